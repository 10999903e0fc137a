"""Outcome of each step of an apply or undo."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from netplugin.tuning.root import Fact
from netplugin.tuning.steps import Group, Target


class Outcome(StrEnum):
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
BAD = frozenset((Outcome.FAILED, Outcome.CHANGED_SINCE))


@dataclass(frozen=True)
class Result:
    """``old`` is the previous value, ``new`` the requested one, both as plan values.

    ``code`` is the error code of a failure, one of those in ``netplugin.errors``.
    """

    group: Group
    target: Target
    old: Fact[str | None]
    new: str | None
    outcome: Outcome
    code: str | None = None
    reason: str | None = None
    fix: str | None = None


def shown(value: Fact[str | None]) -> str:
    """A value as human-readable text."""
    return "not set" if value is None else str(value)
