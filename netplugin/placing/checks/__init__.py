"""Checks of a domain against its ports and the host's plan (pure), one module per subject."""

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
    """Run all checks. Raises: InvalidRequest for a malformed number in the domain XML."""
    return tuple(finding for one in CHECKS for finding in one(case))
