"""What the frames of a direction look like: addresses, flows, sizes, and the bytes themselves."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from enum import StrEnum
from ipaddress import IPv4Address
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field

from netplugin.acceptance.errors import GeneratorError
from netplugin.acceptance.values import MIXES, TrialRequest

#: What a frame size counts and a program does not write: the frame check sequence.
FCS_BYTES: Final = 4
#: Ethernet, IPv4 and UDP: a payload begins here.
HEADER_BYTES: Final = 14 + 20 + 8
#: Multicast begins here; no sender has such an address.
_FIRST_MULTICAST: Final = int(IPv4Address("224.0.0.0"))
_PORTS: Final = 1 << 16

Mac = Annotated[str, Field(pattern=r"^[0-9A-Fa-f][02468ACEace](:[0-9A-Fa-f]{2}){5}$")]


class Vary(StrEnum):
    """By what flows differ. Routers and receive-side scaling without ports need addresses."""

    SOURCE_IP = "source-ip"
    DESTINATION_IP = "destination-ip"
    SOURCE_PORT = "source-port"
    DESTINATION_PORT = "destination-port"


class Frames(BaseModel):
    """UDP over IPv4 in one direction. Addresses of flows count up from the one that is given."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: None: what the generator's own port has; the far port's where there is none configured.
    source_mac: Mac | None = None
    destination_mac: Mac | None = None
    #: None: of the network for benchmarks, 198.18.0.0/15 (RFC 2544, appendix C.2.2).
    source_ip: IPv4Address | None = None
    destination_ip: IPv4Address | None = None
    source_port: Annotated[int, Field(ge=1, lt=_PORTS)] = 1024
    #: The discard service: nobody answers.
    destination_port: Annotated[int, Field(ge=1, lt=_PORTS)] = 9
    vary: Vary = Vary.SOURCE_IP

    def in_direction(self, number: int) -> Frames:
        """With what was left open filled in; odd directions go the other way."""
        here, there = IPv4Address("198.18.0.1"), IPv4Address("198.19.0.1")
        if number % 2:
            here, there = there, here
        return self.model_copy(
            update={
                "source_ip": self.source_ip or here,
                "destination_ip": self.destination_ip or there,
            }
        )

    def check(self, flows: int) -> None:
        """Raises: GeneratorError if so many flows do not fit beside these addresses."""
        first, end = {
            Vary.SOURCE_IP: (int(self.source_ip or 0), _FIRST_MULTICAST),
            Vary.DESTINATION_IP: (int(self.destination_ip or 0), _FIRST_MULTICAST),
            Vary.SOURCE_PORT: (self.source_port, _PORTS),
            Vary.DESTINATION_PORT: (self.destination_port, _PORTS),
        }[self.vary]
        if first + flows > end:
            raise GeneratorError(
                f"{flows} flows do not fit: {self.vary} has room for {end - first}."
                f" Vary something else, begin lower, or ask for fewer flows"
            )


def sizes(request: TrialRequest) -> tuple[int, ...]:
    """Bytes with FCS of the frames of a round, the sizes of a mix spread as evenly as can be."""
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


def frames_of(
    frames: Frames, request: TrialRequest, marker: bytes, at_most: int
) -> Iterator[bytes]:
    """Every flow, in every size of the mix, without FCS; the payload begins with ``marker``.

    ``frames`` has all its addresses. Raises: GeneratorError if that takes more than ``at_most``.
    """
    frames.check(request.flows)
    round_ = sizes(request)
    count = math.lcm(request.flows, len(round_))
    if count > at_most:
        raise GeneratorError(
            f"{request.flows} flows in {len(set(round_))} sizes are {count} frames; it plays no more"
            f" than {at_most}. Ask for fewer flows"
        )
    for number in range(count):
        yield _frame(frames, round_[number % len(round_)], number % request.flows, marker)


def write_pcap(path: str, packets: Iterator[bytes]) -> int:
    """Write a file of Ethernet frames; returns how many there are."""
    count = 0
    with open(path, "wb") as file:
        # Magic, version 2.4, no time zone, no accuracy, longest frame, Ethernet.
        file.write(struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 65535, 1))
        for packet in packets:
            file.write(struct.pack("<IIII", 0, 0, len(packet), len(packet)) + packet)
            count += 1
    return count


def _frame(frames: Frames, size: int, flow: int, marker: bytes) -> bytes:
    source, destination = int(frames.source_ip or 0), int(frames.destination_ip or 0)
    ports = [frames.source_port, frames.destination_port]
    if frames.vary is Vary.SOURCE_IP:
        source += flow
    elif frames.vary is Vary.DESTINATION_IP:
        destination += flow
    else:
        ports[frames.vary is Vary.DESTINATION_PORT] += flow
    room = size - FCS_BYTES - HEADER_BYTES
    ethernet = _mac(frames.destination_mac) + _mac(frames.source_mac) + b"\x08\x00"
    # Version and length, no fragments, time to live 64, UDP, room for the checksum.
    ip = struct.pack(
        ">BBHHHBBHII", 0x45, 0, size - FCS_BYTES - 14, 0, 0, 64, 17, 0, source, destination
    )
    ip = ip[:10] + _checksum(ip) + ip[12:]
    # A UDP checksum of 0 is none, so that a device may change addresses and need not mend it.
    return ethernet + ip + struct.pack(">HHHH", *ports, 8 + room, 0) + marker.ljust(room, b"\0")


def _mac(text: str | None) -> bytes:
    assert text is not None, "the generator fills in MAC addresses"
    return bytes.fromhex(text.replace(":", ""))


def _checksum(header: bytes) -> bytes:
    """That of RFC 791."""
    total = sum(struct.unpack(f">{len(header) // 2}H", header))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return struct.pack(">H", ~total & 0xFFFF)
