"""What is wrong with a domain, beside its ports and its host's plan (pure): a file for each matter."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from netplugin.models import Finding
from netplugin.placing.checks.case import Case
from netplugin.placing.checks.cpus import cpus
from netplugin.placing.checks.memory import memory
from netplugin.placing.checks.model import model
from netplugin.placing.checks.nics import nics
from netplugin.placing.checks.realtime import realtime
from netplugin.placing.checks.siblings import siblings
from netplugin.placing.checks.user import user

CHECKS: tuple[Callable[[Case], Iterable[Finding]], ...] = (
    nics, user, memory, cpus, siblings, model, realtime,
)  # fmt: skip


def check(case: Case) -> tuple[Finding, ...]:
    """Raises: InvalidRequest for numbers that are none."""
    return tuple(finding for one in CHECKS for finding in one(case))
