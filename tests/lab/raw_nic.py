"""The NIC of a VM, and the end of a wire, that send and receive whole frames, as root in a guest can."""

from __future__ import annotations

import errno
import fcntl
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from scapy.layers.l2 import Ether
from scapy.packet import Packet, Raw

from tests.lab.namespaces import entered
from tests.lab.offloads import Offload

_TUNSETIFF, _TUNSETVNETHDRSZ = 0x400454CA, 0x400454D8
_TAP, _NO_PI, _VNET_HDR = 0x0002, 0x1000, 0x4000
_VNET_HDR_LEN = 10
_ALL_PROTOCOLS = 0x0003
_DEADLINE_S = 90.0
_MARKER_TYPE = 0x88B5  # for experiments (IEEE 802)


class Ear(Protocol):
    def fileno(self) -> int: ...
    def receive(self) -> bytes: ...


class RawNic:
    """A tap held open as QEMU holds it, with one queue."""

    def __init__(self, host: str | None, tap: str) -> None:
        with entered(host):
            self._tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            request = struct.pack("16sH22x", tap.encode(), _TAP | _NO_PI | _VNET_HDR)
            fcntl.ioctl(self._tap, _TUNSETIFF, request)

    def fileno(self) -> int:
        return self._tap

    def send(self, frame: bytes) -> None:
        os.write(self._tap, bytes(_VNET_HDR_LEN) + frame.ljust(60, b"\0"))

    def send_with(self, offload: Offload, frame: bytes) -> bool:
        """Ask the host for what a NIC would do; whether the kernel has taken the frame."""
        header = offload.header()
        fcntl.ioctl(self._tap, _TUNSETVNETHDRSZ, struct.pack("i", len(header)))
        try:
            os.write(self._tap, header + frame)
        except OSError as refused:
            if refused.errno != errno.EINVAL:
                raise
            return False
        finally:
            fcntl.ioctl(self._tap, _TUNSETVNETHDRSZ, struct.pack("i", _VNET_HDR_LEN))
        return True

    def receive(self) -> bytes:
        return os.read(self._tap, 1 << 16)[_VNET_HDR_LEN:]

    def close(self) -> None:
        os.close(self._tap)


class RawWire:
    """The end of a wire."""

    def __init__(self, host: str | None, device: str) -> None:
        with entered(host):
            self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS))
            self._socket.bind((device, 0))

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, frame: bytes) -> None:
        self._socket.send(frame.ljust(60, b"\0"))

    def receive(self) -> bytes:
        return self._socket.recv(1 << 16)

    def close(self) -> None:
        self._socket.close()


@contextmanager
def opened(*ends: RawNic | RawWire) -> Iterator[None]:
    try:
        yield
    finally:
        for end in ends:
            end.close()


_serial = iter(range(1, 1 << 30))


def new_name() -> bytes:
    """What no other frame has within, however it was cut or tagged on its way."""
    return b"frame %08d;" % next(_serial)


def marker(source: str, target: str = "ff:ff:ff:ff:ff:ff") -> Packet:
    return Ether(src=source, dst=target, type=_MARKER_TYPE)


def drain(ear: Ear) -> list[bytes]:
    """What has arrived and was not read."""
    found = []
    while select.select([ear], [], [], 0)[0]:
        found.append(ear.receive())
    return found


def arrivals(sender: RawNic | RawWire, ear: Ear, frames: Mapping[str, Packet], last: Packet) -> set[str]:
    """Which of the frames come out, by name: all are sent, and then one that does come out."""
    names = {what: new_name() for what in frames}
    for what, frame in frames.items():
        sender.send(bytes(frame / Raw(names[what])))
    received = until(sender, ear, last)
    return {what for what, name in names.items() if any(name in each for each in received)}


def until(sender: RawNic | RawWire, ear: Ear, last: Packet) -> list[bytes]:
    """Send this frame until it comes out (a port forwards a moment after its carrier is there), and
    tell what else came out until then."""
    name = new_name()
    return until_received(lambda: sender.send(bytes(last / Raw(name))), ear, name)


def until_received(send: Callable[[], None], ear: Ear, name: bytes) -> list[bytes]:
    """Send until a frame of this name comes out, and tell what else came out until then."""
    received: list[bytes] = []
    deadline = time.monotonic() + _DEADLINE_S
    while time.monotonic() < deadline:
        send()
        while select.select([ear], [], [], 1.0)[0]:
            received.append(ear.receive())
            if name in received[-1]:
                return received
    raise AssertionError(f"{name!r} never came out, but {len(received)} others did")


def named(frames: Iterable[Packet]) -> dict[str, Packet]:
    return {f"{number} {frame.summary()}": frame for number, frame in enumerate(frames)}
