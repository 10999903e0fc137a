"""One table of nftables: read as values that can be compared, and changed by transactions.

Attributes are encoded and decoded in the order of their numbers in include/uapi/linux/netfilter/nf_tables.h,
where each kind of object has its list.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from pyroute2.netlink import NLM_F_APPEND, NLM_F_CREATE

from netplugin.host.netlink import Channel, attribute, attributes, text
from netplugin.host.nfnetlink import (
    FAMILIES,
    NfMessage,
    Nfnetlink,
    TransactionRefused,
    ask,
    dump,
    packed,
    unpacked,
)
from netplugin.host.nft_rules import Rule, counted, jump, jump_target, verdict
from netplugin.host.nft_sets import INTERFACE_NAME, KeyType

# include/uapi/linux/netfilter/nf_tables.h
_NEWTABLE, _GETTABLE, _DELTABLE, _NEWCHAIN, _GETCHAIN, _DELCHAIN, _NEWRULE, _GETRULE, _DELRULE = range(9)
_NEWSET, _GETSET, _NEWSETELEM, _GETSETELEM, _DELSETELEM = 9, 10, 12, 13, 14
_ELEMENT, _SET_ID, _MAP, _VERDICTS = 1, 1, 8, 0xFFFFFF00
_DROP, _ACCEPT = 0, 1
_HOOKS = ("prerouting", "input", "forward", "output", "postrouting")
#: More changes of ours than this are not read one by one.
_MOST_CHANGES = 200


@dataclass(frozen=True)
class Chain:
    """A chain. ``base``: of a base chain the attributes of its hook, its policy and its type."""

    rules: tuple[Rule, ...] = ()
    base: bytes = b""


def base_chain(hook: str, priority: int, *rules: Rule) -> Chain:
    """A chain for filters at a hook, which accepts what no rule decides."""
    at = packed(_HOOKS.index(hook), priority)
    return Chain(rules, packed(None, None, None, at, _ACCEPT, None, "filter"))


@dataclass(frozen=True)
class Table:
    """The contents of a table: ``chains`` has the chains that were requested, ``names`` all."""

    names: frozenset[str] = frozenset()
    chains: Mapping[str, Chain] = field(default_factory=dict)
    #: Verdict maps: the target chain of each key, None for any verdict but a jump.
    maps: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)
    #: The keys of other sets, in the kernel's form.
    sets: Mapping[str, Mapping[bytes, str | None]] = field(default_factory=dict)


# -- changes: each is a part of a transaction, and its messages make it ------------------------------


@dataclass(frozen=True)
class AddTable:
    """Create the table if it is missing."""

    def messages(self, table: str) -> Iterator[NfMessage]:
        yield NfMessage(_NEWTABLE, packed(table), NLM_F_CREATE)


@dataclass(frozen=True)
class DeleteTable:
    def messages(self, table: str) -> Iterator[NfMessage]:
        yield NfMessage(_DELTABLE, packed(table))


@dataclass(frozen=True)
class AddSet:
    """Create a set if it is missing."""

    name: str
    keys: KeyType = INTERFACE_NAME
    #: The set's flags, and the type and length of the data of its elements.
    data: ClassVar[tuple[int, int | None, int | None]] = (0, None, None)

    def messages(self, table: str) -> Iterator[NfMessage]:
        flags, *data = self.data
        kind = self.keys.number, self.keys.length, *data, None, None
        body = packed(table, self.name, flags, *kind, _SET_ID, None, None, self.keys.userdata)
        yield NfMessage(_NEWSET, body, NLM_F_CREATE)


@dataclass(frozen=True)
class AddMap(AddSet):
    """Create a verdict map of interface names if it is missing."""

    data = (_MAP, _VERDICTS, 0)


@dataclass(frozen=True)
class SetChain:
    """Create the chain, or replace its rules."""

    name: str
    chain: Chain

    def messages(self, table: str) -> Iterator[NfMessage]:
        yield NfMessage(_NEWCHAIN, packed(table, None, self.name) + self.chain.base, NLM_F_CREATE)
        yield NfMessage(_DELRULE, packed(table, self.name))
        for rule in self.chain.rules:
            body = packed(table, self.name, None, rule.code, None, None, rule.userdata or None)
            yield NfMessage(_NEWRULE, body, NLM_F_CREATE | NLM_F_APPEND)


@dataclass(frozen=True)
class DeleteChain:
    """Delete a chain with its rules."""

    name: str

    def messages(self, table: str) -> Iterator[NfMessage]:
        yield NfMessage(_DELRULE, packed(table, self.name))
        yield NfMessage(_DELCHAIN, packed(table, None, self.name))


@dataclass(frozen=True)
class AddElement:
    """Add the name of a device to a verdict map, or a key in the kernel's form to another set.

    In a map it jumps to the chain ``target``, or (None) its verdict is to drop.
    """

    set: str
    key: str | bytes
    target: str | None = None

    def messages(self, table: str) -> Iterator[NfMessage]:
        then = verdict(_DROP) if self.target is None else jump(self.target)
        data = then if isinstance(self.key, str) else None
        yield NfMessage(_NEWSETELEM, _element(table, self.set, self.key, data), NLM_F_CREATE)


@dataclass(frozen=True)
class DeleteElement:
    """Delete a key, which must be there."""

    set: str
    key: str | bytes

    def messages(self, table: str) -> Iterator[NfMessage]:
        yield NfMessage(_DELSETELEM, _element(table, self.set, self.key))


Command = AddTable | DeleteTable | AddSet | SetChain | DeleteChain | AddElement | DeleteElement


def _element(table: str, name: str, key: str | bytes, data: bytes | None = None) -> bytes:
    value = key if isinstance(key, bytes) else key.encode().ljust(INTERFACE_NAME.length, b"\0")
    return packed(table, name, attribute(_ELEMENT, packed(packed(value), data)))


class Nftables:
    """One table of one family.

    The rules of a chain are read with every call. The names of all chains and the keys of all
    sets are listed once. Afterwards the generation that the kernel counts tells whether another program
    has changed anything, and what we have changed ourselves is read again, one by one. Not thread-safe.
    """

    def __init__(
        self, family: str, table: str, kernel: Nfnetlink | None = None, step: str = "nftables"
    ) -> None:
        """``kernel``: shared by all tables that one agent writes, so that it knows its own transactions.

        ``step``: of the errors.
        """
        self.table = table
        self._kernel = kernel or Nfnetlink()
        self._family = FAMILIES[family]
        self._step = step
        #: The stamp of the listing (``Nfnetlink.stamp``), and all chains without their rules.
        self._listing: tuple[int, Table] | None = None
        #: What we have changed since the listing.
        self._changed: set[Command] = set()

    def commit(self, commands: Sequence[Command], deadline: float) -> None:
        """Make all changes in one transaction.

        Raises: TransactionRefused with the numbers of the commands, BackendUnavailable, HostError,
        OperationTimeout.
        """
        if not commands:
            return
        listing, self._listing = self._listing, None  # for an unknown outcome
        try:
            messages = [each.messages(self.table) for each in commands]
            self._kernel.commit(self._family, messages, self._step, deadline)
        except TransactionRefused:
            self._listing = listing  # nothing has changed
            raise
        self._changed.update(commands)
        if len(self._changed) <= _MOST_CHANGES:
            self._listing = listing

    def read(self, chains: Collection[str] | None, deadline: float) -> Table | None:
        """Read the table with the rules of these chains (None: of all, and nothing from an earlier read).

        None if there is no table. Raises: BackendUnavailable, HostError, OperationTimeout.
        """
        return self._kernel.read(self._step, deadline, lambda *at: self._read(chains, *at))

    def counters(self, deadline: float) -> dict[str, dict[bytes, int]]:
        """The packets that rules have counted, by chain and by the code of the rule (``Rule.code``).

        Rules that have counted none are left out. One list of all rules.

        Raises: BackendUnavailable, HostError, OperationTimeout.
        """
        return self._kernel.read(self._step, deadline, lambda channel, _: self._counters(channel))

    def _counters(self, channel: Channel) -> dict[str, dict[bytes, int]]:
        found: dict[str, dict[bytes, int]] = defaultdict(dict)
        for _, table, chain, _, code, *_ in dump(channel, self._family, _GETRULE, packed(self.table)):
            if text(table) == self.table and (packets := counted(code)):
                found[text(chain)][Rule.read(code, b"").code] = packets
        return found

    def _read(self, chains: Collection[str] | None, channel: Channel, stamp: int) -> Table | None:
        listing, changed = self._listing, self._changed
        self._listing, self._changed = None, set()  # after an error, all is listed
        if chains is None or listing is None or listing[0] != stamp:
            table = self._list(channel)
        else:
            table = self._refreshed(channel, listing[1], changed)
        if table is None:
            return None
        listed = table.names if chains is None else table.names.intersection(chains)
        rules = self._rules(channel, None if chains is None else listed)
        self._listing = (stamp, table) if self._kernel.stamp(channel) == stamp else None
        found = {name: replace(table.chains[name], rules=tuple(rules[name])) for name in listed}
        return replace(table, chains=found)

    def _list(self, channel: Channel) -> Table | None:
        if not ask(channel, self._family, _GETTABLE, packed(self.table)):
            return None
        chains = dict(map(_chain, self._all(channel, _GETCHAIN)))
        maps: dict[str, dict[str, str | None]] = {}
        sets: dict[str, dict[bytes, str | None]] = {}
        for _, _, name, flags, *_ in self._all(channel, _GETSET):
            keys = dict(_elements(self._all(channel, _GETSETELEM, text(name))))
            if int.from_bytes(flags, "big") & _MAP:
                maps[text(name)] = {text(key.partition(b"\0")[0]): target for key, target in keys.items()}
            else:
                sets[text(name)] = keys
        return Table(frozenset(chains), chains, maps, sets)

    def _refreshed(self, channel: Channel, table: Table, changed: Collection[Command]) -> Table | None:
        """The listing with what we have changed, as the kernel has it now."""
        if not changed:
            return table
        chains = dict(table.chains)
        maps: dict[str, dict[Any, str | None]] = {name: dict(keys) for name, keys in table.maps.items()}
        sets: dict[str, dict[Any, str | None]] = {name: dict(keys) for name, keys in table.sets.items()}
        for each in changed:
            match each:
                case SetChain(name) | DeleteChain(name):
                    chains.pop(name, None)
                    request = packed(self.table, None, name)
                    chains.update(map(_chain, ask(channel, self._family, _GETCHAIN, request)))
                case AddElement(name, key) | DeleteElement(name, key):
                    keys = (maps if isinstance(key, str) else sets)[name]
                    keys.pop(key, None)
                    request = _element(self.table, name, key)
                    found = _elements(ask(channel, self._family, _GETSETELEM, request))
                    keys.update((key, target) for _, target in found)
                case _:
                    return self._list(channel)
        return Table(frozenset(chains), chains, maps, sets)

    def _rules(self, channel: Channel, chains: Collection[str] | None) -> Mapping[str, list[Rule]]:
        """The rules of each of these chains (None: of all)."""
        found: dict[str, list[Rule]] = defaultdict(list)
        for name in [None] if chains is None else chains:
            for _, _, chain, _, code, _, _, userdata in self._all(channel, _GETRULE, name):
                found[text(chain)].append(Rule.read(code, userdata))
        return found

    def _all(self, channel: Channel, kind: int, name: str | None = None) -> list[list[bytes]]:
        """What the kernel lists of the table, or of the chain or set of this name.

        It lists the chains and the sets of all tables of the family.
        """
        listed = dump(channel, self._family, kind, packed(self.table, name))
        return [each for each in listed if text(each[1]) == self.table]


def _chain(found: Sequence[bytes]) -> tuple[str, Chain]:
    _, _, _, name, hook, policy, _, kind = found
    at = packed(*unpacked(hook, 2))
    return text(name), Chain((), packed(None, None, None, at, policy, None, kind) if hook else b"")


def _elements(lists: Iterable[Sequence[bytes]]) -> Iterator[tuple[bytes, str | None]]:
    """The keys of a set or a map, each with the chain that its verdict jumps to."""
    for listed in lists:
        for _, element in attributes(listed[3]):
            key, data = unpacked(element, 2)
            yield unpacked(key, 1)[0], jump_target(data)
