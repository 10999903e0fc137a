"""The fields that our flows match: words of ovs-fields(7), and the OXM TLVs that OpenFlow 1.4 has for them.

Equal matches have equal bytes: the TLVs are in the order of their headers, which is one that OVS accepts
(what a field requires comes before it); masks of ones are left out; masked bits are zero.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

_LOCAL = 0xFFFE  # OFPP_LOCAL as the database has it: the internal port of a bridge
_HAS_MASK = 1 << 8
_HIGHEST_PORT = 0xFF00  # from here on port numbers are reserved (OFPP_MAX of OpenFlow 1.0)
_RESERVED = 0xFFFF0000  # and have these bits from OpenFlow 1.1 on
_VID_PRESENT = 0x1000  # OFPVID_PRESENT
_VID_BITS = 0x1FFF


class MalformedFlow(ValueError):
    """A word that is not in the vocabulary of our flows, or bytes that are no match."""


def port_number(ofport: int) -> int:
    """The number of a port in OpenFlow 1.4, from the 16 bits that the database has."""
    return ofport | _RESERVED if _HIGHEST_PORT <= ofport <= 0xFFFF else ofport


def _oxm(number: int, size: int) -> int:
    """The header of an OpenFlow field: class, number, no mask, length in bytes."""
    return 0x8000 << 16 | number << 9 | size


def _nxm(number: int, size: int) -> int:
    """The header of an Open vSwitch field (NXM_1 in lib/meta-flow.h)."""
    return 1 << 16 | number << 9 | size


def _parse_mac(text: str, size: int) -> bytes:
    return bytes.fromhex(text.replace(":", ""))


def _parse_ip4(text: str, size: int) -> bytes:
    return socket.inet_pton(socket.AF_INET, text)


def _parse_ip6(text: str, size: int) -> bytes:
    return socket.inet_pton(socket.AF_INET6, text)


def _parse_number(text: str, size: int) -> bytes:
    return int(text, 0).to_bytes(size, "big")


def _parse_port(text: str, size: int) -> bytes:
    return port_number(_LOCAL if text == "LOCAL" else int(text)).to_bytes(size, "big")


def _parse_vid(text: str) -> bytes:
    """A VLAN, as it is in the tag of a frame that has one. Raises: ValueError."""
    vid = int(text)
    if not 0 <= vid < _VID_PRESENT:
        raise ValueError(f"VLAN {vid}")
    return (_VID_PRESENT | vid).to_bytes(2, "big")


def _parse_tci(text: str, size: int) -> bytes:
    """A tag, or the bits of one: OXM_OF_VLAN_VID has no priority. Raises: ValueError."""
    value = int(text, 0)
    if not 0 <= value <= _VID_BITS:
        raise ValueError(f"bits of a VLAN tag {value:#x}")
    return value.to_bytes(size, "big")


def _show_mac(value: bytes) -> str:
    return value.hex(":")


def _show_ip4(value: bytes) -> str:
    return socket.inet_ntop(socket.AF_INET, value)


def _show_ip6(value: bytes) -> str:
    return socket.inet_ntop(socket.AF_INET6, value)


def _show_number(value: bytes) -> str:
    return str(int.from_bytes(value, "big"))


def _show_hex(value: bytes) -> str:
    return f"{int.from_bytes(value, 'big'):#x}"


def _show_vlan(value: bytes) -> str:
    return f"0x{value.hex()}"


def _show_port(value: bytes) -> str:
    number = int.from_bytes(value, "big")
    return "LOCAL" if number == port_number(_LOCAL) else str(number)


@dataclass(frozen=True, slots=True)
class _Field:
    """A field: its name, the header of its TLV, and how its values are written."""

    name: str
    header: int
    parse: Callable[[str, int], bytes]
    show: Callable[[bytes], str]

    @property
    def size(self) -> int:
        """Bytes of a value."""
        return self.header & 0xFF

    def tlv(self, value: bytes, mask: bytes | None = None) -> bytes:
        """Raises: MalformedFlow if value or mask have another length."""
        if len(value) != self.size or (mask is not None and len(mask) != self.size):
            raise MalformedFlow(f"{self.name} has {self.size} bytes")
        if mask is None:
            return self.header.to_bytes(4, "big") + value
        header = self.header + self.size | _HAS_MASK
        return _normal(header.to_bytes(4, "big") + value + mask)


_ETH_TYPE = _Field("dl_type", _oxm(5, 2), _parse_number, _show_hex)
_VLAN = _Field("vlan_tci", _oxm(6, 2), _parse_tci, _show_vlan)
_PROTOCOL = _Field("nw_proto", _oxm(10, 1), _parse_number, _show_number)
_ALL = (
    _Field("tun_src", _nxm(31, 4), _parse_ip4, _show_ip4),
    _Field("tun_dst", _nxm(32, 4), _parse_ip4, _show_ip4),
    _Field("tun_ipv6_src", _nxm(109, 16), _parse_ip6, _show_ip6),
    _Field("tun_ipv6_dst", _nxm(110, 16), _parse_ip6, _show_ip6),
    _Field("in_port", _oxm(0, 4), _parse_port, _show_port),
    _Field("dl_dst", _oxm(3, 6), _parse_mac, _show_mac),
    _Field("dl_src", _oxm(4, 6), _parse_mac, _show_mac),
    _ETH_TYPE,
    _VLAN,
    _PROTOCOL,
    _Field("nw_src", _oxm(11, 4), _parse_ip4, _show_ip4),
    _Field("nw_dst", _oxm(12, 4), _parse_ip4, _show_ip4),
    _Field("tcp_dst", _oxm(14, 2), _parse_number, _show_number),
    _Field("tp_src", _oxm(15, 2), _parse_number, _show_number),  # of UDP
    _Field("tp_dst", _oxm(16, 2), _parse_number, _show_number),
    _Field("arp_op", _oxm(21, 2), _parse_number, _show_number),
    _Field("arp_spa", _oxm(22, 4), _parse_ip4, _show_ip4),
    _Field("arp_tpa", _oxm(23, 4), _parse_ip4, _show_ip4),
    _Field("arp_sha", _oxm(24, 6), _parse_mac, _show_mac),
    _Field("arp_tha", _oxm(25, 6), _parse_mac, _show_mac),
    _Field("ipv6_src", _oxm(26, 16), _parse_ip6, _show_ip6),
    _Field("ipv6_dst", _oxm(27, 16), _parse_ip6, _show_ip6),
    _Field("icmp_type", _oxm(29, 1), _parse_number, _show_number),  # of ICMPv6
    _Field("nd_target", _oxm(31, 16), _parse_ip6, _show_ip6),
    _Field("tun_id", _oxm(38, 8), _parse_number, _show_hex),
)
BY_NAME = {field.name: field for field in _ALL}
_BY_HEADER = {field.header.to_bytes(4, "big"): field for field in _ALL}


def _protocol(eth_type: int, protocol: int | None = None) -> tuple[bytes, ...]:
    found = (_ETH_TYPE.tlv(eth_type.to_bytes(2, "big")),)
    return found if protocol is None else (*found, _PROTOCOL.tlv(bytes([protocol])))


#: Words for an EtherType and the protocol in it.
_PROTOCOLS = {
    "arp": _protocol(0x0806),
    "rarp": _protocol(0x8035),
    "ip": _protocol(0x0800),
    "udp": _protocol(0x0800, socket.IPPROTO_UDP),
    "ipv6": _protocol(0x86DD),
    "udp6": _protocol(0x86DD, socket.IPPROTO_UDP),
    "tcp6": _protocol(0x86DD, socket.IPPROTO_TCP),
    "icmp6": _protocol(0x86DD, socket.IPPROTO_ICMPV6),
}


@lru_cache(maxsize=512)  # most words are in the flows of every port, the others in several of one port
def parse_word(word: str) -> tuple[bytes, ...]:
    """The TLVs of one word of a match. Raises: MalformedFlow."""
    if word in _PROTOCOLS:
        return _PROTOCOLS[word]
    name, _, text = word.partition("=")
    try:
        if name == "dl_vlan":
            return (_VLAN.tlv(_parse_vid(text)),)
        field = BY_NAME[name]
        value, slash, mask = text.partition("/")
        parsed = field.parse(value, field.size)
        tlv = field.tlv(parsed, _parse_mask(field, mask) if slash else None)
    except (KeyError, ValueError, OverflowError, OSError) as error:
        raise MalformedFlow(f"{word!r} is not in the vocabulary of our flows") from error
    return (tlv,) if tlv else ()


def _parse_mask(field: _Field, text: str) -> bytes:
    if field.parse not in (_parse_ip4, _parse_ip6) or not text.isdigit():
        return field.parse(text, field.size)
    bits = field.size * 8
    return ((1 << bits) - (1 << bits - int(text))).to_bytes(field.size, "big")


@lru_cache(maxsize=4096)
def _normal(tlv: bytes) -> bytes:
    """A TLV that has a mask, without one of ones, with zeros where it has some; empty if it has no ones."""
    size = (len(tlv) - 4) // 2
    value, mask = tlv[4 : 4 + size], int.from_bytes(tlv[4 + size :], "big")
    exact = tlv[:2] + bytes([tlv[2] & ~1, size])
    full = _VID_BITS if exact == _VLAN.header.to_bytes(4, "big") else (1 << size * 8) - 1
    if not mask:
        return b""
    masked = (int.from_bytes(value, "big") & mask).to_bytes(size, "big")
    return exact + masked if mask == full else tlv[:4] + masked + tlv[4 + size :]


def fields_of(words: Iterable[str]) -> bytes:
    """The fields that the words of a match say. Raises: MalformedFlow."""
    return b"".join(sorted(tlv for word in words for tlv in parse_word(word)))


def read_fields(data: bytes) -> bytes:
    """The same fields as OVS sends them, in its own order. Raises: MalformedFlow."""
    return b"".join(sorted([_normal(tlv) if tlv[2] & 1 else tlv for tlv in _split(data)]))


def _split(data: bytes) -> list[bytes]:
    tlvs, at, end = [], 0, len(data)
    while at < end:
        following = at + 4 + data[at + 3] if at + 4 <= end else end + 1
        if following > end:
            raise MalformedFlow("a field ends behind its match")
        tlvs.append(data[at:following])
        at = following
    return tlvs


def words_of(fields: bytes) -> list[str]:
    """The words for these fields; hexadecimal digits for what is not in the vocabulary."""
    tlvs = _split(fields)
    words = []
    known = [name for name, own in _PROTOCOLS.items() if set(own) <= set(tlvs)]
    if known:
        longest = max(known, key=lambda name: len(_PROTOCOLS[name]))
        words, tlvs = [longest], [tlv for tlv in tlvs if tlv not in _PROTOCOLS[longest]]
    return words + [_show(tlv) for tlv in tlvs]


def _show(tlv: bytes) -> str:
    masked = tlv[2] & 1
    size = (len(tlv) - 4) // (2 if masked else 1)
    field = _BY_HEADER.get(tlv[:2] + bytes([tlv[2] & ~1, size]))
    if field is None:
        return f"0x{tlv.hex()}"
    value, mask = tlv[4 : 4 + size], tlv[4 + size :]
    if field is _VLAN and not masked:
        vid = int.from_bytes(value, "big")
        if vid & _VID_PRESENT:
            return f"dl_vlan={vid & ~_VID_PRESENT}"
        return f"vlan_tci={_show_vlan(value)}/{_VID_BITS:#x}"
    return f"{field.name}={field.show(value)}" + (f"/{_show_mask(field, mask)}" if masked else "")


def _show_mask(field: _Field, mask: bytes) -> str:
    bits = f"{int.from_bytes(mask, 'big'):0{field.size * 8}b}"
    if field.parse in (_parse_ip4, _parse_ip6) and "01" not in bits:
        return str(bits.count("1"))
    return field.show(mask)
