"""FDB entries of VXLAN devices and bridges, over netlink (RFC 7348, bridge(8)).

A VXLAN device sends broadcasts and frames with an unknown destination to every address that has an entry for
the all-zero MAC. These addresses are the peers. A learned entry has the MAC of the sender.

A fixed entry of a bridge is static, so it does not age, and sticky, so it does not move to another
port that sends from the same MAC (``br_fdb_update`` in net/bridge/br_fdb.c).
"""

from __future__ import annotations

import errno
import socket
import sys
from collections.abc import Iterator

from pyroute2.netlink.rtnl import RTM_DELNEIGH, RTM_GETNEIGH, RTM_NEWNEIGH
from pyroute2.netlink.rtnl.ndmsg import NTF_MASTER, NTF_SELF, NTF_STICKY, NUD_NOARP, NUD_PERMANENT, ndmsg

from netplugin.host.cbpf import Assembler, BpfProgram
from netplugin.host.links import words
from netplugin.host.netlink import ignored
from netplugin.host.rtnetlink import APPEND, DUMP, REPLACE, Request, Rtnetlink, nest
from netplugin.host.rtnetlink_messages import Message

#: Where a message has its family, and the byte of its state that these bits are in (struct nlmsghdr, ndmsg).
_FAMILY_AT, _STATE_AT = 16, 24 + (sys.byteorder == "big")
_STATIC = NUD_PERMANENT | NUD_NOARP
_ALL = "00:00:00:00:00:00"


class Fdb:
    """FDB access in the network namespace of the calling thread.

    All methods raise HostError and OperationTimeout, besides what they name.
    """

    def __init__(self) -> None:
        self._kernel = Rtnetlink()

    def peers(self, index: int) -> frozenset[str]:
        """List the peers of a VXLAN device."""
        return frozenset(address for mac, address in self._entries(index) if mac == _ALL)

    def add_peer(self, index: int, address: str) -> None:
        """Add a peer and keep the others."""
        peer = _entry(index, _ALL, address, flags=NTF_SELF, state=_STATIC)
        with words("add-peer", address), ignored(errno.EEXIST):
            self._kernel.ask(RTM_NEWNEIGH, peer, APPEND)

    def remove_peer(self, index: int, address: str) -> None:
        """Remove a peer and the MACs learned from it.

        The peer's own entry is removed last, so an interrupted removal is still visible.
        """
        learned = [mac for mac, to in self._entries(index) if to == address and mac != _ALL]
        for mac in (*learned, _ALL):
            self._remove("remove-peer", address, _entry(index, mac, address, flags=NTF_SELF, state=_STATIC))

    def fixed(self, index: int) -> frozenset[str]:
        """List the MACs that are fixed on a bridge port."""
        return frozenset(filter(None, map(_fixed, self._list("list-macs", index))))

    def learned(self, index: int) -> bool:
        """Whether the bridge has learned a MAC on this port."""
        return any(not entry["state"] & _STATIC for entry in self._list("list-macs", index))

    def holder(self, index: int, mac: str) -> int | None:
        """Find where the MAC is fixed: a port of the same bridge as the port ``index``."""
        with words("find-mac", mac), ignored(errno.ENOENT):
            for entry in self._kernel.ask(RTM_GETNEIGH, _entry(index, mac, flags=NTF_MASTER)):
                return entry["ifindex"] if _fixed(entry) else None
        return None

    def fix(self, index: int, mac: str) -> None:
        """Fix a MAC on a bridge port; it leaves any other port."""
        entry = _entry(index, mac, flags=NTF_MASTER | NTF_STICKY, state=NUD_NOARP)
        with words("fix-mac", mac):
            self._kernel.ask(RTM_NEWNEIGH, entry, REPLACE)

    def release(self, index: int, mac: str) -> None:
        """Remove the fixed entry, so the bridge learns the MAC again."""
        self._remove("release-mac", mac, _entry(index, mac, flags=NTF_MASTER, state=NUD_NOARP))

    def _remove(self, step: str, what: str, entry: Request) -> None:
        with words(step, what), ignored(errno.ENOENT):
            self._kernel.ask(RTM_DELNEIGH, entry)

    def _list(self, step: str, index: int) -> list[Message]:
        """The entries of a device. Kernels before 4.20 do not filter them."""
        with words(step, f"device {index}"):
            found = self._kernel.ask(RTM_GETNEIGH, _entry(index), DUMP)
            return [entry for entry in found if entry["ifindex"] == index]

    def _entries(self, index: int) -> Iterator[tuple[str, str]]:
        """Yield MAC and address of each entry. Entries of a bridge above the device have no address."""
        for entry in (each.attributes for each in self._list("list-peers", index)):
            if "NDA_DST" in entry and "NDA_LLADDR" in entry:
                yield entry.mac("NDA_LLADDR"), entry.address("NDA_DST")


def _entry(index: int, mac: str = "", address: str = "", *, flags: int = 0, state: int = 0) -> Request:
    """A message about an entry of a device."""
    named = [("NDA_LLADDR", mac)] if mac else []
    named += [("NDA_DST", address)] if address else []
    fields = {"family": socket.AF_BRIDGE, "ifindex": index, "flags": flags, "state": state}
    return ndmsg().load({**fields, **nest(named)})


def of_static_entries() -> BpfProgram:
    """A filter for a socket (SO_ATTACH_FILTER) of RTNLGRP_NEIGH: static entries of bridges and VXLAN devices.

    Those that a bridge learns come as fast as a VM sends from new MACs.
    """
    program = Assembler()
    program.load(_FAMILY_AT, 1)
    program.unequal(socket.AF_BRIDGE, "other")
    program.load(_STATE_AT, 1)
    program.mask(_STATIC)
    program.equal(0, "other")
    program.end(-1)
    program.label("other")
    program.end(0)
    return program.program()


def changed_port(message: Message) -> int | None:
    """The index of the bridge port that an RTM_NEWNEIGH adds an entry to; None if it is of no bridge."""
    return message["ifindex"] if message["family"] == socket.AF_BRIDGE else None


def _fixed(entry: Message) -> str:
    """The MAC of a fixed entry; empty for another."""
    is_fixed = entry["state"] == NUD_NOARP and entry["flags"] & NTF_STICKY
    return entry.attributes.mac("NDA_LLADDR") if is_fixed else ""
