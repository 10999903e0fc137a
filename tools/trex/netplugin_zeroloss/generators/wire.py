"""Network interfaces, and exact counters of the test frames that leave or arrive.

A counter is a packet socket with a filter that is never read: the kernel counts what the filter accepts
(``PACKET_STATISTICS``), queued or not. It costs one filter run per frame, ignores other traffic (ARP,
router solicitations, LLDP), leaves no state behind, and ends with the process. Interface counters
include other traffic.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar

from netplugin_zeroloss.generators.frames import HEADER_BYTES
from netplugin_zeroloss.values import GeneratorError, UnusableInput

T = TypeVar("T")

#: Length of a marker in bytes. All frames counted together begin their payload with it.
MARKER_BYTES: Final = 8

#: Seconds to wait for the carrier of a link.
_CARRIER_S: Final = 5.0
_LOOK_S: Final = 0.05

# Constants of <linux/if_ether.h>, <linux/if_packet.h>, <linux/sockios.h>, <linux/filter.h>,
# <sched.h>.
_ETH_P_ALL: Final = 3
_SOL_PACKET: Final = 263
_PACKET_ADD_MEMBERSHIP: Final = 1
_PACKET_STATISTICS: Final = 6
_PACKET_MR_PROMISC: Final = 1
_PACKET_OUTGOING: Final = 4
_SO_ATTACH_FILTER: Final = 26
_SIOCGIFFLAGS: Final = 0x8913
_SIOCGIFMTU: Final = 0x8921
_SIOCGIFHWADDR: Final = 0x8927
_IFF_UP: Final = 0x1
_IFF_RUNNING: Final = 0x40
_LOAD_WORD: Final = 0x20
_JUMP_EQUAL: Final = 0x15
_RETURN: Final = 0x06
#: Offset of the packet type for the filter (SKF_AD_OFF + SKF_AD_PKTTYPE).
_FRAME_TYPE: Final = (-0x1000 + 4) & 0xFFFFFFFF
_CLONE_NEWNET: Final = 0x40000000


@dataclass(frozen=True, slots=True)
class Interface:
    """Attributes of an interface. ``mtu`` excludes the Ethernet header."""

    name: str
    index: int
    mac: str
    mtu: int


class FrameCount:
    """Counts frames with a marker that left or reached an interface. The caller closes it."""

    def __init__(self, socket_: socket.socket) -> None:
        self._socket = socket_
        self._count = 0

    def read(self) -> int:
        """Return the number of frames since construction."""
        # Reading resets the kernel counter; tp_packets includes frames dropped for lack of buffer.
        seen = self._socket.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8)
        self._count += struct.unpack("II", seen)[0]
        return self._count

    def close(self) -> None:
        self._socket.close()


class Wire:
    """The interfaces of a network namespace (None: that of this process). The caller closes it."""

    def __init__(self, netns: str | None = None) -> None:
        """Raises: UnusableInput if the namespace does not exist or cannot be entered."""
        self.netns_path = netns and (netns if "/" in netns else f"/run/netns/{netns}")
        # setns() applies to one thread; sockets opened there stay in the namespace.
        self._thread = ThreadPoolExecutor(1, "wire")
        if self.netns_path:
            try:
                self._inside(lambda: _enter(str(self.netns_path)))
            except OSError as error:
                self.close()
                raise UnusableInput(
                    "network namespace", f"{self.netns_path}: {os.strerror(error.errno or 0)}"
                ) from error

    def interface(self, name: str) -> Interface:
        """Return a usable interface. Raises: UnusableInput if it is absent, down or without carrier."""
        deadline = time.monotonic() + _CARRIER_S
        while True:
            try:
                found, flags = self._inside(lambda: _look_at(name))
            except OSError as error:
                where = f" in {self.netns_path}" if self.netns_path else ""
                why = f"{name}: {os.strerror(error.errno or errno.ENODEV)}{where}"
                raise UnusableInput("interface", why) from error
            if not flags & _IFF_UP:
                raise UnusableInput("interface", f"{name} is down: try `ip link set {name} up`")
            if flags & _IFF_RUNNING:
                return found
            if time.monotonic() > deadline:
                raise UnusableInput("interface", f"{name} has no carrier: is its far end up?")
            time.sleep(_LOOK_S)

    def count(self, interface: Interface, marker: bytes, *, outgoing: bool) -> FrameCount:
        """Start counting. Raises: GeneratorError."""
        try:
            return FrameCount(self._inside(lambda: _counting(interface, marker, outgoing)))
        except PermissionError as error:
            raise GeneratorError("counting frames needs root (CAP_NET_RAW)") from error
        except OSError as error:
            raise GeneratorError(f"{interface.name}: {error.strerror}") from error

    def dropped(self, interface: Interface) -> int:
        """Return the received frames that the kernel or the NIC dropped, since the interface exists."""
        text = self._inside(_read_net_dev)
        for line in text.splitlines():
            name, found, counts = line.partition(":")
            if found and name.strip() == interface.name:
                fields = counts.split()
                # Receive columns: bytes, packets, errs, drop (includes missed), fifo.
                return int(fields[3]) + int(fields[4])
        raise GeneratorError(f"{interface.name} is gone")

    def close(self) -> None:
        self._thread.shutdown()

    def _inside(self, work: Callable[[], T]) -> T:
        return self._thread.submit(work).result()


def _enter(path: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(descriptor)


def _look_at(name: str) -> tuple[Interface, int]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        request = struct.pack("16s24x", name.encode())

        def ask(what: int) -> bytes:
            return fcntl.ioctl(asking, what, request)[16:]

        index = socket.if_nametoindex(name)
        (flags,) = struct.unpack_from("H", ask(_SIOCGIFFLAGS))
        (mtu,) = struct.unpack_from("i", ask(_SIOCGIFMTU))
        return Interface(name, index, ask(_SIOCGIFHWADDR)[2:8].hex(":"), mtu), flags


def _counting(interface: Interface, marker: bytes, outgoing: bool) -> socket.socket:
    if len(marker) != MARKER_BYTES:
        raise ValueError("a marker of the wrong length")
    # Protocol 0: the socket receives nothing until the filter is attached.
    counter = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    try:
        program = _filter(marker, outgoing)
        buffer = ctypes.create_string_buffer(program)
        address = struct.pack("HL", len(program) // 8, ctypes.addressof(buffer))
        counter.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, address)
        # With the minimum buffer full, the kernel only counts.
        counter.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 0)
        counter.bind((interface.name, _ETH_P_ALL))
        if not outgoing:
            counter.setsockopt(
                _SOL_PACKET,
                _PACKET_ADD_MEMBERSHIP,
                struct.pack("iHH8s", interface.index, _PACKET_MR_PROMISC, 0, b""),
            )
        return counter
    except BaseException:
        counter.close()
        raise


def _filter(marker: bytes, outgoing: bool) -> bytes:
    """Build the classic BPF program: marker and direction. Jump offsets count instructions ahead."""
    high, low = struct.unpack(">II", marker)
    is_outgoing, is_not = (0, 1) if outgoing else (1, 0)
    return b"".join(
        struct.pack("HBBI", *instruction)
        for instruction in (
            (_LOAD_WORD, 0, 0, HEADER_BYTES),
            (_JUMP_EQUAL, 0, 5, high),
            (_LOAD_WORD, 0, 0, HEADER_BYTES + 4),
            (_JUMP_EQUAL, 0, 3, low),
            (_LOAD_WORD, 0, 0, _FRAME_TYPE),
            (_JUMP_EQUAL, is_outgoing, is_not, _PACKET_OUTGOING),
            (_RETURN, 0, 0, 1),
            (_RETURN, 0, 0, 0),
        )
    )


def _read_net_dev() -> str:
    with open("/proc/thread-self/net/dev", encoding="ascii") as file:
        return file.read()
