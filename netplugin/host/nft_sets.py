"""Types of the keys of nftables sets, with the description by which ``nft`` can list them.

The kernel knows the length of a key only. ``nft`` keeps the rest in the user data of a set (``udata`` in its
src/mnl.c; ``nft --debug=mnl`` prints it), and without it cannot list keys with a part of a packet that has no
name of its own, such as a VNI.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

# nft, include/datatype.h: numbers of types
_INTEGER, _IPV4, _IPV6, _PORT, _DEVICE = 4, 7, 8, 13, 41
_TYPE_BITS = 6
# libnftnl, include/libnftnl/udata.h; nft, include/expression.h
_HOST_ORDER, _NETWORK_ORDER = 1, 2
_PAYLOAD, _CONCATENATION = 7, 13
_WORD = 4  # in a concatenation each part begins at a multiple of this


@dataclass(frozen=True)
class KeyType:
    """``number``: nft's own; ``length`` in bytes; ``userdata``: nft's description."""

    number: int
    length: int
    userdata: bytes


def udata(*values: int | bytes | None) -> bytes:
    """Encode a list of nft, numbered from 0: numbers, other values, and None for none."""
    found = b""
    for number, value in enumerate(values):
        data = struct.pack("=I", value) if isinstance(value, int) else value
        if data is not None:
            found += bytes((number, len(data))) + data
    return found


def concatenation(*parts: KeyType) -> KeyType:
    """The type of keys with several parts."""
    number = length = 0
    for each in parts:
        number = number << _TYPE_BITS | each.number
        length += -(-each.length // _WORD) * _WORD
    described = udata(*(udata(_PAYLOAD, each.userdata) for each in parts))
    return KeyType(number, length, udata(0, None, None, udata(_CONCATENATION, described)))


INTERFACE_NAME = KeyType(_DEVICE, 16, udata(_HOST_ORDER))
PORT = KeyType(_PORT, 2, udata(_NETWORK_ORDER))
#: Parts of a key: fields of the packet, by nft's numbers of protocol and field (its include/proto.h).
UDP_TO = KeyType(_PORT, 2, udata(6, 2))
IPV4_FROM = KeyType(_IPV4, 4, udata(12, 11))
IPV6_FROM = KeyType(_IPV6, 16, udata(13, 8))
#: The VNI has no name there: the transport header, how many bits of it are before the VNI, and its bits.
VNI = KeyType(_INTEGER, 3, udata(0, 0, 3, 96, 24))
