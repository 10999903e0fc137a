"""Read the tables of iptables-legacy and ip6tables-legacy, for ``netplugin.host.frame_filters``.

The kernel returns a table as one block of entries. Their matches have the same form as in nftables. No
program is needed: ``iptables-legacy-save`` needs CAP_NET_RAW for its socket, which the agent does not have.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from netplugin.host.frame_filters import (
    BaseChain,
    Between,
    Filters,
    Load,
    Maybe,
    Rule,
    Step,
    Then,
    Verdict,
    meta,
)
from netplugin.host.netlink import text
from netplugin.host.nft_foreign import extension

_PROC = Path("/proc/net")
# include/uapi/linux/netfilter: x_tables.h, and netfilter_ipv4/ip_tables.h, netfilter_ipv6/ip6_tables.h
_GET_INFO, _GET_ENTRIES = 64, 65
#: struct ipt_getinfo: hooks that are valid, entry and underflow (the policy) of each hook, entries, bytes.
_INFO = struct.Struct("=32sI5I5III")
_HEADER = 40  # of struct ipt_get_entries
_HOOKS = ("prerouting", "input", "forward", "output", "postrouting")
_NAT, _ERROR = "nat", "ERROR"
_ELEMENT = struct.Struct("=H29sB")
_RETURN = -5
_IN, _OUT, _PROTOCOL, _FRAGMENT = 1, 2, 0x40, 1
_L4PROTO, _IIFNAME, _OIFNAME = 16, 6, 7


@dataclass(frozen=True)
class _Layout:
    """Of one family: the option level, and where the parts of an entry are.

    ``addresses``: bytes of the addresses with their masks, which come first; then the names of the devices.
    """

    family: str
    socket_family: int
    level: int
    addresses: int
    protocol: int
    flags: int
    inverted: int
    goto: int
    offsets: int
    elements: int


_LAYOUTS = (
    _Layout("ip", socket.AF_INET, socket.IPPROTO_IP, 16, 80, 82, 83, 2, 88, 112),
    _Layout("ip6", socket.AF_INET6, socket.IPPROTO_IPV6, 64, 128, 131, 132, 4, 140, 168),
)


def legacy_tables() -> tuple[str, ...]:
    """Return the tables that exist in this network namespace, each with its family: ``ip filter``.

    To ask the kernel for another one would make it. ``arp``: of arptables-legacy.
    """
    found = []
    for family, name in (("ip", "ip_tables_names"), ("ip6", "ip6_tables_names"), ("arp", "arp_tables_names")):
        try:
            names = (_PROC / name).read_text().split()
        except OSError:  # the kernel has no such tables
            continue
        found += [f"{family} {each}" for each in sorted(names) if each != _NAT]
    return tuple(found)


def read_legacy() -> tuple[BaseChain, ...]:
    """Read all tables of iptables-legacy and ip6tables-legacy but those for NAT. Raises: OSError."""
    there = legacy_tables()
    found: list[BaseChain] = []
    for layout in _LAYOUTS:
        for table in (name.partition(" ")[2] for name in there if name.startswith(f"{layout.family} ")):
            with socket.socket(layout.socket_family, socket.SOCK_DGRAM) as end:
                found += _table(end, layout, table)
    return tuple(found)


def _table(end: socket.socket, layout: _Layout, name: str) -> Iterator[BaseChain]:
    head = name.encode().ljust(32, b"\0")
    _, valid, *numbers = _INFO.unpack(_ask(end, layout.level, _GET_INFO, head.ljust(_INFO.size, b"\0")))
    starts, policies, size = numbers[:5], numbers[5:10], numbers[11]
    request = (head + struct.pack("=I", size)).ljust(_HEADER + size, b"\0")
    entries = dict(_entries(layout, _ask(end, layout.level, _GET_ENTRIES, request)[_HEADER:]))
    hooks = {hook.upper(): number for number, hook in enumerate(_HOOKS) if valid & 1 << number}
    chains = {starts[number]: hook for hook, number in hooks.items()}
    ends = {policies[number] for number in hooks.values()}
    # The entry before a chain of the user names it.
    chains |= {entry.after: entry.chain for entry in entries.values() if entry.chain}
    rules: dict[str, list[Rule]] = {}
    current = ""
    for at, entry in entries.items():
        current = chains.get(at, current)
        if entry.chain:
            current = ""
        elif current and at not in ends:
            rules.setdefault(current, []).append(tuple(entry.steps(at, chains)))
    table = Filters(layout.family, name, True, {n: tuple(each) for n, each in rules.items()})
    for hook, number in hooks.items():
        policy = Then.DROP if entries[policies[number]].verdict == -1 else Then.ACCEPT
        yield BaseChain(hook.lower(), hook, policy, table)


@dataclass(frozen=True)
class _Entry:
    """``verdict``: of the standard target; ``chain``: the name in the mark that begins a chain."""

    after: int
    conditions: tuple[Step, ...]
    verdict: int | None
    goto: bool
    chain: str = ""

    def steps(self, at: int, chains: Mapping[int, str]) -> Iterator[Step]:
        yield from self.conditions
        if self.verdict is None or self.verdict == self.after:
            return
        if self.verdict >= 0:
            yield Verdict(Then.NEXT, chains.get(self.verdict, ""), goto=self.goto)
        elif self.verdict == _RETURN:
            yield Verdict(Then.NEXT, leave=True)
        else:
            yield Verdict({-1: Then.DROP, -2: Then.ACCEPT}.get(self.verdict, Then.OTHER))


def _entries(layout: _Layout, block: bytes) -> Iterator[tuple[int, _Entry]]:
    at = 0
    while at < len(block):
        target, following = struct.unpack_from("=HH", block, at + layout.offsets)
        entry = block[at : at + following]
        conditions = list(_conditions(layout, entry))
        place = layout.elements
        while place < target:
            size, name, _ = _ELEMENT.unpack_from(entry, place)
            conditions += extension(text(name), entry[place + _ELEMENT.size : place + size], is_target=False)
            place += size
        _, name, _ = _ELEMENT.unpack_from(entry, target)
        kind, data = text(name), entry[target + _ELEMENT.size :]
        verdict = struct.unpack_from("=i", data)[0] if not kind else None
        chain = text(data.partition(b"\0")[0]) if kind == _ERROR else ""
        if kind and not chain:
            conditions += extension(kind, data, is_target=True)
        goto = bool(entry[layout.flags] & layout.goto)
        yield at, _Entry(at + following, tuple(conditions), verdict, goto, chain)
        at += following


def _conditions(layout: _Layout, entry: bytes) -> Iterator[Step]:
    inverted, names = entry[layout.inverted], layout.addresses
    if any(entry[layout.addresses // 2 : layout.addresses]):
        yield Maybe()
    for number, key, bit in ((0, _IIFNAME, _IN), (1, _OIFNAME, _OUT)):
        name, mask = (entry[start : start + 16] for start in (names + 16 * number, names + 32 + 16 * number))
        if length := mask.count(255):
            yield Load(1, meta(key))
            yield Between(1, name[:length], name[:length], not inverted & bit)
    protocol = struct.unpack_from("=H", entry, layout.protocol)[0]
    if protocol:
        yield Load(1, meta(_L4PROTO))
        yield Between(1, bytes((protocol,)), bytes((protocol,)), not inverted & _PROTOCOL)
    if layout.family == "ip" and entry[layout.flags] & _FRAGMENT:
        yield Maybe()


def _ask(end: socket.socket, level: int, option: int, request: bytes) -> bytes:
    """``getsockopt`` with a request in the buffer, which Python's own does not have. Raises: OSError."""
    buffer = ctypes.create_string_buffer(request, len(request))
    length = ctypes.c_uint32(len(request))
    call = ctypes.CDLL(None, use_errno=True).getsockopt
    if call(end.fileno(), level, option, buffer, ctypes.byref(length)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return buffer.raw
