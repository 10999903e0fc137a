"""The frames by which the network learns where a migrated VM is."""

from __future__ import annotations

import struct

_BROADCAST = b"\xff" * 6
_RARP = 0x8035  # RFC 903
_LEAST = 60  # bytes without the checksum (IEEE 802.3, 3.2.7)


def announcement(mac: str) -> bytes:
    """A RARP request of the MAC for itself, as QEMU (``announce_self_create`` in net/announce.c) and DPDK's
    vhost library send it. It names no IP address, so no neighbour changes an entry by it."""
    return _rarp(mac, _bytes(mac))


def handover(mac: str) -> bytes:
    """A RARP request that names no target: the host that the VM left asks the one that waits for it to
    announce it (``handover_flows`` in drivers/ovs/filters.py). QEMU and DPDK name the VM as the target."""
    return _rarp(mac, bytes(6))


def group_of(mac: str) -> str:
    """The locally administered group address (IEEE 802, 8.4) to which a request is passed on as an
    announcement: it is flooded, and is no address of a protocol between switches."""
    return bytes([_bytes(mac)[0] | 3, *_bytes(mac)[1:]]).hex(":")


def _bytes(mac: str) -> bytes:
    return bytes.fromhex(mac.replace(":", ""))


def _rarp(mac: str, target: bytes) -> bytes:
    # RFC 826: Ethernet, IPv4, lengths; operation 3, request reverse.
    body = struct.pack(">HHBBH", 1, 0x0800, 6, 4, 3) + _bytes(mac) + bytes(4) + target + bytes(4)
    return (_BROADCAST + _bytes(mac) + struct.pack(">H", _RARP) + body).ljust(_LEAST, b"\0")
