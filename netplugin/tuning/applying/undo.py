"""Undo: restore every value to what it was before the first apply in the journal. Needs no plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from netplugin.errors import HostError, NetpluginError
from netplugin.tuning.applying.changes import Change, Event, History
from netplugin.tuning.applying.journal import Journal
from netplugin.tuning.applying.machine import Machine
from netplugin.tuning.applying.place import Kept, Raw
from netplugin.tuning.applying.results import Outcome, Result, shown
from netplugin.tuning.root import Unknown

_SINCE = "somebody else set it since"
_FORCE = "look who did; --force puts it back all the same"


def preview_undo(history: History, machine: Machine, force: bool) -> Iterator[Result]:
    """Return what ``undo`` would do; reads the host and writes nothing."""
    for change in reversed(history.changes):
        yield _undone(change, machine, None, force)
    yield from _gone(history)


def undo(machine: Machine, journal: Journal, force: bool) -> Iterator[Result]:
    """Restore values lazily, one per result, the last change first.

    ``force``: also values that something else has changed since.
    Raises: HostError if the journal cannot be read.
    """
    history = journal.history()
    for change in reversed(history.changes):
        result = _undone(change, machine, journal, force)
        if result.outcome in (Outcome.RESTORED, Outcome.GONE):
            journal.mark(Event.UNDONE, change.group, change.target)
        yield result
    yield from _gone(history)
    if not journal.history().changes:
        journal.clear()


def _undone(change: Change, machine: Machine, journal: Journal | None, force: bool) -> Result:
    """Undo one change; without a journal only return what would be done."""
    before = machine.value(change.target, change.before)
    result = Result(
        change.group, change.target, Unknown(str(change.target), "not read"), before, Outcome.FAILED
    )
    try:
        now = machine.read(change.target)
        result = replace(result, old=machine.value(change.target, now))
        if _is_back(change, now, machine):
            return replace(result, outcome=Outcome.RESTORED)
        if not (force or change.open or result.old in change.ours):
            return replace(result, outcome=Outcome.CHANGED_SINCE, reason=_SINCE, fix=_FORCE)
        if journal is None:
            return replace(result, outcome=Outcome.WOULD_RESTORE)
        _restore(change, machine, journal)
    except Kept as gone:
        return replace(result, outcome=Outcome.GONE, reason=str(gone))
    except NetpluginError as refused:
        return replace(result, code=refused.code, reason=refused.detail, fix=refused.fix)
    return replace(result, outcome=Outcome.RESTORED)


def _restore(change: Change, machine: Machine, journal: Journal) -> None:
    journal.mark(Event.UNDOING, change.group, change.target)
    machine.restore(change.target, change.before)
    found = machine.read(change.target)
    if machine.value(change.target, found) != machine.value(change.target, change.before):
        value = shown(machine.value(change.target, found))
        raise HostError(f"{change.target} is {value} afterwards", step="read-back")


def _is_back(change: Change, now: Raw, machine: Machine) -> bool:
    """True if the value is restored: the same raw text, or an equivalent one if no write is open."""
    if now == change.before or change.open:
        return now == change.before
    return machine.value(change.target, now) == machine.value(change.target, change.before)


def _gone(history: History) -> Iterator[Result]:
    for group, target in history.gone:
        nothing = Unknown(str(target), "not read")
        yield Result(group, target, nothing, None, Outcome.GONE, reason="a boot has undone it")
