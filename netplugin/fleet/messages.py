"""The messages of etcd's API that are used, made from a table when they are imported.

No generated code: that of one version of protobuf does not run with another. Names, numbers and types are
those of etcd's ``rpc.proto`` and ``kv.proto`` (3.4 to 3.6); a field that is missing here is skipped by
protobuf when it is read. They are messages of proto2, whose bytes are the same, because there a field that is
set is sent, also one that is 0: ``Compare.mod_revision`` has to be.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

#: A message in each line: its fields as name, number and type; ``*`` is for repeated ones. ``Named``,
#: ``Names``, ``LeaseRequest`` and ``LeaseResponse`` are several of etcd's, with the same fields.
_TABLE = """
Header: cluster_id 1 uint64, revision 3 int64
KeyValue: key 1 bytes, mod_revision 3 int64, value 5 bytes
Event: type 1 int32, kv 2 KeyValue
RangeRequest: key 1 bytes, range_end 2 bytes, limit 3 int64, revision 4 int64, keys_only 8 bool
RangeResponse: header 1 Header, kvs 2 *KeyValue, more 3 bool
PutRequest: key 1 bytes, value 2 bytes, lease 3 int64
DeleteRequest: key 1 bytes
RequestOp: request_put 2 PutRequest, request_delete_range 3 DeleteRequest
Compare: result 1 int32, target 2 int32, key 3 bytes, mod_revision 6 int64
TxnRequest: compare 1 *Compare, success 2 *RequestOp
TxnResponse: header 1 Header, succeeded 2 bool
Nothing:
WatchCreate: key 1 bytes, range_end 2 bytes, start_revision 3 int64, fragment 8 bool
WatchRequest: create_request 1 WatchCreate, progress_request 3 Nothing
WatchResponse: header 1 Header, created 3 bool, canceled 4 bool, compact_revision 5 int64, \
    cancel_reason 6 string, events 11 *Event
LeaseGrantRequest: TTL 1 int64
LeaseRequest: ID 1 int64
LeaseResponse: ID 2 int64, TTL 3 int64
Authenticate: name 1 string, password 2 string
AuthenticateResponse: token 2 string
Permission: permType 1 int32, key 2 bytes, range_end 3 bytes
UserOptions: no_password 1 bool
UserAdd: name 1 string, password 2 string, options 3 UserOptions
Named: name 1 string
Names: names 2 *string
UserGrantRole: user 1 string, role 2 string
RoleGetResponse: perm 2 *Permission
RoleGrantPermission: name 1 string, perm 2 Permission
RoleRevokePermission: role 1 string, key 2 bytes, range_end 3 bytes
"""
#: ``Compare.result`` and ``Compare.target``, and ``Event.type``.
EQUAL, MOD, DELETE = 0, 2, 1


def _messages() -> SimpleNamespace:
    kinds = descriptor_pb2.FieldDescriptorProto
    what = {"name": "netplugin/fleet.proto", "package": "netplugin", "syntax": "proto2"}
    file = descriptor_pb2.FileDescriptorProto(**what)
    for line in _TABLE.strip().splitlines():
        name, _, fields = line.partition(":")
        message = file.message_type.add(name=name)
        for field in filter(None, fields.split(",")):
            called, number, kind = field.split()
            label = kinds.LABEL_REPEATED if kind.startswith("*") else kinds.LABEL_OPTIONAL
            added = message.field.add(name=called, number=int(number), label=label)
            kind = kind.removeprefix("*")
            if kind[0].isupper():
                added.type, added.type_name = kinds.TYPE_MESSAGE, f".netplugin.{kind}"
            else:
                added.type = getattr(kinds, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = {made.name: pool.FindMessageTypeByName(f"netplugin.{made.name}") for made in file.message_type}
    return SimpleNamespace(**{name: message_factory.GetMessageClass(one) for name, one in found.items()})


#: The classes of the messages.
M: Any = _messages()
