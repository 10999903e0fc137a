"""Test frames of one direction: addresses, flows, sizes, and their bytes."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from enum import StrEnum
from ipaddress import IPv4Address
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field

from netplugin.api.fields import worded
from netplugin_zeroloss.values import MIXES, GeneratorError, TrialRequest

#: The FCS: part of the frame size, but not written by programs.
FCS_BYTES: Final = 4
#: Ethernet, IPv4 and UDP headers: offset of the payload.
HEADER_BYTES: Final = 14 + 20 + 8
#: First multicast address, which is no valid source.
_FIRST_MULTICAST: Final = int(IPv4Address("224.0.0.0"))
_PORTS: Final = 1 << 16

_UNICAST = worded(
    r"^[0-9A-Fa-f][02468ACEace](:[0-9A-Fa-f]{2}){5}$",
    "must be a unicast MAC address such as 52:54:00:12:34:56",
)
Mac = Annotated[str, Field(pattern=_UNICAST)]


class Vary(StrEnum):
    """Header field that differs between flows. Routers, and RSS without L4 ports, need addresses."""

    SOURCE_IP = "source-ip"
    DESTINATION_IP = "destination-ip"
    SOURCE_PORT = "source-port"
    DESTINATION_PORT = "destination-port"

    @property
    def field(self) -> str:
        """The name of the field in ``Frames``."""
        return self.replace("-", "_")


class Frames(BaseModel):
    """UDP over IPv4 in one direction. The varied field counts up from the given value, per flow."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: None: the address of the port that sends; as destination that of the port that receives, unless
    #: TRex's configuration has another.
    source_mac: Mac | None = None
    destination_mac: Mac | None = None
    #: None: from the benchmarking network 198.18.0.0/15 (RFC 2544, appendix C.2.2).
    source_ip: IPv4Address | None = None
    destination_ip: IPv4Address | None = None
    source_port: Annotated[int, Field(ge=1, lt=_PORTS)] = 1024
    #: The discard service: no reply.
    destination_port: Annotated[int, Field(ge=1, lt=_PORTS)] = 9
    vary: Vary = Vary.SOURCE_IP

    def in_direction(self, number: int) -> Frames:
        """Return a copy with default IP addresses; odd directions swap source and destination."""
        ends = (IPv4Address("198.18.0.1"), IPv4Address("198.19.0.1"))
        source, destination = self.source_ip or ends[number % 2], self.destination_ip or ends[1 - number % 2]
        return self.model_copy(update={"source_ip": source, "destination_ip": destination})

    @property
    def first(self) -> int:
        """The value of the varied field in the first flow."""
        return int(getattr(self, self.vary.field) or 0)

    def check(self, flows: int) -> None:
        """Check that the varied field has room for ``flows`` values. Raises: GeneratorError."""
        room = (_PORTS if self.vary.endswith("port") else _FIRST_MULTICAST) - self.first
        if flows > room:
            fix = "Vary something else, begin lower, or ask for fewer flows"
            raise GeneratorError(f"{flows} flows do not fit: {self.vary} has room for {room}. {fix}")


def sizes(request: TrialRequest) -> tuple[int, ...]:
    """Return the frame sizes (with FCS) of one round, with the sizes of a mix evenly interleaved."""
    if not request.mix:
        return (request.frame_size,)
    parts = MIXES[request.mix]
    total = sum(count for _, count in parts)
    credit = [0] * len(parts)
    order = []
    for _ in range(total):
        credit = [have + count for have, (_, count) in zip(credit, parts, strict=True)]
        chosen = credit.index(max(credit))
        credit[chosen] -= total
        order.append(parts[chosen][0])
    return tuple(order)


def frames_of(frames: Frames, request: TrialRequest, marker: bytes, at_most: int) -> Iterator[bytes]:
    """Yield every flow in every size of the mix, without FCS; the payload begins with ``marker``.

    All addresses in ``frames`` must be set.
    Raises: GeneratorError if more than ``at_most`` frames are needed.
    """
    frames.check(request.flows)
    round_ = sizes(request)
    count = math.lcm(request.flows, len(round_))
    if count > at_most:
        needs = f"{request.flows} flows in {len(set(round_))} sizes are {count} frames"
        raise GeneratorError(f"{needs}; it plays no more than {at_most}. Ask for fewer flows")
    for number in range(count):
        yield _frame(frames, round_[number % len(round_)], number % request.flows, marker)


def write_pcap(path: str, packets: Iterator[bytes]) -> int:
    """Write a pcap file of Ethernet frames; returns the number of frames."""
    count = 0
    with open(path, "wb") as file:
        # Magic, version 2.4, time zone, accuracy, snapshot length, link type Ethernet.
        file.write(struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 65535, 1))
        for packet in packets:
            file.write(struct.pack("<IIII", 0, 0, len(packet), len(packet)) + packet)
            count += 1
    return count


def _frame(frames: Frames, size: int, flow: int, marker: bytes) -> bytes:
    fields = {vary.field: int(getattr(frames, vary.field) or 0) for vary in Vary}
    fields[frames.vary.field] += flow
    source, destination, *ports = fields.values()
    room = size - FCS_BYTES - HEADER_BYTES
    assert frames.destination_mac and frames.source_mac, "the generator fills in MAC addresses"
    macs = f"{frames.destination_mac}{frames.source_mac}".replace(":", "")
    ethernet = bytes.fromhex(macs) + b"\x08\x00"
    # Version and IHL, TOS, total length, ID, no fragments, TTL 64, UDP, checksum placeholder.
    ip = struct.pack(">BBHHHBBHII", 0x45, 0, size - FCS_BYTES - 14, 0, 0, 64, 17, 0, source, destination)
    # The Internet checksum (RFC 791): the ones' complement of the sum of its 16-bit words.
    total = sum(struct.unpack(">10H", ip))
    ip = ip[:10] + struct.pack(">H", -total % 0xFFFF) + ip[12:]
    # UDP checksum 0 means none (RFC 768), so a device may rewrite addresses without updating it.
    return ethernet + ip + struct.pack(">HHHH", *ports, 8 + room, 0) + marker.ljust(room, b"\0")
