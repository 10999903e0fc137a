"""Checks of a host, from its facts or against a plan (pure), one module per subject."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from netplugin.api.models import Finding
from netplugin.tuning.checks.links import links, vfs
from netplugin.tuning.checks.machine import budget, cpus, memory
from netplugin.tuning.checks.nic_models import nic_models
from netplugin.tuning.checks.running import domains, ovs, pmd
from netplugin.tuning.checks.scene import Scene, planned, unknown

CHECKS: tuple[Callable[[Scene], Iterable[Finding]], ...] = (
    unknown,
    cpus,
    memory,
    vfs,
    nic_models,
    links,
    ovs,
    pmd,
    domains,
    budget,
    planned,
)


def check(scene: Scene) -> tuple[Finding, ...]:
    return tuple(finding for one in CHECKS for finding in one(scene))
