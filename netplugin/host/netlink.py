"""A minimal rtnetlink client on raw bytes, for what is read for every port and what pyroute2 lacks.

A library parses each message into a tree of objects, and a host may have a thousand devices.
docs/libraries.md has the figures.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterator

from netplugin.api.errors import HostError, NetpluginError, OperationTimeout

# include/uapi/linux/netlink.h
_ERROR, _DONE = 2, 3
_REQUEST, _ACK, _DUMP = 0x01, 0x04, 0x300
#: Flags of a request that creates: create, and fail if it exists; replace; append.
EXCLUSIVE, REPLACE, APPEND = 0x600, 0x500, 0xC00
#: The kernel answers RTM_GETQDISC by a notification to all listeners, and sends it to the requester
#: only with NLM_F_ECHO (``qdisc_notify`` in net/sched/sch_api.c).
ECHO = 0x08
_INTERRUPTED, _CAPPED, _TLVS = 0x10, 0x100, 0x200
_SOL_NETLINK, _CAP_ACK, _EXT_ACK = 270, 10, 11
_ERROR_WORDS = 1
_HEADER, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=HH")
_ANSWER_S = 5.0
_DUMPS = 5  # attempts: a dump is repeated if objects came or went meanwhile


class Interrupted(Exception):
    """The listed objects changed during the dump, so the answer may be incomplete."""


@contextlib.contextmanager
def translated(step: str, what: str, refusal: Callable[[str, int], NetpluginError]) -> Iterator[None]:
    """Translate errors of the kernel into typed errors; ``refusal`` makes one of its text and its errno."""
    try:
        yield
    except TimeoutError as late:
        raise OperationTimeout(f"{what}: the kernel did not answer in time", step=step) from late
    except Interrupted as moving:
        raise HostError(f"{what} kept changing while they were read", step=step) from moving
    except OSError as refused:
        raise refusal(refused.strerror or str(refused), refused.errno or 0) from refused


def ask(kind: int, body: bytes, flags: int = 0) -> list[bytes]:
    """Send one request and return the answers up to the kernel's acknowledgement.

    Raises: OSError with the error text of the kernel, TimeoutError.
    """
    return list(_answers(kind, body, _ACK | flags))


def dump(kind: int, body: bytes, fits: Callable[[bytes], bool] = lambda _: True) -> list[bytes]:
    """Dump all objects; empty if one does not match ``fits`` (the kernel ignored the filter).

    Raises: OSError, TimeoutError, Interrupted if the objects change during every attempt.
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
    if marks & _TLVS and marks & _CAPPED:  # only the header of the request is repeated
        said = dict(attributes(payload, 4 + _HEADER.size)).get(_ERROR_WORDS)
        words = f"{words} ({text(said)})" if said else words
    raise OSError(code, words)


def messages(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield type, flags and payload of each netlink message."""
    offset = 0
    while offset + _HEADER.size <= len(data):
        length, kind, flags, _, _ = _HEADER.unpack_from(data, offset)
        if length < _HEADER.size:
            return
        yield kind, flags, data[offset + _HEADER.size : offset + length]
        offset += (length + 3) & ~3


def attributes(payload: bytes, offset: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield type and value of each attribute after a header of ``offset`` bytes."""
    while offset + 4 <= len(payload):
        length, kind = _ATTRIBUTE.unpack_from(payload, offset)
        if length < 4:
            return
        yield kind & 0x3FFF, payload[offset + 4 : offset + length]
        offset += (length + 3) & ~3


def attribute(kind: int, *values: bytes) -> bytes:
    """Encode one attribute; several values are nested attributes."""
    value = b"".join(values)
    return _ATTRIBUTE.pack(4 + len(value), kind) + value + bytes(-len(value) % 4)


def text(value: bytes | None) -> str:
    return (value or b"").rstrip(b"\0").decode(errors="replace")


def number(value: bytes | None, *, signed: bool = False) -> int:
    """Decode an integer in host byte order; zero if it is absent."""
    return int.from_bytes(value or b"", sys.byteorder, signed=signed)
