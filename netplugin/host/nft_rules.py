"""Rules of nftables as values: made of matches, encoded for the kernel, and read back for comparison.

The kernel keeps a rule as a list of expressions, small instructions on registers (include/uapi/linux/
netfilter/nf_tables.h; ``nft --debug=netlink`` prints them). Only those that our rules need are here. What
another program wrote is read too, and differs from all of ours.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Self

from netplugin.host.netlink import attribute, attributes, text

# include/uapi/linux/netfilter/nf_tables.h
_ELEMENT, _NAME, _DATA = 1, 1, 2
_VALUE, _VERDICT, _CODE, _CHAIN = 1, 2, 1, 2
_META_DREG, _META_KEY = 1, 2
_CMP_SREG, _CMP_OP, _CMP_DATA = 1, 2, 3
_PAYLOAD_DREG, _PAYLOAD_BASE, _PAYLOAD_OFFSET, _PAYLOAD_LEN = 1, 2, 3, 4
_BIT_SREG, _BIT_DREG, _BIT_LEN, _BIT_MASK, _BIT_XOR, _BIT_OP = 1, 2, 3, 4, 5, 6
_LOOKUP_SET, _LOOKUP_SREG, _LOOKUP_DREG, _LOOKUP_FLAGS, _INVERTED = 1, 2, 3, 5, 1
_EXTENSION_DREG, _EXTENSION_TYPE, _EXTENSION_OFFSET, _EXTENSION_LEN = 1, 2, 3, 4
_EXTENSION_FLAGS, _EXTENSION_OP, _PRESENT = 5, 6, 1
_IMMEDIATE_DREG, _IMMEDIATE_DATA = 1, 2
_JUMP = -3
_TO_VERDICT, _REGISTER, _REGISTER_BYTES = 0, 1, 16
#: The number of the first word of that register, and the bytes of a word.
_FIRST_WORD, _WORD = 8, 4
#: nft's own attribute of a comment in the user data of a rule (NFTNL_UDATA_RULE_COMMENT).
_COMMENT, _MOST_USERDATA = 0, 256

#: The attributes of each expression that decide what it does, with those of values inside. A counter's are
#: its counts. The kernel may report more: newer ones add attributes.
_KNOWN: Mapping[str, frozenset[int]] = MappingProxyType(
    {
        "meta": frozenset({_META_DREG, _META_KEY}),
        "cmp": frozenset({_CMP_SREG, _CMP_OP, _CMP_DATA}),
        "payload": frozenset({_PAYLOAD_DREG, _PAYLOAD_BASE, _PAYLOAD_OFFSET, _PAYLOAD_LEN}),
        "bitwise": frozenset({_BIT_SREG, _BIT_DREG, _BIT_LEN, _BIT_MASK, _BIT_XOR, _BIT_OP}),
        "lookup": frozenset({_LOOKUP_SET, _LOOKUP_SREG, _LOOKUP_DREG, _LOOKUP_FLAGS}),
        "exthdr": frozenset(range(_EXTENSION_DREG, _EXTENSION_OP + 1)),
        "immediate": frozenset({_IMMEDIATE_DREG, _IMMEDIATE_DATA}),
        "counter": frozenset(),
    }
)
_NESTED = {("cmp", _CMP_DATA), ("bitwise", _BIT_MASK), ("bitwise", _BIT_XOR), ("immediate", _IMMEDIATE_DATA)}


@dataclass(frozen=True)
class Meta:
    """What is known of a packet besides its bytes, by the kernel's number of the key (``nft_meta_keys``)."""

    key: int


#: Host byte order for the group, network byte order for the protocol (an EtherType).
PROTOCOL, IIFNAME, OIFNAME, IIFGROUP, OIFGROUP = (Meta(key) for key in (1, 6, 7, 21, 22))
#: Of an IP packet: its version (AF_INET, AF_INET6), and the protocol above it; a byte each.
NFPROTO, L4PROTO = Meta(15), Meta(16)
LINK, NETWORK, TRANSPORT = 0, 1, 2


@dataclass(frozen=True)
class Payload:
    """Bytes of the packet, from an offset in its link, network or transport header."""

    base: int
    offset: int
    length: int


@dataclass(frozen=True)
class Extension:
    """One byte of an IPv6 extension header, or (``present``) whether the packet has this header: 1 or 0."""

    header: int
    offset: int = 0
    present: bool = False


@dataclass(frozen=True)
class Match:
    """Continue with the rule only if the loaded bytes, after ``mask``, are (or are not) the value."""

    load: Meta | Payload | Extension
    value: bytes
    mask: bytes = b""
    equal: bool = True
    #: Whether the load is a whole field: nft prints a comparison of several only if each is whole.
    whole: bool = True

    def joined(self, other: object) -> Match | None:
        """Return this and the next match as one comparison; None if they cannot be one."""
        if not isinstance(other, Match) or not (self._joins and other._joins):
            return None
        ours, next_ = self.load, other.load
        if not isinstance(ours, Payload) or not isinstance(next_, Payload):
            return None
        length = ours.length + next_.length
        adjacent = (ours.base, ours.offset + ours.length) == (next_.base, next_.offset)
        if not adjacent or length > _REGISTER_BYTES:
            return None
        return replace(self, load=replace(ours, length=length), value=self.value + other.value)

    @property
    def _joins(self) -> bool:
        return self.equal and self.whole and not self.mask


@dataclass(frozen=True)
class VerdictMap:
    """Do what a verdict map has for the loaded bytes; continue with the rule if it has nothing."""

    load: Meta | Payload
    name: str


@dataclass(frozen=True)
class Member:
    """Continue with the rule only if the loaded bytes, part after part, are (or are not) in a set."""

    loads: tuple[Payload, ...]
    name: str
    inside: bool = True


@dataclass(frozen=True)
class Verdict:
    code: int


@dataclass(frozen=True)
class Counter:
    """Count the packets that come this far."""


DROP, ACCEPT, COUNTER = Verdict(0), Verdict(1), Counter()
Statement = Match | VerdictMap | Member | Verdict | Counter


@dataclass(frozen=True)
class Rule:
    """One rule: its expressions as the kernel takes them. Rules are equal if they do the same."""

    code: bytes
    comment: str | None = None

    @classmethod
    def make(cls, *statements: Statement, comment: str | None = None) -> Self:
        return cls(b"".join(part for each in _joined(statements) for part in _encoded(each)), comment)

    @classmethod
    def read(cls, code: bytes, userdata: bytes | None) -> Self:
        """Parse what the kernel has of a rule (NFTA_RULE_EXPRESSIONS and NFTA_RULE_USERDATA)."""
        return cls(b"".join(_normal(part) for _, part in attributes(code)), _comment(userdata or b""))

    def with_comment(self, comment: str) -> Rule:
        return Rule(self.code, comment)

    @property
    def userdata(self) -> bytes:
        """The user data with the comment, as nft has it; empty if there is none. Raises: ValueError."""
        if self.comment is None:
            return b""
        value = self.comment.encode() + b"\0"
        if len(value) + 2 > _MOST_USERDATA - 1:
            raise ValueError(f"a comment of {len(value)} bytes is too long")
        return bytes((_COMMENT, len(value))) + value


def verdict(code: int, chain: str = "") -> bytes:
    """Encode a verdict as a value (NFTA_DATA_VERDICT)."""
    target = attribute(_CHAIN, chain.encode() + b"\0") if chain else b""
    return attribute(_VERDICT, attribute(_CODE, struct.pack(">i", code)), target)


def jump(chain: str) -> bytes:
    """Encode a jump to a chain as a value."""
    return verdict(_JUMP, chain)


def jump_target(data: bytes | None) -> str | None:
    """The chain that a verdict jumps to; None for any other value."""
    found = dict(attributes(dict(attributes(data or b"")).get(_VERDICT, b"")))
    if _signed(found.get(_CODE)) != _JUMP:
        return None
    return text(found.get(_CHAIN))


def value_of(data: bytes | None) -> bytes:
    """The bytes of a value (NFTA_DATA_VALUE); empty for a verdict."""
    return dict(attributes(data or b"")).get(_VALUE, b"")


def value(data: bytes) -> bytes:
    """Encode bytes as a value."""
    return attribute(_VALUE, data)


# -- how each statement is encoded -----------------------------------------------------------------


def _joined(statements: Sequence[Statement]) -> Iterator[Statement]:
    """Make one comparison of those of adjacent bytes: less to evaluate for each packet, and to read back."""
    last: Statement | None = None
    for each in statements:
        one = last.joined(each) if isinstance(last, Match) else None
        if one is None and last is not None:
            yield last
        last = one or each
    if last is not None:
        yield last


@lru_cache(maxsize=8192)
def _encoded(statement: Statement) -> tuple[bytes, ...]:
    match statement:
        case Match(load, wanted, mask, equal):
            masked = [_mask(mask)] if mask else []
            return (_load(load), *masked, _compare(wanted, equal))
        case VerdictMap(load, name):
            to_verdict = _u32(_LOOKUP_DREG, _TO_VERDICT), _u32(_LOOKUP_FLAGS, 0)
            return (_load(load), _lookup(name, *to_verdict))
        case Member(loads, name, inside):
            flags = _u32(_LOOKUP_FLAGS, 0 if inside else _INVERTED)
            return (*_side_by_side(loads), _lookup(name, flags))
        case Verdict(code):
            parts = _u32(_IMMEDIATE_DREG, _TO_VERDICT), attribute(_IMMEDIATE_DATA, verdict(code))
            return (_expression("immediate", *parts),)
        case Counter():
            return (_expression("counter"),)


def _side_by_side(loads: Sequence[Payload]) -> Iterator[bytes]:
    """Load the parts of a key, each from the beginning of a word."""
    word = 0
    for load in loads:
        yield _load(load, _FIRST_WORD + word if word else _REGISTER)
        word += -(-load.length // _WORD)


def _lookup(name: str, *attributes_: bytes) -> bytes:
    where = attribute(_LOOKUP_SET, name.encode() + b"\0"), _u32(_LOOKUP_SREG, _REGISTER)
    return _expression("lookup", *where, *attributes_)


def _load(load: Meta | Payload | Extension, register: int = _REGISTER) -> bytes:
    match load:
        case Meta(key):
            return _expression("meta", _u32(_META_DREG, register), _u32(_META_KEY, key))
        case Payload(base, offset, length):
            return _expression(
                "payload",
                _u32(_PAYLOAD_DREG, register),
                _u32(_PAYLOAD_BASE, base),
                _u32(_PAYLOAD_OFFSET, offset),
                _u32(_PAYLOAD_LEN, length),
            )
        case Extension(header, offset, present):
            return _expression(
                "exthdr",
                _u32(_EXTENSION_DREG, register),
                attribute(_EXTENSION_TYPE, bytes((header,))),
                _u32(_EXTENSION_OFFSET, offset),
                _u32(_EXTENSION_LEN, 1),
                _u32(_EXTENSION_FLAGS, _PRESENT * present),
                _u32(_EXTENSION_OP, 0),
            )


def _compare(wanted: bytes, equal: bool) -> bytes:
    operator = _u32(_CMP_OP, 0 if equal else 1)
    return _expression("cmp", _u32(_CMP_SREG, _REGISTER), operator, attribute(_CMP_DATA, value(wanted)))


def _mask(mask: bytes) -> bytes:
    return _expression(
        "bitwise",
        _u32(_BIT_SREG, _REGISTER),
        _u32(_BIT_DREG, _REGISTER),
        _u32(_BIT_LEN, len(mask)),
        attribute(_BIT_MASK, value(mask)),
        attribute(_BIT_XOR, value(bytes(len(mask)))),
        _u32(_BIT_OP, 0),
    )


def _expression(name: str, *parts: bytes) -> bytes:
    return attribute(_ELEMENT, attribute(_NAME, name.encode() + b"\0"), attribute(_DATA, *parts))


def _u32(kind: int, value_: int) -> bytes:
    return attribute(kind, struct.pack(">I", value_))


# -- what the kernel reports -----------------------------------------------------------------------


@lru_cache(maxsize=8192)
def _normal(expression: bytes) -> bytes:
    """Encode an expression of the kernel as we do: attributes in order, and without those of no effect."""
    found = dict(attributes(expression))
    name = text(found.get(_NAME))
    known = _KNOWN.get(name)
    if known is None:
        return attribute(_ELEMENT, expression)
    parts = dict(attributes(found.get(_DATA, b"")))
    if name == "bitwise":
        parts.setdefault(_BIT_OP, bytes(4))  # kernels before 5.6 have no other
    return _expression(name, *(_part(name, kind, parts[kind]) for kind in sorted(parts.keys() & known)))


def _part(name: str, kind: int, data: bytes) -> bytes:
    if (name, kind) not in _NESTED:
        return attribute(kind, data)
    inner = dict(attributes(data))
    if _VERDICT in inner:
        found = dict(attributes(inner[_VERDICT]))
        return attribute(kind, verdict(_signed(found.get(_CODE)), text(found.get(_CHAIN))))
    return attribute(kind, value(inner.get(_VALUE, b"")))


def _comment(userdata: bytes) -> str | None:
    """The comment in the user data of a rule, which is a list of kind, length and bytes."""
    at = 0
    while at + 2 <= len(userdata):
        kind, length = userdata[at], userdata[at + 1]
        if kind == _COMMENT:
            return text(userdata[at + 2 : at + 2 + length])
        at += 2 + length
    return None


def _signed(data: bytes | None) -> int:
    return int.from_bytes(data or b"", "big", signed=True)
