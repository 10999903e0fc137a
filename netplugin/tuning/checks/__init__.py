"""Checks of a host, from its facts or against a plan (pure), one module per subject."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from netplugin.models import Finding
from netplugin.tuning.checks.budget import budget
from netplugin.tuning.checks.cpus import cpus
from netplugin.tuning.checks.domains import domains
from netplugin.tuning.checks.links import links
from netplugin.tuning.checks.memory import memory
from netplugin.tuning.checks.ovs import ovs
from netplugin.tuning.checks.planned import planned
from netplugin.tuning.checks.pmd import pmd
from netplugin.tuning.checks.scene import Scene
from netplugin.tuning.checks.unknown import unknown
from netplugin.tuning.checks.vfs import vfs

CHECKS: tuple[Callable[[Scene], Iterable[Finding]], ...] = (
    unknown, cpus, memory, vfs, links, ovs, pmd, domains, budget, planned,
)  # fmt: skip


def check(scene: Scene) -> tuple[Finding, ...]:
    return tuple(finding for one in CHECKS for finding in one(scene))
