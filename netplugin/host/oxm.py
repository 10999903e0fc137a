"""The fields that our flows match: words of ovs-fields(7), and the OXM TLVs that OpenFlow 1.4 has for them.

Equal matches have equal bytes: the TLVs are in the order of their headers, which is one that OVS accepts
(what a field requires comes before it); masks of ones are left out; masked bits are zero, as OVS sends them.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address
from typing import NamedTuple

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


class _Kind(NamedTuple):
    """How the values of a field are written. ``parse`` raises ValueError."""

    parse: Callable[[str], int]
    show: Callable[[int], str]


def _parse_mac(text: str) -> int:
    value = bytes.fromhex(text.replace(":", ""))
    if len(value) != 6:
        raise ValueError(f"MAC {text}")
    return int.from_bytes(value, "big")


def _parse_vid(text: str) -> int:
    """A VLAN, as it is in the tag of a frame that has one. Raises: ValueError."""
    vid = int(text)
    if not 0 <= vid < _VID_PRESENT:
        raise ValueError(f"VLAN {vid}")
    return _VID_PRESENT | vid


_NUMBER = _Kind(lambda text: int(text, 0), str)
_HEX = _Kind(_NUMBER.parse, hex)
_TAG = _Kind(_NUMBER.parse, "{:#06x}".format)
_MAC = _Kind(_parse_mac, lambda number: number.to_bytes(6, "big").hex(":"))
_IP4 = _Kind(lambda text: int(IPv4Address(text)), lambda number: str(IPv4Address(number)))
_IP6 = _Kind(lambda text: int(IPv6Address(text)), lambda number: str(IPv6Address(number)))
_PORT = _Kind(
    lambda text: port_number(_LOCAL if text == "LOCAL" else int(text)),
    lambda number: "LOCAL" if number == port_number(_LOCAL) else str(number),
)


@dataclass(frozen=True, slots=True)
class _Field:
    """A field of OpenFlow, or (``vendor``) of Open vSwitch: its number, and the bytes of its values."""

    name: str
    number: int
    size: int
    kind: _Kind
    vendor: bool = False

    @property
    def header(self) -> int:
        """What its TLV without a mask begins with: class, number, length (NXM_1 in lib/meta-flow.h)."""
        return (1 if self.vendor else 0x8000) << 16 | self.number << 9 | self.size

    @property
    def ones(self) -> int:
        """The mask of all bits."""
        return _VID_BITS if self.kind is _TAG else (1 << 8 * self.size) - 1

    def tlv(self, value: int, mask: int | None = None) -> bytes:
        """Encode a value; empty with a mask of zeros. Raises: ValueError if it has more bits."""
        mask = self.ones if mask is None else mask
        if not (0 <= value <= self.ones and 0 <= mask <= self.ones):
            raise ValueError(f"{self.name} has {self.ones.bit_length()} bits")
        if mask == self.ones:
            return self.header.to_bytes(4, "big") + value.to_bytes(self.size, "big")
        masked = (value & mask).to_bytes(self.size, "big") + mask.to_bytes(self.size, "big")
        return (self.header + self.size | _HAS_MASK).to_bytes(4, "big") + masked if mask else b""


_ETH_TYPE = _Field("dl_type", 5, 2, _HEX)
_VLAN = _Field("vlan_tci", 6, 2, _TAG)
_PROTOCOL = _Field("nw_proto", 10, 1, _NUMBER)
_ALL = (
    _Field("tun_src", 31, 4, _IP4, vendor=True),
    _Field("tun_dst", 32, 4, _IP4, vendor=True),
    _Field("tun_ipv6_src", 109, 16, _IP6, vendor=True),
    _Field("tun_ipv6_dst", 110, 16, _IP6, vendor=True),
    _Field("in_port", 0, 4, _PORT),
    _Field("dl_dst", 3, 6, _MAC),
    _Field("dl_src", 4, 6, _MAC),
    _ETH_TYPE,
    _VLAN,
    _PROTOCOL,
    _Field("nw_src", 11, 4, _IP4),
    _Field("nw_dst", 12, 4, _IP4),
    _Field("tcp_dst", 14, 2, _NUMBER),
    _Field("tp_src", 15, 2, _NUMBER),  # of UDP
    _Field("tp_dst", 16, 2, _NUMBER),
    _Field("arp_op", 21, 2, _NUMBER),
    _Field("arp_spa", 22, 4, _IP4),
    _Field("arp_tpa", 23, 4, _IP4),
    _Field("arp_sha", 24, 6, _MAC),
    _Field("arp_tha", 25, 6, _MAC),
    _Field("ipv6_src", 26, 16, _IP6),
    _Field("ipv6_dst", 27, 16, _IP6),
    _Field("icmp_type", 29, 1, _NUMBER),  # of ICMPv6
    _Field("nd_target", 31, 16, _IP6),
    _Field("tun_id", 38, 8, _HEX),
)
BY_NAME = {field.name: field for field in _ALL}
_BY_HEADER = {field.header.to_bytes(4, "big"): field for field in _ALL}

#: Words for an EtherType and the protocol in it.
_PROTOCOLS = {
    "arp": (_ETH_TYPE.tlv(0x0806),),
    "rarp": (_ETH_TYPE.tlv(0x8035),),
    "ip": (_ETH_TYPE.tlv(0x0800),),
    "udp": (_ETH_TYPE.tlv(0x0800), _PROTOCOL.tlv(socket.IPPROTO_UDP)),
    "ipv6": (_ETH_TYPE.tlv(0x86DD),),
    "udp6": (_ETH_TYPE.tlv(0x86DD), _PROTOCOL.tlv(socket.IPPROTO_UDP)),
    "tcp6": (_ETH_TYPE.tlv(0x86DD), _PROTOCOL.tlv(socket.IPPROTO_TCP)),
    "icmp6": (_ETH_TYPE.tlv(0x86DD), _PROTOCOL.tlv(socket.IPPROTO_ICMPV6)),
}


@lru_cache(maxsize=512)  # most words are in the flows of every port, the others in several of one port
def parse_word(word: str) -> tuple[bytes, ...]:
    """The TLVs of one word of a match. Raises: Malformed."""
    if word in _PROTOCOLS:
        return _PROTOCOLS[word]
    name, _, text = word.partition("=")
    try:
        if name == "dl_vlan":
            tlv = _VLAN.tlv(_parse_vid(text))
        else:
            field = BY_NAME[name]
            value, slash, mask = text.partition("/")
            tlv = field.tlv(field.kind.parse(value), _parse_mask(field, mask) if slash else None)
    except (KeyError, ValueError) as error:
        raise Malformed(f"{word!r} is not in the vocabulary of our flows") from error
    return (tlv,) if tlv else ()


def _parse_mask(field: _Field, text: str) -> int:
    """Of an address it may be the length of a prefix."""
    if field.kind not in (_IP4, _IP6) or not text.isdigit():
        return field.kind.parse(text)
    return field.ones + 1 - (1 << 8 * field.size - int(text))


def fields_of(words: Iterable[str]) -> bytes:
    """The fields that the words of a match say. Raises: Malformed."""
    return b"".join(sorted(tlv for word in words for tlv in parse_word(word)))


def read_fields(data: bytes) -> bytes:
    """The same fields as OVS sends them, in its own order. Raises: Malformed."""
    return b"".join(sorted(_split(data)))


def _split(data: bytes) -> list[bytes]:
    tlvs, at, end = [], 0, len(data)
    while at < end:
        following = at + 4 + data[at + 3] if at + 4 <= end else end + 1
        if following > end:
            raise Malformed("a field ends behind its match")
        tlvs.append(data[at:following])
        at = following
    return tlvs


def words_of(fields: bytes) -> list[str]:
    """The words for these fields; hexadecimal digits for what is not in the vocabulary."""
    tlvs = _split(fields)
    words = [name for name, own in _PROTOCOLS.items() if set(own) <= set(tlvs)]
    words = sorted(words, key=lambda name: len(_PROTOCOLS[name]))[-1:]
    return words + [_show(tlv) for tlv in tlvs if not words or tlv not in _PROTOCOLS[words[0]]]


def _show(tlv: bytes) -> str:
    masked = tlv[2] & 1
    size = (len(tlv) - 4) // (1 + masked)
    field = _BY_HEADER.get(tlv[:2] + bytes([tlv[2] & ~1, size]))
    if field is None or len(tlv) != 4 + size * (1 + masked):
        return f"0x{tlv.hex()}"
    value = int.from_bytes(tlv[4 : 4 + size], "big")
    mask = int.from_bytes(tlv[4 + size :], "big") if masked else field.ones
    if field is _VLAN and mask == field.ones and value & _VID_PRESENT:
        return f"dl_vlan={value & ~_VID_PRESENT}"
    if field is not _VLAN and mask == field.ones:
        return f"{field.name}={field.kind.show(value)}"
    length = mask.bit_count()
    is_prefix = field.kind in (_IP4, _IP6) and mask == field.ones & ~(field.ones >> length)
    return f"{field.name}={field.kind.show(value)}/{length if is_prefix else field.kind.show(mask)}"
