"""Frames byte by byte: sent from a kernel device, and looked for where they come out, tags and all."""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.lab.namespaces import entered

_MARK = struct.Struct("!6sI")
_MAGIC = b"npmark"
_SHORTEST = 60  # IEEE 802.3, without the FCS: what is shorter would be padded behind the mark
_ETH_P_ALL = 3
# include/uapi/linux/if_packet.h: the kernel takes the outer tag off a frame and puts it there.
_SOL_PACKET, _PACKET_AUXDATA = 263, 8
_AUXDATA = struct.Struct("=IIIHHHH")
_VLAN_VALID, _TPID_VALID = 0x10, 0x40
_RCVBUFFORCE = 33
_TURNS = 3
TPIDS = (0x8100, 0x88A8)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A frame as it came out; ``vlans`` are its tags from the outer to the inner."""

    number: int
    frame: bytes

    @property
    def vlans(self) -> tuple[int, ...]:
        found, at = [], 12
        while int.from_bytes(self.frame[at : at + 2]) in TPIDS:
            found.append(int.from_bytes(self.frame[at + 2 : at + 4]) & 0xFFF)
            at += 4
        return tuple(found)


@dataclass
class Ear:
    """What has come out of a device by now, of the frames that carry our mark."""

    raw: socket.socket
    arrivals: list[Arrival] = field(default_factory=list)
    #: Marks that were given: none is given twice.
    given: int = 0

    def listen(self, until: float) -> None:
        """Take what comes until this time, and at least what is there."""
        while select.select([self.raw], [], [], max(0.0, until - time.monotonic()))[0]:
            frame, extra, _, address = self.raw.recvmsg(1 << 16, 256)
            at = frame.rfind(_MAGIC)
            if at >= 0 and address[2] != socket.PACKET_OUTGOING:
                number = _MARK.unpack_from(frame, at)[1]
                self.arrivals.append(Arrival(number, _with_tag(frame, extra)))

    def of(self, number: int) -> list[Arrival]:
        return [arrival for arrival in self.arrivals if arrival.number == number]


@contextmanager
def hearing(netns: str | None, device: str) -> Iterator[Ear]:
    """Take what comes out of a device for the time of the block."""
    with entered(netns):
        raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
    with raw:
        raw.setsockopt(socket.SOL_SOCKET, _RCVBUFFORCE, 16 << 20)
        raw.setsockopt(_SOL_PACKET, _PACKET_AUXDATA, 1)
        raw.bind((device, _ETH_P_ALL))
        yield Ear(raw)


@contextmanager
def mouth(netns: str | None, device: str) -> Iterator[socket.socket]:
    """A socket whose frames leave by a device as they are."""
    with entered(netns):
        raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    with raw:
        raw.bind((device, 0))
        yield raw


def marked(frame: bytes, number: int) -> bytes:
    """The frame with our mark behind what its headers say that it has, as padding is."""
    return frame.ljust(_SHORTEST, b"\0") + _MARK.pack(_MAGIC, number)


def send_all(
    out: socket.socket, ear: Ear, frames: Mapping[str, bytes], known: bytes, deadline_s: float = 180
) -> dict[str, list[Arrival]]:
    """Send each frame, then one that is ``known`` to pass; the answer is where each came out.

    One queue leads there, so that what has not come before the known frame has been dropped. Each is
    sent three times, apart from the others: that the lab loses one by itself is no proof.
    """
    names = list(frames)
    base = ear.given
    ear.given += len(names) + _TURNS
    deadline = time.monotonic() + deadline_s
    for turn in range(_TURNS):
        for number, name in enumerate(names, start=base):
            out.send(marked(frames[name], number))
        last = base + len(names) + turn
        while not ear.of(last):
            assert time.monotonic() < deadline, "the known frame does not come out"
            out.send(marked(known, last))
            ear.listen(time.monotonic() + 0.2)
    return {name: ear.of(number) for number, name in enumerate(names, start=base)}


def _with_tag(frame: bytes, extra: Sequence[tuple[int, int, bytes]]) -> bytes:
    for level, kind, data in extra:
        if (level, kind) == (_SOL_PACKET, _PACKET_AUXDATA):
            status, _, _, _, _, tci, tpid = _AUXDATA.unpack_from(data)
            if status & _VLAN_VALID:
                tpid = tpid if status & _TPID_VALID else TPIDS[0]
                return frame[:12] + struct.pack("!HH", tpid, tci) + frame[12:]
    return frame
