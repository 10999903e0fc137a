"""One table of nftables: read as values that can be compared, and changed by transactions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from netplugin.host.netlink import Channel, attribute, attributes, text
from netplugin.host.nfnetlink import (
    CREATE,
    FAMILIES,
    HEAD,
    Message,
    Nfnetlink,
    TransactionRefused,
    ask,
    dump,
    text_attribute,
    u32,
)
from netplugin.host.nft_rules import Rule, jump, jump_target, value, value_of, verdict
from netplugin.host.nft_sets import INTERFACE_NAME, KeyType

STEP = "nftables"

# include/uapi/linux/netfilter/nf_tables.h
_NEWTABLE, _GETTABLE, _DELTABLE = 0, 1, 2
_NEWCHAIN, _GETCHAIN, _DELCHAIN = 3, 4, 5
_NEWRULE, _GETRULE, _DELRULE = 6, 7, 8
_NEWSET, _GETSET = 9, 10
_NEWSETELEM, _GETSETELEM, _DELSETELEM = 12, 13, 14
_TABLE = 1  # the first attribute of everything in a table, and the name of a table
_CHAIN_NAME, _CHAIN_HOOK, _CHAIN_POLICY, _CHAIN_TYPE, _HOOK_NUMBER, _HOOK_PRIORITY = 3, 4, 5, 7, 1, 2
_RULE_CHAIN, _RULE_EXPRESSIONS, _RULE_USERDATA = 2, 4, 7
_SET_NAME, _SET_FLAGS, _SET_KEY_TYPE, _SET_KEY_LEN = 2, 3, 4, 5
_SET_DATA_TYPE, _SET_DATA_LEN, _SET_ID, _SET_USERDATA = 6, 7, 10, 13
_ELEMENTS_SET, _ELEMENTS, _ELEMENT, _KEY, _DATA = 2, 3, 1, 1, 2
_MAP, _VERDICTS = 8, 0xFFFFFF00
_DROP_CODE, _ACCEPT_CODE = 0, 1
_HOOKS = ("prerouting", "input", "forward", "output", "postrouting")
_APPEND = 0x800
_MOST_KEYS = 1000  # of up to 36 bytes each


@dataclass(frozen=True)
class Chain:
    """A chain. The fields of the hook are None for a chain that is not a base chain."""

    rules: tuple[Rule, ...] = ()
    type: str | None = None
    hook: str | None = None
    prio: int | None = None
    policy: str | None = None

    def definition(self) -> Chain:
        """The chain without its rules."""
        return replace(self, rules=())


@dataclass(frozen=True)
class Table:
    """The contents of a table: ``chains`` has the chains that were requested, ``names`` all."""

    names: frozenset[str] = frozenset()
    chains: Mapping[str, Chain] = field(default_factory=dict)
    #: Verdict maps: the target chain of each key, None for any verdict but a jump.
    maps: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)


# -- changes ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Command(ABC):
    """One change of a table, as a part of a transaction."""

    @abstractmethod
    def messages(self, table: str) -> Iterator[Message]:
        """Yield the requests that make the change."""


@dataclass(frozen=True)
class AddTable(Command):
    """Create the table if it is missing."""

    def messages(self, table: str) -> Iterator[Message]:
        yield Message(_NEWTABLE, text_attribute(_TABLE, table), CREATE)


@dataclass(frozen=True)
class DeleteTable(Command):
    def messages(self, table: str) -> Iterator[Message]:
        yield Message(_DELTABLE, text_attribute(_TABLE, table))


@dataclass(frozen=True)
class AddSet(Command):
    """Create a set if it is missing."""

    name: str
    keys: KeyType

    def messages(self, table: str) -> Iterator[Message]:
        yield Message(_NEWSET, _set(table, self.name, self.keys, 0), CREATE)


@dataclass(frozen=True)
class AddMap(Command):
    """Create a verdict map of interface names if it is missing."""

    name: str

    def messages(self, table: str) -> Iterator[Message]:
        verdicts = u32(_SET_DATA_TYPE, _VERDICTS) + u32(_SET_DATA_LEN, 0)
        yield Message(_NEWSET, _set(table, self.name, INTERFACE_NAME, _MAP) + verdicts, CREATE)


def _set(table: str, name: str, keys: KeyType, flags: int) -> bytes:
    body = text_attribute(_TABLE, table) + text_attribute(_SET_NAME, name) + u32(_SET_FLAGS, flags)
    body += u32(_SET_KEY_TYPE, keys.number) + u32(_SET_KEY_LEN, keys.length)
    return body + u32(_SET_ID, 1) + attribute(_SET_USERDATA, keys.userdata)


@dataclass(frozen=True)
class ChainCommand(Command, ABC):
    name: str

    def _on_chain(self, table: str) -> bytes:
        """The attributes of a request about the rules of the chain."""
        return text_attribute(_TABLE, table) + text_attribute(_RULE_CHAIN, self.name)


@dataclass(frozen=True)
class SetChain(ChainCommand):
    """Create the chain, or replace its rules."""

    chain: Chain

    def messages(self, table: str) -> Iterator[Message]:
        yield Message(_NEWCHAIN, text_attribute(_TABLE, table) + self._definition(), CREATE)
        where = self._on_chain(table)
        yield Message(_DELRULE, where)
        for rule in self.chain.rules:
            body = where + attribute(_RULE_EXPRESSIONS, rule.code)
            if rule.comment is not None:
                body += attribute(_RULE_USERDATA, rule.userdata)
            yield Message(_NEWRULE, body, CREATE | _APPEND)

    def _definition(self) -> bytes:
        chain, body = self.chain, text_attribute(_CHAIN_NAME, self.name)
        if chain.hook is None or chain.prio is None:
            return body
        hook = u32(_HOOK_NUMBER, _HOOKS.index(chain.hook)), u32(_HOOK_PRIORITY, chain.prio % (1 << 32))
        body += attribute(_CHAIN_HOOK, *hook) + text_attribute(_CHAIN_TYPE, chain.type or "filter")
        return body + u32(_CHAIN_POLICY, _DROP_CODE if chain.policy == "drop" else _ACCEPT_CODE)


@dataclass(frozen=True)
class DeleteChain(ChainCommand):
    """Delete a chain with its rules."""

    def messages(self, table: str) -> Iterator[Message]:
        yield Message(_DELRULE, self._on_chain(table))
        yield Message(_DELCHAIN, text_attribute(_TABLE, table) + text_attribute(_CHAIN_NAME, self.name))


@dataclass(frozen=True)
class ElementCommand(Command, ABC):
    """A change of a key of a verdict map."""

    map: str
    key: str


@dataclass(frozen=True)
class AddElement(ElementCommand):
    """Add a key that jumps to the chain, or (None) whose verdict is to drop."""

    target: str | None

    def messages(self, table: str) -> Iterator[Message]:
        then = jump(self.target) if self.target is not None else verdict(_DROP_CODE)
        yield Message(_NEWSETELEM, _element(table, self.map, self.key, attribute(_DATA, then)), CREATE)


@dataclass(frozen=True)
class DeleteElement(ElementCommand):
    def messages(self, table: str) -> Iterator[Message]:
        yield Message(_DELSETELEM, _element(table, self.map, self.key))


def _element(table: str, name: str, key: str, data: bytes = b"") -> bytes:
    return _of_set(
        table, name, [attribute(_KEY, value(key.encode().ljust(INTERFACE_NAME.length, b"\0"))) + data]
    )


def _of_set(table: str, name: str, elements: Iterable[bytes]) -> bytes:
    where = text_attribute(_TABLE, table) + text_attribute(_ELEMENTS_SET, name)
    return where + attribute(_ELEMENTS, *(attribute(_ELEMENT, each) for each in elements))


@dataclass(frozen=True)
class AddKeys(Command):
    """Add keys to a set; those that it has stay."""

    set: str
    keys: tuple[bytes, ...]

    def messages(self, table: str) -> Iterator[Message]:
        return _keyed(_NEWSETELEM, table, self.set, self.keys, CREATE)


@dataclass(frozen=True)
class DeleteKeys(Command):
    """Delete keys of a set, which must have them."""

    set: str
    keys: tuple[bytes, ...]

    def messages(self, table: str) -> Iterator[Message]:
        return _keyed(_DELSETELEM, table, self.set, self.keys, 0)


def _keyed(kind: int, table: str, name: str, keys: Sequence[bytes], flags: int) -> Iterator[Message]:
    """The keys in as many messages as they need: an attribute has less than 64 KiB."""
    for at in range(0, len(keys), _MOST_KEYS):
        each = (attribute(_KEY, value(key)) for key in keys[at : at + _MOST_KEYS])
        yield Message(kind, _of_set(table, name, each), flags)


# -- the table -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contents:
    """All chains of a table with their rules, and all sets with their keys in the kernel's form."""

    chains: Mapping[str, Chain]
    sets: Mapping[str, Sequence[bytes]]


class TableReader:
    """The requests that read a table. All raise OSError, TimeoutError, netlink.Interrupted."""

    def __init__(self, family: str, table: str) -> None:
        self._family = FAMILIES[family]
        self._name = table
        self._table = text_attribute(_TABLE, table)

    def read_all(self, channel: Channel) -> Contents | None:
        """Read a small table; None if there is none."""
        if not self.is_there(channel):
            return None
        rules = self.rules(channel, None)
        chains = {
            name: replace(chain, rules=tuple(rules.get(name, ())))
            for name, chain in self.chains(channel).items()
        }
        sets = {
            name: [key for payload in self._elements(channel, name) for key, _ in _elements(payload)]
            for name in self.sets(channel)
        }
        return Contents(chains, sets)

    def is_there(self, channel: Channel) -> bool:
        try:
            ask(channel, self._family, Message(_GETTABLE, self._table))
        except FileNotFoundError:
            return False
        return True

    def chains(self, channel: Channel) -> dict[str, Chain]:
        """All chains without their rules. The kernel lists those of all tables of the family."""
        found = dump(channel, self._family, Message(_GETCHAIN, b""))
        return dict(_chain(payload) for payload in found if self._has(payload))

    def sets(self, channel: Channel) -> dict[str, bool]:
        """All sets, with whether each is a map."""
        found = [
            _attributes(p) for p in dump(channel, self._family, Message(_GETSET, self._table)) if self._has(p)
        ]
        return {text(each.get(_SET_NAME)): bool(_number(each.get(_SET_FLAGS)) & _MAP) for each in found}

    def keys(self, channel: Channel, name: str) -> Iterator[tuple[str, str | None]]:
        """The keys of a verdict map of interface names, each with its target."""
        for payload in self._elements(channel, name):
            yield from _verdicts(payload)

    def rules(self, channel: Channel, chains: Collection[str] | None) -> dict[str, list[Rule]]:
        """The rules of each of these chains (None: of all)."""
        names = [b""] if chains is None else [text_attribute(_RULE_CHAIN, name) for name in chains]
        found: dict[str, list[Rule]] = {}
        for name in names:
            for payload in dump(channel, self._family, Message(_GETRULE, self._table + name)):
                parts = _attributes(payload)
                rule = Rule.read(parts.get(_RULE_EXPRESSIONS, b""), parts.get(_RULE_USERDATA))
                found.setdefault(text(parts.get(_RULE_CHAIN)), []).append(rule)
        return found

    def _elements(self, channel: Channel, name: str) -> Iterator[bytes]:
        where = self._table + text_attribute(_ELEMENTS_SET, name)
        return dump(channel, self._family, Message(_GETSETELEM, where))

    def _has(self, payload: bytes) -> bool:
        return text(_attributes(payload).get(_TABLE)) == self._name


@dataclass(frozen=True)
class _Listing:
    """All chains without their rules, and all maps: valid while nobody else changes nf_tables."""

    stamp: int
    chains: Mapping[str, Chain]
    maps: Mapping[str, Mapping[str, str | None]]


class Nftables:
    """One table of one family.

    The rules of a chain are read with every call. The names of all chains and the keys of all
    maps are listed once. Afterwards the generation that the kernel counts tells whether another program
    has changed anything, and what we have changed ourselves is read again, one by one. Not thread-safe.
    """

    def __init__(self, family: str, table: str, kernel: Nfnetlink | None = None) -> None:
        """``kernel``: shared by all tables that one agent writes, so that it knows its own transactions."""
        self.table = table
        self._kernel = kernel or Nfnetlink()
        self._family = FAMILIES[family]
        self._reader = TableReader(family, table)
        self._listing: _Listing | None = None
        #: What we have changed since the listing.
        self._changed: set[ChainCommand | ElementCommand] = set()

    # -- writing ---------------------------------------------------------------------------------

    def commit(self, commands: Sequence[Command], deadline: float) -> None:
        """Make all changes in one transaction.

        Raises: TransactionRefused with the numbers of the commands, BackendUnavailable, HostError,
        OperationTimeout.
        """
        if not commands:
            return
        each = [(at, message) for at, c in enumerate(commands) for message in c.messages(self.table)]
        listing, self._listing = self._listing, None  # for an unknown outcome
        try:
            self._kernel.commit(self._family, [message for _, message in each], STEP, deadline)
        except TransactionRefused as refused:
            self._listing = listing  # nothing has changed
            raise refused.counted(lambda at: each[at][0]) from refused
        listed = [c for c in commands if isinstance(c, ChainCommand | ElementCommand)]
        self._changed.update(listed)
        self._listing = listing if len(listed) == len(commands) else None

    # -- reading ---------------------------------------------------------------------------------

    def read(self, chains: Collection[str] | None, deadline: float) -> Table | None:
        """Read the table with the rules of these chains (None: of all, and nothing from an earlier read).

        None if there is no table. Raises: BackendUnavailable, HostError, OperationTimeout.
        """
        return self._kernel.read(STEP, deadline, partial(self._read, chains))

    def _read(self, chains: Collection[str] | None, channel: Channel, stamp: int) -> Table | None:
        listing, changed = self._listing, self._changed
        self._listing, self._changed = None, set()  # after an error, all is listed
        if chains is None or listing is None or listing.stamp != stamp:
            found = self._list(channel, stamp)
        else:
            found = self._refreshed(channel, listing, changed)
        if found is None:
            return None
        wanted = found.chains if chains is None else [name for name in chains if name in found.chains]
        rules = self._reader.rules(channel, None if chains is None else wanted)
        self._listing = found if self._kernel.stamp(channel) == stamp else None
        return Table(
            names=frozenset(found.chains),
            chains={name: replace(found.chains[name], rules=tuple(rules.get(name, ()))) for name in wanted},
            maps=found.maps,
        )

    def _list(self, channel: Channel, stamp: int) -> _Listing | None:
        if not self._reader.is_there(channel):
            return None
        maps = [name for name, is_map in self._reader.sets(channel).items() if is_map]
        keys = {name: dict(self._reader.keys(channel, name)) for name in maps}
        return _Listing(stamp, self._reader.chains(channel), keys)

    def _refreshed(
        self, channel: Channel, listing: _Listing, changed: Collection[ChainCommand | ElementCommand]
    ) -> _Listing:
        """The listing with what we have changed, as the kernel has it now."""
        if not changed:
            return listing
        chains, maps = dict(listing.chains), {name: dict(keys) for name, keys in listing.maps.items()}
        for each in changed:
            if isinstance(each, ChainCommand):
                chains.pop(each.name, None)
                body = text_attribute(_TABLE, self.table) + text_attribute(_CHAIN_NAME, each.name)
                chains.update(_chain(p) for p in self._one(channel, Message(_GETCHAIN, body)))
            else:
                keys = maps.setdefault(each.map, {})
                keys.pop(each.key, None)
                body = _element(self.table, each.map, each.key)
                for payload in self._one(channel, Message(_GETSETELEM, body)):
                    keys.update(_verdicts(payload))
        return _Listing(listing.stamp, chains, maps)

    def _one(self, channel: Channel, message: Message) -> list[bytes]:
        try:
            return ask(channel, self._family, message)
        except FileNotFoundError:
            return []


# -- what the kernel reports -----------------------------------------------------------------------


def _attributes(payload: bytes) -> dict[int, bytes]:
    return dict(attributes(payload, HEAD))


def _number(data: bytes | None, *, signed: bool = False) -> int:
    return int.from_bytes(data or b"", "big", signed=signed)


def _chain(payload: bytes) -> tuple[str, Chain]:
    found = _attributes(payload)
    name = text(found.get(_CHAIN_NAME))
    if _CHAIN_HOOK not in found:
        return name, Chain()
    hook = dict(attributes(found[_CHAIN_HOOK]))
    number, policy = _number(hook.get(_HOOK_NUMBER)), _number(found.get(_CHAIN_POLICY))
    return name, Chain(
        type=text(found.get(_CHAIN_TYPE)),
        hook=_HOOKS[number] if number < len(_HOOKS) else f"hook {number}",
        prio=_number(hook.get(_HOOK_PRIORITY), signed=True),
        policy="drop" if policy == _DROP_CODE else "accept",
    )


def _elements(payload: bytes) -> Iterator[tuple[bytes, bytes | None]]:
    """The keys of a set or map in one message, each with its data."""
    for _, element in attributes(_attributes(payload).get(_ELEMENTS, b"")):
        parts = dict(attributes(element))
        yield value_of(parts.get(_KEY)), parts.get(_DATA)


def _verdicts(payload: bytes) -> Iterator[tuple[str, str | None]]:
    """The keys of a verdict map of interface names in one message, each with its target."""
    for key, data in _elements(payload):
        yield text(key.partition(b"\0")[0]), jump_target(data)
