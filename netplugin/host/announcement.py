"""The frame by which the network learns where a migrated VM is."""

from __future__ import annotations

import struct

_BROADCAST = b"\xff" * 6
_RARP = 0x8035  # RFC 903
_LEAST = 60  # bytes without the checksum (IEEE 802.3, 3.2.7)


def announcement(mac: str) -> bytes:
    """A RARP request of the MAC for itself, as QEMU (``announce_self_create`` in net/announce.c) and DPDK's
    vhost library send it. It names no IP address, so no neighbour changes an entry by it."""
    own = bytes.fromhex(mac.replace(":", ""))
    # RFC 826: Ethernet, IPv4, lengths; operation 3, request reverse.
    body = struct.pack(">HHBBH", 1, 0x0800, 6, 4, 3) + own + bytes(4) + own + bytes(4)
    return (_BROADCAST + own + struct.pack(">H", _RARP) + body).ljust(_LEAST, b"\0")
