"""Apply the live steps of a plan: write each to the journal first, set it, read it back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from netplugin.errors import HostError, NetpluginError
from netplugin.tuning.applying.changes import Event
from netplugin.tuning.applying.journal import Journal
from netplugin.tuning.applying.machine import Machine
from netplugin.tuning.applying.place import Kept, Raw
from netplugin.tuning.applying.results import Outcome, Result, shown
from netplugin.tuning.planning.plan import Plan
from netplugin.tuning.steps import Effect, Step, Target, TunedProfile

_LATER = {
    Effect.OVS_RESTART: Outcome.NEEDS_OVS_RESTART,
    Effect.REBOOT: Outcome.NEEDS_REBOOT,
}


def preview(plan: Plan) -> Iterator[Result]:
    """Return what ``apply`` would do (pure)."""
    yield from _all(plan, Effect.LIVE, Outcome.WOULD_SET)
    yield from _later(plan)


def apply(plan: Plan, machine: Machine, journal: Journal) -> Iterator[Result]:
    """Apply the live steps lazily, one per result; a failed step does not stop the others.

    Raises: HostError if the journal cannot be read.
    """
    journal.history()
    live = [step for step in plan.steps if step.effect is Effect.LIVE]
    refused: set[Target] = set()
    profile_set = False
    for step in live:
        result = _take(step, machine, journal)
        if result is not None:
            yield result
            if result.outcome is not Outcome.SET:
                refused.add(step.target)
            profile_set |= result.outcome is Outcome.SET and isinstance(step.target, TunedProfile)
    if profile_set:
        yield from _again([step for step in live if step.target not in refused], machine, journal)
    yield from _later(plan)


def _again(steps: list[Step], machine: Machine, journal: Journal) -> Iterator[Result]:
    """Apply the steps again that a tuned profile has overridden.

    The profile is set after the other steps, so that the journal has their original values: a profile does
    not restore everything when it ends (tuned 2.20 leaves the writeback cpumask).
    """
    for step in steps:
        result = _take(step, machine, journal)
        if result is not None:
            yield result


def _take(step: Step, machine: Machine, journal: Journal) -> Result | None:
    """Apply one step; None if the value is already as planned."""
    result = Result(step.group, step.target, step.now, step.wanted, Outcome.FAILED)
    try:
        before = machine.read(step.target)
        result = replace(result, old=machine.value(step.target, before))
    except (NetpluginError, Kept) as refused:
        return _because(result, refused)
    if result.old == step.wanted:
        return None
    journal.writing(step.group, step.target, before, step.wanted)
    try:
        machine.write(step.target, step.wanted)
        _require(machine, step.target, step.wanted)
    except (NetpluginError, Kept) as refused:
        return _taken_back(_because(result, refused), before, machine, journal)
    journal.mark(Event.WRITTEN, step.group, step.target)
    return replace(result, outcome=Outcome.SET)


def _taken_back(result: Result, before: Raw, machine: Machine, journal: Journal) -> Result:
    """Restore the value after a failed write; if that fails too, it stays in the journal for ``--undo``."""
    try:
        if machine.read(result.target) != before:
            machine.restore(result.target, before)
            _require(machine, result.target, machine.value(result.target, before))
    except Kept:
        pass  # the target no longer exists, so there is nothing to restore
    except NetpluginError as stuck:
        reason = f"{result.reason}; and it could not be put back: {stuck.detail}"
        return replace(
            result, outcome=Outcome.FAILED, reason=reason, fix="netplugin host apply --undo --yes"
        )
    journal.withdraw()
    return result


def _require(machine: Machine, target: Target, wanted: str | None) -> None:
    found = machine.value(target, machine.read(target))
    if found != wanted:
        raise HostError(
            f"{target} is {shown(found)} afterwards and not {shown(wanted)}", step="read-back"
        )


def _because(result: Result, refused: NetpluginError | Kept) -> Result:
    if isinstance(refused, Kept):
        return replace(result, outcome=Outcome.KEPT, reason=str(refused))
    return replace(result, code=refused.code, reason=refused.detail, fix=refused.fix)


def _later(plan: Plan) -> Iterator[Result]:
    for effect, outcome in _LATER.items():
        yield from _all(plan, effect, outcome)


def _all(plan: Plan, effect: Effect, outcome: Outcome) -> Iterator[Result]:
    for step in plan.left(effect):
        yield Result(step.group, step.target, step.now, step.wanted, outcome)
