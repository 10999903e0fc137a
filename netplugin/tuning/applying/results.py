"""What became of each step."""

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


#: What makes the exit status 1.
BAD = frozenset((Outcome.FAILED, Outcome.CHANGED_SINCE))


@dataclass(frozen=True)
class Result:
    """``old`` is what was there, ``new`` what was asked for, both as plans say values.

    ``code`` is that of the error that a failure is, as ``netplugin.errors`` has them.
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
    """For people."""
    return "not set" if value is None else str(value)
