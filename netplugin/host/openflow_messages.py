"""The messages of OpenFlow 1.4 that we exchange with an OVS bridge, as bytes (pure).

The structures are those of the OpenFlow Switch Specification 1.4.0, section 7; its names are in the
comments. All numbers are big-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from netplugin.host.flow import Flow, is_marked
from netplugin.host.flow_actions import output
from netplugin.host.oxm import Malformed, port_number, read_fields

VERSION = 5
# ofp_type
HELLO, ERROR, ECHO_REQUEST, ECHO_REPLY = 0, 1, 2, 3
GET_CONFIG_REQUEST, GET_CONFIG_REPLY, SET_CONFIG = 7, 8, 9
_PACKET_OUT, _PORT_MOD = 13, 16
_FLOW_MOD, _MULTIPART_REQUEST, _MULTIPART_REPLY = 14, 18, 19
_BARRIER_REQUEST, BARRIER_REPLY, BUNDLE_CONTROL, _BUNDLE_ADD = 20, 21, 33, 34

_HEADER = struct.Struct(">BBHI")
_MOST = 0xFFFF  # bytes of a message
ANY = 0xFFFFFFFF
_ANY_TABLE = 0xFF
_TABLE = 0xFFF9  # OFPP_TABLE
_ADD, _DELETE, _DELETE_STRICT = 0, 3, 4  # ofp_flow_mod_command
WHOLE_COOKIE = (1 << 64) - 1
STATS = struct.Struct(">HBxIIHHHHH2xQQQ")  # ofp_flow_stats
_AGGREGATE_STATS = struct.Struct(">QQI4x")  # ofp_aggregate_stats_reply
# ofp_multipart_type; OFPMPF_REPLY_MORE; bytes before the body of a part
FLOW_STATS, _AGGREGATE, _PORT_DESC, _FLOW_MONITOR = 1, 2, 13, 16
_MORE, _PART = 1, 8
_APPLY_ACTIONS = 4  # OFPIT_APPLY_ACTIONS
_OPEN, _COMMIT = 0, 4  # ofp_bundle_ctrl_type
_ATOMIC_ORDERED = 3
_BUNDLE = 1
FIRST_IN_BUNDLE = 2
_CONFIG = struct.Struct(">HH")
_FRAGMENTS_MATCHED = 3  # OFPC_NX_FRAG_MATCH (include/openflow/openflow-common.h of OVS)

#: The codes that a flow or a bundle may bring, by ofp_error_type, as OVS names them.
_ERRORS = {
    1: (
        "OFPBRC_BAD_VERSION BAD_TYPE BAD_STAT BAD_VENDOR BAD_SUBTYPE EPERM BAD_LEN BUFFER_EMPTY "
        "BUFFER_UNKNOWN BAD_TABLE_ID IS_SECONDARY BAD_PORT BAD_PACKET MULTIPART_BUFFER_OVERFLOW"
    ),
    2: (
        "OFPBAC_BAD_TYPE BAD_LEN BAD_VENDOR BAD_VENDOR_TYPE BAD_OUT_PORT BAD_ARGUMENT EPERM TOO_MANY "
        "BAD_QUEUE BAD_OUT_GROUP MATCH_INCONSISTENT UNSUPPORTED_ORDER BAD_TAG BAD_SET_TYPE BAD_SET_LEN "
        "BAD_SET_ARGUMENT"
    ),
    3: (
        "OFPBIC_UNKNOWN_INST UNSUP_INST BAD_TABLE_ID UNSUP_METADATA UNSUP_METADATA_MASK BAD_EXPERIMENTER "
        "BAD_EXP_TYPE BAD_LEN EPERM DUP_INST"
    ),
    4: (
        "OFPBMC_BAD_TYPE BAD_LEN BAD_TAG BAD_DL_ADDR_MASK BAD_NW_ADDR_MASK BAD_WILDCARDS BAD_FIELD BAD_VALUE "
        "BAD_MASK BAD_PREREQ DUP_FIELD EPERM"
    ),
    5: (
        "OFPFMFC_UNKNOWN TABLE_FULL BAD_TABLE_ID OVERLAP EPERM BAD_TIMEOUT BAD_COMMAND BAD_FLAGS CANT_SYNC "
        "BAD_PRIORITY"
    ),
    17: (
        "OFPBFC_UNKNOWN EPERM BAD_ID BUNDLE_EXIST BUNDLE_CLOSED OUT_OF_BUNDLES BAD_TYPE BAD_FLAGS "
        "MSG_BAD_LEN MSG_BAD_XID MSG_UNSUP MSG_CONFLICT MSG_TOO_MANY MSG_FAILED TIMEOUT BUNDLE_IN_PROGRESS"
    ),
}


@dataclass(frozen=True, slots=True)
class OpenFlowMessage:
    """A message that was received; ``body`` is without the header."""

    kind: int
    xid: int
    body: bytes


def split(data: bytearray) -> list[OpenFlowMessage]:
    """Take the messages that are whole from the beginning of what has come. Raises: Malformed."""
    found, at = [], 0
    while len(data) - at >= _HEADER.size:
        version, kind, length, xid = _HEADER.unpack_from(data, at)
        if length < _HEADER.size or (version != VERSION and kind not in (HELLO, ERROR)):
            raise Malformed(f"no OpenFlow 1.4: {bytes(data[at : at + 16]).hex(' ')}")
        if len(data) - at < length:
            break
        found.append(OpenFlowMessage(kind, xid, bytes(data[at + _HEADER.size : at + length])))
        at += length
    del data[:at]
    return found


def message(kind: int, xid: int, body: bytes = b"") -> bytes:
    """A message. Raises: Malformed if it is too long for one."""
    length = _HEADER.size + len(body)
    if length > _MOST:
        raise Malformed(f"a message of {length} bytes")
    return _HEADER.pack(VERSION, kind, length, xid) + body


def hello(xid: int) -> bytes:
    """OFPT_HELLO that offers version 1.4 only (OFPHET_VERSIONBITMAP)."""
    return message(HELLO, xid, struct.pack(">HHI", 1, 8, 1 << VERSION))


def barrier(xid: int) -> bytes:
    """Answered after all that was sent before."""
    return message(_BARRIER_REQUEST, xid)


def _match(fields: bytes) -> bytes:
    """An ofp_match; its length is without the padding (OFPMT_OXM)."""
    return struct.pack(">HH", 1, 4 + len(fields)) + fields + bytes(-(4 + len(fields)) % 8)


def _flow_mod(command: int, flow: Flow, mask: int = 0, instructions: bytes = b"") -> bytes:
    head = flow.cookie, mask, flow.table, command, 0, 0, flow.priority, ANY, ANY, ANY, 0, 0
    return struct.pack(">QQBBHHHIIIHH", *head) + _match(flow.fields) + instructions


def add(flow: Flow) -> bytes:
    """The body of an OFPT_FLOW_MOD that adds a flow, or replaces the one of the same identity."""
    apply = struct.pack(">HH4x", _APPLY_ACTIONS, 8 + len(flow.actions)) + flow.actions
    return _flow_mod(_ADD, flow, instructions=apply if flow.actions else b"")


def delete(cookie: int) -> bytes:
    """The body that deletes the flows of a cookie, from all tables."""
    return _flow_mod(_DELETE, Flow(cookie, 0, b"", b"", _ANY_TABLE), WHOLE_COOKIE)


def delete_strict(flow: Flow) -> bytes:
    """The body that deletes one flow, if it has the cookie."""
    return _flow_mod(_DELETE_STRICT, flow, WHOLE_COOKIE)


def bundle(flow_mods: Iterable[bytes]) -> list[bytes]:
    """Open an atomic bundle of the bodies, whose transaction ids begin with ``FIRST_IN_BUNDLE``.

    It is to be committed when all are known to be in it: OVS commits a bundle without the messages that
    it has refused.
    """
    head = struct.pack(">I2xH", _BUNDLE, _ATOMIC_ORDERED)
    # What is in the bundle has the same id as the message that adds it (OFPBFC_MSG_BAD_XID).
    added = [
        message(_BUNDLE_ADD, xid, head + message(_FLOW_MOD, xid, body))
        for xid, body in enumerate(flow_mods, FIRST_IN_BUNDLE)
    ]
    return [_bundle_control(_OPEN), *added]


def commit() -> bytes:
    """Commit the bundle, as transaction 1."""
    return _bundle_control(_COMMIT)


def _bundle_control(kind: int) -> bytes:
    return message(BUNDLE_CONTROL, 1, struct.pack(">IHH", _BUNDLE, kind, _ATOMIC_ORDERED))


def multipart(kind: int, xid: int, body: bytes = b"") -> bytes:
    return message(_MULTIPART_REQUEST, xid, struct.pack(">HH4x", kind, 0) + body)


def parts(answers: Sequence[OpenFlowMessage], kind: int, requests: Collection[int], what: str) -> list[bytes]:
    """The bodies of the parts that answer the requests with these transaction ids. Raises: Malformed."""
    incomplete = set(requests)
    for answer in answers:
        if answer.kind != _MULTIPART_REPLY or not _is_part(answer, kind):
            raise Malformed(f"a multipart reply that is not of {what}s")
        if not answer.body[3] & _MORE:
            incomplete.discard(answer.xid)
    if incomplete:
        raise Malformed("an answer without its last part")
    return [answer.body[_PART:] for answer in answers]


def _is_part(answer: OpenFlowMessage, kind: int) -> bool:
    return len(answer.body) >= _PART and answer.body[:2] == kind.to_bytes(2, "big")


def entries(data: bytes, form: struct.Struct, length_at: int, what: str) -> Iterator[tuple[Any, bytes]]:
    """Yield the head and the rest of each entry of a part. Raises: Malformed.

    ``length_at``: where in the head its length is.
    """
    at = 0
    while at < len(data):
        if len(data) - at < form.size:
            raise Malformed(f"a part of a {what}")
        head = form.unpack_from(data, at)
        end = at + head[length_at]
        if end < at + form.size or end > len(data):
            raise Malformed(f"a {what} that ends behind its message")
        yield head, data[at + form.size : end]
        at = end


def request_flows(xid: int, cookie: int, mask: int, *, counted: bool = False) -> bytes:
    """Ask for the flows of all tables whose cookie is the same in the bits of ``mask``, or (``counted``) for
    their number (OFPMP_FLOW, OFPMP_AGGREGATE).
    """
    body = struct.pack(">B3xII4xQQ", _ANY_TABLE, ANY, ANY, cookie, mask) + _match(b"")
    return multipart(_AGGREGATE if counted else FLOW_STATS, xid, body)


def read_counts(answers: Sequence[OpenFlowMessage], requests: Collection[int]) -> list[int]:
    """The numbers of flows that answer these requests. Raises: Malformed."""
    counts = parts(answers, _AGGREGATE, requests, "number of flow")
    if any(len(each) != _AGGREGATE_STATS.size for each in counts) or len(counts) != len(requests):
        raise Malformed("no number of flows")
    return [_AGGREGATE_STATS.unpack(each)[2] for each in counts]


def read_flows(answers: Sequence[OpenFlowMessage], requests: Collection[int]) -> list[Flow]:
    """The flows that answer ``request_flows`` with these transaction ids. Raises: Malformed."""
    flows = []
    for part in parts(answers, FLOW_STATS, requests, "flow"):
        for head, rest in entries(part, STATS, 0, "flow"):
            _, table, _, _, priority, *options, cookie, _, _ = head
            flows.append(Flow(cookie, priority, *read_rule(rest), table, tuple(options)))
    return flows


def read_rule(rest: bytes) -> tuple[bytes, bytes]:
    """The fields and the actions. Raises: Malformed."""
    length = int.from_bytes(rest[2:4], "big")
    behind = -(-length // 8) * 8
    if rest[:2] != b"\0\1" or length < 4 or behind > len(rest):
        raise Malformed("a flow without an OXM match")
    fields = read_fields(rest[4:length])
    instructions = rest[behind:]
    if not instructions:
        return fields, b""
    if instructions[:4] == struct.pack(">HH", _APPLY_ACTIONS, len(instructions) & _MOST):
        return fields, instructions[8:]
    return fields, b"instructions " + instructions  # no actions of ours: they differ from all


class Changed(IntEnum):
    """Whose flows others have changed; the gravest is the greatest."""

    NOTHING = 0
    OTHERS = 1  # without our mark, or unknown: a flow that replaces one of ours need not have our mark
    OURS = 2


_UPDATE = struct.Struct(">HHBxH")  # the begin of ofp_flow_update_full
_UPDATE_REST = struct.Struct(">HH4xQ")  # and what follows before its match
_ADDS_REMOVES_MODIFIES = 2 | 4 | 8  # ofp_flow_monitor_flags
_ADDED, _MODIFIED, _ABBREVIATED = 1, 3, 4  # ofp_flow_update_event


def monitor_flows() -> bytes:
    """Ask for a notice of each change of a flow by others (OFPMP_FLOW_MONITOR), as transaction 0.

    Changes by this connection itself come abbreviated: OVS shows them only with a flag that is not set
    (``ofmonitor_report`` in ofproto/connmgr.c). Since OVS 3.0.
    """
    body = struct.pack(">IIIHBB", 1, ANY, ANY, _ADDS_REMOVES_MODIFIES, _ANY_TABLE, 0)
    return multipart(_FLOW_MONITOR, 0, body + _match(b""))


def is_of_monitor(reply: OpenFlowMessage) -> bool:
    """Whether it has notices of ``monitor_flows``."""
    return reply.kind == _MULTIPART_REPLY and _is_part(reply, _FLOW_MONITOR)


def read_changes(reply: OpenFlowMessage) -> Changed:
    """The gravest change of those in a part of ``monitor_flows``. Raises: Malformed.

    Flows that vswitchd learns, which alone have a timeout and are not in table 0, are left out.
    """
    gravest = Changed.NOTHING
    for (_, event, table, _), rest in entries(reply.body[_PART:], _UPDATE, 0, "change"):
        if _ADDED <= event <= _MODIFIED and len(rest) >= _UPDATE_REST.size:
            timeout, _, cookie = _UPDATE_REST.unpack_from(rest)
            if not is_marked(cookie):
                gravest = max(gravest, Changed.OTHERS)
            elif not (table and timeout):
                gravest = Changed.OURS
        elif event != _ABBREVIATED:
            gravest = Changed.OURS  # OVS has left some out, because they were not read in time
    return gravest


_PORT = struct.Struct(">IH2x6s2x16sII")  # ofp_port without its properties
_NO_FORWARD = 1 << 5  # OFPPC_NO_FWD


@dataclass(frozen=True, slots=True)
class OfPortState:
    """A port of a bridge. ``ofport``: its number as the database has it, in 16 bits. ``is_shut``: whether
    frames that are forwarded to it are dropped.
    """

    ofport: int
    address: bytes
    is_shut: bool


def request_ports(xid: int) -> bytes:
    """Ask for all ports of a bridge (OFPMP_PORT_DESC)."""
    return multipart(_PORT_DESC, xid)


def read_ports(answers: Sequence[OpenFlowMessage], request: int) -> list[OfPortState]:
    """The answer to ``request_ports`` with this transaction id. Raises: Malformed."""
    bodies = parts(answers, _PORT_DESC, [request], "port")
    found = [head for body in bodies for head, _ in entries(body, _PORT, 1, "port")]
    return [OfPortState(head[0] & 0xFFFF, head[2], bool(head[4] & _NO_FORWARD)) for head in found]


def set_port(xid: int, port: OfPortState, *, shut: bool) -> bytes:
    """Set whether frames that are forwarded to the port are dropped (OFPT_PORT_MOD)."""
    config = _NO_FORWARD if shut else 0
    body = struct.pack(">I4x6s2xII", port_number(port.ofport), port.address, config, _NO_FORWARD)
    return message(_PORT_MOD, xid, body)


def packet_out(xid: int, ofport: int, frame: bytes) -> bytes:
    """Look a frame up in the flow tables as one that came from the port (OFPT_PACKET_OUT, OFPP_TABLE)."""
    actions = output(_TABLE)
    return message(_PACKET_OUT, xid, struct.pack(">IIH6x", ANY, ofport, len(actions)) + actions + frame)


def match_fragments(xid: int) -> bytes:
    """Match L4 ports of first fragments; the bridge sends no frame to us (miss_send_len 0)."""
    return message(SET_CONFIG, xid, _CONFIG.pack(_FRAGMENTS_MATCHED, 0))


def fragments_matched(reply: OpenFlowMessage) -> bool:
    """Read OFPT_GET_CONFIG_REPLY. Raises: Malformed."""
    if reply.kind != GET_CONFIG_REPLY or len(reply.body) != _CONFIG.size:
        raise Malformed("no configuration")
    return bool(_CONFIG.unpack(reply.body)[0] == _FRAGMENTS_MATCHED)


def refuses_version(reply: OpenFlowMessage) -> bool:
    """Whether an OFPT_ERROR says that the bridge does not speak our version (OFPET_HELLO_FAILED)."""
    return reply.body[:2] == b"\0\0"


def error_name(reply: OpenFlowMessage) -> str:
    """The name of an OFPT_ERROR, such as ``OFPBAC_BAD_OUT_GROUP``; numbers if it has none here.

    Raises: Malformed.
    """
    if len(reply.body) < 4:
        raise Malformed("an error without a code")
    kind, code = struct.unpack_from(">HH", reply.body)
    prefix, _, names = _ERRORS.get(kind, "").partition("_")
    known = names.split()
    return f"{prefix}_{known[code]}" if code < len(known) else f"error type {kind}, code {code}"
