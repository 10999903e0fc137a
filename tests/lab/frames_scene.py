"""Send every kind of frame from one port, and see where each comes out."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from scapy.packet import Packet, Raw

from tests.lab.frames import KINDS, MARK_BYTES, Backend, Kind, Sender, Setting, checksum_from
from tests.lab.frames_nics import LEAST_PLACE, Ear, Nic, TapNic

DEADLINE_S = 90.0
_MARK, _NO_MARK = re.compile(rb"NPF(\d{6})"), b"NPF000000"
_ATTEMPTS = 3
#: Each place of a frame but the last is looked at in steps of so many bytes.
_STEP = 4
#: What passes leaves by these, as it was sent.
WIRE, NEIGHBOUR = "the wire", "a VM of its network"

#: From what is on the wire to the frame of the sender's network; None if it is another's.
Unwrap = Callable[[bytes], bytes | None]


def untagged(frame: bytes) -> bytes | None:
    """A flat network: what is on the wire is the frame itself."""
    return frame


def tagged(vlan_id: int) -> Unwrap:
    head = b"\x81\x00" + vlan_id.to_bytes(2, "big")

    def unwrap(frame: bytes) -> bytes | None:
        return frame[:12] + frame[16:] if frame[12:16] == head else None

    return unwrap


def tunnelled(vni: int) -> Unwrap:
    """VXLAN over IPv4 (RFC 7348): 14 bytes of Ethernet, 20 of IPv4, 8 of UDP, 8 of VXLAN."""

    def unwrap(frame: bytes) -> bytes | None:
        ours = frame[12:14] == b"\x08\x00" and frame[36:38] == (4789).to_bytes(2, "big")
        return frame[50:] if ours and frame[46:49] == vni.to_bytes(3, "big") else None

    return unwrap


@dataclass(frozen=True)
class Sent:
    """A frame as it must come out, if it passes."""

    kind: str
    frame: bytes
    passes: bool
    #: Where the host is asked to write a checksum: only with that it is this frame.
    checksum_at: int | None = None

    def numbered(self, number: int) -> Sent:
        return replace(self, frame=self.frame.replace(_NO_MARK, b"NPF%06d" % number))


@dataclass
class Scene:
    """One sender on a network, and every place that a frame of its might come out at."""

    backend: Backend
    network: str
    sender: Sender
    nic: Nic
    wire: Ear
    unwrap: Unwrap
    #: The VM on the same network; None where there can be none.
    neighbour: Ear | None
    #: Other receivers: other networks' VMs, the host's own protocols, the sender itself.
    others: Mapping[str, Ear]
    #: Returns when the datapath does what the agent has set.
    settle: Callable[[], object] = lambda: None
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))

    @property
    def exits(self) -> frozenset[str]:
        """Where all that passes comes out: it goes to nobody's MAC, or to a group."""
        return frozenset({WIRE} | ({NEIGHBOUR} if self.neighbour else set()))

    def differences(self, setting: Setting, kinds: Sequence[Kind] = KINDS) -> list[str]:
        """What is seen of each kind and is not as the table has it."""
        self.settle()
        found = set()
        for sent, fate in self._seen(list(self._frames(kinds, setting))):
            desired = "passed" if sent.passes else "dropped"
            if fate != desired:
                where = f"{self.backend}, {self.network}, {setting}"
                found.add(f"{sent.kind} ({where}): {fate}; the table says {desired}")
        return sorted(found)

    def _frames(self, kinds: Sequence[Kind], setting: Setting) -> Iterator[Sent]:
        """The frames of these kinds, and each with a checksum that the host is to write."""
        for kind in kinds:
            passes = kind.passes_on(self.backend, setting)
            for packet in kind.build(self.sender):
                frame = _marked(packet)
                yield Sent(kind.name, frame, passes)
                if isinstance(self.nic, TapNic):
                    first = checksum_from(frame)
                    if first is not None:
                        place = max(first, LEAST_PLACE)
                        yield Sent(f"{kind.name}, checksum at byte {place}", frame, passes, place)
                    for place in _places_before(len(frame) - MARK_BYTES if first is None else first):
                        yield Sent(f"{kind.name}, checksum at byte {place}", frame, False, place)

    def _seen(self, frames: Sequence[Sent]) -> Iterator[tuple[Sent, str]]:
        """The fate of every frame. What did not arrive and should is sent again: a lost frame is no
        dropped one."""
        sent = {(number := next(self._numbers)): each.numbered(number) for each in frames}
        came_out: dict[int, set[str]] = {number: set() for number in sent}
        for attempt in range(_ATTEMPTS):
            for number, each in sent.items():
                if not attempt or (each.passes and not came_out[number] >= self.exits):
                    self._send(each)
            self._wait_until_all_came(sent, came_out)
        for number, each in sent.items():
            yield each, self._fate(came_out[number])

    def _send(self, sent: Sent) -> None:
        if isinstance(self.nic, TapNic) and sent.checksum_at is not None:
            self.nic.send_incomplete(sent.frame, sent.checksum_at)
        else:
            self.nic.send(sent.frame)

    def _fate(self, places: set[str]) -> str:
        if not places:
            return "dropped"
        return "passed" if places == self.exits else "came out at " + ", ".join(sorted(places))

    def _wait_until_all_came(self, sent: Mapping[int, Sent], came_out: Mapping[int, set[str]]) -> None:
        """Frames keep their order on each way: behind them goes one that passes, and another when
        that has come, for whoever handles the ways in turns."""
        deadline = time.monotonic() + DEADLINE_S
        last = Sent("the last", _marked(KINDS[0].build(self.sender)[0]), True)
        for _ in range(2):
            number = next(self._numbers)
            places: set[str] = set()
            frames = {**sent, number: last.numbered(number)}
            while not places >= self.exits:
                assert time.monotonic() < deadline, f"what passes came to {places or 'no place'}"
                self._send(frames[number])
                resend = time.monotonic() + 1.0
                while time.monotonic() < resend and not places >= self.exits:
                    for place, found in self._look(frames):
                        (places if found == number else came_out.get(found, set())).add(place)

    def _look(self, sent: Mapping[int, Sent]) -> Iterator[tuple[str, int]]:
        """Which of the marked frames are where by now."""
        for number, frame in self._marks(self.wire, sent):
            whole = self.unwrap(frame) == sent[number].frame
            yield WIRE if whole else f"the wire, as {frame[:64].hex()}", number
        for number, frame in self._marks(self.neighbour, sent) if self.neighbour else ():
            whole = frame == sent[number].frame
            yield NEIGHBOUR if whole else f"{NEIGHBOUR}, as {frame[:64].hex()}", number
        for place, ear in self.others.items():
            yield from ((place, number) for number, _ in self._marks(ear, sent))

    @staticmethod
    def _marks(ear: Ear, sent: Collection[int]) -> Iterator[tuple[int, bytes]]:
        for frame in ear.received():
            for text in _MARK.findall(frame):
                if int(text) in sent:
                    yield int(text), frame


def _marked(packet: Packet) -> bytes:
    return bytes(packet / Raw(_NO_MARK.ljust(MARK_BYTES, b".")))


def _places_before(end: int) -> Iterator[int]:
    yield from range(0, end - 2, _STEP)
    yield from (end - 2, end - 1)
