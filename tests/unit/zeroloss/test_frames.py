"""The frames that generators send, as bytes: addresses, flows, sizes, checksums, and the file of them."""

from __future__ import annotations

import struct
from collections import Counter
from ipaddress import IPv4Address
from itertools import pairwise
from pathlib import Path

import pytest
from netplugin_zeroloss.generators.frames import Frames, Vary, frames_of, sizes, write_pcap
from netplugin_zeroloss.values import GeneratorError, TrialRequest

MARKER = b"\xca\xfe\xba\xbe\x01\x02\x03\x04"
MACS = {"source_mac": "02:00:00:00:00:01", "destination_mac": "02:00:00:00:00:02"}


def built(frames: Frames, at_most: int = 100_000, **asked: object) -> list[bytes]:
    request = TrialRequest(1e3, 1.0, **asked)  # type: ignore[arg-type]
    return list(frames_of(frames.in_direction(0), request, MARKER, at_most))


def fields(frame: bytes) -> tuple[str, str, int, int]:
    source, destination = struct.unpack_from(">II", frame, 26)
    ports = struct.unpack_from(">HH", frame, 34)
    return str(IPv4Address(source)), str(IPv4Address(destination)), *ports


def test_a_frame_byte_by_byte() -> None:
    [frame] = built(Frames(**MACS), flows=1)
    assert len(frame) == 60, "64 bytes with the frame check sequence, which the NIC adds"
    assert frame[:14].hex() == "0200000000020200000000010800"
    assert frame[14:34].hex() == "4500002e000000004011ee97c6120001c6130001"
    # To the discard service, without a checksum.
    assert frame[34:42].hex() == "04000009001a0000"
    assert frame[42:] == MARKER + bytes(10)


def test_the_checksum_of_every_flow_is_right() -> None:
    for frame in built(Frames(**MACS), flows=300):
        total = sum(struct.unpack_from(">10H", frame, 14))
        assert (total & 0xFFFF) + (total >> 16) == 0xFFFF


@pytest.mark.parametrize(
    ("vary", "last"),
    [
        (Vary.SOURCE_IP, ("198.18.1.44", "198.19.0.1", 1024, 9)),
        (Vary.DESTINATION_IP, ("198.18.0.1", "198.19.1.44", 1024, 9)),
        (Vary.SOURCE_PORT, ("198.18.0.1", "198.19.0.1", 1323, 9)),
        (Vary.DESTINATION_PORT, ("198.18.0.1", "198.19.0.1", 1024, 308)),
    ],
)
def test_flows_differ_in_one_field(vary: Vary, last: tuple[str, str, int, int]) -> None:
    found = [fields(frame) for frame in built(Frames(**MACS, vary=vary), flows=300)]
    assert len(set(found)) == 300
    assert found[0] == ("198.18.0.1", "198.19.0.1", 1024, 9) and found[-1] == last


def test_the_way_back_has_the_addresses_the_other_way_round() -> None:
    there, back = Frames().in_direction(0), Frames().in_direction(1)
    assert (there.source_ip, there.destination_ip) == (back.destination_ip, back.source_ip)
    own = Frames(source_ip=IPv4Address("10.0.0.1")).in_direction(1)
    assert str(own.source_ip) == "10.0.0.1" and str(own.destination_ip) == "198.18.0.1"


@pytest.mark.parametrize(
    ("frames", "flows", "room"),
    [
        (Frames(vary=Vary.SOURCE_PORT), 64_513, 64_512),
        (Frames(vary=Vary.DESTINATION_PORT, destination_port=65_535), 2, 1),
        (Frames(source_ip=IPv4Address("223.255.255.255")), 2, 1),
    ],
)
def test_more_flows_than_fit_are_refused(frames: Frames, flows: int, room: int) -> None:
    frames.in_direction(0).check(flows - 1)
    with pytest.raises(GeneratorError, match=f"room for {room}"):
        frames.in_direction(0).check(flows)


def test_a_mix_has_its_shares_spread() -> None:
    found = sizes(TrialRequest(1e3, 1.0, mix="imix", frame_size=354))
    assert Counter(found) == {64: 28, 570: 16, 1518: 4}
    # No two of the largest within eight frames, no three of the middle in a row.
    large = [place for place, size in enumerate(found) if size == 1518]
    assert min(b - a for a, b in pairwise(large)) >= 8
    assert (570, 570, 570) not in zip(found, found[1:], found[2:], strict=False)


def test_every_flow_in_every_place_of_the_mix() -> None:
    frames = built(Frames(**MACS), flows=10, mix="imix", frame_size=354)
    assert len(frames) == 240, "the smallest number that 10 flows and rounds of 48 both divide"
    assert Counter(len(frame) + 4 for frame in frames) == {64: 140, 570: 80, 1518: 20}
    assert len({fields(frame) for frame in frames}) == 10
    assert all(struct.unpack_from(">H", f, 16)[0] == len(f) - 14 for f in frames)
    with pytest.raises(GeneratorError, match="fewer flows"):
        built(Frames(**MACS), at_most=239, flows=10, mix="imix", frame_size=354)


def test_the_file_is_a_pcap(tmp_path: Path) -> None:
    path = tmp_path / "x.pcap"
    frames = built(Frames(**MACS), flows=3)
    assert write_pcap(str(path), iter(frames)) == 3
    content = path.read_bytes()
    assert struct.unpack_from("<IHH", content) == (0xA1B2C3D4, 2, 4)
    assert struct.unpack_from("<I", content, 20) == (1,), "Ethernet"
    assert len(content) == 24 + 3 * (16 + 60)
    assert content[40:100] == frames[0]
