"""Requests to rtnetlink: messages of pyroute2, on kept sockets with a limit for each answer.

``IPRoute`` and ``AsyncIPRoute`` have no limit, and build filters for all that they can request with each
request, which takes several times as long as the rest of it. So their messages are used here without them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

from pyroute2 import netlink
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg

from netplugin.host.netlink import HEADER_BYTES, Interrupted, Kept
from netplugin.host.rtnetlink_messages import Message

#: A message of pyroute2 to send: its fields, and its attributes with their names.
Request = Any
#: The flags of a request: do it, make a new object, add one to others, make one or change it, list.
DO = netlink.NLM_F_REQUEST | netlink.NLM_F_ACK
CREATE = DO | netlink.NLM_F_CREATE | netlink.NLM_F_EXCL
APPEND = DO | netlink.NLM_F_CREATE | netlink.NLM_F_APPEND
REPLACE = DO | netlink.NLM_F_CREATE | netlink.NLM_F_REPLACE
DUMP = netlink.NLM_F_REQUEST | netlink.NLM_F_DUMP
_ATTEMPTS = 5


class Rtnetlink:
    """Requests to rtnetlink, in the network namespace of the calling thread, which must not change."""

    def __init__(self) -> None:
        self._channels = Kept(netlink.NETLINK_ROUTE)

    def ask(
        self, kind: int, request: Request, flags: int = DO, fits: Callable[[Message], bool] = lambda _: True
    ) -> list[Message]:
        """Send a message of a type and return the answers, without an acknowledgement.

        There are none if one does not match ``fits``: the kernel ignored the filter of a list.

        Raises: OSError with the error text of the kernel, TimeoutError, Interrupted if the objects change
        during every attempt.
        """
        request.reset()
        request.encode()
        body = bytes(request.data[HEADER_BYTES:])
        for _ in range(_ATTEMPTS):
            with self._channels.use() as channel, contextlib.suppress(Interrupted):
                found = []
                for answered, data in channel.request(kind, body, flags):
                    found.append(Message(answered, data))
                    if not fits(found[-1]):
                        return []
                return found
        raise Interrupted


def nest(attributes: Iterable[tuple[Any, ...]]) -> dict[str, Any]:
    """Attributes as the value of one: of each its name and value, and its flags if it has some."""
    return {"attrs": list(attributes)}


def about_link(*attributes: tuple[Any, ...], **fields: int) -> Request:
    """A message about a device: attributes, and fields of struct ifinfomsg."""
    return ifinfmsg().load({**fields, **nest(attributes)})
