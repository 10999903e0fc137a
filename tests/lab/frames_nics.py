"""Where frames go in and come out, byte for byte: taps, raw sockets, vhost-user ports, the host's ears."""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Protocol

from tests.lab.namespaces import entered, namespace, within
from tests.lab.processes import Argument, Daemon, run
from tests.lab.testpmd import POLITELY, START_DEADLINE_S, check_path
from tests.lab.traffic_taps import open_tap

# include/uapi/linux: virtio_net.h (without merged buffers), if_packet.h, asm-generic/socket.h
_OFFLOAD, _NEEDS_CSUM = struct.Struct("<BBHHHH"), 1
_NO_OFFLOAD = bytes(_OFFLOAD.size)
#: Newer kernels refuse to write a checksum before this byte (``virtio_net_hdr_to_skb``).
LEAST_PLACE = 20
_SOL_PACKET, _PACKET_AUXDATA, _RCVBUFFORCE = 263, 8, 33
_AUXDATA = struct.Struct("=IIIHHHH")
_TAG_VALID, _TAG_HAS_TPID = 1 << 4, 1 << 6
_ALL, _DOT1Q = 0x0003, 0x8100
_MAXIMUM = 65536
_TESTPMD_MEMORY_MB = 128


class Ear(Protocol):
    """A place where frames come out."""

    def received(self) -> list[bytes]:
        """What has come since the last call."""


class Nic(Ear, Protocol):
    """A place where frames go in too."""

    def send(self, frame: bytes) -> None: ...


class TapNic:
    """The VM's end of a tap, opened as QEMU opens it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def send(self, frame: bytes) -> None:
        os.write(self._descriptor, _NO_OFFLOAD + frame)

    def send_incomplete(self, frame: bytes, at: int) -> None:
        """Send it with other bytes at this place, where the host's checksum makes it this frame."""
        try:
            self.send_with(_OFFLOAD.pack(_NEEDS_CSUM, 0, 0, 0, at, 0), _incomplete(frame, at))
        except OSError as refused:
            if refused.errno != errno.EINVAL or at >= LEAST_PLACE:
                raise

    def send_with(self, header: bytes, frame: bytes) -> None:
        """Send it with a virtio header of one's own."""
        os.write(self._descriptor, header + frame)

    def received(self) -> list[bytes]:
        found = []
        with suppress(BlockingIOError):
            while True:
                found.append(os.read(self._descriptor, _MAXIMUM)[len(_NO_OFFLOAD) :])
        return found


def _incomplete(frame: bytes, at: int) -> bytes:
    """RFC 1071: the bytes are such that their sum with all that follows is what the frame has there."""
    rest = frame[at + 2 :] + bytes(len(frame) % 2 ^ at % 2)
    total = sum(struct.unpack(f"!{len(rest) // 2}H", rest))
    [checksum] = struct.unpack("!H", frame[at : at + 2])
    return frame[:at] + struct.pack("!H", (-checksum - total) % 0xFFFF) + frame[at + 2 :]


@contextmanager
def tap_nic(netns: str | None, tap: str) -> Iterator[TapNic]:
    with entered(netns):
        descriptor = open_tap(tap)
    try:
        yield TapNic(descriptor)
    finally:
        os.close(descriptor)


class PacketNic:
    """A kernel device by a raw socket: what arrives there, with the tag that the kernel took off."""

    def __init__(self, raw: socket.socket) -> None:
        self._socket = raw

    def send(self, frame: bytes) -> None:
        self._socket.send(frame)

    def received(self) -> list[bytes]:
        found = []
        with suppress(BlockingIOError):
            while True:
                frame, auxiliary, _, sender = self._socket.recvmsg(_MAXIMUM, 256)
                if sender[2] != socket.PACKET_OUTGOING:
                    found.append(_with_tag(frame, auxiliary))
        return found


def _with_tag(frame: bytes, auxiliary: Sequence[tuple[int, int, bytes]]) -> bytes:
    """packet(7), PACKET_AUXDATA: the kernel keeps the outermost tag next to the frame."""
    for level, kind, data in auxiliary:
        if (level, kind) == (_SOL_PACKET, _PACKET_AUXDATA):
            status, _, _, _, _, tag, protocol = _AUXDATA.unpack_from(data)
            if status & _TAG_VALID:
                protocol = protocol if status & _TAG_HAS_TPID else _DOT1Q
                return frame[:12] + struct.pack("!HH", protocol, tag) + frame[12:]
    return frame


@contextmanager
def packet_nic(netns: str | None, device: str) -> Iterator[PacketNic]:
    with _raw(netns, _ALL) as raw:
        raw.bind((device, _ALL))
        raw.setsockopt(_SOL_PACKET, 1, struct.pack("iHH8s", _index(netns, device), 1, 0, b""))
        yield PacketNic(raw)


def _index(netns: str | None, device: str) -> int:
    with entered(netns):
        return socket.if_nametoindex(device)


@contextmanager
def _raw(netns: str | None, protocol: int) -> Iterator[socket.socket]:
    with entered(netns):
        raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(protocol))
    with raw:
        raw.setsockopt(socket.SOL_SOCKET, _RCVBUFFORCE, 32 << 20)
        raw.setsockopt(_SOL_PACKET, _PACKET_AUXDATA, 1)
        raw.setblocking(False)
        yield raw


class HostStack:
    """What the host's own protocols are given, on whichever interface.

    A socket for one protocol is served where the kernel's own protocols are: after a bridge or OVS
    has had the frame, and only if it was left to the host (``__netif_receive_skb_core`` in
    net/core/dev.c). A socket for all protocols would be before that.
    """

    #: IPv4, ARP, IPv6, RARP, slow protocols, 802.1X, LLDP, 802.2, SNAP, for experiments.
    PROTOCOLS = (
        0x0800,
        0x0806,
        0x86DD,
        0x8035,
        0x8809,
        0x888E,
        0x88CC,
        0x0004,
        0x0005,
        0x88B5,
    )

    def __init__(self, ears: Sequence[Ear]) -> None:
        self._ears = ears

    def received(self) -> list[bytes]:
        return [frame for ear in self._ears for frame in ear.received()]


@contextmanager
def host_stack(netns: str | None) -> Iterator[HostStack]:
    with ExitStack() as stack:
        yield HostStack(
            [PacketNic(stack.enter_context(_raw(netns, protocol))) for protocol in HostStack.PROTOCOLS]
        )


@contextmanager
def vhost_nics(
    name: str, sockets: Sequence[Path], macs: Sequence[str], core: int = 0
) -> Iterator[list[PacketNic]]:
    """VMs' ends of vhost-user ports: a namespace in which a device is joined to each of them.

    One testpmd serves all: it polls, and each would take a CPU. DPDK's pcap driver hands over
    tags as they are, where its af_packet driver makes each an 802.1Q one.
    """
    for path in sockets:
        check_path(path)
    with ExitStack() as stack:
        stack.enter_context(namespace(name))
        for number in range(len(sockets)):
            near, far = f"vm{number}", f"back{number}"
            run(within(name, ["sysctl", "-qw", "net.ipv6.conf.default.disable_ipv6=1"]))
            run(within(name, ["ip", "link", "add", near, "type", "veth", "peer", "name", far]))
            for device in (near, far):
                run(within(name, ["ip", "link", "set", device, "arp", "off", "mtu", "2000", "up"]))
        log = sockets[0].with_name(f"{name}.testpmd.log")
        args = within(name, [*POLITELY, *_testpmd(name, sockets, macs, core)])
        daemon = stack.enter_context(Daemon("testpmd", args, log))
        daemon.wait_for(
            lambda: all(path.is_socket() for path in sockets), START_DEADLINE_S, "testpmd listens"
        )
        yield [stack.enter_context(packet_nic(name, f"vm{number}")) for number in range(len(sockets))]


def _testpmd(name: str, sockets: Sequence[Path], macs: Sequence[str], core: int) -> Iterator[Argument]:
    yield from ("dpdk-testpmd", "--lcores", f"0@{core},1@{core}", "-m", str(_TESTPMD_MEMORY_MB))
    yield from ("--no-huge", "--single-file-segments", "--no-pci", "--no-telemetry")
    yield f"--file-prefix={name}"
    for number, (path, mac) in enumerate(zip(sockets, macs, strict=True)):
        yield f"--vdev=net_virtio_user{number},path={path},server=1,queue_size=256,mac={mac}"
        yield f"--vdev=net_pcap{number},rx_iface_in=back{number},tx_iface=back{number}"
    yield from ("--", "--forward-mode=io", "--port-topology=paired", "--rxd=256", "--txd=256")
    yield from ("--total-num-mbufs=16384", "--nb-cores=1", "--stats-period=5", "--auto-start")
    yield "--no-lsc-interrupt"
