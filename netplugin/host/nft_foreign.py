"""Read the nftables of other programs, of all families, for ``netplugin.host.frame_filters``.

Expressions that are not known here become conditions that may be true or not. The matches of iptables, which
nftables has too, become the conditions that nft would have in their place.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

from netplugin.host.frame_filters import BaseChain, Filters, FrameCondition, FrameRule, FrameVerdict, Then
from netplugin.host.netlink import Channel, attributes, text
from netplugin.host.nfnetlink import FAMILIES, FAMILY_NAMES, dump, packed, unpacked

_ANY = 0
_HOOKS = ("prerouting", "input", "forward", "output", "postrouting", "ingress")
_HOOKS_OF = MappingProxyType({"arp": ("input", "output", "forward"), "netdev": ("ingress", "egress")})
# include/uapi/linux/netfilter/nf_tables.h
_GETCHAIN, _GETRULE, _GETSET, _GETSETELEM = 4, 7, 10, 13
#: Flags of sets, and of their elements.
_INTERVAL, _MAP, _EVAL, _CONCATENATION = 0x4, 0x8, 0x20, 0x80
_INTERVAL_END, _CATCH_ALL = 1, 2
#: nft's numbers of types of keys that no frame is known by here: addresses, and concatenations (from 64).
_ADDRESSES, _CONCATENATED = frozenset({7, 8, 9}), 64
#: Kinds of named objects that count packets, or help conntrack.
_COUNTER, _HELPER = 1, 3

#: Expressions and targets of iptables that let the rule go on, and those that end it.
_PASSING = frozenset(
    {"counter", "log", "notrack", "last", "flow_offload", "comment"}
    | {"LOG", "NFLOG", "MARK", "CONNMARK", "TCPMSS", "CHECKSUM", "CT", "TRACE", "CLASSIFY", "DSCP", "TOS"}
)
_ENDING: Mapping[str, Then] = MappingProxyType(
    dict.fromkeys(("reject", "REJECT", "DROP"), Then.DROP)
    | dict.fromkeys(("masq", "nat", "redir"), Then.ACCEPT)
    # Other programs or devices get the frame.
    | dict.fromkeys(("queue", "fwd", "tproxy", "synproxy"), Then.OTHER)
)
_CODES = MappingProxyType(
    {0: (Then.DROP, False), 1: (Then.ACCEPT, False), -1: (Then.NEXT, False), -5: (Then.NEXT, True)}
    | {-3: (Then.NEXT, False), -4: (Then.NEXT, True)}  # jump, goto
)

#: The elements of a set: first and last key, and of a map of verdicts the verdict.
_Elements = tuple[tuple[bytes, bytes, FrameVerdict], ...]
#: No frame is known by a key of this length, so it may be in the set or not.
_UNKNOWN: _Elements = ((b"", bytes(128), FrameVerdict(Then.OTHER)),)


def read_foreign(channel: Channel, ours: Collection[tuple[str, str]]) -> tuple[BaseChain, ...]:
    """Read the base chains of all tables but ``ours`` (family and name), with what they call.

    Chains for NAT are left out: they see the first packet of a connection, and change addresses.
    Raises: OSError, TimeoutError, netlink.Interrupted.
    """
    bases: dict[tuple[str, str], list[tuple[bytes, bytes, bytes]]] = defaultdict(list)
    for family, owner, _, name, hook, policy, _, kind in dump(channel, _ANY, _GETCHAIN):
        table = FAMILY_NAMES.get(family[0], ""), text(owner)
        if hook and table[0] and table not in ours and text(kind) != "nat":
            bases[table].append((name, hook, policy))
    found: list[BaseChain] = []
    for table, chains in sorted(bases.items()):
        filters = Filters(*table, chains=_chains(channel, *table))
        found += [_base(*chain, filters) for chain in chains]
    return tuple(found)


def _base(name: bytes, hook: bytes, policy: bytes, table: Filters) -> BaseChain:
    number, _, device, devices = unpacked(hook, 4)
    hooks = dict(enumerate(_HOOKS_OF.get(table.family, _HOOKS)))
    names = {text(device), *(text(each) for _, each in attributes(devices))} - {""}
    then = Then.ACCEPT if _number(policy or b"\1") else Then.DROP
    return BaseChain(hooks.get(_number(number), ""), text(name), then, table, tuple(sorted(names)))


def _chains(channel: Channel, family: str, table: str) -> Mapping[str, tuple[FrameRule, ...]]:
    def listed(kind: int, name: str | None = None) -> Iterator[list[bytes]]:
        return dump(channel, FAMILIES[family], kind, packed(table, name))

    rules: dict[str, list[bytes]] = defaultdict(list)
    for _, _, chain, _, expressions, *_ in listed(_GETRULE):
        rules[text(chain)].append(expressions)
    sets = {text(each[2]): each[3:6] for each in listed(_GETSET) if text(each[1]) == table}

    def elements_of(name: str) -> _Elements:
        flags, kind, length = map(_number, sets.get(name, [b"", b"", b""]))
        of_unknown = kind >= _CONCATENATED or kind in _ADDRESSES or flags & (_EVAL | _CONCATENATION)
        if of_unknown or name not in sets:
            return _UNKNOWN  # its keys are not worth reading
        lists = (attributes(each[3]) for each in listed(_GETSETELEM, name))
        found = [unpacked(element, 3) for elements in lists for _, element in elements]
        return _elements(found, flags, length)

    return {
        chain: tuple(rule for number, each in enumerate(of, 1) for rule in _rules(number, each, elements_of))
        for chain, of in rules.items()
    }


def _elements(found: list[list[bytes]], flags: int, length: int) -> _Elements:
    keys = []
    for key, data, mark in found:
        if _number(mark) & _CATCH_ALL:
            return _UNKNOWN
        then = _verdict(data) if flags & _MAP else FrameVerdict(Then.NEXT)
        keys.append((_value(key), _number(mark) & _INTERVAL_END, then))
    if not flags & _INTERVAL:
        return tuple((key, key, then) for key, _, then in keys)
    # An interval ends before the next key, which is the begin of another one or an end.
    keys.sort(key=lambda each: (each[0], not each[1]))
    following = [*(_number(key) for key, *_ in keys[1:]), 1 << 8 * length]
    return tuple(
        (key, (max(after, 1) - 1).to_bytes(length, "big"), then)
        for (key, is_end, then), after in zip(keys, following, strict=True)
        if not is_end
    )


def _rules(number: int, expressions: bytes, elements_of: Callable[[str], _Elements]) -> Iterator[FrameRule]:
    """Translate a rule; none if it has no verdict."""
    found: list[FrameCondition] = []
    #: By register: what of the frame it has, as a condition that has nothing to compare with yet.
    registers: dict[bytes, FrameCondition] = {}
    for _, expression in attributes(expressions):
        name, data = unpacked(expression, 2)
        first, second, third, fourth, fifth, sixth, *more = unpacked(data, 10)
        loaded, kind = registers.get(first, FrameCondition()), text(name)
        match kind:
            case "meta" | "ct" | "payload":
                if first:  # otherwise it sets something, and goes on
                    key = (_number(each) for each in (second, third, fourth) if each)
                    registers[first] = FrameCondition((kind, *key))
            case "immediate" if not _number(first):
                yield FrameRule(number, tuple(found), _verdict(second))
                return
            case "immediate":
                registers.pop(first, None)
            case "cmp":
                found.append(_compared(loaded, _number(second), _value(third)))
            case "range":
                between = _value(third), _value(fourth)
                found.append(replace(loaded, ranges=(between,), inside=not _number(second)))
            case "bitwise":
                is_mask = not (_number(sixth) or any(_value(fifth)) or loaded.mask)
                registers[second] = replace(loaded, mask=_value(fourth)) if is_mask else FrameCondition()
            case "lookup":
                loaded = registers.get(second, FrameCondition())
                elements = elements_of(text(first))
                if third and not _number(third):
                    for low, high, verdict in elements:
                        yield FrameRule(number, (*found, replace(loaded, ranges=((low, high),))), verdict)
                    return
                ranges = tuple((low, high) for low, high, _ in elements)
                found.append(replace(loaded, ranges=ranges, inside=not _number(fifth) & 1))
                registers.pop(third, None)
            case "match":
                found += matched(text(first), third)
            case "target":
                if (then := ended_by(text(first))) is not None:
                    yield FrameRule(number, tuple(found), FrameVerdict(then))
                    return
            case "objref" if _number(first) in (_COUNTER, _HELPER):
                pass
            case "dynset" if not (more[0] or more[3]):  # expressions with conditions, such as a limit
                pass
            case _ if kind in _ENDING:
                yield FrameRule(number, tuple(found), FrameVerdict(_ENDING[kind]))
                return
            case _ if kind not in _PASSING:
                registers.clear()
                found.append(FrameCondition())


def _compared(loaded: FrameCondition, operation: int, value: bytes) -> FrameCondition:
    """``operation``: equal, not equal, less, less or equal, greater, greater or equal."""
    low = bytes(len(value)) if operation in (3, 4) else value
    high = b"\xff" * len(value) if operation in (2, 5) else value
    return replace(loaded, ranges=((low, high),), inside=operation in (0, 3, 5))


def _verdict(data: bytes) -> FrameVerdict:
    code, chain = unpacked(unpacked(data, 2)[1], 2)
    then, leaves = _CODES.get(int.from_bytes(code, "big", signed=True), (Then.OTHER, False))
    return FrameVerdict(then, text(chain), leaves)


# -- matches and targets of iptables ---------------------------------------------------------------

#: include/uapi/linux/netfilter: the offsets of match_flags, invert_flags and state_mask in struct
#: xt_conntrack_mtinfo2 and 3; XT_CONNTRACK_STATE.
_CONNTRACK, _BY_STATE = 146, 1
_PHYSDEV_BYTES = 66


def matched(name: str, info: bytes) -> Iterator[FrameCondition]:
    """Translate a match of iptables, by its name and its data."""
    match name:
        case "conntrack" if len(info) >= _CONNTRACK + 6:
            by, inverted, states = struct.unpack_from("=HHH", info, _CONNTRACK)
            if by & _BY_STATE:
                none, mask = bytes(4), struct.pack("=I", states)
                yield FrameCondition(("ct", 0), ((none, none),), bool(inverted & _BY_STATE), mask)
            if by != _BY_STATE:
                yield FrameCondition()
        case "physdev" if len(info) >= _PHYSDEV_BYTES:
            inside, in_mask, outside, out_mask = (info[at : at + 16] for at in (0, 16, 32, 48))
            inverted, flags = info[64:66]
            # By flag (xt_physdev.h): the names of the ports, and whether there are some.
            asked = {1: inside[: in_mask.count(255)], 2: outside[: out_mask.count(255)]}
            for flag in (each for each in (1, 2, 4, 8, 16) if each & flags):
                value = asked.get(flag, b"\1")
                yield FrameCondition(("physdev", flag), ((value, value),), not inverted & flag)
        case "udp" if len(info) >= 9:  # struct xt_udp
            yield from _ports(info, info[8])
        case "tcp" if len(info) >= 12:  # struct xt_tcp
            yield from _ports(info, info[11])
            if any(info[8:11]):  # options and flags
                yield FrameCondition()
        case _ if name not in _PASSING:
            yield FrameCondition()


def ended_by(target: str) -> Then | None:
    """Return what a target of iptables does with a frame; None if the rule goes on."""
    return None if target in _PASSING else _ENDING.get(target, Then.OTHER)


def _ports(info: bytes, inverted: int) -> Iterator[FrameCondition]:
    """Match ranges of ports: from, and to."""
    from_low, from_high, low, high = struct.unpack_from("=4H", info)
    if (from_low, from_high) != (0, 0xFFFF):
        yield FrameCondition()
    to = struct.pack(">H", low), struct.pack(">H", high)
    yield FrameCondition(("payload", 2, 2, 2), (to,), not inverted & 2)


def _value(data: bytes) -> bytes:
    return unpacked(data, 1)[0]


def _number(data: bytes) -> int:
    return int.from_bytes(data, "big")
