"""The kernel's events in a namespace, counted: links, qdiscs, peers and rules."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from netplugin.host.netlink import messages, number
from tests.lab.namespaces import entered

# include/uapi/linux: rtnetlink.h (groups as bit masks), neighbour.h, netfilter/nfnetlink.h
_LINK, _NEIGHBOUR, _TC = 1, 1 << 2, 1 << 3
_NEWQDISC, _NEIGHBOURS, _PERMANENT = 36, (28, 29), 0x80
_QUIET_S = 0.5
_NETFILTER, _NFTABLES, _SOL_NETLINK, _ADD_MEMBERSHIP = 12, 7, 270, 1


class News:
    def __init__(self, routes: socket.socket, rules: socket.socket) -> None:
        self._sources = (routes, rules)

    def wait(self, count: int, going_on: Callable[[], bool] = lambda: False) -> int:
        """Wait for so many, until it is quiet and nothing goes on; tells how many there were."""
        found = 0
        while found < count:
            ready, _, _ = select.select(self._sources, [], [], _QUIET_S)
            if not ready and not going_on():
                break
            for source in ready:
                reported = messages(source.recv(1 << 20))
                found += sum(_counts(kind, payload) for kind, _, payload in reported)
        return found


def _counts(kind: int, payload: bytes) -> bool:
    """Not what a bridge learns of MACs, nor that a qdisc came: that is reported whenever one is read."""
    if kind in _NEIGHBOURS:
        return bool(number(payload[8:10]) & _PERMANENT)  # ndm_state
    return kind != _NEWQDISC


@contextmanager
def news(name: str | None) -> Iterator[News]:
    with entered(name):
        routes = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        rules = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETFILTER)
    with routes, rules:
        routes.bind((0, _LINK | _NEIGHBOUR | _TC))
        rules.bind((0, 0))
        rules.setsockopt(_SOL_NETLINK, _ADD_MEMBERSHIP, _NFTABLES)
        yield News(routes, rules)
