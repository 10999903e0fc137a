"""Checks of a domain against its ports and the host's plan (pure), one module per subject."""

from __future__ import annotations

from netplugin.api.models import Finding
from netplugin.tuning.placing.checks.case import Case
from netplugin.tuning.placing.checks.cpus import cpus, model, realtime, siblings
from netplugin.tuning.placing.checks.memory import memory
from netplugin.tuning.placing.checks.nics import nics, user

CHECKS = (nics, user, memory, cpus, siblings, model, realtime)


def check(case: Case) -> tuple[Finding, ...]:
    """Run all checks. Raises: InvalidRequest for a malformed number in the domain XML."""
    return tuple(finding for one in CHECKS for finding in one(case))
