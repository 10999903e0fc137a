"""Kept netlink channels: used again, and never for a request that could get the answer of another one."""

from __future__ import annotations

import errno
import gc
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from netplugin.host import netlink
from netplugin.host.link_messages import GETLINK, all_links, by_name, identity
from netplugin.host.netlink import Channel, Channels, Rtnetlink


def number(channel: Channel) -> int:
    """The number of the socket, which no other one has."""
    return os.fstat(channel.socket.fileno()).st_ino


def sockets() -> int:
    return sum(
        "socket:" in os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()
    )


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    opened: list[int] = []
    real = Channel.__init__

    def init(self: Channel, protocol: int = socket.NETLINK_ROUTE, timeout_s: float = 5.0) -> None:
        opened.append(protocol)
        real(self, protocol, timeout_s)

    with monkeypatch.context() as patch:
        patch.setattr(Channel, "__init__", init)
        yield opened


def test_requests_share_one_socket_also_after_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Rtnetlink()
    with counted(monkeypatch) as opened:
        for _ in range(3):
            assert identity(kernel.ask(GETLINK, by_name("lo"))[0])[0] == "lo"
            assert "lo" in {identity(each)[0] for each in kernel.dump(GETLINK, all_links())}
            with pytest.raises(OSError, match="No such device"):
                kernel.ask(GETLINK, by_name("nowhere"))
    assert len(opened) == 1


def test_a_list_that_was_not_read_to_its_end_disturbs_no_later_request() -> None:
    channels = Channels()
    with channels.use() as first:
        before = number(first)
        next(first.dump(GETLINK, all_links()))
        assert not first.idle
    with channels.use() as second:
        assert number(second) != before
        assert identity(second.ask(GETLINK, by_name("lo"))[0])[0] == "lo"
    assert Rtnetlink().dump(GETLINK, all_links(), lambda _: False) == []


@pytest.mark.parametrize("lost", [BlockingIOError(), OSError(errno.ENOBUFS, "No buffer space available")])
def test_an_answer_that_comes_too_late_or_is_lost_ends_the_channel(
    lost: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel has no such answer here on request: its call that receives is replaced."""
    channels = Channels()
    with channels.use() as first:
        before = number(first)
        first.ask(GETLINK, by_name("lo"))

    class Deaf:
        def __init__(self, real: socket.socket) -> None:
            self.send, self.close, self.fileno = real.send, real.close, real.fileno

        def recv(self, _size: int) -> bytes:
            raise lost

    with pytest.raises(OSError) as raised, channels.use() as same:
        assert number(same) == before
        monkeypatch.setattr(same, "socket", Deaf(same.socket))
        same.ask(GETLINK, by_name("lo"))
    assert isinstance(raised.value, TimeoutError) or raised.value.errno == errno.ENOBUFS
    with channels.use() as other:
        assert number(other) != before and len(other.ask(GETLINK, by_name("lo"))) == 1


def test_an_answer_is_waited_for_no_longer_than_asked() -> None:
    with Channel(timeout_s=0.05) as channel, pytest.raises(TimeoutError):
        channel._receive()


def test_two_threads_have_a_socket_each() -> None:
    channels, at_once = Channels(), threading.Barrier(2)
    found: list[int] = []

    def use() -> None:
        with channels.use() as channel:
            at_once.wait(60)
            found.append(number(channel))
            at_once.wait(60)

    threads = [threading.Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(set(found)) == 2
    with channels.use() as kept:
        assert number(kept) in found


def test_a_forked_process_opens_a_socket_of_its_own() -> None:
    channels = Channels()
    with channels.use() as ours:
        before = number(ours)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with channels.use() as theirs:
            os.write(writer, struct.pack("=Q", number(theirs)))
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as answer:
        (its,) = struct.unpack("=Q", answer.read())
    os.waitpid(child, 0)
    with channels.use() as again:
        assert number(again) == before != its


@pytest.mark.filterwarnings("error")
def test_who_needs_no_channels_any_more_leaves_no_socket_open() -> None:
    gc.collect()
    before = sockets()
    kernel = Rtnetlink()
    kernel.ask(GETLINK, by_name("lo"))
    assert sockets() == before + 1
    del kernel
    assert sockets() == before


def test_an_answer_to_an_earlier_request_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers go on for as long as a channel is kept."""
    channels = Channels()
    with channels.use() as channel:
        channel.ask(GETLINK, by_name("lo"))
        late = netlink._HEADER.pack(20, netlink.ERROR, 0, 1, 0) + struct.pack("=i", -errno.EPERM)
        real = channel._receive
        answers = iter([late])
        monkeypatch.setattr(channel, "_receive", lambda: next(answers, None) or real())
        assert len(channel.ask(GETLINK, by_name("lo"))) == 1
