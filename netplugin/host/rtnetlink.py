"""rtnetlink through pyroute2: its messages, on kept sockets with a limit for each answer.

``IPRoute`` and ``AsyncIPRoute`` have no limit, and build filters for all that they can request with each
request, which takes several times as long as the rest of it. So their messages are used here without them.

What pyroute2 0.9.7 lacks is added at the end: docs/libraries.md has the list.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from pyroute2.netlink import (
    NETLINK_GET_STRICT_CHK,
    NLM_F_ACK,
    NLM_F_APPEND,
    NLM_F_CREATE,
    NLM_F_DUMP,
    NLM_F_EXCL,
    NLM_F_REPLACE,
    NLM_F_REQUEST,
    SOL_NETLINK,
    nla,
)
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg
from pyroute2.netlink.rtnl.marshal import MarshalRtnl
from pyroute2.netlink.rtnl.tcmsg import plugins, sched_bpf, sched_tbf
from pyroute2.netlink.rtnl.tcmsg.act_police import nla_plus_police

from netplugin.host.netlink import ANSWER_S, Channel, Interrupted, Kept, numbered

#: A message of pyroute2: its header's fields by name, its attributes by ``Attributes``.
Message = Any
#: The flags of a request: do it, make a new object, add one to others, make one or change it, list.
DO = NLM_F_REQUEST | NLM_F_ACK
CREATE = DO | NLM_F_CREATE | NLM_F_EXCL
APPEND = DO | NLM_F_CREATE | NLM_F_APPEND
REPLACE = DO | NLM_F_CREATE | NLM_F_REPLACE
DUMP = NLM_F_REQUEST | NLM_F_DUMP
_ATTEMPTS = 5
#: The bytes of struct nlmsghdr, and those that begin each struct about a device: family and index.
_HEADER, _ABOUT = 16, 8


class Rtnetlink:
    """Requests to rtnetlink, in the network namespace of the calling thread, which must not change."""

    def __init__(self, answer_s: float = ANSWER_S) -> None:
        """``answer_s``: how long each part of an answer may take."""
        self._connections = Kept(lambda: Connection(answer_s))

    def ask(
        self, kind: int, request: Message, flags: int = DO, fits: Callable[[Message], bool] = lambda _: True
    ) -> list[Message]:
        """Send a message of a type and return the answers, without an acknowledgement.

        There are none if one does not match ``fits``: the kernel ignored the filter of a list.

        Raises: OSError with the error text of the kernel, TimeoutError, Interrupted if the objects change
        during every attempt.
        """
        for _ in range(_ATTEMPTS):
            with self._connections.use() as connection, contextlib.suppress(Interrupted):
                found = []
                for message in connection.messages(kind, request, flags):
                    if not fits(message):
                        return []
                    found.append(message)
                return found
        raise Interrupted


class Connection(Channel):
    """A socket for messages of pyroute2."""

    def __init__(self, answer_s: float) -> None:
        """Raises: OSError."""
        super().__init__(socket.NETLINK_ROUTE, answer_s)
        self._marshal = MarshalRtnl()
        with contextlib.suppress(OSError):  # kernels before 4.20 filter fewer lists
            self.socket.setsockopt(SOL_NETLINK, NETLINK_GET_STRICT_CHK, 1)

    def messages(self, kind: int, request: Message, flags: int) -> Iterator[Message]:
        """Send a message and yield each answer. See ``Channel.answers`` for the errors."""
        number = self.next_number()
        request["header"].update(type=kind, flags=flags, sequence_number=number)
        request.reset()
        request.encode()
        self.send(bytes(request.data))
        for answered, data in self.answers(number):
            yield self._marshal.parse_one_message(answered, 0, number, data, 0, len(data))


def nest(attributes: Iterable[tuple[Any, ...]]) -> dict[str, Any]:
    """Attributes as the value of one: of each its name and value, and its flags if it has some."""
    return {"attrs": list(attributes)}


def about_link(*attributes: tuple[Any, ...], **fields: int) -> Message:
    """A message about a device: attributes, and fields of struct ifinfomsg."""
    return ifinfmsg().load({**fields, **nest(attributes)})


def decoded(data: bytes) -> Iterator[Message]:
    """Yield the messages of a datagram that an event socket has received."""
    yield from MarshalRtnl().parse(data)


def latest(
    datagrams: Iterable[bytes], kinds: Collection[int], family: int | None = None, about: int = _ABOUT
) -> Iterator[Message | None]:
    """Yield the messages of these types that an event socket has received, of one type about one device the
    last only.

    ``family``: of this one alone. ``about``: how many bytes after the header say what a message is about.

    None if the kernel dropped some, which an empty datagram says. To decode a message takes many times as
    long as to look at its header, and who has a tap open can change its MAC a thousand times a second.
    """
    last: dict[tuple[int, bytes], bytes] = {}
    for data in datagrams:
        if not data:
            yield None
        for _, kind, _, message in numbered(data):
            if kind not in kinds or (
                family is not None and message[_HEADER : _HEADER + 1] != bytes([family])
            ):
                continue
            key = kind, message[_HEADER : _HEADER + about]
            last.pop(key, None)  # its place is that of the last one
            last[key] = message
    for message in last.values():
        yield from decoded(message)


class Attributes:
    """The attributes of a message or of a nested attribute, by name, each decoded when it is read.

    Raises: ValueError for a value of another type than the name has: pyroute2 leaves bytes as they are if it
    cannot decode them.
    """

    def __init__(self, nest: Any) -> None:
        self._nest = nest if isinstance(nest, dict) else {}  # an attribute holds what it is part of weakly
        self._slots = {slot.name: slot for slot in reversed(self._all)}

    @property
    def _all(self) -> Sequence[Any]:
        return dict.get(self._nest, "attrs", ())

    def __contains__(self, name: str) -> bool:
        return name in self._slots

    def __len__(self) -> int:
        return len(self._all)

    def value(self, name: str) -> Any:
        slot = self._slots.get(name)
        return None if slot is None else slot.value

    def number(self, name: str) -> int:
        """An integer; zero if it is absent."""
        value = self.value(name)
        if not isinstance(value, int | None):
            raise ValueError(f"{name} is no number: {value!r}")
        return value or 0

    def text(self, name: str) -> str:
        """A string; empty if it is absent."""
        return _text(self.value(name))

    def texts(self, name: str) -> tuple[str, ...]:
        return tuple(_text(slot.value) for slot in self._all if slot.name == name)

    def nest(self, name: str) -> Attributes:
        return Attributes(self.value(name))

    def fields(self, name: str) -> dict[str, Any]:
        """The fields of a structure; empty if it is absent."""
        value = self.value(name)
        if not isinstance(value, dict | None):
            raise ValueError(f"{name} is no structure: {value!r}")
        return value or {}


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value or ""


# -- what pyroute2 lacks ---------------------------------------------------------------------------


_bridge = ifinfmsg.ifinfo.bridge_data


class _Bridge(nla):  # type: ignore[misc]
    """Bridge options up to Linux 6.8 (include/uapi/linux/if_link.h)."""

    prefix = _bridge.prefix
    br_id = _bridge.br_id
    nla_map = (
        *_bridge.nla_map,
        ("IFLA_BR_VLAN_STATS_PER_PORT", "uint8"),
        ("IFLA_BR_MULTI_BOOLOPT", "boolopt"),
        ("IFLA_BR_MCAST_QUERIER_STATE", "hex"),
        ("IFLA_BR_FDB_N_LEARNED", "uint32"),
        ("IFLA_BR_FDB_MAX_LEARNED", "uint32"),
    )

    class boolopt(nla):  # type: ignore[misc]
        fields = (("optval", "I"), ("optmask", "I"))


class _Tbf(nla):  # type: ignore[misc]
    """Options of sch_tbf with rates of 64 bits."""

    nla_map = (*sched_tbf.options.nla_map, ("TCA_TBF_RATE64", "uint64"))
    tbf_parms = sched_tbf.options.tbf_parms
    rtab = sched_tbf.options.rtab
    ptab = sched_tbf.options.ptab


class _Bpf(nla, nla_plus_police):  # type: ignore[misc]
    """Options of cls_bpf with classic programs as bytes."""

    nla_map = tuple(
        {**dict(sched_bpf.options.nla_map), "TCA_BPF_OPS_LEN": "uint16", "TCA_BPF_OPS": "cdata"}.items()
    )
    bpf_act = sched_bpf.options.bpf_act


# struct ifla_vf_vlan_info has 16 bytes, and the kernel refuses a shorter one.
_vlan = ifinfmsg.vflist.vfinfo.vf_vlist.ivvi
_vlan.fields = (*_vlan.fields, ("__align", "2x"))

ifinfmsg.ifinfo.register_link_kind(module={"bridge": _Bridge})
plugins["tbf"] = SimpleNamespace(**{**vars(sched_tbf), "options": _Tbf})
plugins["bpf"] = SimpleNamespace(**{**vars(sched_bpf), "options": _Bpf})
