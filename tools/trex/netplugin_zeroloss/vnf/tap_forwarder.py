"""The process of the VNF ``taps``: forwards frames between pairs of taps, one at a time.

It counts the received and sent frames per port in a file that it maps, two numbers of 64 bits each.
"""

from __future__ import annotations

import argparse
import fcntl
import mmap
import os
import select
import struct
from collections.abc import Sequence
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


class Forwarder:
    """Forwards between taps 0 and 1, 2 and 3, and so on."""

    def __init__(self, taps: Sequence[tuple[str, str, str]], counters: Path) -> None:
        """``taps``: name, own MAC address and MAC address of the far end of each."""
        self._files = [_open(name) for name, _, _ in taps]
        self._heads = [_address(peer) + _address(own) for _, own, peer in taps]
        draft = counters.with_suffix(".new")
        draft.write_bytes(bytes(16 * len(taps)))
        with draft.open("r+b") as file:
            # Frames received by port n at 2n, sent at 2n + 1.
            self._counts = memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")
        draft.rename(counters)

    def run(self) -> None:
        """Forward until the process is killed."""
        ports = {file: number for number, file in enumerate(self._files)}
        with select.epoll() as ready:
            for file in self._files:
                ready.register(file, select.EPOLLIN)
            while True:
                for file, _ in ready.poll():
                    self._carry(ports[file])

    def _carry(self, number: int) -> None:
        buffer = bytearray(_LONGEST)
        view, partner = memoryview(buffer), number ^ 1
        source, target, head = self._files[number], self._files[partner], self._heads[partner]
        for _ in range(_BURST):
            try:
                size = os.readv(source, [buffer])
            except BlockingIOError:
                return
            self._counts[2 * number] += 1
            buffer[_ADDRESSES] = head
            try:
                os.write(target, view[:size])
            except OSError:
                continue  # dropped: received, but not counted as sent
            self._counts[2 * partner + 1] += 1


def _open(name: str) -> int:
    flags = int(Path(f"/sys/class/net/{name}/tun_flags").read_text(), 16)
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    desired = _TAP | _NO_PI | _VNET_HDR | (flags & _MULTI_QUEUE)
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", name.encode(), desired))
    return file


def _address(mac: str) -> bytes:
    return bytes.fromhex(mac.replace(":", ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--counters", type=Path, required=True)
    parser.add_argument("--cpu", type=int, help="run on this CPU")
    parser.add_argument("--tap", nargs=3, action="append", required=True, metavar=("NAME", "MAC", "PEER"))
    options = parser.parse_args()
    if options.cpu is not None:
        os.sched_setaffinity(0, {options.cpu})
    Forwarder([tuple(tap) for tap in options.tap], options.counters).run()


if __name__ == "__main__":
    main()
