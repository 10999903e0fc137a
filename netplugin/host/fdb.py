"""Where a VXLAN device sends to, by netlink: its forwarding database (RFC 7348, bridge(8)).

A frame whose destination is not known, and each broadcast, goes to every address that an entry of
the all-zero MAC names: these are the peers. What is learned is an entry for the sender's MAC.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import struct
from collections.abc import Iterator

from netplugin.host import netlink
from netplugin.host.links import words
from netplugin.host.netlink import attribute, attributes

# include/uapi/linux: rtnetlink.h, neighbour.h
_NEWNEIGH, _DELNEIGH, _GETNEIGH = 28, 29, 30
_DST, _LLADDR = 1, 2
_NTF_SELF, _NUD_PERMANENT, _NUD_NOARP = 0x02, 0x80, 0x40
_NDMSG, _IFINFO = struct.Struct("=BxxxiHBB"), struct.Struct("=BxHiII")
_ALL = bytes(6)


class Fdb:
    """The entries of the VXLAN devices in the network namespace that the calling thread is in."""

    def peers(self, index: int) -> frozenset[str]:
        """The addresses that unknown destinations go to. Raises: HostError, OperationTimeout."""
        return frozenset(address for mac, address in self._entries(index) if mac == _ALL)

    def add_peer(self, index: int, address: str) -> None:
        """One more peer, beside those there are. Raises: HostError, OperationTimeout."""
        with words("add-peer", address), contextlib.suppress(FileExistsError):
            netlink.ask(_NEWNEIGH, _entry(index, _ALL, address), netlink.APPEND)

    def remove_peer(self, index: int, address: str) -> None:
        """The peer goes, and what was learned of it.

        Its own entry goes last: while that is there, a removal that was cut off is seen.

        Raises: HostError, OperationTimeout.
        """
        learned = [mac for mac, to in self._entries(index) if to == address and mac != _ALL]
        for mac in (*learned, _ALL):
            with words("remove-peer", address), _suppressed(errno.ENOENT):
                netlink.ask(_DELNEIGH, _entry(index, mac, address))

    def _entries(self, index: int) -> Iterator[tuple[bytes, str]]:
        """MAC and address of each entry; those of a bridge about the device have no address."""
        with words("list-peers", f"device {index}"):
            found = netlink.dump(_GETNEIGH, _IFINFO.pack(socket.AF_BRIDGE, 0, index, 0, 0))
        for payload in found:
            _, at, _, _, _ = _NDMSG.unpack_from(payload)
            values = dict(attributes(payload, _NDMSG.size))
            if at == index and _DST in values and _LLADDR in values:
                yield values[_LLADDR], str(ipaddress.ip_address(values[_DST]))


def _entry(index: int, mac: bytes, address: str) -> bytes:
    state = _NUD_PERMANENT | _NUD_NOARP
    return (
        _NDMSG.pack(socket.AF_BRIDGE, index, state, _NTF_SELF, 0)
        + attribute(_DST, ipaddress.ip_address(address).packed)
        + attribute(_LLADDR, mac)
    )


@contextlib.contextmanager
def _suppressed(code: int) -> Iterator[None]:
    try:
        yield
    except OSError as refused:
        if refused.errno != code:
            raise
