"""Wake the agent when another process changes a VF or its NIC, from link and PCI device events.

The kernel sends a link event when anything changes on a PF or its VFs, without details, and a uevent when
a PCI device appears, disappears, or changes its driver. Each event triggers a check of the whole pool.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterator

from netplugin.backend import Wake
from netplugin.host.netlink import attributes, messages, text
from netplugin.host.news import News, queued
from netplugin.host.supervisor import Supervisor

# include/uapi/linux: netlink.h, rtnetlink.h (as a bit mask), if_link.h; lib/kobject_uevent.c
_UEVENTS, _UEVENT_GROUP, _LINK_GROUP = 15, 1, 1
_NEWLINK, _DELLINK, _IFINFO_BYTES, _IFNAME = 16, 17, 16, 3
_NIC = Wake("a NIC with VFs changed")
_PCI = Wake("PCI devices came, went or changed their driver")
_LOST = Wake("news of NICs was lost")


class Watch(News):
    """Listener for link and PCI events. Own changes are given as PCI addresses and interface names."""

    def __init__(
        self,
        wake: Callable[[Wake], None],
        interfaces: Callable[[], Collection[str]],
        supervisor: Supervisor,
    ) -> None:
        """``interfaces`` returns the names of the PFs. Raises: OSError if the kernel refuses the sockets."""
        self._interfaces = interfaces
        self._links = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        self._devices = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _UEVENTS)
        self._links.bind((0, _LINK_GROUP))
        self._devices.bind((0, _UEVENT_GROUP))
        super().__init__("vf-watch", wake, (self._links, self._devices), supervisor)

    def of(self, own: frozenset[str] | None) -> Iterator[Wake]:
        names = self._interfaces()
        for data in queued(self._links):
            for kind, _, payload in messages(data):
                name = _interface(kind, payload)
                if name in names and name not in (own or ()):
                    yield _NIC
            if not data:
                yield _LOST
        for data in queued(self._devices):
            address = pci_address(data)
            if address is not None and address not in (own or ()):
                yield _PCI
            if not data:
                yield _LOST


def _interface(kind: int, payload: bytes) -> str | None:
    if kind not in (_NEWLINK, _DELLINK):
        return None
    return next((text(v) for a, v in attributes(payload, _IFINFO_BYTES) if a == _IFNAME), None)


def pci_address(uevent: bytes) -> str | None:
    """Return the PCI address that a kernel uevent is about; None if it is about another subsystem."""
    fields = dict(part.partition(b"=")[::2] for part in uevent.split(b"\0"))
    if fields.get(b"SUBSYSTEM") != b"pci":
        return None
    return fields.get(b"PCI_SLOT_NAME", b"").decode(errors="replace") or None
