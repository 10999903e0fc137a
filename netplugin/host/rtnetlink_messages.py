"""What rtnetlink answers and reports, by pyroute2's names and formats; an attribute is decoded when read.

pyroute2 makes an object for each attribute of a message, about a hundred for a bridge port, before one is
read: 1.2 ms where a plug reads some ten devices and gets as many events. So its classes are used here as the
description of the messages: numbers, names, formats. What is no number or string its classes decode.

What pyroute2 0.9.7 lacks is added at the end: docs/libraries.md has the list.
"""

from __future__ import annotations

import struct
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from typing import Any

from pyroute2.netlink import nla, nlmsg_base
from pyroute2.netlink.exceptions import NetlinkDecodeError
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg
from pyroute2.netlink.rtnl.marshal import MarshalRtnl
from pyroute2.netlink.rtnl.tcmsg import sched_bpf, sched_tbf

from netplugin.host.netlink import HEADER_BYTES, attribute, attributes, numbered, text

#: A class of pyroute2 that describes a message or an attribute.
Definition = Any
_GENERIC, _NUMBERS = (nlmsg_base.decode, nla.decode), frozenset("bBhHiIqQ")


class Attributes:
    """Attributes, each with its number and value, by the names of a class of pyroute2.

    Raises: ValueError, TypeError or struct.error, in each method, for a value that cannot be decoded.
    """

    def __init__(self, definition: Definition, found: Iterable[tuple[int, bytes]] = ()) -> None:
        self._definition = definition
        self._values: dict[int, list[bytes]] = {}
        for number, value in found:
            self._values.setdefault(number, []).append(value)

    def __contains__(self, name: str) -> bool:
        return bool(self._all(name))

    def __len__(self) -> int:
        return sum(map(len, self._values.values()))

    def _all(self, name: str) -> Sequence[bytes]:
        return self._values.get(_named(self._definition)[name][0], ()) if self._values else ()

    def _bytes(self, name: str) -> bytes:
        return next(iter(self._all(name)), b"")

    def value(self, name: str) -> Any:
        """The value, a number or what its class decodes; None if it is absent."""
        for value in self._all(name):
            return _decoded(_named(self._definition)[name][1], value)
        return None

    def number(self, name: str) -> int:
        """An integer; zero if it is absent."""
        return int(self.value(name) or 0)

    def text(self, name: str) -> str:
        """A string; empty if it is absent."""
        return text(self._bytes(name))

    def texts(self, name: str) -> tuple[str, ...]:
        return tuple(map(text, self._all(name)))

    def address(self, name: str) -> str:
        """An IP address; empty if it is absent."""
        return str(self.value(name) or "")

    def mac(self, name: str) -> str:
        """An address of the link layer, also one that is no MAC; empty if it is absent."""
        return self._bytes(name).hex(":")

    def fields(self, name: str) -> Mapping[str, Any]:
        """The fields of a structure; empty if it is absent."""
        return dict(self.value(name) or {})

    def nest(self, name: str) -> Attributes:
        """The attributes within it; empty if it is absent."""
        return self.nest_as(name, _named(self._definition)[name][1] if self._values else None)

    def nest_as(self, name: str, definition: Definition | None) -> Attributes:
        """Those of an attribute whose class another one names. Empty if that is not known (None)."""
        return Attributes(definition, attributes(self._bytes(name)) if definition is not None else ())


def _decoded(kind: Definition, value: bytes) -> Any:
    layout = _plain(kind)
    if layout is not None and len(value) >= layout[0].size:
        values = layout[0].unpack_from(value)
        return values[0] if layout[1] == ("value",) else dict(zip(layout[1], values, strict=True))
    found = kind(attribute(0, value))
    try:
        found.decode()
    except NetlinkDecodeError as strange:
        raise ValueError(str(strange)) from strange
    return found.getvalue()


class Message:
    """A message with its header: ``kind`` (RTM_*), the fields of its structure by name, and attributes."""

    def __init__(self, kind: int, data: bytes) -> None:
        """Raises: LookupError if pyroute2 does not know the type, struct.error if it is too short."""
        self.kind, self.data = kind, data
        self._definition = MarshalRtnl.msg_map[kind]
        form, names = _structure(self._definition)
        self._fields = dict(zip(names, form.unpack_from(data, HEADER_BYTES), strict=True))
        #: Where its attributes begin.
        self.begin = HEADER_BYTES + (form.size + 3 & ~3)

    def __getitem__(self, field: str) -> int:
        return int(self._fields[field])

    @cached_property
    def attributes(self) -> Attributes:
        return Attributes(self._definition, attributes(self.data, self.begin))


def received(datagrams: Iterable[bytes], kinds: Collection[int]) -> Iterator[Message | None]:
    """Yield the messages of these types that an event socket has received.

    None if the kernel dropped some, which an empty datagram says.
    """
    for data in datagrams:
        if not data:
            yield None
        for _, kind, _, content in numbered(data):
            if kind in kinds:
                yield Message(kind, content)


@cache
def _named(definition: Definition) -> dict[str, tuple[int, Definition]]:
    """The number and the class of each attribute, by its name (``nla_map`` of pyroute2)."""
    entries = definition.nla_map
    if not isinstance(entries[0][0], int):
        entries = [(number, *entry) for number, entry in enumerate(entries)]
    return {name: (number, _class(definition, words)) for number, name, words, *_ in entries}


def _class(definition: Definition, words: str) -> Definition | None:
    """None if another attribute says which (then pyroute2 has a function), or if it is an array."""
    found = getattr(definition, words, None)
    return None if isinstance(found, types.FunctionType) else found


@cache
def _plain(definition: Definition) -> tuple[struct.Struct, tuple[str, ...]] | None:
    """Format and names of a number or structure of numbers, as the machine has them; None for another."""
    is_decoded = definition.decode not in _GENERIC or definition.nla_map or definition.value_map
    are_numbers = all(form in _NUMBERS for _, form in definition.fields)
    return _structure(definition) if are_numbers and not is_decoded else None


@cache
def _structure(definition: Definition) -> tuple[struct.Struct, tuple[str, ...]]:
    names = tuple(name for name, form in definition.fields if form[-1] != "x")
    return struct.Struct("=" + "".join(form for _, form in definition.fields)), names


# -- what pyroute2 lacks ---------------------------------------------------------------------------


class _BooleanOptions(nla):  # type: ignore[misc]
    fields = (("optval", "I"), ("optmask", "I"))


def _extended(definition: Definition, attributes: Mapping[str, str], **classes: Definition) -> Definition:
    """A class of pyroute2 with more attributes, or others: a copy, as a class is numbered once for all."""
    own = {name: value for name, value in vars(definition).items() if not name.startswith("_")}
    named = {**dict(definition.nla_map), **attributes}
    members = {**own, **classes, "nla_map": tuple(named.items())}
    return type(definition.__name__, definition.__bases__, members)


# Up to Linux 6.8 (include/uapi/linux/if_link.h).
_OF_BRIDGES = {
    "IFLA_BR_VLAN_STATS_PER_PORT": "uint8",
    "IFLA_BR_MULTI_BOOLOPT": "boolean_options",
    "IFLA_BR_MCAST_QUERIER_STATE": "hex",
    "IFLA_BR_FDB_N_LEARNED": "uint32",
    "IFLA_BR_FDB_MAX_LEARNED": "uint32",
}
_kinds = ifinfmsg.ifinfo.data_map
_kinds["bridge"] = _extended(_kinds["bridge"], _OF_BRIDGES, boolean_options=_BooleanOptions)
# Rates of 64 bits; classic programs as bytes.
sched_tbf.options = _extended(sched_tbf.options, {"TCA_TBF_RATE64": "uint64"})
sched_bpf.options = _extended(sched_bpf.options, {"TCA_BPF_OPS_LEN": "uint16", "TCA_BPF_OPS": "cdata"})
# struct ifla_vf_vlan_info has 16 bytes, and the kernel refuses a shorter one.
_vlan = ifinfmsg.vflist.vfinfo.vf_vlist.ivvi
_vlan.fields = (*_vlan.fields, ("__align", "2x"))
