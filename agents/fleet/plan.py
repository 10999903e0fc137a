"""What to do with what was read of etcd, or watched (pure).

Nothing is removed but by a value that requests it, of a generation above that which the host has carried
out, for an object that the fleet has made here. A key that is missing, a value that cannot be read, another
cluster or an older revision remove nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from agents.store.fleet import Known, Memory
from netplugin.api.errors import Conflict, NetpluginError
from netplugin.fleet.names import Ref
from netplugin.fleet.reports import Written
from netplugin.fleet.values import Acceptance, Spec

# Removals that a host found when it read its range: so many are carried out at once, and this part of what
# the fleet has on it. More may be a mistake.
_FEW, _PART = 5, 0.1


class Held(Conflict):
    """A removal that waits for an acceptance."""


@dataclass(frozen=True)
class Reading:
    """The whole range of the host as of one revision, and the acceptances, with the revision of each."""

    cluster: str
    revision: int
    items: Mapping[Ref, Written]
    acceptances: tuple[tuple[Acceptance, int], ...] = ()
    #: The revision of the host's own summary there; 0: there is none.
    reported: int = 0
    #: Whose range it is.
    host: str = ""

    def is_older_than(self, memory: Memory) -> bool:
        """Whether this is an older copy of what the host has seen, however far that has come since."""
        if self.cluster != memory.cluster:
            return False
        own = 0 if self.is_of_another_name(memory) else memory.reported
        return memory.went_back or self.revision < memory.revision or 0 < self.reported < own

    def is_of_another_name(self, memory: Memory) -> bool:
        return memory.host not in ("", self.host)


@dataclass(frozen=True)
class Step:
    """Make the object so, or (without a spec) remove it; ``owned``: if the fleet has made it."""

    ref: Ref
    revision: int
    known: Known
    spec: Spec | None
    owned: bool = field(default=True, compare=False)


@dataclass(frozen=True)
class Plan:
    memory: Memory
    steps: tuple[Step, ...] = ()
    #: The objects whose value is not carried out, and why.
    faults: Mapping[Ref, NetpluginError] = field(default_factory=dict)
    #: Removed objects whose keys have gone too; what the fleet has made stays without a key.
    gone: frozenset[Ref] = frozenset()
    forget_generations: bool = False
    #: What counts as carried out from now on, without a step.
    known: Mapping[Ref, Known] = field(default_factory=dict)


def plan_read(memory: Memory, known: Mapping[Ref, Known], reading: Reading) -> Plan:
    """For a start, a new connection, and after a compaction.

    Raises: Conflict if this is another etcd, or an older copy of it, that no operator has accepted.
    """
    before = memory
    memory, afresh = _accepted(before, reading)
    if afresh:
        known = {ref: replace(each, generation=0) for ref, each in known.items()}
    # The removals that a host finds under a new name were meant for the one which had that before.
    removals = {ref: item.desired for ref, item in reading.items.items() if item.is_removal and item.desired}
    others = {
        ref: replace(known[ref], generation=max(known[ref].generation, removal.generation))
        for ref, removal in removals.items()
        if reading.is_of_another_name(before) and ref in known and known[ref].is_owned
    }
    known = {**known, **others}
    missing = frozenset(known) - frozenset(reading.items)
    plan = plan_watched(memory, known, reading.items, missing, reading.revision)
    braked = {step.ref for step in plan.steps if step.owned and step.revision > memory.accepted_revision}
    held = {ref for ref, removal in removals.items() if ref in braked and not removal.drained}
    if len(held) <= max(_FEW, int(_PART * sum(each.is_owned for each in known.values()))):
        held = set()
    text = f"{len(held)} removals were found at once: they wait for an operator"
    fix = f"netplugin fleet accept --revision {reading.revision}, or write the objects again"
    faults = {**plan.faults, **dict.fromkeys(held, Held(text, step="fleet", fix=fix))}
    steps = tuple(step for step in plan.steps if step.ref not in held)
    return replace(plan, steps=steps, faults=faults, forget_generations=afresh, known=others)


def plan_watched(
    memory: Memory,
    known: Mapping[Ref, Known],
    items: Mapping[Ref, Written],
    deleted: frozenset[Ref],
    revision: int,
) -> Plan:
    """For changes that came one after the other: the last of each object, and the keys that have gone."""
    steps: list[Step] = []
    faults: dict[Ref, NetpluginError] = {}
    for ref, item in sorted(items.items()):
        try:
            steps += _steps(ref, item, known.get(ref))
        except NetpluginError as refused:
            faults[ref] = refused
    gone = frozenset(ref for ref in deleted if ref in known and not known[ref].is_owned)
    return Plan(replace(memory, revision=max(memory.revision, revision)), tuple(steps), faults, gone=gone)


def _steps(ref: Ref, item: Written, known: Known | None) -> list[Step]:
    """One, or none if nothing is to be done. Raises: NetpluginError if the value cannot be carried out."""
    if item.desired is None:
        raise item.error or Conflict("it has no value", step="merge")
    desired, at = item.desired, known.generation if known else 0
    if desired.generation < at:
        text = f"generation {desired.generation} is older than {at}, which this host has carried out"
        raise Conflict(text, step="merge", fix="write the value again, with a generation above it")
    if known is None or desired.generation > at:
        after = Known(desired.generation, desired.digest)
        return [Step(ref, item.revision, after, desired.spec, known is not None and known.is_owned)]
    if desired.digest == known.value:
        return []
    text = f"generation {at} has another value here: of a second writer, or changed while the host had"
    fix = "let one writer have the object, and write the value again with a higher generation"
    raise Conflict(f"{text} no fleet, or had another name", step="merge", fix=fix)


def _accepted(memory: Memory, reading: Reading) -> tuple[Memory, bool]:
    """The memory after this reading, and whether an operator lets the host begin afresh with it.

    Raises: Conflict.
    """
    here = [each for each in reading.acceptances if each[0].cluster == reading.cluster]
    is_other = reading.cluster != memory.cluster
    afresh = memory.cluster != "" and (is_other or reading.is_older_than(memory))
    if afresh:
        here = [e for e in here if e[0].replaces == memory.cluster and e[0].number > memory.accepted]
        if not here:
            older = f"etcd is an older copy: at revision {reading.revision} now, at {memory.revision} before"
            other = f"this is cluster {reading.cluster}, and the host was at {memory.cluster} before"
            fix = f"or let it count: netplugin fleet accept --revision {reading.revision}"
            text = f"{other if is_other else older}; nothing of it is carried out"
            raise Conflict(text, step="fleet", fix=f"correct [fleet] endpoints; {fix}")
    after = replace(memory, cluster=reading.cluster, revision=reading.revision, host=reading.host)
    if afresh or reading.is_of_another_name(memory):
        after = replace(after, accepted_revision=0, reported=0, went_back=False)
    for each, wrote in here:
        if each.number > after.accepted:
            up_to = min(each.revision, wrote)
            after = replace(after, accepted=each.number, accepted_revision=up_to)
    return after, afresh
