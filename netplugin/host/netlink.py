"""Netlink sockets: kept open for the next request, with a limit for each answer; and the bytes of nfnetlink.

The messages of rtnetlink are pyroute2's (``netplugin.host.rtnetlink``).
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import weakref
from collections.abc import Callable, Iterator

from pyroute2 import netlink

from netplugin.api.errors import HostError, NetpluginError, OperationTimeout

# include/uapi/linux/netlink.h: NETLINK_CAP_ACK, NLMSGERR_ATTR_MSG
_CAP_ACK, _ERROR_WORDS = 10, 1
#: The kernel's own limit (MAX_ERRNO in include/linux/err.h).
_ERRNOS = 4096
_HEADER, _ATTRIBUTE, _TIMEVAL = struct.Struct("=IHHII"), struct.Struct("=HH"), struct.Struct("@ll")
HEADER_BYTES = _HEADER.size
_LONGEST = 1 << 18
#: How long each part of an answer may take, in seconds.
ANSWER_S = 5.0


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
    except (struct.error, LookupError, ValueError, TypeError) as strange:
        raise HostError(f"{what}: the kernel's answer cannot be read: {strange!r}", step=step) from strange


@contextlib.contextmanager
def ignored(*codes: int) -> Iterator[None]:
    """Ignore errors of the kernel with these numbers."""
    try:
        yield
    except OSError as refused:
        if refused.errno not in codes:
            raise


def wait_at_most(end: socket.socket, timeout_s: float) -> None:
    """Limit the wait for each part of an answer, in the kernel: Python would poll before each call.

    ``recv`` raises BlockingIOError then.
    """
    seconds, fraction = divmod(timeout_s, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(int(seconds), int(fraction * 1e6)))


class Channel:
    """A socket of one netlink protocol, in the network namespace of the thread that makes it.

    It may be used by another thread, and by one at a time.
    """

    def __init__(self, protocol: int) -> None:
        """Raises: OSError."""
        self.socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol)
        for option in (_CAP_ACK, netlink.NETLINK_EXT_ACK, netlink.NETLINK_GET_STRICT_CHK):
            self.socket.setsockopt(netlink.SOL_NETLINK, option, 1)
        wait_at_most(self.socket, ANSWER_S)
        self.process = os.getpid()
        #: Whether nothing more will come: all answers to the last request are read.
        self.idle = True
        self._number = 0

    def close(self) -> None:
        self.socket.close()

    def request(self, kind: int, body: bytes, flags: int) -> Iterator[tuple[int, bytes]]:
        """Send a request, and yield type and message, with its header, of each answer up to the last.

        Raises: OSError with the error text of the kernel, TimeoutError, Interrupted if the listed objects
        changed meanwhile.
        """
        self._number += 1
        self.idle = moving = False
        self.send(with_header(kind, flags, self._number, body))
        while True:
            for number, answered, marks, message in numbered(self._receive()):
                if number != self._number:
                    continue
                moving = moving or bool(marks & netlink.NLM_F_DUMP_INTR)
                self.idle = answered in (netlink.NLMSG_DONE, netlink.NLMSG_ERROR)
                if self.idle:
                    # The end of a list has an error too, as if an object does not fit into a message.
                    error = refusal(marks if answered == netlink.NLMSG_ERROR else 0, message[HEADER_BYTES:])
                    if error is not None:
                        raise error
                    if moving:
                        raise Interrupted
                    return
                if not moving:
                    yield answered, message

    def send(self, request: bytes) -> None:
        """Raises: OSError."""
        self.socket.send(request)

    def _receive(self) -> bytes:
        try:
            return self.socket.recv(_LONGEST)
        except BlockingIOError as late:
            raise TimeoutError from late


class Kept:
    """An open channel, kept for the next request: to open and close one takes six system calls.

    A thread that finds the kept one in use opens another one. A channel is closed if an answer may still
    come (a timeout, a list that was not read to its end), and a process that was forked opens its own.
    """

    def __init__(self, protocol: int) -> None:
        self._protocol = protocol
        self._kept: list[Channel] = []
        weakref.finalize(self, _close, self._kept)

    @contextlib.contextmanager
    def use(self) -> Iterator[Channel]:
        """Take the kept channel, or open one. Raises: OSError."""
        channel = self._take()
        try:
            yield channel
        finally:
            if channel.idle and not self._kept:
                self._kept.append(channel)
            else:
                channel.close()

    def _take(self) -> Channel:
        with contextlib.suppress(IndexError):
            channel = self._kept.pop()
            if channel.process == os.getpid():
                return channel
            channel.close()
        return Channel(self._protocol)


def _close(channels: list[Channel]) -> None:
    for channel in channels:
        channel.close()


def refusal(marks: int, payload: bytes) -> OSError | None:
    """Parse an NLMSG_ERROR: the error with the kernel's text; None for an acknowledgement.

    NLMSG_DONE begins with an error too.
    """
    code = -int.from_bytes(payload[:4], sys.byteorder, signed=True)
    if code == 0:
        return None
    words = os.strerror(code) if 0 < code < _ERRNOS else f"error {code}"
    # With the second, only the header of the request is repeated.
    if marks & netlink.NLM_F_ACK_TLVS and marks & netlink.NLM_F_CAPPED:
        error_text = dict(attributes(payload, 4 + HEADER_BYTES)).get(_ERROR_WORDS)
        words = f"{words} ({text(error_text)})" if error_text else words
    return OSError(code, words)


def with_header(kind: int, flags: int, number: int, body: bytes) -> bytes:
    """One netlink message."""
    return _HEADER.pack(HEADER_BYTES + len(body), kind, flags, number, 0) + body


def numbered(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield the number of the request, type, flags and all bytes of each netlink message."""
    offset = 0
    while offset + HEADER_BYTES <= len(data):
        length, kind, flags, number_, _ = _HEADER.unpack_from(data, offset)
        if length < HEADER_BYTES:
            return
        yield number_, kind, flags, data[offset : offset + length]
        offset += (length + 3) & ~3


def places(data: bytes, offset: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield type, and where the value begins and ends, of each attribute in this range."""
    while offset + 4 <= end:
        length, kind = _ATTRIBUTE.unpack_from(data, offset)
        if length < 4:
            return
        yield kind & 0x3FFF, offset + 4, min(offset + length, end)
        offset += (length + 3) & ~3


def attributes(payload: bytes, offset: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield type and value of each attribute after a header of ``offset`` bytes."""
    for kind, begin, end in places(payload, offset, len(payload)):
        yield kind, payload[begin:end]


def attribute(kind: int, *values: bytes) -> bytes:
    """Encode one attribute; several values are nested attributes."""
    value = b"".join(values)
    return _ATTRIBUTE.pack(4 + len(value), kind) + value + bytes(-len(value) % 4)


def text(value: bytes | None) -> str:
    return (value or b"").rstrip(b"\0").decode(errors="replace")
