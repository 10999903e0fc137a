"""Rules of nftables as values: made of matches, encoded for the kernel, and read back for comparison.

The kernel keeps a rule as a list of expressions, small instructions on registers (include/uapi/linux/
netfilter/nf_tables.h; ``nft --debug=netlink`` prints them). Only those that our rules need are here. What
another program wrote is read too, and differs from all of ours.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Self

from netplugin.host.netlink import attribute, attributes, text
from netplugin.host.nfnetlink import packed, unpacked
from netplugin.host.nft_sets import udata

# include/uapi/linux/netfilter/nf_tables.h
_ELEMENT = 1  # of a list
_JUMP = -3
_TO_VERDICT, _REGISTER, _REGISTER_BYTES = 0, 1, 16
#: The number of the first word of that register, and the bytes of a word.
_FIRST_WORD, _WORD = 8, 4
#: nft's number of a comment in the user data of a rule (NFTNL_UDATA_RULE_COMMENT), and its most bytes.
_COMMENT, _MOST_COMMENT = 0, 253

#: The highest number of the attributes of each expression that decide what it does, and which of them are
#: values or verdicts. Those of a counter are its counts. The kernel may report more: newer ones add some.
_ATTRIBUTES = MappingProxyType(
    {"meta": 2, "cmp": 3, "payload": 4, "bitwise": 6, "lookup": 5, "exthdr": 6, "immediate": 2, "counter": 0}
)
_DATA = frozenset({("cmp", 3), ("bitwise", 4), ("bitwise", 5), ("immediate", 2)})


@dataclass(frozen=True)
class Meta:
    """What is known of a packet besides its bytes, by the kernel's number of the key (``nft_meta_keys``)."""

    key: int

    def code(self, register: int) -> bytes:
        return _expression("meta", register, self.key)


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

    def code(self, register: int) -> bytes:
        return _expression("payload", register, self.base, self.offset, self.length)


@dataclass(frozen=True)
class Extension:
    """The first byte of an IPv6 extension header, or (``present``) whether the packet has it: 1 or 0."""

    header: int
    present: bool = False

    def code(self, register: int) -> bytes:
        return _expression("exthdr", register, bytes((self.header,)), 0, 1, int(self.present), 0)


Load = Meta | Payload | Extension


@dataclass(frozen=True)
class Match:
    """Continue with the rule only if the loaded bytes, after ``mask``, are (or are not) the value."""

    load: Load
    value: bytes
    mask: bytes = b""
    equal: bool = True
    #: Whether the load is a whole field: nft prints a comparison of several only if each is whole.
    whole: bool = True

    def code(self) -> bytes:
        size, mask, zeros = len(self.mask), packed(self.mask), packed(bytes(len(self.mask)))
        masked = _expression("bitwise", _REGISTER, _REGISTER, size, mask, zeros, 0) if size else b""
        compared = _expression("cmp", _REGISTER, 0 if self.equal else 1, packed(self.value))
        return self.load.code(_REGISTER) + masked + compared

    def joined(self, other: Match) -> Match | None:
        """Return this and the next match as one comparison; None if they cannot be one."""
        ours, next_ = self._field, other._field
        if ours is None or next_ is None or ours.length + next_.length > _REGISTER_BYTES:
            return None
        if (ours.base, ours.offset + ours.length) != (next_.base, next_.offset):
            return None
        both = replace(ours, length=ours.length + next_.length)
        return replace(self, load=both, value=self.value + other.value)

    @property
    def _field(self) -> Payload | None:
        """What is compared, if more can be compared with it."""
        can_join = self.equal and self.whole and not self.mask
        return self.load if can_join and isinstance(self.load, Payload) else None


#: A match, or an expression that is encoded.
Statement = Match | bytes


@dataclass(frozen=True)
class Rule:
    """One rule: its expressions as the kernel takes them. Rules are equal if they do the same."""

    code: bytes
    comment: str | None = None

    @classmethod
    def make(cls, *statements: Statement, comment: str | None = None) -> Self:
        return cls(b"".join(map(_encoded, _joined(statements))), comment)

    @classmethod
    def read(cls, code: bytes, userdata: bytes) -> Self:
        """Parse what the kernel has of a rule (NFTA_RULE_EXPRESSIONS and NFTA_RULE_USERDATA)."""
        return cls(b"".join(_normal(part) for _, part in attributes(code)), _comment(userdata))

    @property
    def userdata(self) -> bytes:
        """The user data with the comment, as nft has it; empty if there is none. Raises: ValueError."""
        if self.comment is None:
            return b""
        value = self.comment.encode() + b"\0"
        if len(value) > _MOST_COMMENT:
            raise ValueError(f"a comment of {len(value)} bytes is too long")
        return udata(value)


def _expression(name: str, *values: int | str | bytes | None) -> bytes:
    return attribute(_ELEMENT, packed(name, packed(*values)))


def verdict_map(load: Load, name: str) -> bytes:
    """Do what a verdict map has for the loaded bytes; continue with the rule if it has nothing."""
    return load.code(_REGISTER) + _expression("lookup", name, _REGISTER, _TO_VERDICT, None, 0)


def member(loads: Iterable[Payload], name: str, *, inside: bool = True) -> bytes:
    """Continue with the rule only if the loaded bytes, part after part, are (or are not) in a set."""
    found, word = b"", 0
    for load in loads:  # each from the beginning of a word
        found += load.code(_FIRST_WORD + word if word else _REGISTER)
        word += -(-load.length // _WORD)
    return found + _expression("lookup", name, _REGISTER, None, None, 0 if inside else 1)


def verdict(number: int, chain: str | None = None) -> bytes:
    """Encode a verdict (``nft_data``)."""
    return packed(None, packed(number, chain))


def jump(chain: str) -> bytes:
    """Encode the verdict to jump to a chain."""
    return verdict(_JUMP, chain)


DROP, ACCEPT = (_expression("immediate", _TO_VERDICT, verdict(number)) for number in (0, 1))
#: Count the packets that come this far.
COUNTER = _expression("counter")


#: A counter as the kernel lists it: its name, and the number of its packets (NFTA_COUNTER_PACKETS).
_COUNTS = b"counter\0"
_PACKETS = 2


def counted(code: bytes) -> int:
    """The packets that a rule of the kernel has counted; 0 if it has no counter."""
    if _COUNTS not in code:
        return 0
    for _, expression in attributes(code):
        name, data = unpacked(expression, 2)
        if name == _COUNTS:
            return int.from_bytes(unpacked(data, _PACKETS)[_PACKETS - 1], "big")
    return 0


def jump_target(data: bytes) -> str | None:
    """The chain that a verdict jumps to; None for any other value."""
    chain = text(unpacked(unpacked(data, 2)[1], 2)[1])
    return chain if _plain(data) == jump(chain) else None


def _joined(statements: Iterable[Statement]) -> list[Statement]:
    """Make one comparison of those of adjacent bytes: less to evaluate for each packet, and to read back."""
    found: list[Statement] = []
    for each in statements:
        last = found[-1] if found else None
        both = last.joined(each) if isinstance(last, Match) and isinstance(each, Match) else None
        found[len(found) - bool(both) :] = [both or each]
    return found


@lru_cache(maxsize=8192)
def _encoded(statement: Statement) -> bytes:
    return statement if isinstance(statement, bytes) else statement.code()


@lru_cache(maxsize=8192)
def _normal(expression: bytes) -> bytes:
    """Encode an expression of the kernel as we do: attributes in order, and without those of no effect."""
    name, data = unpacked(expression, 2)
    kind = text(name)
    if kind not in _ATTRIBUTES:
        return attribute(_ELEMENT, expression)
    values = unpacked(data, _ATTRIBUTES[kind])
    found = (_plain(each) if (kind, at) in _DATA else each for at, each in enumerate(values, 1))
    return _expression(kind, *(each or None for each in found))


def _plain(data: bytes) -> bytes:
    """Encode a value or a verdict of the kernel as we do."""
    value, verdict_ = unpacked(data, 2)
    return packed(value or None, packed(*(part or None for part in unpacked(verdict_, 2))) or None)


def _comment(userdata: bytes) -> str | None:
    """The comment in the user data of a rule, which is a list of kind, length and bytes."""
    while len(userdata) >= 2:
        kind, length = userdata[:2]
        if kind == _COMMENT:
            return text(userdata[2 : 2 + length])
        userdata = userdata[2 + length :]
    return None
