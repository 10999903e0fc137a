"""The kernel's events in a namespace, counted: links, qdiscs, peers and rules."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pyroute2.netlink import NETLINK_NETFILTER, NETLINK_ROUTE
from pyroute2.netlink.nfnetlink import NFNLGRP_NFTABLES
from pyroute2.netlink.rtnl import (
    RTM_DELNEIGH,
    RTM_NEWNEIGH,
    RTM_NEWQDISC,
    RTNLGRP_LINK,
    RTNLGRP_NEIGH,
    RTNLGRP_TC,
)
from pyroute2.netlink.rtnl.marshal import MarshalRtnl
from pyroute2.netlink.rtnl.ndmsg import NUD_PERMANENT

from netplugin.host.kernel_events import subscribed
from netplugin.host.netlink import numbered
from netplugin.host.rtnetlink_messages import Message, received
from tests.lab.namespaces import entered

_QUIET_S = 0.5


class News:
    def __init__(self, routes: socket.socket, rules: socket.socket) -> None:
        self._sources = (routes, rules)

    def wait(self, count: int, going_on: Callable[[], bool] = lambda: False) -> int:
        """Wait for so many, until it is quiet and nothing goes on; tells how many there were."""
        found, (routes, _) = 0, self._sources
        while found < count:
            ready, _, _ = select.select(self._sources, [], [], _QUIET_S)
            if not ready and not going_on():
                break
            for source in ready:
                data = source.recv(1 << 20)
                if source is routes:
                    found += sum(map(_counts, filter(None, received([data], MarshalRtnl.msg_map))))
                else:
                    found += len(list(numbered(data)))
        return found


def _counts(message: Message) -> bool:
    """Not what a bridge learns of MACs, nor that a qdisc came: that is reported whenever one is read."""
    if message.kind in (RTM_NEWNEIGH, RTM_DELNEIGH):
        return bool(message["state"] & NUD_PERMANENT)
    return message.kind != RTM_NEWQDISC


@contextmanager
def news(name: str | None) -> Iterator[News]:
    with entered(name):
        routes = subscribed(NETLINK_ROUTE, RTNLGRP_LINK, RTNLGRP_NEIGH, RTNLGRP_TC)
        rules = subscribed(NETLINK_NETFILTER, NFNLGRP_NFTABLES)
    with routes, rules:
        yield News(routes, rules)
