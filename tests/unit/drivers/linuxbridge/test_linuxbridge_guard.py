"""The program at a tap, run by an interpreter of classic BPF: it decides on any frame, however it is cut."""

from __future__ import annotations

import ipaddress
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scapy.layers.dhcp import BOOTP
from scapy.layers.inet import IP, UDP
from scapy.layers.inet6 import (
    ICMPv6ND_NA,
    ICMPv6ND_NS,
    ICMPv6ND_RA,
    IPv6,
    IPv6ExtHdrDestOpt,
    IPv6ExtHdrFragment,
    IPv6ExtHdrHopByHop,
)
from scapy.layers.l2 import ARP, Ether

from drivers.linuxbridge.guard import NOTHING, port_guard
from netplugin.host.cbpf import BpfProgram
from tests.unit.drivers.linuxbridge.strategies import make_spec

MAC, OTHER = "52:54:00:00:00:01", "52:54:00:77:77:77"
PASS, DROP = 0xFFFFFFFF, 2
_TAGGED = 0xFFFFF000 + 48


def run(program: BpfProgram, frame: bytes, *, tagged: bool = False) -> int:
    """What the program ends with. A load beyond the end of the frame, which ends it too, is an error.

    As Documentation/networking/filter.rst describes the machine.
    """
    code = list(struct.iter_unpack("=HBBI", program.code))
    a = x = at = 0
    memory = [0] * 16

    def load(offset: int, size: int) -> int:
        assert offset + size <= len(frame), "a load beyond the end"
        return int.from_bytes(frame[offset : offset + size], "big")

    while True:
        operation, met, unmet, k = code[at]
        at += 1
        match operation:
            case 0x20 | 0x28 | 0x30:
                a = int(tagged) if k == _TAGGED else load(k, {0x20: 4, 0x28: 2, 0x30: 1}[operation])
            case 0x40 | 0x48 | 0x50:
                a = load(x + k, {0x40: 4, 0x48: 2, 0x50: 1}[operation])
            case 0x80:
                a = len(frame)
            case 0x60:
                a = memory[k]
            case 0x01:
                x = k
            case 0xB1:
                x = 4 * (load(k, 1) & 0x0F)
            case 0x02:
                memory[k] = a
            case 0x04:
                a = (a + k) & 0xFFFFFFFF
            case 0x0C:
                a = (a + x) & 0xFFFFFFFF
            case 0x1C:
                a = (a - x) & 0xFFFFFFFF
            case 0x54:
                a &= k
            case 0x64:
                a = (a << k) & 0xFFFFFFFF
            case 0x07:
                x = a
            case 0x87:
                a = x
            case 0x05:
                at += k
            case 0x15 | 0x1D:
                at += met if a == (x if operation & 8 else k) else unmet
            case 0x35 | 0x3D:
                at += met if a >= (x if operation & 8 else k) else unmet
            case 0x06:
                return int(k)
            case _:
                raise AssertionError(hex(operation))


def guard(**security: Any) -> BpfProgram:
    return port_guard(make_spec(port_security=security))


ETHER = Ether(src=MAC, dst="ff:ff:ff:ff:ff:ff")
LONG = IPv6(src="fe80::1") / IPv6ExtHdrHopByHop() / IPv6ExtHdrDestOpt() / ICMPv6ND_RA()
FRAMES = [
    bytes(frame)
    for frame in (
        ETHER / ARP(hwsrc=MAC),
        Ether(src=MAC, type=0x8035) / ARP(op=3, hwsrc=MAC, psrc="0.0.0.0"),
        ETHER / IP(options=[b"\1"] * 12) / UDP(dport=68) / BOOTP(),
        ETHER / LONG,
        ETHER / IPv6() / IPv6ExtHdrFragment() / UDP(dport=546),
    )
]
POLICIES: list[dict[str, Any]] = [
    {},
    {"enabled": False},
    {"roles": ["router"]},
    {"roles": ["dhcp_server"]},
    {"allowed_addresses": [{"ip": "10.0.0.5", "mac": OTHER}]},
    {"allowed_addresses": [{"ip": "fe80::/60"}, {"ip": "2001:db8::/72"}, {"ip": "2001:db8::5"}]},
]


@given(
    st.sampled_from(POLICIES),
    st.sampled_from(FRAMES),
    st.dictionaries(st.integers(12, 80), st.integers(0, 255), max_size=6),
    st.integers(14, 120),
    st.booleans(),
)
def test_it_decides_on_any_frame(
    policy: dict[str, Any], frame: bytes, changed: dict[int, int], length: int, tagged: bool
) -> None:
    """``run`` fails if it reads beyond the end, where the kernel would let the frame pass."""
    data = bytearray(frame)
    for at, value in changed.items():
        if at < len(data):
            data[at] = value
    assert run(guard(**policy), bytes(data[:length]), tagged=tagged) in (PASS, DROP)
    if tagged:
        assert run(guard(**policy), bytes(data[:length]), tagged=True) == DROP


@pytest.mark.parametrize("length", range(14, 100))
def test_no_frame_is_too_short(length: int) -> None:
    for policy in POLICIES:
        for frame in FRAMES:
            assert run(guard(**policy), frame[:length]) in (PASS, DROP)


def test_a_mac_is_allowed_if_it_is_on_the_list() -> None:
    both = guard(allowed_addresses=[{"ip": "10.0.0.5", "mac": OTHER}])
    for mac in (MAC, OTHER):
        frame = bytes(Ether(src=mac, dst="ff:ff:ff:ff:ff:ff") / IP(src="10.0.0.5")).ljust(60, b"\0")
        assert run(both, frame) == PASS
        assert run(guard(), frame) == (PASS if mac == MAC else DROP)
        assert run(NOTHING, frame) == DROP


def test_a_port_with_all_that_it_may_have_fits() -> None:
    for text in ("10.0.{n}.5", "2001:db8:{n}::5", "2001:db8:{n}::/95", "2001:db8:{n}::/57"):
        addresses = [{"ip": text.format(n=n), "mac": f"52:54:00:00:01:{n:02x}"} for n in range(64)]
        # What the kernel lists in one message has 32 KiB at most (netlink_recvmsg).
        assert guard(allowed_addresses=addresses).length < 3900


ADDRESSES = ["10.0.0.5", "10.1.0.0/23", "2001:db8::5", "2001:db8:1:ff80::/57", "2001:db8:2::/70"]


@pytest.mark.parametrize(
    "source",
    [
        "10.0.0.5",
        "10.0.0.6",
        "10.1.1.255",
        "10.1.2.0",
        "2001:db8::5",
        "2001:db8::6",
        "2001:db8:1:ffff::1",
        "2001:db8:1:ff7f::1",
        "2001:db8:2:0:3ff::",
        "2001:db8:2:0:400::",
        "fe80::5054:ff:fe00:1",
        "fe80::5054:ff:fe00:2",
        "fe80:0:0:1:5054:ff:fe00:1",
    ],
)
def test_a_source_is_allowed_if_it_is_on_the_list(source: str) -> None:
    address = ipaddress.ip_address(source)
    networks = [*map(ipaddress.ip_network, ADDRESSES), ipaddress.ip_network("fe80::5054:ff:fe00:1")]
    expected = PASS if any(address in network for network in networks) else DROP
    program = guard(allowed_addresses=[{"ip": each} for each in ADDRESSES])
    packet = IP(src=source) if address.version == 4 else IPv6(src=source)
    assert run(program, bytes(ETHER / packet / UDP(dport=9)).ljust(60, b"\0")) == expected
    if address.version == 4:
        assert run(program, bytes(ETHER / ARP(hwsrc=MAC, psrc=source))) == expected
        probe = ARP(hwsrc=MAC, psrc="0.0.0.0", pdst=source)
        assert run(program, bytes(ETHER / probe)) == expected
        return
    for own, message in (("2001:db8::5", ICMPv6ND_NA(tgt=source)), ("::", ICMPv6ND_NS(tgt=source))):
        assert run(program, bytes(ETHER / IPv6(src=own) / message)) == expected


def test_the_programs_of_thousands_of_ports_are_made_once() -> None:
    macs = [f"52:54:00:02:{number >> 8:02x}:{number & 255:02x}" for number in range(2000)]
    specs = [make_spec(mac=mac, port_security={"enabled": False}) for mac in macs]
    made = [port_guard(spec) for spec in specs]
    assert all(port_guard(spec) is program for spec, program in zip(specs, made, strict=True))
