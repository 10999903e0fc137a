"""Checks of a host, from its facts or against a plan (pure), one module per subject."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from netplugin.api.models import Finding
from netplugin.tuning.checks.cpus import budget, cpus
from netplugin.tuning.checks.domains import domains
from netplugin.tuning.checks.links import links, vfs
from netplugin.tuning.checks.memory import memory
from netplugin.tuning.checks.ovs import ovs, pmd
from netplugin.tuning.checks.planned import planned, unknown
from netplugin.tuning.checks.scene import Scene

CHECKS: tuple[Callable[[Scene], Iterable[Finding]], ...] = (
    unknown,
    cpus,
    memory,
    vfs,
    links,
    ovs,
    pmd,
    domains,
    budget,
    planned,
)


def check(scene: Scene) -> tuple[Finding, ...]:
    return tuple(finding for one in CHECKS for finding in one(scene))
