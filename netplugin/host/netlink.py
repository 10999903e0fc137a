"""A minimal netlink client on raw bytes.

A library parses each message into a tree of objects, and a host may have a thousand devices.
docs/libraries.md has the figures.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Self

from netplugin.api.errors import HostError, NetpluginError, OperationTimeout

# include/uapi/linux/netlink.h
ERROR, _DONE = 2, 3
_REQUEST, _ACK, _DUMP = 0x01, 0x04, 0x300
#: Flags of a request that creates: create, and fail if it exists; replace; append.
EXCLUSIVE, REPLACE, APPEND = 0x600, 0x500, 0xC00
#: The kernel answers RTM_GETQDISC by a notification to all listeners, and sends it to the requester
#: only with NLM_F_ECHO (``qdisc_notify`` in net/sched/sch_api.c).
ECHO = 0x08
_INTERRUPTED, _CAPPED, _TLVS = 0x10, 0x100, 0x200
_SOL_NETLINK, _CAP_ACK, _EXT_ACK = 270, 10, 11
_ERROR_WORDS = 1
#: The kernel's own limit (MAX_ERRNO in include/linux/err.h).
_ERRNOS = 4096
_HEADER, _ATTRIBUTE, _TIMEVAL = struct.Struct("=IHHII"), struct.Struct("=HH"), struct.Struct("@ll")
_ANSWER_S = 5.0
_DUMPS = 5  # attempts: a dump is repeated if objects came or went meanwhile


class Interrupted(Exception):
    """The listed objects changed during the dump, so the answer may be incomplete."""


@contextlib.contextmanager
def translated(step: str, what: str, refusal: Callable[[str, int], NetpluginError]) -> Iterator[None]:
    """Translate errors of the kernel into typed errors; ``refusal`` makes one of its text and its errno.

    An answer that cannot be read, within the same block, is an error too.
    """
    try:
        yield
    except TimeoutError as late:
        raise OperationTimeout(f"{what}: the kernel did not answer in time", step=step) from late
    except Interrupted as moving:
        raise HostError(f"{what} kept changing while they were read", step=step) from moving
    except OSError as refused:
        raise refusal(refused.strerror or str(refused), refused.errno or 0) from refused
    except (struct.error, LookupError, ValueError) as strange:
        raise HostError(f"{what}: the kernel's answer cannot be read: {strange!r}", step=step) from strange


class Channel:
    """A socket of one netlink protocol, in the network namespace of the thread that makes it.

    It may be used by another thread, and by one at a time. A context manager, which closes it.
    """

    def __init__(self, protocol: int = socket.NETLINK_ROUTE, timeout_s: float = _ANSWER_S) -> None:
        """Raises: OSError."""
        self.socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol)
        for option in (_CAP_ACK, _EXT_ACK):
            self.socket.setsockopt(_SOL_NETLINK, option, 1)
        self.wait_at_most(timeout_s)
        self.process = os.getpid()
        #: Whether nothing more will come: all answers to the last request are read.
        self.idle = True
        self._number = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def wait_at_most(self, timeout_s: float) -> None:
        """Limit the wait for each part of an answer, in the kernel: Python would poll before each call."""
        seconds, fraction = divmod(timeout_s, 1)
        limit = _TIMEVAL.pack(int(seconds), int(fraction * 1e6))
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def ask(self, kind: int, body: bytes, flags: int = 0) -> list[bytes]:
        """Send one request and return the answers up to the kernel's acknowledgement.

        Raises: OSError with the error text of the kernel, TimeoutError.
        """
        return list(self._answers(kind, body, _ACK | flags))

    def dump(self, kind: int, body: bytes) -> Iterator[bytes]:
        """Yield all objects, as the kernel sends them.

        Raises: OSError, TimeoutError, Interrupted if the objects changed meanwhile; then read on until the
        end before the next request, or use another channel.
        """
        return self._answers(kind, body, _DUMP)

    def _answers(self, kind: int, body: bytes, flags: int) -> Iterator[bytes]:
        self._number += 1
        self.idle = False
        self.socket.send(
            _HEADER.pack(_HEADER.size + len(body), kind, _REQUEST | flags, self._number, 0) + body
        )
        moving = False
        while True:
            for number_, answer, marks, payload in numbered(self._receive()):
                if number_ != self._number:
                    continue
                moving = moving or bool(marks & _INTERRUPTED)
                self.idle = answer in (_DONE, ERROR)
                if answer == _DONE:
                    if moving:
                        raise Interrupted
                    return
                if answer == ERROR:
                    _raise(marks, payload)
                    return
                if not moving:
                    yield payload

    def _receive(self) -> bytes:
        try:
            return self.socket.recv(1 << 17)
        except BlockingIOError as late:
            raise TimeoutError from late


class Channels:
    """Open channels of one protocol, kept for the next request: to open and close one takes six system calls.

    A thread that finds the kept channel in use opens another one. A channel is closed if an answer may still
    come (a timeout, a list that was not read to its end), and a process that was forked opens its own.
    """

    def __init__(self, protocol: int = socket.NETLINK_ROUTE) -> None:
        self._protocol = protocol
        self._kept: list[Channel] = []
        weakref.finalize(self, _close, self._kept)

    @contextlib.contextmanager
    def use(self, timeout_s: float | None = None) -> Iterator[Channel]:
        """Take the kept channel, or open one. ``timeout_s`` None: as it is. Raises: OSError."""
        channel = self._take()
        try:
            if timeout_s is not None:
                channel.wait_at_most(timeout_s)
            yield channel
        finally:
            if channel.idle and not self._kept:
                self._kept.append(channel)
            else:
                channel.socket.close()

    def _take(self) -> Channel:
        with contextlib.suppress(IndexError):
            channel = self._kept.pop()
            if channel.process == os.getpid():
                return channel
            channel.socket.close()
        return Channel(self._protocol)


def _close(channels: list[Channel]) -> None:
    for channel in channels:
        channel.socket.close()


class Rtnetlink:
    """Requests to rtnetlink, in the network namespace of the calling thread, which must not change."""

    def __init__(self) -> None:
        self._channels = Channels()

    def ask(self, kind: int, body: bytes, flags: int = 0) -> list[bytes]:
        """See ``Channel.ask``."""
        with self._channels.use() as channel:
            return channel.ask(kind, body, flags)

    def dump(self, kind: int, body: bytes, fits: Callable[[bytes], bool] = lambda _: True) -> list[bytes]:
        """Dump all objects; empty if one does not match ``fits`` (the kernel ignored the filter).

        Raises: OSError, TimeoutError, Interrupted if the objects change during every attempt.
        """
        for attempt in range(_DUMPS):
            found: list[bytes] = []
            try:
                with self._channels.use() as channel:
                    for payload in channel.dump(kind, body):
                        if not fits(payload):
                            return []
                        found.append(payload)
                return found
            except Interrupted:
                if attempt == _DUMPS - 1:
                    raise
        raise AssertionError


def _raise(marks: int, payload: bytes) -> None:
    error = refusal(marks, payload)
    if error is not None:
        raise error


def refusal(marks: int, payload: bytes) -> OSError | None:
    """Parse an NLMSG_ERROR: the error with the kernel's text; None for an acknowledgement."""
    code = -number(payload[:4], signed=True)
    if code == 0:
        return None
    words = os.strerror(code) if 0 < code < _ERRNOS else f"error {code}"
    if marks & _TLVS and marks & _CAPPED:  # only the header of the request is repeated
        said = dict(attributes(payload, 4 + _HEADER.size)).get(_ERROR_WORDS)
        words = f"{words} ({text(said)})" if said else words
    return OSError(code, words)


def messages(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield type, flags and payload of each netlink message."""
    for _, kind, flags, payload in numbered(data):
        yield kind, flags, payload


def numbered(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield the number of the request, type, flags and payload of each netlink message."""
    offset = 0
    while offset + _HEADER.size <= len(data):
        length, kind, flags, number_, _ = _HEADER.unpack_from(data, offset)
        if length < _HEADER.size:
            return
        yield number_, kind, flags, data[offset + _HEADER.size : offset + length]
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
