"""rtnetlink as bytes: one request, its answers. For what is read for every port, at little cost.

A library reads a message into a tree of objects, which takes half a millisecond; a host has a
thousand devices.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Callable, Iterator

# include/uapi/linux/netlink.h
_ERROR, _DONE = 2, 3
_REQUEST, _ACK, _DUMP = 0x01, 0x04, 0x300
#: Of a request that makes something: it must be new; what is there is replaced; one more beside it.
EXCLUSIVE, CREATE, REPLACE, APPEND = 0x600, 0x400, 0x500, 0xC00
#: The kernel answers RTM_GETQDISC with news to all who listen, and to who asked only if they want
#: an echo (``qdisc_notify`` in net/sched/sch_api.c).
ECHO = 0x08
_INTERRUPTED, _CAPPED, _TLVS = 0x10, 0x100, 0x200
_SOL_NETLINK, _CAP_ACK, _EXT_ACK = 270, 10, 11
_ERROR_WORDS = 1
_HEADER, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=HH")
_ANSWER_S = 5.0
_DUMPS = 5  # a dump during which something came or went is begun anew, so often at most


class Interrupted(Exception):
    """What was being listed changed meanwhile, so that the answer may lack some of it."""


def ask(kind: int, body: bytes, flags: int = 0) -> list[bytes]:
    """The answers to one request that the kernel acknowledges.

    Raises: OSError with the kernel's own words, TimeoutError.
    """
    return list(_answers(kind, body, _ACK | flags))


def dump(kind: int, body: bytes, fits: Callable[[bytes], bool] = lambda _: True) -> list[bytes]:
    """All that the kernel lists; nothing if it lists what does not fit, so does not heed the filter.

    Raises: OSError, TimeoutError, Interrupted if it never holds still.
    """
    for attempt in range(_DUMPS):
        found: list[bytes] = []
        try:
            for payload in _answers(kind, body, _DUMP):
                if not fits(payload):
                    return []
                found.append(payload)
            return found
        except Interrupted:
            if attempt == _DUMPS - 1:
                raise
    raise AssertionError


def _answers(kind: int, body: bytes, flags: int) -> Iterator[bytes]:
    request = _HEADER.pack(_HEADER.size + len(body), kind, _REQUEST | flags, 1, 0) + body
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as netlink:
        netlink.settimeout(_ANSWER_S)
        for option in (_CAP_ACK, _EXT_ACK):
            netlink.setsockopt(_SOL_NETLINK, option, 1)
        netlink.send(request)
        while True:
            for answer, marks, payload in messages(netlink.recv(1 << 17)):
                if marks & _INTERRUPTED:
                    raise Interrupted
                if answer == _DONE:
                    return
                if answer == _ERROR:
                    _raise(marks, payload)
                    return
                yield payload


def _raise(marks: int, payload: bytes) -> None:
    code = -number(payload[:4], signed=True)
    if code == 0:
        return
    words = os.strerror(code)
    if (
        marks & _TLVS and marks & _CAPPED
    ):  # the request's own header is repeated, nothing more of it
        said = dict(attributes(payload, 4 + _HEADER.size)).get(_ERROR_WORDS)
        words = f"{words} ({text(said)})" if said else words
    raise OSError(code, words)


def messages(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Type, flags and payload of each netlink message."""
    offset = 0
    while offset + _HEADER.size <= len(data):
        length, kind, flags, _, _ = _HEADER.unpack_from(data, offset)
        if length < _HEADER.size:
            return
        yield kind, flags, data[offset + _HEADER.size : offset + length]
        offset += (length + 3) & ~3


def attributes(payload: bytes, offset: int = 0) -> Iterator[tuple[int, bytes]]:
    """Type and value of each attribute after a header of ``offset`` bytes."""
    while offset + 4 <= len(payload):
        length, kind = _ATTRIBUTE.unpack_from(payload, offset)
        if length < 4:
            return
        yield kind & 0x3FFF, payload[offset + 4 : offset + length]
        offset += (length + 3) & ~3


def attribute(kind: int, *values: bytes) -> bytes:
    """One attribute; several values are those that are nested in it."""
    value = b"".join(values)
    return _ATTRIBUTE.pack(4 + len(value), kind) + value + bytes(-len(value) % 4)


def text(value: bytes | None) -> str:
    return (value or b"").rstrip(b"\0").decode(errors="replace")


def number(value: bytes | None, *, signed: bool = False) -> int:
    """A number in the machine's own order; zero if there is none."""
    return int.from_bytes(value or b"", sys.byteorder, signed=signed)
