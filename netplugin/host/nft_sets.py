"""Types of the keys of nftables sets, with the description by which ``nft`` can list them.

The kernel knows the length of a key only. ``nft`` keeps the rest in the user data of a set (``udata`` in its
src/mnl.c; ``nft --debug=mnl`` prints it), and without it cannot list keys with a part of a packet that has no
name of its own, such as a VNI.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Self

# libnftnl, include/libnftnl/udata.h; nft, include/datatype.h and include/proto.h
_BYTEORDER, _TYPEOF, _EXPRESSION, _DATA = 0, 3, 0, 1
_HOST_ORDER, _NETWORK_ORDER = 1, 2
_PAYLOAD, _CONCATENATION = 7, 13
_PROTOCOL, _FIELD, _BASE, _OFFSET, _LENGTH = 0, 1, 2, 3, 4
_NUMBER, _IPV4, _IPV6, _PORT, _DEVICE = 4, 7, 8, 13, 41
_TYPE_BITS = 6
_WORD = 4  # in a concatenation each part begins at a multiple of this


@dataclass(frozen=True)
class KeyType:
    """``number``: nft's own; ``length`` in bytes; ``userdata``: nft's description."""

    number: int
    length: int
    userdata: bytes


@dataclass(frozen=True)
class Part:
    """One part of a key: a field of the packet."""

    number: int
    length: int
    described: bytes

    @classmethod
    def field(cls, number: int, length: int, protocol: int, field: int) -> Self:
        return cls(number, length, _number(_PROTOCOL, protocol) + _number(_FIELD, field))

    @classmethod
    def bits(cls, base: int, offset: int, length: int) -> Self:
        """Bits of a header without a name. ``base``: see ``nft_rules``; offset and length are in bits."""
        where = _number(_BASE, base + 1) + _number(_OFFSET, offset) + _number(_LENGTH, length)
        return cls(_NUMBER, length // 8, _number(_PROTOCOL, 0) + _number(_FIELD, 0) + where)


def concatenation(*parts: Part) -> KeyType:
    """The type of keys with several parts."""
    number, length, described = 0, 0, b""
    for at, part in enumerate(parts):
        number = number << _TYPE_BITS | part.number
        length += -(-part.length // _WORD) * _WORD
        described += _data(at, _number(_EXPRESSION, _PAYLOAD) + _data(_DATA, part.described))
    typeof = _number(_EXPRESSION, _CONCATENATION) + _data(_DATA, described)
    return KeyType(number, length, _number(_BYTEORDER, 0) + _data(_TYPEOF, typeof))


def _data(kind: int, value: bytes) -> bytes:
    return bytes((kind, len(value))) + value


def _number(kind: int, value: int) -> bytes:
    return _data(kind, struct.pack("=I", value))


INTERFACE_NAME = KeyType(_DEVICE, 16, _number(_BYTEORDER, _HOST_ORDER))
PORT = KeyType(_PORT, 2, _number(_BYTEORDER, _NETWORK_ORDER))
UDP_TO = Part.field(_PORT, 2, protocol=6, field=2)
IPV4_FROM = Part.field(_IPV4, 4, protocol=12, field=11)
IPV6_FROM = Part.field(_IPV6, 16, protocol=13, field=8)
