"""Which faults a step may have, and what the peer at the other end would say."""

from __future__ import annotations

import errno
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from tests.lab.steps.naming import Kind, Step, netlink_messages, openflow_messages

#: The errors that each call can give, by its manual page.
_OF_CALL = {
    "connect": "ECONNREFUSED ENOENT EACCES ETIMEDOUT",
    "bind": "EADDRINUSE EACCES ENOSPC",
    "open": "EACCES ENOSPC EMFILE EROFS EIO",
    "openat": "EACCES ENOSPC EMFILE EROFS EIO",
    "mkdir": "EACCES ENOSPC EROFS EEXIST",
    "mkdirat": "EACCES ENOSPC EROFS EEXIST",
    "unlink": "EACCES EROFS EBUSY ENOENT",
    "unlinkat": "EACCES EROFS EBUSY ENOENT",
    "rmdir": "EBUSY ENOTEMPTY EACCES",
    "rename": "EACCES ENOSPC EROFS EIO",
    "fchown": "EPERM EROFS EIO",
    "fchmod": "EPERM EROFS EIO",
    "ftruncate": "EIO EPERM",
    "ioctl": "EBUSY EPERM EINVAL ENODEV ENOMEM",
    "execve": "ENOENT EACCES ENOMEM EAGAIN",
}
_OF_KIND = {
    Kind.NETLINK: "ENOBUFS",
    Kind.NETFILTER: "ENOBUFS",
    Kind.OVSDB: "EPIPE ECONNRESET",
    Kind.OPENFLOW: "EPIPE ECONNRESET",
    Kind.UNIXCTL: "EPIPE ECONNRESET",
    Kind.STREAM: "EPIPE ECONNRESET ENOBUFS",
    Kind.ANSWER: "EPIPE ECONNRESET",
    Kind.DATA: "ENOSPC EIO EDQUOT",
    Kind.KERNEL_FILE: "EIO EINVAL EPERM EBUSY ENOENT",
    Kind.SYNC: "EIO ENOSPC",
}
_OTHERS = "EIO EPERM ENOMEM"
#: What the kernel answers to a netlink message.
_REFUSALS = "EPERM EBUSY ENODEV EEXIST ENOENT ENOMEM EINVAL EOPNOTSUPP"
_PEERS = (Kind.NETLINK, Kind.NETFILTER, Kind.OVSDB, Kind.OPENFLOW, Kind.UNIXCTL, Kind.STREAM)
_CONNECTED = (Kind.OVSDB, Kind.OPENFLOW, Kind.UNIXCTL, Kind.STREAM)
_BATCH_BEGIN, _NO_SUCH, _BUNDLE_ADD, _BARRIER = 16, 99, 34, 20


#: The first word of each fault.
KINDS = ("kill", "error", "refused", "connection", "hang", "late")


@dataclass(frozen=True, slots=True)
class Fault:
    """At the n-th step of this name (from 1), this happens."""

    step: str
    nth: int
    what: str

    @property
    def kills(self) -> bool:
        return self.what.startswith("kill")

    @property
    def kind(self) -> str:
        return self.what.split()[0]

    def __str__(self) -> str:
        return f"{self.what} at {self.step} #{self.nth}"


def faults_of(step: Step) -> Iterator[str]:
    """All that can happen at a step."""
    yield "kill before"
    if step.data is not None and len(step.data) > 1:
        yield "kill in half"
    yield "kill after"
    call = step.name.split()[0]
    for name in (_OF_CALL.get(call) or _OF_KIND.get(step.kind) or _OTHERS).split():
        yield f"error {name}"
    if step.kind in (Kind.NETLINK, Kind.NETFILTER):
        for name in _REFUSALS.split():
            yield f"refused {name}"
    if step.kind in _CONNECTED:
        yield "connection lost"
    if step.data is not None:
        for how in refusals(step):
            yield f"refused {how}"
    if step.kind in _PEERS:
        yield "hang"
    if step.kind is not Kind.ANSWER:
        yield "late"


def number_of(what: str) -> int:
    """The errno of ``error EIO`` or ``refused EIO``."""
    found: int = getattr(errno, what.split()[-1])
    return found


def refusals(step: Step) -> tuple[str, ...]:
    """How a request can be changed so that the real peer refuses it."""
    if step.kind is Kind.OVSDB:
        return ("abort", "constraint") if step.name.startswith("ovsdb transact") else ("method",)
    if step.kind is Kind.OPENFLOW:
        kinds = [kind for kind, _, _ in openflow_messages(step.data or b"")]
        return ("first", "last flow") if _BUNDLE_ADD in kinds else ("first",)
    return ("method",) if step.kind is Kind.UNIXCTL else ()


def refused(step: Step, how: str) -> bytes:
    """The request that the peer refuses."""
    data = step.data or b""
    if step.kind is Kind.OPENFLOW:
        return _bad_openflow(data, how)
    message = json.loads(data)
    if how == "method":
        message["method"] = "no-such-method"
    elif how == "abort":
        message["params"].append({"op": "abort"})
    else:  # ovsdb-server checks values against its schema
        message["params"].append({"op": "insert", "table": "Port", "row": {"vlan_mode": "no-such-mode"}})
    return json.dumps(message).encode()


def _bad_openflow(data: bytes, how: str) -> bytes:
    """One message, or what one adds to a bundle, is of a kind that there is not."""
    changed = bytearray(data)
    found = [(kind, at) for kind, at, _ in openflow_messages(data) if kind not in (0, _BARRIER)]
    if how == "last flow":
        at = max(at for kind, at in found if kind == _BUNDLE_ADD)
        changed[at + 16 + 1] = _NO_SUCH  # ofp_bundle_add_msg: the header and 8 bytes, then the message
    elif found:
        changed[found[0][1] + 1] = _NO_SUCH
    return bytes(changed)


def netlink_refusal(step: Step, number: int) -> bytes:
    """The kernel's answer that refuses the first request of ``step`` (struct nlmsgerr)."""
    requests = [(kind, seq) for kind, _, seq in netlink_messages(step.data or b"") if kind > _BATCH_BEGIN]
    kind, sequence = requests[0] if requests else (0, 0)
    body = struct.pack("=i", -number) + struct.pack("=IHHII", 16, kind, 0, sequence, 0)
    return struct.pack("=IHHII", 16 + len(body), 2, 0x100, sequence, 0) + body
