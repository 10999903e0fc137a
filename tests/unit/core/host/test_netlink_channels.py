"""Kept netlink sockets: used again, and never for a request that could get the answer of another one."""

from __future__ import annotations

import errno
import gc
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyroute2.netlink.rtnl import RTM_GETLINK

from netplugin.host import netlink
from netplugin.host.links import Links
from netplugin.host.netlink import Channel, Interrupted, Kept
from netplugin.host.rtnetlink import DUMP, Request, Rtnetlink, about_link
from netplugin.host.rtnetlink_messages import Message, received
from tests.unit.kernel_answers import packet


def everything() -> tuple[int, Request, int]:
    return RTM_GETLINK, about_link(), DUMP


def get(name: str) -> tuple[int, Request]:
    return RTM_GETLINK, about_link(("IFLA_IFNAME", name))


def names(messages: list[Message]) -> list[str]:
    return [message.attributes.text("IFLA_IFNAME") for message in messages]


def number(connection: Channel) -> int:
    """The number of the socket, which no other one has."""
    return os.fstat(connection.socket.fileno()).st_ino


def sockets() -> int:
    return sum(
        "socket:" in os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()
    )


@contextmanager
def replaced(connection: Channel, receive: Callable[[socket.socket, int], bytes]) -> Iterator[None]:
    """Replace the call by which the socket receives."""
    real = connection.socket

    class Replaced:
        def recv(self, size: int) -> bytes:
            return receive(real, size)

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    connection.socket = Replaced()  # type: ignore[assignment]
    try:
        yield
    finally:
        connection.socket = real


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Channel]]:
    opened: list[Channel] = []
    real = Channel.__init__

    def init(self: Channel, *args: Any) -> None:
        opened.append(self)
        real(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Channel, "__init__", init)
        yield opened


def test_requests_share_one_socket_also_after_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Rtnetlink()
    with counted(monkeypatch) as opened:
        for _ in range(3):
            assert names(kernel.ask(*get("lo"))) == ["lo"]
            assert "lo" in names(kernel.ask(*everything()))
            with pytest.raises(OSError, match="No such device"):
                kernel.ask(*get("nowhere"))
    assert len(opened) == 1


def test_a_list_that_was_not_read_to_its_end_disturbs_no_later_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = Rtnetlink()
    with counted(monkeypatch) as opened:
        assert kernel.ask(*everything(), lambda _: False) == [], "the kernel has ignored a filter"
        assert names(kernel.ask(*get("lo"))) == ["lo"]
        assert "lo" in names(kernel.ask(*everything()))
    assert len(opened) == 2 and opened[0].socket.fileno() == -1


@pytest.mark.parametrize("lost", [BlockingIOError(), OSError(errno.ENOBUFS, "No buffer space available")])
def test_an_answer_that_comes_too_late_or_is_lost_ends_the_socket(
    lost: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel has no such answer here on request: its call that receives is replaced."""
    kernel = Rtnetlink()

    def receive(*_: object) -> bytes:
        raise lost

    with counted(monkeypatch) as opened:
        kernel.ask(*get("lo"))
        with replaced(opened[0], receive), pytest.raises(OSError) as raised:
            kernel.ask(*get("lo"))
        assert isinstance(raised.value, TimeoutError) or raised.value.errno == errno.ENOBUFS
        assert names(kernel.ask(*get("lo"))) == ["lo"]
    assert len(opened) == 2 and opened[0].socket.fileno() == -1


def test_an_answer_is_waited_for_no_longer_than_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netlink, "ANSWER_S", 0.05)
    monkeypatch.setattr(Channel, "send", lambda *_: 0)  # the kernel has no request to answer
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        Rtnetlink().ask(*get("lo"))
    with closing(Channel(socket.NETLINK_ROUTE)) as channel, pytest.raises(TimeoutError):
        channel._receive()
    assert time.monotonic() - begun < 60


def test_two_threads_have_a_socket_each() -> None:
    kept, at_once = Kept(socket.NETLINK_ROUTE), threading.Barrier(2)
    found: list[int] = []

    def use() -> None:
        with kept.use() as connection:
            at_once.wait(60)
            found.append(number(connection))
            at_once.wait(60)

    threads = [threading.Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(set(found)) == 2
    with kept.use() as again:
        assert number(again) in found


def test_a_socket_serves_one_thread_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Rtnetlink()
    with counted(monkeypatch) as opened:
        for _ in range(3):
            thread = threading.Thread(target=lambda: kernel.ask(*get("lo")))
            thread.start()
            thread.join(60)
    assert len(opened) == 1


def test_sixty_four_threads_get_their_own_answers() -> None:
    links, wrong = Links(), []

    def use() -> None:
        for _ in range(2):
            lo, none = links.get("lo"), links.get("nowhere")
            if lo is None or lo.name != "lo" or none is not None:
                wrong.append((lo, none))

    threads = [threading.Thread(target=use) for _ in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


def test_a_forked_process_opens_a_socket_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Rtnetlink()
    with counted(monkeypatch) as opened:
        kernel.ask(*get("lo"))
        before = number(opened[0])
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            kernel.ask(*get("lo"))
            os.write(writer, struct.pack("=Q", number(opened[-1])))
            os._exit(0)
        os.close(writer)
        with open(reader, "rb") as answer:
            (its,) = struct.unpack("=Q", answer.read())
        os.waitpid(child, 0)
        kernel.ask(*get("lo"))
        assert [number(each) for each in opened] == [before] and its != before


@pytest.mark.filterwarnings("error")
def test_who_needs_no_sockets_any_more_leaves_none_open() -> None:
    gc.collect()
    before = sockets()
    kernel = Rtnetlink()
    kernel.ask(*get("lo"))
    assert sockets() == before + 1
    del kernel
    assert sockets() == before


def test_an_answer_to_an_earlier_request_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Rtnetlink()
    with counted(monkeypatch) as opened:
        kernel.ask(*get("lo"))
        late = [packet(2, struct.pack("=i", -errno.EPERM) + packet(18, b""), number=1)]

        def receive(end: socket.socket, size: int) -> bytes:
            return late.pop() if late else end.recv(size)

        with replaced(opened[0], receive):
            assert names(kernel.ask(*get("lo"))) == ["lo"] and late == []


# -- lists -----------------------------------------------------------------------------------------

_LINK = struct.pack("=BxHiII", 0, 1, 1, 0, 0) + struct.pack("=HH4s", 8, 3, b"one\0")
_INTERRUPTED, _MULTI = 0x10, 2


def _ending(flags: int, code: int = 0) -> Callable[[int], bytes]:
    """A list of one device, by the number of the request, with these flags and this error at its end."""

    def data(number: int) -> bytes:
        end = packet(3, struct.pack("=i", -code), _MULTI | flags, number)
        return packet(16, _LINK, _MULTI, number) + end

    return data


def _lists(monkeypatch: pytest.MonkeyPatch, *lists: Callable[[int], bytes]) -> list[int]:
    """Let the kernel answer with these lists, one after the other; returns the requests."""
    asked: list[int] = []

    def send(_: Channel, data: bytes) -> None:
        asked.append(int.from_bytes(data[8:12], sys.byteorder))

    monkeypatch.setattr(Channel, "send", send)
    monkeypatch.setattr(Channel, "_receive", lambda _: lists[min(len(asked), len(lists)) - 1](asked[-1]))
    return asked


def test_a_list_that_changed_meanwhile_is_requested_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last message alone may say so (``nl_dump_check_consistent`` in include/net/netlink.h)."""
    asked = _lists(monkeypatch, _ending(_INTERRUPTED), _ending(0))
    assert names(Rtnetlink().ask(*everything())) == ["one"] and len(asked) == 2


def test_a_list_that_keeps_changing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _lists(monkeypatch, _ending(_INTERRUPTED))
    with pytest.raises(Interrupted):
        Rtnetlink().ask(*everything())
    assert len(asked) == 5


def test_a_list_that_ends_with_an_error_is_not_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a device does not fit into a message (``netlink_dump_done`` in net/netlink/af_netlink.c)."""
    _lists(monkeypatch, _ending(0, errno.EMSGSIZE))
    with pytest.raises(OSError) as raised:
        Rtnetlink().ask(*everything())
    assert raised.value.errno == errno.EMSGSIZE


# -- events ----------------------------------------------------------------------------------------


def test_events_are_counted_by_type_and_so_is_a_loss() -> None:
    def event(kind: int, index: int, name: bytes) -> bytes:
        return packet(kind, struct.pack("=BxHiII", 0, 1, index, 0, 0) + struct.pack("=HH4s", 8, 3, name))

    new, gone = 16, 17
    queue = [event(new, 5, b"one") + event(gone, 6, b"two"), b"", event(new, 5, b"six")]

    def read(*kinds: int) -> list[tuple[int, int, str] | None]:
        return [
            each and (each.kind, each["index"], each.attributes.text("IFLA_IFNAME"))
            for each in received(queue, kinds)
        ]

    assert read(new, gone) == [(new, 5, "one"), (gone, 6, "two"), None, (new, 5, "six")]
    assert read(gone) == [(gone, 6, "two"), None]
