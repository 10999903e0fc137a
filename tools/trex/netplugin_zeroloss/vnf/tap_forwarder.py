"""The process of the VNF ``taps``: forwards frames between pairs of taps, one at a time."""

from __future__ import annotations

import fcntl
import os
import select
import struct
import sys
from pathlib import Path

#: linux/if_tun.h
_TUNSETIFF = 0x400454CA
_TAP, _NO_PI, _VNET_HDR, _MULTI_QUEUE = 0x0002, 0x1000, 0x4000, 0x0100
#: Size of struct virtio_net_hdr before each frame, which the agent's taps have for QEMU.
_HEADER = 10
_ADDRESSES = slice(_HEADER, _HEADER + 12)
#: Maximum frames of one port before the others are served.
_BURST = 64
_LONGEST = 1 << 16


def main(words: list[str]) -> None:
    """Forward between taps 0 and 1, 2 and 3, and so on, until the process is killed.

    ``words``: name, own MAC address and MAC address of the far end of each.
    """
    files = [_open(name) for name in words[::3]]
    pairs = zip(words[1::3], words[2::3], strict=True)
    heads = [bytes.fromhex(f"{peer}{own}".replace(":", "")) for own, peer in pairs]
    with select.epoll() as ready:
        for file in files:
            ready.register(file, select.EPOLLIN)
        while True:
            for file, _ in ready.poll():
                partner = files.index(file) ^ 1
                _carry(file, files[partner], heads[partner])


def _carry(source: int, target: int, head: bytes) -> None:
    buffer = bytearray(_LONGEST)
    for _ in range(_BURST):
        try:
            size = os.readv(source, [buffer])
        except BlockingIOError:
            return
        buffer[_ADDRESSES] = head
        try:
            os.write(target, memoryview(buffer)[:size])
        except OSError:
            continue  # dropped: received, and not sent


def _open(name: str) -> int:
    flags = int(Path(f"/sys/class/net/{name}/tun_flags").read_text(), 16)
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    desired = _TAP | _NO_PI | _VNET_HDR | (flags & _MULTI_QUEUE)
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", name.encode(), desired))
    return file


if __name__ == "__main__":
    main(sys.argv[1:])
