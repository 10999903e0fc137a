"""Read the nftables of other programs, of all families, for ``netplugin.host.frame_filters``.

Expressions that are not known here become conditions that may be true or not.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType

from netplugin.host.frame_filters import (
    BaseChain,
    Between,
    Filters,
    KnownSet,
    Load,
    Lookup,
    Mask,
    Maybe,
    Never,
    Physical,
    Rule,
    Set,
    Step,
    Then,
    Verdict,
    connection,
    meta,
    payload,
)
from netplugin.host.netlink import Channel, attributes, text
from netplugin.host.nfnetlink import HEAD, Message, dump, text_attribute

#: Of the kernel (NFPROTO_*): its number, and nft's name.
FAMILIES: Mapping[int, str] = MappingProxyType(
    {1: "inet", 2: "ip", 3: "arp", 5: "netdev", 7: "bridge", 10: "ip6"}
)
_ANY = 0
_HOOKS = ("prerouting", "input", "forward", "output", "postrouting", "ingress")
_HOOKS_OF = MappingProxyType({"arp": ("input", "output", "forward"), "netdev": ("ingress", "egress")})
# include/uapi/linux/netfilter/nf_tables.h
_GETCHAIN, _GETRULE, _GETSET, _GETSETELEM = 4, 7, 10, 13
_CHAIN_TABLE, _CHAIN_NAME, _CHAIN_HOOK, _CHAIN_POLICY, _CHAIN_TYPE = 1, 3, 4, 5, 7
_HOOK_NUMBER, _HOOK_DEVICE, _HOOK_DEVICES = 1, 3, 4
_TABLE, _RULE_CHAIN, _RULE_EXPRESSIONS = 1, 2, 4
_SET_NAME, _SET_FLAGS, _SET_KEY_TYPE, _SET_KEY_LEN = 2, 3, 4, 5
_INTERVAL, _MAP, _TIMEOUT, _EVAL, _CONCATENATION = 0x4, 0x8, 0x10, 0x20, 0x80
_ELEMENTS_SET, _ELEMENTS, _ELEMENT_KEY, _ELEMENT_DATA, _ELEMENT_FLAGS = 2, 3, 1, 2, 3
_INTERVAL_END, _CATCH_ALL = 1, 2
_VALUE, _VERDICT, _CODE, _TARGET = 1, 2, 1, 2
_DROP, _ACCEPT, _CONTINUE, _JUMP, _GOTO, _RETURN = 0, 1, -1, -3, -4, -5
#: nft's numbers of types of keys that no frame is known by here: addresses, and concatenations (from 64).
_ADDRESSES, _CONCATENATED = frozenset({7, 8, 9}), 64

#: Kinds of named objects that count packets, or help conntrack; attributes of ``dynset`` with conditions.
_COUNTER, _HELPER, _LIMITS = 1, 3, frozenset({7, 10})
#: Expressions and targets of iptables that let the rule go on.
_PASSING = frozenset(
    {"counter", "log", "notrack", "last", "flow_offload", "comment"}
    | {"LOG", "NFLOG", "MARK", "CONNMARK", "TCPMSS", "CHECKSUM", "CT", "TRACE", "CLASSIFY", "DSCP", "TOS"}
)
_VERDICTS: Mapping[str, Verdict] = MappingProxyType(
    {
        "reject": Verdict(Then.DROP),
        "REJECT": Verdict(Then.DROP),
        "DROP": Verdict(Then.DROP),
        "masq": Verdict(Then.ACCEPT),
        "nat": Verdict(Then.ACCEPT),
        "redir": Verdict(Then.ACCEPT),
        # Other programs or devices get the frame.
        **dict.fromkeys(("queue", "fwd", "tproxy", "synproxy", "NFQUEUE", "TPROXY"), Verdict(Then.OTHER)),
    }
)


def read_foreign(channel: Channel, ours: Collection[tuple[str, str]]) -> tuple[BaseChain, ...]:
    """Read the base chains of all tables but ``ours`` (family and name), with what they call.

    Chains for NAT are left out: they see the first packet of a connection, and change addresses.
    Raises: OSError, TimeoutError, netlink.Interrupted.
    """
    found = [
        (FAMILIES.get(each[0], ""), _attributes(each))
        for each in dump(channel, _ANY, Message(_GETCHAIN, b""))
    ]
    bases: dict[tuple[str, str], list[Mapping[int, bytes]]] = defaultdict(list)
    for family, chain in found:
        table = family, text(chain.get(_CHAIN_TABLE))
        if _CHAIN_HOOK in chain and family and table not in ours and text(chain.get(_CHAIN_TYPE)) != "nat":
            bases[table].append(chain)
    result: list[BaseChain] = []
    for (family, name), chains in sorted(bases.items()):
        table_ = _filters(channel, family, name)
        result += [_base(chain, table_) for chain in chains]
    return tuple(result)


def _base(chain: Mapping[int, bytes], table: Filters) -> BaseChain:
    hook = dict(attributes(chain[_CHAIN_HOOK]))
    names, number = _HOOKS_OF.get(table.family, _HOOKS), _number(hook.get(_HOOK_NUMBER))
    devices = [value for _, value in attributes(hook.get(_HOOK_DEVICES, b""))]
    return BaseChain(
        names[number] if number < len(names) else "",
        text(chain.get(_CHAIN_NAME)),
        Then.DROP if _CHAIN_POLICY in chain and _number(chain[_CHAIN_POLICY]) == _DROP else Then.ACCEPT,
        table,
        tuple(sorted({text(each) for each in [*devices, hook.get(_HOOK_DEVICE, b"")]} - {""})),
    )


def _filters(channel: Channel, family: str, name: str) -> Filters:
    number = next(n for n, f in FAMILIES.items() if f == family)
    table = text_attribute(_TABLE, name)
    chains: dict[str, list[Rule]] = defaultdict(list)
    for each in dump(channel, number, Message(_GETRULE, table)):
        parts = _attributes(each)
        chains[text(parts.get(_RULE_CHAIN))].append(tuple(_steps(parts.get(_RULE_EXPRESSIONS, b""))))
    used = {s.name for rules in chains.values() for rule in rules for s in rule if isinstance(s, Lookup)}
    listed = [_attributes(each) for each in dump(channel, number, Message(_GETSET, table))] if used else []
    sets = {}
    for parts in listed:
        set_ = text(parts.get(_SET_NAME))
        if set_ in used and text(parts.get(_TABLE)) == name and _is_known(parts):
            elements = dump(
                channel, number, Message(_GETSETELEM, table + text_attribute(_ELEMENTS_SET, set_))
            )
            sets[set_] = _known(parts, [_attributes(each) for each in elements])
    return Filters(family, name, chains={n: tuple(rules) for n, rules in chains.items()}, sets=sets)


def _is_known(parts: Mapping[int, bytes]) -> bool:
    """Whether the set's keys are worth reading."""
    kind, flags = _number(parts.get(_SET_KEY_TYPE)), _number(parts.get(_SET_FLAGS))
    return kind < _CONCATENATED and kind not in _ADDRESSES and not flags & (_EVAL | _CONCATENATION)


def _known(parts: Mapping[int, bytes], messages: list[Mapping[int, bytes]]) -> KnownSet:
    flags, length = _number(parts.get(_SET_FLAGS)), _number(parts.get(_SET_KEY_LEN))
    elements = [
        dict(attributes(element))
        for message in messages
        for _, element in attributes(message.get(_ELEMENTS, b""))
    ]
    keys: list[tuple[bytes, int, Verdict | None]] = []
    every: list[tuple[bytes, bytes, Verdict | None]] = []
    for element in elements:
        mark = _number(element.get(_ELEMENT_FLAGS))
        key = dict(attributes(element.get(_ELEMENT_KEY, b""))).get(_VALUE, b"")
        then = _verdict(element.get(_ELEMENT_DATA, b"")) if flags & _MAP else None
        if mark & _CATCH_ALL:
            every.append((bytes(length), b"\xff" * length, then))
        else:
            keys.append((key, mark & _INTERVAL_END, then))
    if not flags & _INTERVAL:
        return KnownSet((*((key, key, then) for key, _, then in keys), *every))
    # An interval ends before the next key, which is the begin of another one or an end.
    keys.sort(key=lambda each: (each[0], not each[1]))
    following = [key for key, *_ in keys[1:]]
    ranges = []
    for (key, is_end, then), after in zip(keys, [*following, b""], strict=True):
        if not is_end:
            ranges.append((key, _before(after, length), then))
    return KnownSet((*ranges, *every))


def _before(key: bytes, length: int) -> bytes:
    last = (int.from_bytes(key, "big") - 1) % (1 << 8 * length) if key else (1 << 8 * length) - 1
    return last.to_bytes(length, "big")


# -- expressions -----------------------------------------------------------------------------------


def _steps(expressions: bytes) -> Iterator[Step]:
    for _, expression in attributes(expressions):
        parts = dict(attributes(expression))
        name, data = text(parts.get(1)), dict(attributes(parts.get(2, b"")))
        if name in ("match", "target"):
            yield from extension(text(data.get(1)), data.get(3, b""), is_target=name == "target")
        else:
            yield from _step(name, data)


def _step(name: str, data: Mapping[int, bytes]) -> Iterator[Step]:
    first, second = _word(data.get(1)), _word(data.get(2))
    match name:
        case "meta" if 1 in data:
            yield Load(first, meta(_number(data.get(2))))
        case "ct" if 1 in data:
            yield Load(first, connection(_number(data.get(2))))
        case "payload" if 1 in data:
            yield Load(first, payload(*(_number(data.get(key)) for key in (2, 3, 4))))
        case "meta" | "ct" | "payload":
            pass  # it sets something, and goes on
        case "objref" if _number(data.get(1)) in (_COUNTER, _HELPER):
            pass
        case "dynset" if not data.keys() & _LIMITS:
            pass
        case "immediate" if first == 0:
            yield _verdict(data.get(2, b""))
        case "immediate":
            yield Set(first, _value(data.get(2)))
        case "cmp":
            yield _comparison(first, _number(data.get(2)), _value(data.get(3)))
        case "range":
            yield Between(first, _value(data.get(3)), _value(data.get(4)), not _number(data.get(2)))
        case "bitwise" if not _number(data.get(6)):
            yield Mask(first, second, _value(data.get(4)), _value(data.get(5)))
        case "lookup":
            target = data.get(3)
            is_verdict = target is not None and _word(target) == 0
            yield Lookup(second, text(data.get(1)), not _number(data.get(5)) & 1, is_verdict)
            if target is not None and not is_verdict:
                yield Load(_word(target), None)
        case _ if name in _VERDICTS:
            yield _VERDICTS[name]
        case _ if name not in _PASSING:
            yield from (Load(word, None) for word in {first, second} if word)
            yield Maybe()


def _comparison(register: int, operation: int, value: bytes) -> Between:
    match operation:
        case 0 | 1:  # equal, not equal
            return Between(register, value, value, operation == 0)
        case 2 | 5:  # less, greater or equal
            return Between(register, value, None, operation == 5)
        case _:  # less or equal, greater
            return Between(register, None, value, operation == 3)


def _verdict(data: bytes) -> Verdict:
    found = dict(attributes(dict(attributes(data)).get(_VERDICT, b"")))
    code = int.from_bytes(found.get(_CODE, b""), "big", signed=True)
    match code:
        case 0 | 1:
            return Verdict(Then.ACCEPT if code else Then.DROP)
        case -3 | -4:  # jump, goto
            return Verdict(Then.NEXT, text(found.get(_TARGET)), goto=code == _GOTO)
        case -1 | -5:  # continue, return
            return Verdict(Then.NEXT, leave=code == _RETURN)
    return Verdict(Then.OTHER)


# -- matches and targets of iptables, which nftables has too ---------------------------------------

#: include/uapi/linux/netfilter: the offsets of match_flags, invert_flags and state_mask in struct
#: xt_conntrack_mtinfo2 and 3; XT_CONNTRACK_STATE; the bit of a new connection.
_CONNTRACK, _BY_STATE, _NEW = 146, 1, 1 << 3
_PHYSDEV_BYTES = 66


def extension(name: str, info: bytes, *, is_target: bool) -> Iterator[Step]:
    """Translate a match or a target of iptables, by its name and its data."""
    if is_target and name in _VERDICTS:
        yield _VERDICTS[name]
    elif name == "conntrack" and len(info) >= _CONNTRACK + 6:
        asked, inverted, states = struct.unpack_from("=HHH", info, _CONNTRACK)
        if asked & _BY_STATE and bool(states & _NEW) == bool(inverted & _BY_STATE):
            yield Never()
        elif asked != _BY_STATE:
            yield Maybe()
    elif name == "state" and len(info) >= 4:  # struct xt_state_info
        if not struct.unpack_from("=I", info)[0] & _NEW:
            yield Never()
    elif name == "physdev" and len(info) >= _PHYSDEV_BYTES:
        inside, in_mask, outside, out_mask = (info[at : at + 16] for at in (0, 16, 32, 48))
        inverted, flags = info[64:66]
        yield Physical(inside[: in_mask.count(255)], outside[: out_mask.count(255)], flags, inverted)
    elif name == "udp" and len(info) >= 9:  # struct xt_udp
        yield from _to_port(info, info[8])
    elif name == "tcp" and len(info) >= 12:  # struct xt_tcp
        yield from _to_port(info, info[11])
        if any(info[8:11]):  # options and flags
            yield Maybe()
    elif name not in _PASSING:
        yield Maybe()
        if is_target:
            yield Verdict(Then.OTHER)


def _to_port(info: bytes, inverted: int) -> Iterator[Step]:
    """Match ranges of ports: from, and to."""
    from_low, from_high, low, high = struct.unpack_from("=4H", info)
    if (from_low, from_high) != (0, 0xFFFF):
        yield Maybe()
    yield Load(4, payload(2, 2, 2))
    yield Between(4, struct.pack(">H", low), struct.pack(">H", high), not inverted & 2)


def _word(register: bytes | None) -> int:
    """The number of a register's first word of four bytes; 0 is the verdict (``nft_parse_register``)."""
    number = _number(register)
    return number * 4 if number <= 4 else number - 4


def _value(data: bytes | None) -> bytes:
    return dict(attributes(data or b"")).get(_VALUE, b"")


def _attributes(payload_: bytes) -> dict[int, bytes]:
    return dict(attributes(payload_, HEAD))


def _number(data: bytes | None) -> int:
    return int.from_bytes(data or b"", "big")
