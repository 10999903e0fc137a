"""Apply the live steps of a plan, each journalled first and read back, and undo them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from netplugin.api.errors import HostError, NetpluginError
from netplugin.tuning import steps
from netplugin.tuning.applying import kernel, services
from netplugin.tuning.applying.accessor import (
    Raw,
    Run,
    SettingAccessor,
    WritableRoot,
    WriteIgnored,
    run_program,
)
from netplugin.tuning.applying.journal import AppliedChange, ApplyJournal, History, JournalEvent
from netplugin.tuning.applying.ovs_config import OvsConfig, OvsOtherConfig
from netplugin.tuning.planning.plan import TuningPlan
from netplugin.tuning.root import Fact, Unknown
from netplugin.tuning.steps import Effect, Group, Step, Target, TunedProfile


class StepOutcome(StrEnum):
    WOULD_SET = "would-set"
    SET = "set"
    KEPT = "kept"
    FAILED = "failed"
    NEEDS_OVS_RESTART = "needs-ovs-restart"
    NEEDS_REBOOT = "needs-reboot"
    WOULD_RESTORE = "would-restore"
    RESTORED = "restored"
    GONE = "gone"
    CHANGED_SINCE = "changed-since"


#: Outcomes that make the exit status 1.
BAD = frozenset((StepOutcome.FAILED, StepOutcome.CHANGED_SINCE))


@dataclass(frozen=True)
class Result:
    """``old`` is the previous value, ``new`` the requested one, both as plan values.

    ``code`` is the error code of a failure, one of those in ``netplugin.api.errors``.
    """

    group: Group
    target: Target
    old: Fact[str | None]
    new: str | None
    outcome: StepOutcome
    code: str | None = None
    reason: str | None = None
    fix: str | None = None


def shown(value: Fact[str | None]) -> str:
    """A value as human-readable text."""
    return "not set" if value is None else str(value)


_NOT_YET = {
    Effect.LIVE: StepOutcome.WOULD_SET,
    Effect.OVS_RESTART: StepOutcome.NEEDS_OVS_RESTART,
    Effect.REBOOT: StepOutcome.NEEDS_REBOOT,
}


def preview(plan: TuningPlan, effects: Iterable[Effect] = tuple(Effect)) -> Iterator[Result]:
    """Return what ``apply`` would do (pure)."""
    for effect in effects:
        for step in plan.left(effect):
            yield Result(step.group, step.target, step.now, step.desired, _NOT_YET[effect])


def apply(plan: TuningPlan, machine: TunedMachine, journal: ApplyJournal) -> Iterator[Result]:
    """Apply the live steps lazily, one per result; a failed step does not stop the others.

    Raises: HostError if the journal cannot be read or written; nothing is changed after that.
    """
    journal.history()
    live = [step for step in plan.steps if step.effect is Effect.LIVE]
    refused: set[Target] = set()
    profile_set = False
    for step in live:
        result = _take(step, machine, journal)
        if result is not None:
            yield result
            if result.outcome is not StepOutcome.SET:
                refused.add(step.target)
            profile_set |= result.outcome is StepOutcome.SET and isinstance(step.target, TunedProfile)
    if profile_set:
        # Again what the profile has overridden. It is set after the others, so that the journal has their
        # original values: a profile does not restore everything when it ends (tuned 2.20 leaves the
        # writeback cpumask).
        for step in live:
            if step.target not in refused and (result := _take(step, machine, journal)):
                yield result
    yield from preview(plan, (Effect.OVS_RESTART, Effect.REBOOT))


def _take(step: Step, machine: TunedMachine, journal: ApplyJournal) -> Result | None:
    """Apply one step; None if the value is already as planned."""
    result = Result(step.group, step.target, step.now, step.desired, StepOutcome.FAILED)
    try:
        before = machine.read(step.target)
        result = replace(result, old=machine.value(step.target, before))
    except (NetpluginError, WriteIgnored) as refused:
        return _because(result, refused)
    if result.old == step.desired:
        return None
    journal.writing(step.group, step.target, before, step.desired)
    try:
        machine.write(step.target, step.desired)
        _require(machine, step.target, step.desired)
    except (NetpluginError, WriteIgnored) as refused:
        return _taken_back(_because(result, refused), before, machine, journal)
    journal.mark(JournalEvent.WRITTEN, step.group, step.target)
    return replace(result, outcome=StepOutcome.SET)


def _taken_back(result: Result, before: Raw, machine: TunedMachine, journal: ApplyJournal) -> Result:
    """Restore the value after a failed write; if that fails too, it stays in the journal for ``--undo``."""
    try:
        if machine.read(result.target) != before:
            machine.restore(result.target, before)
            _require(machine, result.target, machine.value(result.target, before))
    except WriteIgnored:
        pass  # the target no longer exists, so there is nothing to restore
    except NetpluginError as stuck:
        reason = f"{result.reason}; and it could not be put back: {stuck.detail}"
        fix = "netplugin host apply --undo --yes"
        return replace(result, outcome=StepOutcome.FAILED, reason=reason, fix=fix)
    journal.withdraw()
    return result


def _require(machine: TunedMachine, target: Target, desired: str | None) -> None:
    found = machine.value(target, machine.read(target))
    if found != desired:
        raise HostError(f"{target} is {shown(found)} afterwards and not {shown(desired)}", step="read-back")


def _because(
    result: Result, refused: NetpluginError | WriteIgnored, ignored: StepOutcome = StepOutcome.KEPT
) -> Result:
    if isinstance(refused, WriteIgnored):
        return replace(result, outcome=ignored, reason=str(refused))
    return replace(result, code=refused.code, reason=refused.detail, fix=refused.fix)


_SINCE = "somebody else set it since"
_FORCE = "look who did; --force puts it back all the same"


def preview_undo(history: History, machine: TunedMachine, force: bool) -> Iterator[Result]:
    """Return what ``undo`` would do; reads the host and writes nothing."""
    for change in reversed(history.changes):
        yield _undone(change, machine, None, force)
    yield from _gone(history)


def undo(machine: TunedMachine, journal: ApplyJournal, force: bool) -> Iterator[Result]:
    """Restore values to what they were before the first apply in the journal, lazily, the last change first.

    ``force``: also values that something else has changed since.
    Raises: HostError if the journal cannot be read or written; nothing is changed after that.
    """
    history = journal.history()
    for change in reversed(history.changes):
        result = _undone(change, machine, journal, force)
        if result.outcome in (StepOutcome.RESTORED, StepOutcome.GONE):
            journal.mark(JournalEvent.UNDONE, change.group, change.target)
        yield result
    yield from _gone(history)
    if not journal.history().changes:
        journal.clear()


def _undone(
    change: AppliedChange, machine: TunedMachine, journal: ApplyJournal | None, force: bool
) -> Result:
    """Undo one change; without a journal only return what would be done."""
    before = machine.value(change.target, change.before)
    nothing = Unknown(str(change.target), "not read")
    result = Result(change.group, change.target, nothing, before, StepOutcome.FAILED)
    try:
        now = machine.read(change.target)
        result = replace(result, old=machine.value(change.target, now))
        if _is_back(change, now, machine):
            return replace(result, outcome=StepOutcome.RESTORED)
        if not (force or change.open or result.old in change.ours):
            return replace(result, outcome=StepOutcome.CHANGED_SINCE, reason=_SINCE, fix=_FORCE)
    except (NetpluginError, WriteIgnored) as refused:
        return _because(result, refused, StepOutcome.GONE)
    if journal is None:
        return replace(result, outcome=StepOutcome.WOULD_RESTORE)
    # Not in a try: an error of the journal is not one of this change, and must end the undo.
    journal.mark(JournalEvent.UNDOING, change.group, change.target)
    try:
        _restore(change, machine)
    except (NetpluginError, WriteIgnored) as refused:
        return _because(result, refused, StepOutcome.GONE)
    return replace(result, outcome=StepOutcome.RESTORED)


def _restore(change: AppliedChange, machine: TunedMachine) -> None:
    machine.restore(change.target, change.before)
    found = machine.read(change.target)
    if machine.value(change.target, found) != machine.value(change.target, change.before):
        value = shown(machine.value(change.target, found))
        raise HostError(f"{change.target} is {value} afterwards", step="read-back")


def _is_back(change: AppliedChange, now: Raw, machine: TunedMachine) -> bool:
    """True if the value is restored: the same raw text, or an equivalent one if no write is open."""
    if now == change.before or change.open:
        return now == change.before
    return machine.value(change.target, now) == machine.value(change.target, change.before)


def _gone(history: History) -> Iterator[Result]:
    for group, target in history.gone:
        nothing = Unknown(str(target), "not read")
        yield Result(group, target, nothing, None, StepOutcome.GONE, reason="a boot has undone it")


@dataclass(frozen=True)
class TunedMachine:
    """Access to a host: files below ``root``, OVS, programs, the scheduler, and the agent's VF allocation."""

    root: WritableRoot
    ovs: OvsOtherConfig
    ports: kernel.Ports
    run: Run = run_program
    set_scheduler: kernel.SetScheduler = kernel.set_scheduler

    def read(self, target: Target) -> Raw:
        """Read the raw value. Raises, like the other methods: NetpluginError, ``WriteIgnored``."""
        return self._place(target).read(target)

    def value(self, target: Target, raw: Raw) -> str | None:
        return self._place(target).value(target, raw)

    def write(self, target: Target, desired: str | None) -> None:
        self._place(target).write(target, desired)

    def restore(self, target: Target, raw: Raw) -> None:
        self._place(target).restore(target, raw)

    def _place(self, target: Target) -> SettingAccessor[Any]:
        places: Mapping[type, SettingAccessor[Any]] = {
            steps.File: kernel.KernelFiles(self.root),
            steps.Sysctl: kernel.KernelFiles(self.root),
            steps.OtherConfig: OvsConfig(self.ovs),
            steps.TunedVariable: services.TunedVariables(self.root),
            steps.TunedProfile: services.TunedProfiles(self.root, self.run),
            steps.ThreadPriority: kernel.KernelThreads(self.root, self.set_scheduler),
            steps.Swap: kernel.Swaps(self.root, self.run),
            steps.BannedCpus: services.IrqbalanceFile(self.root, self.run),
            steps.VfCount: kernel.VfCounts(self.root, self.ports),
        }
        return places[type(target)]
