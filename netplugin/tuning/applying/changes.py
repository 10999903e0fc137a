"""Journal lines, and the changes still to be undone that follow from them (pure)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from netplugin.tuning.applying.place import Raw
from netplugin.tuning.as_json import as_json
from netplugin.tuning.steps import (
    BannedCpus,
    BootPages,
    Group,
    KernelArgument,
    OtherConfig,
    ServiceCpus,
    Target,
    TunedProfile,
    TunedVariable,
)

#: Targets that are set only at boot.
_AT_BOOT = (KernelArgument, ServiceCpus, BootPages)
_KINDS: dict[str, type[Any]] = {
    kind.kind: kind for kind in get_args(Target) if kind not in _AT_BOOT
}
#: Targets stored on disk. All others are kernel state, which a reboot resets.
_ON_DISK = (OtherConfig, TunedProfile, TunedVariable, BannedCpus)


class Event(StrEnum):
    """``WRITING`` and ``UNDOING`` are logged before the host is changed, the other two after."""

    WRITING = "writing"
    WRITTEN = "written"
    UNDOING = "undoing"
    UNDONE = "undone"


class Line(BaseModel):
    """``before`` is a raw value, ``wanted`` a plan value; only ``writing`` lines have them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    event: Event
    boot: str
    group: Group
    target: dict[str, Any]
    before: Raw = None
    wanted: str | None = None

    @property
    def of(self) -> Target:
        """The target of the line. Raises: ValueError."""
        words = dict(self.target)
        try:
            found: Target = _KINDS[words.pop("kind")](**words)
        except (KeyError, TypeError) as wrong:
            raise ValueError(f"there is no such target: {self.target}") from wrong
        return found


@dataclass(frozen=True)
class Change:
    """All writes to one target. ``before`` is the value before the first; ``ours`` are all values written.

    ``open``: a write started and its end is not in the journal, so the value may be partly written.
    """

    group: Group
    target: Target
    before: Raw
    ours: frozenset[str | None]
    open: bool


@dataclass(frozen=True)
class History:
    """``changes`` in the order of their first write; ``gone`` are changes that a reboot has undone."""

    changes: tuple[Change, ...] = ()
    gone: tuple[tuple[Group, Target], ...] = ()


def line(event: Event, boot: str, group: Group, target: Target, **more: Raw) -> str:
    return json.dumps(
        {"event": event, "boot": boot, "group": group, "target": as_json(target), **more}
    )


def history(lines: Iterable[str], boot: str) -> History:
    """Return what is left to undo; ``boot`` is the kernel's current boot id. Raises: ValueError."""
    changes: dict[Target, Change] = {}
    gone: dict[Target, Group] = {}
    profile_set = False
    for text in lines:
        try:
            entry = Line.model_validate_json(text)
        except ValidationError as wrong:
            raise ValueError(f"{text[:60]!r} is no line of a journal") from wrong
        target = entry.of
        profile_set |= isinstance(target, TunedProfile)
        if entry.boot != boot and not isinstance(target, _ON_DISK):
            gone[target] = entry.group
            if entry.event is Event.UNDONE:
                del gone[target]
        else:
            gone.pop(target, None)
            _take(changes, entry, target)
    found = (
        _as_profile_leaves_it(change) if profile_set else change for change in changes.values()
    )
    return History(tuple(found), tuple((g, t) for t, g in gone.items()))


def _as_profile_leaves_it(change: Change) -> Change:
    """Accept a missing irqbalance list as our own value: a tuned profile that ends removes the list, whoever
    wrote it (``_restore_banned_cpus`` in tuned's tuned/plugins/plugin_irqbalance.py)."""
    if not isinstance(change.target, BannedCpus):
        return change
    return replace(change, ours=change.ours | {None})


def _take(changes: dict[Target, Change], entry: Line, target: Target) -> None:
    there = changes.get(target)
    if entry.event is Event.WRITING:
        before = there.before if there else entry.before
        ours = (there.ours if there else frozenset()) | {entry.wanted}
        changes[target] = Change(entry.group, target, before, ours, open=True)
    elif there is None:
        raise ValueError(f"{entry.event} of {target}, which nothing was written to")
    elif entry.event is Event.UNDONE:
        del changes[target]
    else:
        changes[target] = replace(there, open=entry.event is Event.UNDOING)
