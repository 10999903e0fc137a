"""VMs on taps without guests: a network namespace whose NIC is joined to the tap, as QEMU would.

The kernel's own stack is the VM's: it pings, and it sends streams of datagrams that are counted. It
is there at once, where a guest takes ten seconds.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from tests.lab.namespaces import entered, namespace, within
from tests.lab.processes import CommandError, run, wait_for

NIC = "eth0"
_TUNSETIFF = 0x400454CA
_TAP, _NO_PI, _VNET_HDR, _MULTI_QUEUE = 0x0002, 0x1000, 0x4000, 0x0100
_PORT = 5201
_STAMP = struct.Struct("!I")
_QUIET_S = 1.0


class TapVm:
    """One NIC with an address, on the tap that the agent made."""

    def __init__(
        self,
        name: str,
        host: str | None,
        tap: str,
        mac: str,
        address: str,
        *,
        mtu: int = 1500,
        queues: int = 1,
    ) -> None:
        """``host`` is the namespace of the tap. The NIC takes frames longer than ``mtu``, which the
        network must not carry: it is the network's limit that is to be seen, not the VM's."""
        self.name, self.host, self.tap = name, host, tap
        self.mac, self.address, self.mtu = mac, address, mtu
        self._many = queues > 1
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(namespace(self.name))
            with entered(self.host):
                outer = open_tap(self.tap, _MULTI_QUEUE if self._many else 0)
            stack.callback(os.close, outer)
            with entered(self.name):
                inner = open_tap(NIC)
            stack.callback(os.close, inner)
            self.ip("link", "set", NIC, "address", self.mac, "mtu", str(self.mtu + 500), "up")
            self.ip("address", "add", f"{self.address}/24", "dev", NIC)
            stack.enter_context(_pumped(outer, inner))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def ip(self, *words: str) -> str:
        return run(within(self.name, ["ip", *words]))

    def pings(self, address: str, size: int = 56, wait_s: int = 1) -> bool:
        """One ping, unfragmented, of so many bytes of payload (the packet has 28 more)."""
        ping = ["ping", "-c", "1", "-W", str(wait_s), "-M", "do", "-s", str(size), address]
        try:
            run(within(self.name, ping))
        except CommandError:
            return False
        return True

    def reaches(self, address: str, size: int = 56, deadline_s: float = 60.0) -> bool:
        """Pings until one is answered: a bridge port forwards a moment after its carrier is there."""
        deadline = time.monotonic() + deadline_s
        while time.monotonic() < deadline:
            if self.pings(address, size):
                return True
        return False

    @contextmanager
    def listening(self) -> Iterator[Arrivals]:
        """Count what arrives for the time of the block."""
        with entered(self.name):
            inbox = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with inbox:
            # SO_RCVBUFFORCE: nothing may be lost for want of room here.
            inbox.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)
            inbox.bind((self.address, _PORT))
            inbox.settimeout(0.1)
            arrivals = Arrivals()
            with _thread(lambda stop: arrivals.count(inbox, stop)):
                yield arrivals

    def sent_from(self, source: str, to: str) -> int:
        """Send one datagram from this address, which the NIC must have."""
        with entered(self.name):
            outbox = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with outbox:
            outbox.bind((source, 0))
            outbox.sendto(_STAMP.pack(1 << 31), (to, _PORT))
        return 1

    def stream(self, to: str, *, count: int, size: int, kbps: int) -> int:
        """Send so many datagrams of ``size`` bytes at this rate, and tell how many were sent."""
        with entered(self.name):
            outbox = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with outbox:
            outbox.connect((to, _PORT))
            gap = size * 8 / (kbps * 1000)
            start = time.monotonic()
            for number in range(count):
                late = start + number * gap - time.monotonic()
                if late > 0:
                    time.sleep(late)  # the pace is the load that is offered
                outbox.send(_STAMP.pack(number).ljust(size, b"\0"))
        return count

    @contextmanager
    def streaming(self, to: str, *, size: int) -> Iterator[list[int]]:
        """Send a datagram each millisecond for the time of the block; the numbers of those that were sent.

        After a time without a CPU it goes on at the same pace: more at once might not find room on their way.
        """
        with entered(self.name):
            outbox = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sent: list[int] = []

        def send(stop: threading.Event) -> None:
            while not stop.wait(0.001):
                outbox.send(_STAMP.pack(len(sent)).ljust(size, b"\0"))
                sent.append(len(sent))

        with outbox:
            outbox.connect((to, _PORT))
            with _thread(send):
                yield sent
                so_far = len(sent)
                wait_for(lambda: len(sent) > so_far, 60, "it still sends")


@dataclass
class Arrivals:
    """What has arrived, each datagram once, and when the first and the last did."""

    numbers: set[int] = field(default_factory=set)
    bytes: int = 0
    first: float = 0.0
    last: float = 0.0

    def count(self, inbox: socket.socket, stop: threading.Event) -> None:
        while not stop.is_set():
            with suppress(TimeoutError):
                data = inbox.recv(65536)
                self.last = time.monotonic()
                self.first = self.first or self.last
                self.numbers.add(_STAMP.unpack_from(data)[0])
                self.bytes += len(data)

    def settle(self) -> None:
        """Wait until nothing more comes."""
        while time.monotonic() - (self.last or time.monotonic()) < _QUIET_S:
            time.sleep(0.05)

    @property
    def kbps(self) -> float:
        return self.bytes * 8 / 1000 / max(self.last - self.first, 1e-9)


def open_tap(name: str, more: int = 0) -> int:
    """A tap as QEMU opens it: a header of virtio-net's, 10 bytes, is before each frame."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    request = struct.pack("16sH22x", name.encode(), _TAP | _NO_PI | _VNET_HDR | more)
    fcntl.ioctl(descriptor, _TUNSETIFF, request)
    return descriptor


@contextmanager
def _pumped(one: int, other: int) -> Iterator[None]:
    """What comes out of each goes into the other."""
    ends = {one: other, other: one}

    def pump(stop: threading.Event) -> None:
        while not stop.is_set():
            for end in select.select(list(ends), [], [], 0.1)[0]:
                for _ in range(64):
                    try:
                        frame = os.read(end, 1 << 17)
                    except BlockingIOError:
                        break
                    with suppress(OSError):  # a device that is down takes nothing
                        os.write(ends[end], frame)

    with _thread(pump):
        yield


@contextmanager
def _thread(work: object) -> Iterator[None]:
    stop = threading.Event()
    thread = threading.Thread(target=work, args=(stop,), daemon=True)  # type: ignore[arg-type]
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(timeout=60)
