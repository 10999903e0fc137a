"""Messages of rtnetlink as bytes of the kernel's, and a kernel that gives answers of a test's choice."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import pytest

from netplugin.host.netlink import Channel
from netplugin.host.rtnetlink_messages import Message

_HEADER = struct.Struct("=IHHII")
_ERROR, _DONE, _MULTI, _DUMP, _GET = 2, 3, 2, 0x300, 2

#: What the kernel has for a request: its kind, body and flags. Raises OSError or TimeoutError instead.
Answer = Callable[[int, bytes, int], Sequence[bytes]]


def packet(kind: int, body: bytes, flags: int = 0, number: int = 1) -> bytes:
    return _HEADER.pack(_HEADER.size + len(body), kind, flags, number, 0) + body


def message(kind: int, body: bytes) -> Message:
    """A notification."""
    return Message(kind, packet(kind, body))


def answer_by(monkeypatch: pytest.MonkeyPatch, answer: Answer) -> None:
    """Let ``answer`` stand for the kernel in all requests to rtnetlink."""
    queued: list[bytes | TimeoutError] = []

    def send(_: Channel, data: bytes) -> None:
        _, kind, flags, number, _ = _HEADER.unpack_from(data)
        is_list = flags & _DUMP == _DUMP and kind % 4 == _GET
        try:
            found = answer(kind, bytes(data[_HEADER.size :]), flags)
        except TimeoutError as late:
            queued.append(late)
        except OSError as refused:
            body = struct.pack("=i", -(refused.errno or 0)) + data
            queued.append(packet(_ERROR, body, number=number))
        else:
            parts = [packet(kind - _GET, each, _MULTI * is_list, number) for each in found]
            ended = (
                packet(_DONE, bytes(4), _MULTI, number)
                if is_list
                else packet(_ERROR, bytes(4) + data, 0, number)
            )
            queued.append(b"".join([*parts, ended]))

    def receive(_: Channel) -> bytes:
        data = queued.pop(0)
        if isinstance(data, TimeoutError):
            raise data
        return data

    monkeypatch.setattr(Channel, "send", send)
    monkeypatch.setattr(Channel, "_receive", receive)
