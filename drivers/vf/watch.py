"""Tells when somebody else changes a VF or its NIC: news of links, and of PCI devices.

A PF's interface makes news when anything is set on it or its VFs, and does not say what; a PCI
device when it comes, goes, or changes its driver. So each makes a look at the whole pool due.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import select
import socket
import threading
from collections.abc import Callable, Collection, Iterator

from netplugin.backend import Wake
from netplugin.host.netlink import attributes, messages, text

LOG = logging.getLogger(__name__)

# include/uapi/linux: netlink.h, rtnetlink.h (as a bit mask), if_link.h; lib/kobject_uevent.c
_UEVENTS, _UEVENT_GROUP, _LINK_GROUP = 15, 1, 1
_NEWLINK, _DELLINK, _IFINFO_BYTES, _IFNAME = 16, 17, 16, 3
_NIC = Wake("a NIC with VFs changed")
_PCI = Wake("PCI devices came, went or changed their driver")
_LOST = Wake("news of NICs was lost")


class Watch:
    """A thread that reads the kernel's news; ``close`` ends it.

    What we do ourselves makes news too, and the kernel queues it before the call returns. So a
    change is made within ``quiet``, and what is queued of these devices at its end is our own.
    """

    def __init__(
        self, wake: Callable[[Wake], None], interfaces: Callable[[], Collection[str]]
    ) -> None:
        """``interfaces`` gives the names of the PFs. Raises: OSError if there is no such news."""
        self._wake = wake
        self._interfaces = interfaces
        self._lock = threading.Lock()
        self._links = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        self._devices = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _UEVENTS)
        self._links.bind((0, _LINK_GROUP))
        self._devices.bind((0, _UEVENT_GROUP))
        self._stop_reader, self._stop_writer = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="vf-watch", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def quiet(self, names: Collection[str]) -> Iterator[None]:
        """While we change these: PCI addresses and interfaces."""
        with self._lock:
            self._tell(self._news())
            try:
                yield
            finally:
                self._tell(self._news(own=names))

    def close(self) -> None:
        self._stop_writer.send(b"x")
        self._thread.join(timeout=5)
        for end in (self._links, self._devices, self._stop_reader, self._stop_writer):
            end.close()

    def _run(self) -> None:
        watched = [self._links, self._devices, self._stop_reader]
        while True:
            ready, _, _ = select.select(watched, [], [])
            if self._stop_reader in ready:
                return
            with self._lock:
                self._tell(self._news())

    def _tell(self, news: set[Wake]) -> None:
        for why in news:
            with contextlib.suppress(Exception):
                self._wake(why)

    def _news(self, own: Collection[str] = ()) -> set[Wake]:
        """What is queued, but for what happened to these."""
        news: set[Wake] = set()
        names = self._interfaces()
        for data in _queued(self._links):
            for kind, _, payload in messages(data):
                name = _interface(kind, payload)
                if name in names and name not in own:
                    news.add(_NIC)
            if not data:
                news.add(_LOST)
        for data in _queued(self._devices):
            address = pci_address(data)
            if address is not None and address not in own:
                news.add(_PCI)
            if not data:
                news.add(_LOST)
        return news


def _queued(source: socket.socket) -> Iterator[bytes]:
    """Each datagram that waits; an empty one if the kernel had to drop some."""
    while True:
        try:
            yield source.recv(1 << 17, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError as lost:
            if lost.errno != errno.ENOBUFS:
                raise
            yield b""


def _interface(kind: int, payload: bytes) -> str | None:
    if kind not in (_NEWLINK, _DELLINK):
        return None
    return next((text(v) for a, v in attributes(payload, _IFINFO_BYTES) if a == _IFNAME), None)


def pci_address(uevent: bytes) -> str | None:
    """The PCI device that a message of the kernel's is about; None if it is about another thing."""
    fields = dict(part.partition(b"=")[::2] for part in uevent.split(b"\0"))
    if fields.get(b"SUBSYSTEM") != b"pci":
        return None
    return fields.get(b"PCI_SLOT_NAME", b"").decode(errors="replace") or None
