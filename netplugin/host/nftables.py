"""nftables through ``nft -j``, with rules as values that can be compared with the kernel's."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from netplugin.api.errors import HostError
from netplugin.host.processes import run

STEP = "nftables"
_MANY = 16  # above this many chains, reading the whole table is faster than reading each chain
Command = dict[str, Any]
_START = re.compile(r'\s*\{\s*"nftables"\s*:\s*\[\s*')
_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class Rule:
    """One rule in the notation of libnftables-json(5). Rules are equal if they do the same."""

    text: str

    @classmethod
    def make(cls, *statements: Mapping[str, Any], comment: str | None = None) -> Rule:
        value = {"expr": [_plain(s) for s in statements], "comment": comment}
        return cls(json.dumps(value, sort_keys=True))

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> Rule:
        """Parse a rule of the output of ``nft -j list``."""
        return cls.make(*found.get("expr", ()), comment=found.get("comment"))

    @property
    def comment(self) -> str | None:
        comment: str | None = json.loads(self.text)["comment"]
        return comment

    def said(self, comment: str) -> Rule:
        """The same rule with this comment."""
        return Rule(json.dumps({**json.loads(self.text), "comment": comment}, sort_keys=True))

    def fields(self) -> dict[str, Any]:
        """The fields of the command that adds the rule."""
        return {key: value for key, value in json.loads(self.text).items() if value is not None}


@dataclass(frozen=True)
class Chain:
    """A chain. The fields of the hook are None for a chain that is not a base chain."""

    rules: tuple[Rule, ...] = ()
    type: str | None = None
    hook: str | None = None
    prio: int | None = None
    policy: str | None = None

    def definition(self) -> dict[str, Any]:
        """The fields of a base chain; empty for any other chain."""
        names = ("type", "hook", "prio", "policy")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


@dataclass(frozen=True)
class Table:
    """The contents of a table: ``chains`` has the chains that were requested, ``names`` all."""

    names: frozenset[str] = frozenset()
    chains: Mapping[str, Chain] = field(default_factory=dict)
    #: Verdict maps: the target chain of each key, None for any verdict but a jump.
    maps: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)


class Nftables:
    """One table of one family, accessed with the program ``nft``."""

    def __init__(self, family: str, table: str) -> None:
        self.family = family
        self.table = table

    def commit(self, commands: Sequence[Command], deadline: float) -> None:
        """Run all commands in one transaction. Raises: BackendUnavailable, HostError, OperationTimeout."""
        if commands:
            self._run(commands, deadline)

    def read(self, chains: Sequence[str] | None, deadline: float) -> Table | None:
        """Read the table with the rules of these chains (None: of all); None if there is no table.

        Raises: BackendUnavailable, HostError, OperationTimeout.
        """
        with format_errors(STEP):
            defined = {o["name"]: o for o in self._list("chains", "chain", deadline)}
            if not defined and not self._exists(deadline):
                return None
            maps = self._list("maps", "map", deadline)
            wanted = [name for name in defined if chains is None or name in chains]
            rules = self._rules(wanted, chains is None, deadline)
            return Table(
                names=frozenset(defined),
                chains={name: _chain(defined[name], rules.get(name, [])) for name in wanted},
                maps={o["name"]: _jumps(o.get("elem", [])) for o in maps},
            )

    def _list(self, what: str, kind: str, deadline: float) -> list[Any]:
        """All objects of a kind in the table. Lists the whole family, because listing one table may fail."""
        found = self._run([{"list": {what: {"family": self.family}}}], deadline)
        return [o for k, o in found if k == kind and o["table"] == self.table]

    def _exists(self, deadline: float) -> bool:
        found = self._run([{"list": {"tables": {"family": self.family}}}], deadline)
        return any(kind == "table" and o["name"] == self.table for kind, o in found)

    def _rules(self, chains: Sequence[str], whole: bool, deadline: float) -> dict[str, list[Rule]]:
        """The rules of each chain.

        Runs nft once per chain, because nft 1.0.6 returns only the last one if a call lists
        several. If there are many chains, it lists the whole table in one call.
        """
        if whole or len(chains) > _MANY:
            asked = [{"list": {"table": {"family": self.family, "name": self.table}}}]
        else:
            asked = [self.command("list", "chain", name=name) for name in chains]
        found: dict[str, list[Rule]] = {}
        for command in asked:
            for kind, value in self._run([command], deadline):
                if kind == "rule":
                    found.setdefault(value["chain"], []).append(Rule.read(value))
        return found

    # -- commands --------------------------------------------------------------------------------

    def command(self, verb: str, kind: str, **fields: Any) -> Command:
        """A command on an object of the table."""
        return {verb: {kind: {"family": self.family, "table": self.table, **fields}}}

    def add_table(self) -> Command:
        return {"add": {"table": {"family": self.family, "name": self.table}}}

    def delete_table(self) -> Command:
        return {"delete": {"table": {"family": self.family, "name": self.table}}}

    def set_chain(self, name: str, chain: Chain) -> list[Command]:
        """Create the chain, or replace its rules."""
        return [
            self.command("add", "chain", name=name, **chain.definition()),
            self.command("flush", "chain", name=name),
            *(self.command("add", "rule", chain=name, **rule.fields()) for rule in chain.rules),
        ]

    def delete_chain(self, name: str) -> list[Command]:
        verbs = ("flush", "delete")
        return [self.command(verb, "chain", name=name) for verb in verbs]

    def add_jump(self, name: str, key: str, chain: str) -> Command:
        """Add a key to the verdict map ``name`` that jumps to the chain."""
        return self._add_element(name, key, {"jump": {"target": chain}})

    def add_drop(self, name: str, key: str) -> Command:
        """Add a key to the verdict map ``name`` whose verdict is to drop."""
        return self._add_element(name, key, {"drop": None})

    def _add_element(self, name: str, key: str, verdict: Mapping[str, Any]) -> Command:
        return self.command("add", "element", name=name, elem=[[key, verdict]])

    def delete_element(self, name: str, key: str) -> Command:
        """Delete a key of the verdict map ``name``."""
        return self.command("delete", "element", name=name, elem=[key])

    def _run(self, commands: Sequence[Command], deadline: float) -> Iterable[tuple[str, Any]]:
        """Run nft and return the objects of its answer, each with its kind."""
        text = json.dumps({"nftables": list(commands)})
        answer = run(["nft", "-j", "-f", "-"], step=STEP, deadline=deadline, stdin=text)
        return parse_answer(answer, STEP) if answer.strip() else []


def parse_answer(answer: str, step: str) -> Iterator[tuple[str, Any]]:
    """Parse the output of ``nft -j``: its objects, each with its kind.

    One object at a time: the whole answer for a thousand ports takes 40 MB as values.

    Raises: HostError if it is not in the format of libnftables-json(5).
    """
    with format_errors(step):
        if not (start := _START.match(answer)):
            raise ValueError(answer[:200])
        at = start.end()
        while answer[at] != "]":
            found, at = _DECODER.raw_decode(answer, at)
            yield next(iter(found.items()))
            while answer[at] in ", \n":
                at += 1


@contextlib.contextmanager
def format_errors(step: str) -> Iterator[None]:
    """Translate the errors of reading an answer of nft that has another format. Raises: HostError."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, StopIteration) as broken:
        raise HostError(
            "the answer of nft has another format than the tables of the agent in libnftables-json(5): "
            f"{type(broken).__name__}: {broken}",
            step=step,
            fix="look in nft list ruleset for tables named netplugin that another program wrote, and whether "
            "another version of nft is installed",
        ) from broken


def set_element(found: Any) -> list[Any]:
    """The parts of a set's element, which nft wraps if it has a comment, a counter or a timeout."""
    return list((found["elem"]["val"] if "elem" in found else found)["concat"])


def _chain(found: Mapping[str, Any], rules: Sequence[Rule]) -> Chain:
    hook = (found.get(key) for key in ("type", "hook", "prio", "policy"))
    return Chain(tuple(rules), *hook)


def _jumps(elements: Sequence[Any]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for element in elements:
        key, verdict = element
        if isinstance(key, dict):  # {"elem": {"val": ..}}: an element with a counter or a timeout
            key = key.get("elem", {}).get("val")
        jump = verdict.get("jump") if isinstance(verdict, dict) else None
        found[str(key)] = jump["target"] if jump else None
    return found


def _plain(value: Any) -> Any:
    """Normalize a value that has several notations: IPv6 addresses, and counters with their values."""
    if isinstance(value, dict):
        if "counter" in value:
            return {"counter": None}
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, str) and "::" in value:
        try:
            return str(ipaddress.IPv6Address(value))
        except ValueError:
            return value
    return value
