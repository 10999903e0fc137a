"""FDB entries of VXLAN devices and bridges, over netlink (RFC 7348, bridge(8)).

A VXLAN device sends broadcasts and frames with an unknown destination to every address that has an
entry for the all-zero MAC. These addresses are the peers. A learned entry has the MAC of the
sender.

A fixed entry of a bridge is static, so it does not age, and sticky, so it does not move to another
port that sends from the same MAC (``br_fdb_update`` in net/bridge/br_fdb.c).
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from netplugin.host import netlink
from netplugin.host.cbpf import Assembler, BpfProgram
from netplugin.host.links import words
from netplugin.host.netlink import Rtnetlink, attribute, attributes, number

# include/uapi/linux: rtnetlink.h, neighbour.h
_NEWNEIGH, _DELNEIGH, _GETNEIGH = 28, 29, 30
_DST, _LLADDR, _MASTER = 1, 2, 9
_NTF_SELF, _NTF_MASTER, _NTF_STICKY = 0x02, 0x04, 0x40
_NUD_PERMANENT, _NUD_NOARP = 0x80, 0x40
_NDMSG, _IFINFO = struct.Struct("=BxxxiHBB"), struct.Struct("=BxHiII")
#: Where a message has its family, and the byte of its state that these bits are in (struct nlmsghdr, ndmsg).
_FAMILY_AT, _STATE_AT = 16, 24 + (sys.byteorder == "big")
_ALL = bytes(6)


class Fdb:
    """FDB access in the network namespace of the calling thread."""

    def __init__(self) -> None:
        self._kernel = Rtnetlink()

    def peers(self, index: int) -> frozenset[str]:
        """List the peers of a VXLAN device. Raises: HostError, OperationTimeout."""
        return frozenset(address for mac, address in self._entries(index) if mac == _ALL)

    def add_peer(self, index: int, address: str) -> None:
        """Add a peer and keep the others. Raises: HostError, OperationTimeout."""
        with words("add-peer", address), contextlib.suppress(FileExistsError):
            self._kernel.ask(_NEWNEIGH, _entry(index, _ALL, address), netlink.APPEND)

    def remove_peer(self, index: int, address: str) -> None:
        """Remove a peer and the MACs learned from it.

        The peer's own entry is removed last, so an interrupted removal is still visible.

        Raises: HostError, OperationTimeout.
        """
        learned = [mac for mac, to in self._entries(index) if to == address and mac != _ALL]
        for mac in (*learned, _ALL):
            with words("remove-peer", address), _suppressed(errno.ENOENT):
                self._kernel.ask(_DELNEIGH, _entry(index, mac, address))

    def fixed(self, index: int) -> frozenset[str]:
        """List the MACs that are fixed on a bridge port. Raises: HostError, OperationTimeout."""
        found = map(_fixed, self._dump("list-macs", index))
        return frozenset(mac for at, mac in found if at == index and mac)

    def learned(self, index: int) -> bool:
        """Whether the bridge has learned a MAC on this port. Raises: HostError, OperationTimeout."""
        for payload in self._dump("list-macs", index):
            _, at, state, _, _ = _NDMSG.unpack_from(payload)
            if at == index and not state & (_NUD_PERMANENT | _NUD_NOARP):
                return True
        return False

    def holder(self, index: int, mac: str) -> int | None:
        """Find where the MAC is fixed: a port of the same bridge as the port ``index``.

        Raises: HostError, OperationTimeout.
        """
        body = _NDMSG.pack(socket.AF_BRIDGE, index, 0, _NTF_MASTER, 0)
        with words("find-mac", mac), _suppressed(errno.ENOENT):
            for payload in self._kernel.ask(_GETNEIGH, body + attribute(_LLADDR, _packed(mac))):
                at, found = _fixed(payload)
                return at if found else None
        return None

    def fix(self, index: int, mac: str) -> None:
        """Fix a MAC on a bridge port; it leaves any other port. Raises: HostError, OperationTimeout."""
        with words("fix-mac", mac):
            flags = _NTF_MASTER | _NTF_STICKY
            self._kernel.ask(_NEWNEIGH, _bridged(index, mac, flags), netlink.REPLACE)

    def release(self, index: int, mac: str) -> None:
        """Remove the fixed entry, so the bridge learns the MAC again. Raises: HostError, OperationTimeout."""
        with words("release-mac", mac), _suppressed(errno.ENOENT):
            self._kernel.ask(_DELNEIGH, _bridged(index, mac, _NTF_MASTER))

    def _dump(self, step: str, index: int) -> list[bytes]:
        with words(step, f"device {index}"):
            return self._kernel.dump(_GETNEIGH, _IFINFO.pack(socket.AF_BRIDGE, 0, index, 0, 0))

    def _entries(self, index: int) -> Iterator[tuple[bytes, str]]:
        """Yield MAC and address of each entry. Entries of a bridge above the device have no address."""
        for payload in self._dump("list-peers", index):
            _, at, _, _, _ = _NDMSG.unpack_from(payload)
            values = dict(attributes(payload, _NDMSG.size))
            if at == index and _DST in values and _LLADDR in values:
                yield values[_LLADDR], str(ipaddress.ip_address(values[_DST]))


@dataclass(frozen=True)
class StaticEntry:
    """A notification that a static entry was made or (``gone``) removed: the index of its device, and that of
    the bridge if it is an entry of a bridge (0: of a VXLAN device)."""

    gone: bool
    index: int
    bridge: int
    mac: str


def static_entry(kind: int, payload: bytes) -> StaticEntry:
    """Parse a message that ``of_static_entries`` lets pass."""
    _, index, _, _, _ = _NDMSG.unpack_from(payload)
    found = dict(attributes(payload, _NDMSG.size))
    return StaticEntry(kind == _DELNEIGH, index, number(found.get(_MASTER)), found.get(_LLADDR, b"").hex(":"))


def of_static_entries() -> BpfProgram:
    """A filter for a socket (SO_ATTACH_FILTER) of RTNLGRP_NEIGH: static entries of bridges and VXLAN devices.

    Those that a bridge learns come as fast as a VM sends from new MACs.
    """
    program = Assembler()
    program.load(_FAMILY_AT, 1)
    program.unequal(socket.AF_BRIDGE, "other")
    program.load(_STATE_AT, 1)
    program.mask(_NUD_PERMANENT | _NUD_NOARP)
    program.equal(0, "other")
    program.end(-1)
    program.label("other")
    program.end(0)
    return program.program()


def changed_port(kind: int, payload: bytes) -> int | None:
    """The index of the bridge port that an entry was added to, or moved to; None for another message."""
    family, index, *_ = _NDMSG.unpack_from(payload)
    return int(index) if kind == _NEWNEIGH and family == socket.AF_BRIDGE else None


def _entry(index: int, mac: bytes, address: str) -> bytes:
    state = _NUD_PERMANENT | _NUD_NOARP
    return (
        _NDMSG.pack(socket.AF_BRIDGE, index, state, _NTF_SELF, 0)
        + attribute(_DST, ipaddress.ip_address(address).packed)
        + attribute(_LLADDR, mac)
    )


def _bridged(index: int, mac: str, flags: int) -> bytes:
    head = _NDMSG.pack(socket.AF_BRIDGE, index, _NUD_NOARP, flags, 0)
    return head + attribute(_LLADDR, _packed(mac))


def _packed(mac: str) -> bytes:
    return bytes.fromhex(mac.replace(":", ""))


def _fixed(payload: bytes) -> tuple[int, str]:
    """The port of an entry, and its MAC if it is fixed there (else an empty string)."""
    _, at, state, flags, _ = _NDMSG.unpack_from(payload)
    if state != _NUD_NOARP or not flags & _NTF_STICKY:
        return at, ""
    return at, dict(attributes(payload, _NDMSG.size)).get(_LLADDR, b"").hex(":")


@contextlib.contextmanager
def _suppressed(code: int) -> Iterator[None]:
    try:
        yield
    except OSError as refused:
        if refused.errno != code:
            raise
