"""Read the tables of iptables-legacy and ip6tables-legacy, for ``netplugin.host.frame_filters``.

The kernel returns a table as one block of entries. Their matches have the same form as in nftables. No
program is needed: ``iptables-legacy-save`` needs CAP_NET_RAW for its socket, which the agent does not have.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from netplugin.host.frame_filters import BaseChain, Filters, FrameCondition, FrameRule, FrameVerdict, Then
from netplugin.host.netlink import text
from netplugin.host.nft_foreign import ended_by, matched

_PROC = Path("/proc/net")
# include/uapi/linux/netfilter: x_tables.h, and netfilter_ipv4/ip_tables.h, netfilter_ipv6/ip6_tables.h
_GET_INFO, _GET_ENTRIES = 64, 65
#: struct ipt_getinfo: hooks that are valid, entry and underflow (the policy) of each hook, entries, bytes.
_INFO = struct.Struct("=32sI5I5III")
_HEADER = 40  # of struct ipt_get_entries
_HOOKS = ("prerouting", "input", "forward", "output", "postrouting")
#: struct ipt_entry and ip6t_entry: the addresses with their masks, the names of the devices with their masks,
#: protocol, flags, inverted flags, and where the target and the next entry begin.
_ENTRIES = {
    "ip": struct.Struct("=16s16s16s16s16sHBB4xHH20x"),
    "ip6": struct.Struct("=64s16s16s16s16sHxBB7xHH24x"),
}
_SOCKETS = {"ip": (socket.AF_INET, socket.IPPROTO_IP), "ip6": (socket.AF_INET6, socket.IPPROTO_IPV6)}
_ELEMENT = struct.Struct("=H29sB")
_NAT, _ERROR = "nat", "ERROR"
_IN, _OUT, _PROTOCOL = 1, 2, 0x40
#: Flags of entries, by family: for fragments only (of IPv6 the flag says that there is a protocol), goto.
_FRAGMENT, _GOTO = {"ip": 1, "ip6": 0}, {"ip": 2, "ip6": 4}
_L4PROTO, _IIFNAME, _OIFNAME = (("meta", key) for key in (16, 6, 7))
#: Verdicts of the standard target; those from 0 are jumps.
_VERDICTS = {
    -1: FrameVerdict(Then.DROP),
    -2: FrameVerdict(Then.ACCEPT),
    -5: FrameVerdict(Then.NEXT, leaves=True),
}


def legacy_tables() -> list[tuple[str, str]]:
    """Return family and name of each table that exists in this network namespace.

    To ask the kernel for another one would make it. ``arp``: of arptables-legacy.
    """
    found = []
    for family in ("ip", "ip6", "arp"):
        try:
            names = (_PROC / f"{family}_tables_names").read_text().split()
        except OSError:  # the kernel has no such tables
            continue
        found += [(family, each) for each in sorted(names) if each != _NAT]
    return found


def read_legacy() -> tuple[BaseChain, ...]:
    """Read all tables of iptables-legacy and ip6tables-legacy but those for NAT. Raises: OSError."""
    found: list[BaseChain] = []
    for family, table in legacy_tables():
        if family in _SOCKETS:
            found += _table(family, table)
    return tuple(found)


def _table(family: str, name: str) -> Iterator[BaseChain]:
    head = name.encode().ljust(32, b"\0")
    _, valid, *numbers = _INFO.unpack(_ask(family, _GET_INFO, head.ljust(_INFO.size, b"\0")))
    request = (head + struct.pack("=I", numbers[11])).ljust(_HEADER + numbers[11], b"\0")
    entries = list(_entries(family, _ask(family, _GET_ENTRIES, request)[_HEADER:]))
    hooks = [(hook, number) for number, hook in enumerate(_HOOKS) if valid & 1 << number]
    chains = {numbers[number]: hook.upper() for hook, number in hooks}
    # The entry before a chain of the user names it.
    named = ((after, data) for _, after, _, kind, data, _ in entries if kind == _ERROR)
    chains |= {after: text(data.partition(b"\0")[0]) for after, data in named}
    rules: dict[str, list[FrameRule]] = {}
    policies: dict[int, Then] = {}
    for at, after, conditions, kind, data, is_goto in entries:
        if at in chains:
            current, number = rules.setdefault(chains[at], []), 0
        number += 1
        if kind:
            then = ended_by(kind)
            verdict = FrameVerdict(then) if then else None
        elif (code := struct.unpack_from("=i", data)[0]) < 0:
            verdict = _VERDICTS.get(code, FrameVerdict(Then.OTHER))
        else:
            verdict = FrameVerdict(Then.NEXT, chains[code], is_goto) if code != after else None
        if at in numbers[5:10]:
            policies[at] = verdict.then if verdict else Then.ACCEPT
        elif verdict and kind != _ERROR:
            current.append(FrameRule(number, conditions, verdict))
    table = Filters(family, name, True, {chain: tuple(each) for chain, each in rules.items()})
    for hook, number in hooks:
        yield BaseChain(hook, hook.upper(), policies[numbers[5 + number]], table)


def _entries(
    family: str, block: bytes
) -> Iterator[tuple[int, int, tuple[FrameCondition, ...], str, bytes, bool]]:
    """Yield where it and the next begin, its conditions, name and data of its target, whether it is a goto.

    The standard target has no name.
    """
    form, at = _ENTRIES[family], 0
    while at < len(block):
        addresses, *names, protocol, flags, inverted, target, following = form.unpack_from(block, at)
        conditions = []
        if any(addresses[len(addresses) // 2 :]) or flags & _FRAGMENT[family]:
            conditions.append(FrameCondition())
        for key, bit, name, mask in zip((_IIFNAME, _OIFNAME), (_IN, _OUT), names[:2], names[2:], strict=True):
            if length := mask.count(255):
                conditions.append(FrameCondition(key, ((name[:length], name[:length]),), not inverted & bit))
        if protocol:
            number = bytes((protocol,))
            conditions.append(FrameCondition(_L4PROTO, ((number, number),), not inverted & _PROTOCOL))
        place, end = at + form.size, at + target
        while place < end:
            size, name, _ = _ELEMENT.unpack_from(block, place)
            conditions += matched(text(name), block[place + _ELEMENT.size : place + size])
            place += size
        _, kind, _ = _ELEMENT.unpack_from(block, end)
        data = block[end + _ELEMENT.size : at + following]
        yield at, at + following, tuple(conditions), text(kind), data, bool(flags & _GOTO[family])
        at += following


def _ask(family: str, option: int, request: bytes) -> bytes:
    """``getsockopt`` with a request in the buffer, which Python's own does not have. Raises: OSError."""
    buffer = ctypes.create_string_buffer(request, len(request))
    length = ctypes.c_uint32(len(request))
    call = ctypes.CDLL(None, use_errno=True).getsockopt
    domain, level = _SOCKETS[family]
    with socket.socket(domain, socket.SOCK_DGRAM) as end:
        if call(end.fileno(), level, option, buffer, ctypes.byref(length)):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
    return buffer.raw
