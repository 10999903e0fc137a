"""The ports of all bridges, listed once and then kept current by the kernel's notifications.

A list takes a message for each port of the host. The kernel queues the notifications of a change before the
call that makes it returns, so what is queued covers every change that has ended. If it had to drop some,
everything is listed again.
"""

from __future__ import annotations

import contextlib
import socket
from collections import defaultdict
from collections.abc import Iterator, Mapping

from pyroute2.netlink import NETLINK_ROUTE
from pyroute2.netlink.rtnl import RTM_DELLINK, RTM_NEWLINK, RTNLGRP_LINK

from netplugin.host.kernel_events import queued, subscribed
from netplugin.host.link_messages import bridge_port_event, name_of
from netplugin.host.link_values import BridgePort
from netplugin.host.links import Links, words
from netplugin.host.rtnetlink_messages import received

_SO_RCVBUFFORCE = 33
#: For the notifications between two reads: about a thousand. Only those of a very busy time are lost.
_QUEUE = 4 << 20


class BridgeMembers:
    """The ports of bridges in the network namespace of the thread that reads first. Not thread-safe."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._events: socket.socket | None = None
        #: By the index of its device.
        self._ports: dict[int, BridgePort] = {}

    def read(self, *, whole: bool) -> Mapping[str, Mapping[str, int]]:
        """The MTU of each bridge port, by bridge name and device name.

        ``whole``: list all, instead of using the notifications. Raises: HostError, OperationTimeout.
        """
        events = list(self._queued())
        if whole or None in events or self._events is None:
            self._list()
        else:
            changed = {**self._ports, **dict(filter(None, events))}
            self._ports = {index: port for index, port in changed.items() if port is not None}
        found: dict[int, dict[str, int]] = defaultdict(dict)
        for port in self._ports.values():
            found[port.bridge][port.name] = port.mtu
        with words("list-members", "bridges"):
            return {name_of(bridge): ports for bridge, ports in found.items()}

    def close(self) -> None:
        if self._events is not None:
            self._events.close()
            self._events = None

    def _queued(self) -> Iterator[tuple[int, BridgePort | None] | None]:
        """Yield what changed: the device's index with its place on a bridge; None if something was lost."""
        if self._events is None:
            return
        for message in received(queued(self._events), (RTM_NEWLINK, RTM_DELLINK)):
            if message is None:
                yield None
            elif (event := bridge_port_event(message)) is not None:
                yield event

    def _list(self) -> None:
        """Subscribe, then list: a change in between is in both."""
        if self._events is None:
            self._events = subscribed(NETLINK_ROUTE, RTNLGRP_LINK)
            with contextlib.suppress(PermissionError):  # then the system's limit is left
                self._events.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _QUEUE)
        self._ports = dict(self._links.bridge_ports())
