"""The fields that our flows match: words of ovs-fields(7), and the OXM TLVs that OpenFlow 1.4 has for them.

Equal matches have equal bytes: the TLVs are in the order of their headers, which is one that OVS accepts
(what a field requires comes before it); masks of ones are left out; masked bits are zero, as OVS sends them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address

_LOCAL = 0xFFFE  # OFPP_LOCAL as the database has it: the internal port of a bridge
_HAS_MASK = 1 << 8
_HIGHEST_PORT = 0xFF00  # from here on port numbers are reserved (OFPP_MAX of OpenFlow 1.0)
_RESERVED = 0xFFFF0000  # and have these bits from OpenFlow 1.1 on
_VID_PRESENT = 0x1000  # OFPVID_PRESENT
_VID_BITS = 0x1FFF  # OXM_OF_VLAN_VID has no priority


class Malformed(ValueError):
    """A word that is not in the vocabulary of our flows, or bytes that are not what they say."""


def port_number(ofport: int) -> int:
    """The number of a port in OpenFlow 1.4, from the 16 bits that the database has."""
    return ofport | _RESERVED if _HIGHEST_PORT <= ofport <= 0xFFFF else ofport


# How the values of fields are written. All raise ValueError.


def _number(text: str) -> int:
    return int(text, 0)


def _mac(text: str) -> int:
    value = bytes.fromhex(text.replace(":", ""))
    if len(value) != 6:
        raise ValueError(f"MAC {text}")
    return int.from_bytes(value, "big")


def _ip4(text: str) -> int:
    return int(IPv4Address(text))


def _ip6(text: str) -> int:
    return int(IPv6Address(text))


def _port(text: str) -> int:
    return port_number(_LOCAL if text == "LOCAL" else int(text))


def _vid(text: str) -> int:
    """A VLAN, as it is in the tag of a frame that has one."""
    vid = int(text)
    if not 0 <= vid < _VID_PRESENT:
        raise ValueError(f"VLAN {vid}")
    return _VID_PRESENT | vid


@dataclass(frozen=True, slots=True)
class _Field:
    """A field of OpenFlow, or (``vendor``) of Open vSwitch: its number, and the bytes of its values."""

    name: str
    number: int
    size: int
    parse: Callable[[str], int]
    vendor: bool = False

    @property
    def header(self) -> int:
        """What its TLV without a mask begins with: class, number, length (NXM_1 in lib/meta-flow.h)."""
        return (1 if self.vendor else 0x8000) << 16 | self.number << 9 | self.size

    @property
    def ones(self) -> int:
        """The mask of all bits."""
        return _VID_BITS if (self.number, self.vendor) == (6, False) else (1 << 8 * self.size) - 1

    def tlv(self, value: int, mask: int | None = None) -> bytes:
        """Encode a value; empty with a mask of zeros. Raises: ValueError if it has more bits."""
        mask = self.ones if mask is None else mask
        if not (0 <= value <= self.ones and 0 <= mask <= self.ones):
            raise ValueError(f"{self.name} has {self.ones.bit_length()} bits")
        if mask == self.ones:
            return self.header.to_bytes(4, "big") + value.to_bytes(self.size, "big")
        masked = (value & mask).to_bytes(self.size, "big") + mask.to_bytes(self.size, "big")
        return (self.header + self.size | _HAS_MASK).to_bytes(4, "big") + masked if mask else b""


_FIELDS = (
    _Field("tun_src", 31, 4, _ip4, vendor=True),
    _Field("tun_dst", 32, 4, _ip4, vendor=True),
    _Field("tun_ipv6_src", 109, 16, _ip6, vendor=True),
    _Field("tun_ipv6_dst", 110, 16, _ip6, vendor=True),
    _Field("in_port", 0, 4, _port),
    _Field("dl_dst", 3, 6, _mac),
    _Field("dl_src", 4, 6, _mac),
    _Field("dl_type", 5, 2, _number),
    _Field("vlan_tci", 6, 2, _number),
    _Field("dl_vlan", 6, 2, _vid),
    _Field("nw_proto", 10, 1, _number),
    _Field("nw_src", 11, 4, _ip4),
    _Field("nw_dst", 12, 4, _ip4),
    _Field("tcp_dst", 14, 2, _number),
    _Field("tp_src", 15, 2, _number),  # of UDP
    _Field("tp_dst", 16, 2, _number),
    _Field("arp_op", 21, 2, _number),
    _Field("arp_spa", 22, 4, _ip4),
    _Field("arp_tpa", 23, 4, _ip4),
    _Field("arp_sha", 24, 6, _mac),
    _Field("arp_tha", 25, 6, _mac),
    _Field("ipv6_src", 26, 16, _ip6),
    _Field("ipv6_dst", 27, 16, _ip6),
    _Field("icmp_type", 29, 1, _number),  # of ICMPv6
    _Field("nd_target", 31, 16, _ip6),
    _Field("tun_id", 38, 8, _number),
)
BY_NAME = {field.name: field for field in _FIELDS}

#: Words for an EtherType and the protocol in it.
_PROTOCOLS = {
    "arp": "dl_type=0x0806",
    "rarp": "dl_type=0x8035",
    "ip": "dl_type=0x0800",
    "udp": "dl_type=0x0800,nw_proto=17",
    "ipv6": "dl_type=0x86dd",
    "udp6": "dl_type=0x86dd,nw_proto=17",
    "tcp6": "dl_type=0x86dd,nw_proto=6",
    "icmp6": "dl_type=0x86dd,nw_proto=58",
}


@lru_cache(maxsize=512)  # most words are in the flows of every port, the others in several of one port
def parse_word(word: str) -> tuple[bytes, ...]:
    """The TLVs of one word of a match. Raises: Malformed."""
    if word in _PROTOCOLS:
        return tuple(tlv for each in _PROTOCOLS[word].split(",") for tlv in parse_word(each))
    name, _, text = word.partition("=")
    try:
        field = BY_NAME[name]
        value, slash, mask = text.partition("/")
        tlv = field.tlv(field.parse(value), _parse_mask(field, mask) if slash else None)
    except (KeyError, ValueError) as error:
        raise Malformed(f"{word!r} is not in the vocabulary of our flows") from error
    return (tlv,) if tlv else ()


def _parse_mask(field: _Field, text: str) -> int:
    """Of an address it may be the length of a prefix."""
    if field.parse not in (_ip4, _ip6) or not text.isdigit():
        return field.parse(text)
    return field.ones + 1 - (1 << 8 * field.size - int(text))


def fields_of(words: Iterable[str]) -> bytes:
    """The fields that the words of a match say. Raises: Malformed."""
    return b"".join(sorted(tlv for word in words for tlv in parse_word(word)))


def read_fields(data: bytes) -> bytes:
    """The same fields as OVS sends them, in its own order. Raises: Malformed."""
    tlvs, at, end = [], 0, len(data)
    while at < end:
        following = at + 4 + data[at + 3] if at + 4 <= end else end + 1
        if following > end:
            raise Malformed("a field ends behind its match")
        tlvs.append(data[at:following])
        at = following
    return b"".join(sorted(tlvs))
