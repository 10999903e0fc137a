"""What a stopped system call is about to do, and to whom: the name of a step.

A name is the same in each run of an operation: numbers that the host chooses are left out of it.
"""

from __future__ import annotations

import json
import re
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from tests.lab.steps.stopped import Stopped

_NETLINK_HEADER, _OPENFLOW_HEADER = struct.Struct("=IHHII"), struct.Struct("!BBHI")
#: linux/rtnetlink.h, in the order of their numbers from 16 on, four of each kind.
_ROUTE_KINDS = (
    "LINK ADDR ROUTE NEIGH RULE QDISC TCLASS TFILTER ACTION PREFIX MULTICAST ANYCAST NEIGHTBL NDUSEROPT "
    "ADDRLABEL DCB NETCONF MDB NSID STATS CACHEREPORT CHAIN NEXTHOP LINKPROP VLAN NEXTHOPBUCKET TUNNEL"
).split()
_ROUTE_VERBS = "NEW DEL GET SET".split()
#: linux/netfilter/nf_tables.h (enum nf_tables_msg_types).
_NFT = (
    "NEWTABLE GETTABLE DELTABLE NEWCHAIN GETCHAIN DELCHAIN NEWRULE GETRULE DELRULE NEWSET GETSET DELSET "
    "NEWSETELEM GETSETELEM DELSETELEM NEWGEN GETGEN TRACE NEWOBJ GETOBJ DELOBJ GETOBJ_RESET NEWFLOWTABLE "
    "GETFLOWTABLE DELFLOWTABLE GETRULE_RESET DESTROYTABLE DESTROYCHAIN DESTROYRULE DESTROYSET "
    "DESTROYSETELEM DESTROYOBJ DESTROYFLOWTABLE GETSETELEM_RESET"
).split()
_NFT_SUBSYSTEM, _NETLINK_NETFILTER, _NETLINK_GENERIC = 10, 12, 16
_FLOW_MOD_IN_BUNDLE = 34
_OPENFLOW = {0: "HELLO", 14: "FLOW_MOD", 18: "MULTIPART", 20: "BARRIER", 33: "BUNDLE", 34: "BUNDLE_ADD"}
#: Which argument of a call is a path; with two the second is that of the new name.
_PATHS = {
    "open": (0,), "openat": (1,), "mkdir": (0,), "mkdirat": (1,), "rmdir": (0,), "unlink": (0,),
    "unlinkat": (1,), "rename": (0, 1), "renameat": (1, 3), "renameat2": (1, 3), "link": (0, 1),
    "linkat": (1, 3), "symlink": (0, 1), "symlinkat": (0, 2), "chmod": (0,), "fchmodat": (1,),
    "chown": (0,), "lchown": (0,), "fchownat": (1,), "truncate": (0,), "execve": (0,), "utimensat": (1,),
}  # fmt: skip
_OF_FILE = frozenset({"fsync", "fdatasync", "ftruncate", "fchmod", "fchown", "ioctl"})
#: Names made of an identifier's hash, and numbers.
_VARIES = re.compile(r"(?<![a-z])[0-9a-f]{6,}|\d+")
_LONGEST = 110


class Kind(Enum):
    """What a step acts on: it decides which faults there are."""

    NETLINK = auto()
    NETFILTER = auto()
    OVSDB = auto()
    OPENFLOW = auto()
    UNIXCTL = auto()
    STREAM = auto()
    ANSWER = auto()
    CONNECT = auto()
    DATA = auto()
    KERNEL_FILE = auto()
    SYNC = auto()
    PATH = auto()
    OTHER = auto()


@dataclass(frozen=True, slots=True)
class Step:
    """One stopped call: its name, and what it would send or write, if that is what it does."""

    name: str
    kind: Kind
    data: bytes | None = None


def step_of(stopped: Stopped, own_port: int) -> Step | None:
    """Name a call; None for one that stays inside the process (a pipe or socket of its own).

    ``own_port`` is the TCP port at which the process itself listens.
    """
    call = stopped.call
    if call in ("sendto", "sendmsg", "sendmmsg", "write", "writev", "pwrite64"):
        return _sending(stopped, own_port)
    if call in ("connect", "bind"):
        return Step(f"{call} {_plain(_address(stopped))}", Kind.CONNECT)
    if call in _PATHS:
        paths = [stopped.text(stopped.args[index]) for index in _PATHS[call]]
        return Step(f"{call} {' '.join(map(_plain, paths))}", Kind.PATH)
    if call in _OF_FILE:
        name = f"{call} {_plain(stopped.link(stopped.args[0]))}"
        if call == "ioctl":
            name += f" {stopped.args[1] & 0xFFFFFFFF:#x}"
        return Step(name, Kind.SYNC if call in ("fsync", "fdatasync") else Kind.OTHER)
    return Step(f"call {call}", Kind.OTHER)


def _sending(stopped: Stopped, own_port: int) -> Step | None:
    link = stopped.link(stopped.args[0])
    if link.startswith(("pipe:", "anon_inode:")):
        return None
    if not link.startswith("socket:"):
        kernel = link.startswith(("/proc/", "/sys/"))
        data = stopped.data()
        written = f" {data[:24].decode(errors='replace').strip()}" if kernel else ""
        kind = Kind.KERNEL_FILE if kernel else Kind.DATA
        return Step(f"{stopped.call} {_plain(link)}{written}", kind, data)
    with stopped.taken() as end:
        domain = end.getsockopt(socket.SOL_SOCKET, socket.SO_DOMAIN)
        protocol = end.getsockopt(socket.SOL_SOCKET, socket.SO_PROTOCOL)
        try:
            own, peer = end.getsockname(), end.getpeername()
        except OSError:
            own, peer = end.getsockname(), ""
    data = stopped.data()
    if domain == socket.AF_NETLINK:
        return _netlink(protocol, data)
    if domain == socket.AF_UNIX:
        return _to_unix(peer.decode(errors="replace") if isinstance(peer, bytes) else peer, own, data)
    if own[1] == own_port:
        return Step(f"answer {_plain(_first_line(data))}", Kind.ANSWER, data)
    return Step(f"send {_first_line(data)}", Kind.STREAM, data)


def _to_unix(peer: str, own: object, data: bytes) -> Step | None:
    if not peer and not own:
        return None  # a pair of its own
    file = Path(peer).name
    if file.endswith(".mgmt"):
        kinds = [_OPENFLOW.get(kind, str(kind)) for kind, _, _ in openflow_messages(data)]
        return Step(f"openflow {Path(peer).stem} {_counted(kinds)}", Kind.OPENFLOW, data)
    try:
        message = json.loads(data)
        method, params = message["method"], message["params"]
    except (ValueError, TypeError, KeyError):
        return Step(f"send {_plain(file)} {_plain(_first_line(data))}"[:_LONGEST], Kind.STREAM, data)
    if file.endswith(".ctl"):
        return Step(f"unixctl {method}", Kind.UNIXCTL, data)
    done = ""
    if method == "transact":
        done = " " + _counted([f"{op['op']}:{op.get('table', '')}" for op in params[1:] if "op" in op])
    return Step(f"ovsdb {method}{done}"[:_LONGEST], Kind.OVSDB, data)


def _netlink(protocol: int, data: bytes) -> Step:
    words = []
    for kind, _, _ in netlink_messages(data):
        if protocol == socket.NETLINK_ROUTE and kind >= 16:
            family, verb = divmod(kind - 16, 4)
            named = _ROUTE_KINDS[family] if family < len(_ROUTE_KINDS) else str(family)
            words.append(_ROUTE_VERBS[verb] + named)
        elif protocol == _NETLINK_NETFILTER and kind >> 8 == _NFT_SUBSYSTEM and (kind & 0xFF) < len(_NFT):
            words.append(_NFT[kind & 0xFF])
        elif protocol != _NETLINK_NETFILTER or kind >= 32:
            words.append(str(kind))
    if protocol == _NETLINK_NETFILTER:
        return Step(f"nftables {_counted(words)}"[:_LONGEST], Kind.NETFILTER, data)
    which = {socket.NETLINK_ROUTE: "netlink", _NETLINK_GENERIC: "generic netlink"}
    named = which.get(protocol, f"netlink protocol {protocol}")
    return Step(f"{named} {_counted(words)}"[:_LONGEST], Kind.NETLINK, data)


def netlink_messages(data: bytes) -> Iterator[tuple[int, int, int]]:
    """The kind, the flags and the number of each message."""
    at = 0
    while at + _NETLINK_HEADER.size <= len(data):
        length, kind, flags, number, _ = _NETLINK_HEADER.unpack_from(data, at)
        if length < _NETLINK_HEADER.size:
            return
        yield kind, flags, number
        at += (length + 3) & ~3


def openflow_messages(data: bytes) -> Iterator[tuple[int, int, int]]:
    """The kind of each message, its offset and its length."""
    at = 0
    while at + _OPENFLOW_HEADER.size <= len(data):
        _, kind, length, _ = _OPENFLOW_HEADER.unpack_from(data, at)
        if length < _OPENFLOW_HEADER.size:
            return
        yield kind, at, length
        at += length


def _counted(words: list[str]) -> str:
    """The words in order, each once."""
    return ",".join(dict.fromkeys(words))


def _address(stopped: Stopped) -> str:
    raw = stopped.memory(stopped.args[1], min(stopped.args[2], 110))
    family = int.from_bytes(raw[:2], "little")
    if family == socket.AF_UNIX:
        return raw[2:].split(b"\0")[0].decode(errors="replace") or "@"
    if family == socket.AF_NETLINK:
        return "netlink"
    return f"family {family}"


def _first_line(data: bytes) -> str:
    return data[:40].split(b"\r\n")[0].decode(errors="replace")


def _plain(path: str) -> str:
    """A path's last two names without what differs from run to run."""
    return _VARIES.sub("N", "/".join(path.split("/")[-2:]))
