"""A VM without a guest: a network namespace whose NIC testpmd joins to a vhost-user socket or a vDPA device.

The kernel's own stack is the VM's: it pings, and frames are sent and counted by hand. It is there in
a second, where a guest takes ten.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.lab.namespaces import entered, namespace, within
from tests.lab.processes import CommandError, run
from tests.lab.testpmd import Forward, Testpmd, TestpmdOptions

DEVICE, _BACK = "eth0", "back0"
#: IEEE 802.1: for experiments within one's own network.
_ETHERTYPE = 0x88B5
_HEADER = struct.Struct("!6s6sHI")

#: What has not come after so long has been lost.
LATE_S = 10.0

# include/uapi/asm-generic/socket.h: beyond net.core.rmem_max, or frames may be lost in the ear.
_RCVBUFFORCE = 33


class Vm(AbstractContextManager["Vm"]):
    """One NIC with an address, on the VM's side of a `dpdkvhostuserclient` port or of a vDPA device."""

    def __init__(
        self,
        name: str,
        path: str,
        mac: str,
        address: str,
        mtu: int = 1500,
        queues: int = 1,
        *,
        tagged: bool = False,
        log: Path | None = None,
        reconnects: bool = False,
    ) -> None:
        """``tagged``: VLAN tags pass too; DPDK's af_packet driver takes the outer one off.

        ``path``, ``log`` and ``reconnects`` are testpmd's.
        """
        self.name = name
        self.mac = mac
        self.address = address
        self.mtu = mtu
        self._testpmd = Testpmd(
            Path(path),
            TestpmdOptions(
                forward=Forward.IO,
                mac=mac,
                wire=_BACK,
                netns=name,
                queues=queues,
                jumbo=mtu > 1500 or tagged,
                memory_mb=192 if mtu > 1500 or tagged else 64,
                # The largest ring: nothing is lost while testpmd waits for a busy core.
                ring_size=1024,
                reconnects=reconnects,
            ),
            log,
        )
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(namespace(self.name))
            # The NIC takes what the port must not: the port's own MTU is to be seen, not the VM's.
            wide = str(max(self.mtu, 1500) + 500)
            self._ip("link", "add", DEVICE, "mtu", wide, "type", "veth", "peer", "name", _BACK)
            self._ip("link", "set", _BACK, "mtu", wide, "up")
            # There is no NIC that sums for the stack.
            run(within(self.name, ["ethtool", "-K", DEVICE, "tx", "off"]))
            self._ip("link", "set", DEVICE, "address", self.mac)
            self._ip("link", "set", DEVICE, "up")
            self._ip("address", "add", f"{self.address}/24", "dev", DEVICE)
            stack.enter_context(self._testpmd)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def pings(self, address: str, size: int = 56, wait_s: int = 1) -> bool:
        """One ping, unfragmented, of so many bytes of payload (the packet has 28 more)."""
        ping = ["ping", "-c", "1", "-W", str(wait_s), "-M", "do", "-s", str(size), address]
        try:
            run(within(self.name, ping))
        except CommandError:
            return False
        return True

    def forget(self) -> None:
        """Forget the neighbours: the next ping asks for them by ARP."""
        self._ip("neighbour", "flush", "dev", DEVICE)

    def knows(self, address: str, mac: str) -> None:
        self._ip("neighbour", "replace", address, "lladdr", mac, "dev", DEVICE)

    def send(self, to: str, count: int, size: int = 100) -> None:
        """Frames of ours to a MAC, numbered from 0; ``size`` is the layer-3 payload."""
        with self._raw() as raw:
            for number in range(count):
                raw.send(self._frame(to, number, size))

    @contextmanager
    def streaming(self, to: Vm, ear: Ear, under_way: int = 100) -> Iterator[list[int]]:
        """Send frames to a VM, one every two milliseconds, for the time of the block; gives their numbers.

        No more of them are under way than all on the way have room for, however long somebody waits for a
        CPU: when so many more were sent than the ``ear`` has heard, those that are late are waited for.
        """
        sent: list[int] = []
        stop = threading.Event()

        def send() -> None:
            lost = 0
            with self._raw() as raw:
                while not stop.wait(0.002):
                    patience = time.monotonic() + LATE_S
                    while len(sent) - lost - ear.listen() >= under_way:
                        if stop.wait(0.002):
                            return
                        if time.monotonic() > patience:
                            lost = len(sent) - ear.listen()
                    raw.send(self._frame(to.mac, len(sent)))
                    sent.append(len(sent))

        thread = threading.Thread(target=send)
        thread.start()
        try:
            yield sent
        finally:
            stop.set()
            thread.join()

    def _frame(self, to: str, number: int, size: int = 100) -> bytes:
        head = _HEADER.pack(_packed(to), _packed(self.mac), _ETHERTYPE, number)
        return head.ljust(14 + size, b"\0")

    @contextmanager
    def receives(self) -> Iterator[Ear]:
        """Count the frames of ours that come to this VM's MAC for the time of the block."""
        with self._raw() as raw:
            raw.setsockopt(socket.SOL_SOCKET, _RCVBUFFORCE, 32 << 20)
            raw.setblocking(False)
            yield Ear(raw, self.mac)

    @contextmanager
    def _raw(self) -> Iterator[socket.socket]:
        with entered(self.name):
            raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETHERTYPE))
        with raw:
            raw.bind((DEVICE, _ETHERTYPE))
            yield raw

    def _ip(self, *words: str) -> None:
        run(within(self.name, ["ip", *words]))


class Ear:
    """What a VM has received so far."""

    def __init__(self, raw: socket.socket, mac: str) -> None:
        self._raw = raw
        self._mac = _packed(mac)
        self.bytes = 0
        self.numbers: list[int] = []

    def listen(self) -> int:
        """Take what has come; the answer is how many frames there are by now."""
        while True:
            try:
                frame, (_, _, direction, _, _) = self._raw.recvfrom(65536)
            except BlockingIOError:
                return len(self.numbers)
            to, _, _, number = _HEADER.unpack_from(frame)
            if to == self._mac and direction != socket.PACKET_OUTGOING:
                self.numbers.append(number)
                self.bytes += len(frame)

    def settle(self, quiet_s: float = 0.5) -> int:
        """Listen until nothing more comes."""
        received = -1
        while received != (now := self.listen()):
            received = now
            time.sleep(quiet_s)
        return received


def _packed(mac: str) -> bytes:
    return bytes.fromhex(mac.replace(":", ""))
