"""What a VM may ask of the host in a frame's virtio header: checksums, segments, segments of tunnels."""

from __future__ import annotations

import struct
from dataclasses import dataclass

NEEDS_CSUM = 1
# include/uapi/linux/virtio_net.h; since Linux 6.17 with a tunnel, whose outer packet is IPv4.
TCP4, UDP, TCP6, UDP_SEGMENTS, TUNNEL = 1, 3, 4, 5, 0x20
_PLAIN, _HASH, _TUNNEL = struct.Struct("<BBHHHH"), bytes(10), struct.Struct("<HH")


@dataclass(frozen=True)
class Offload:
    """A header: the checksum from byte ``start`` goes ``offset`` bytes behind that; see virtio 1.2, 5.1.6."""

    start: int | None = None
    offset: int = 0
    gso: int = 0
    gso_size: int = 0
    #: Where the tunnel's UDP header is said to be, and the packet within.
    tunnel: tuple[int, int] | None = None

    def header(self) -> bytes:
        flags = NEEDS_CSUM if self.start is not None else 0
        plain = _PLAIN.pack(flags, self.gso, 0, self.gso_size, self.start or 0, self.offset)
        return plain + (_HASH + _TUNNEL.pack(*self.tunnel) if self.tunnel else b"")


def internet_sum(data: bytes) -> int:
    """The ones' complement sum (RFC 1071)."""
    data += bytes(len(data) % 2)
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def forged(frame: bytes, at: int, value: int) -> tuple[bytes, Offload]:
    """Change the last two bytes, which are of no matter, so that the checksum at this byte is the value."""
    frame = frame[:-2] + bytes(2)
    last = (-value - internet_sum(frame[at:])) % 0xFFFF
    # The last two bytes are one word of the sum if an even number is before them.
    assert (len(frame) - at) % 2 == 0
    return frame[:-2] + struct.pack("!H", last), Offload(start=at)
