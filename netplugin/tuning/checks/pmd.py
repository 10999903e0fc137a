"""Receive queues on PMD threads: the right NUMA node, even load, none that nobody polls."""

from __future__ import annotations

from collections.abc import Iterator

from netplugin.models import Finding, PmdState
from netplugin.pmd.findings import findings
from netplugin.pmd.settings import read_settings
from netplugin.tuning.checks.scene import Scene
from netplugin.tuning.root import Unknown


def pmd(scene: Scene) -> Iterator[Finding]:
    """Nothing where OVS was not asked, or has no PMD threads."""
    live = scene.live.ovs
    if not isinstance(live, Unknown):
        settings = read_settings(live.other_config)
        yield from findings(
            PmdState(cpus="", cores=live.pmds, settings=settings, unpolled=live.unpolled)
        )
