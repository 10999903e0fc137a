"""Check receive queues on PMD threads: NUMA node, load balance, unpolled queues."""

from __future__ import annotations

from collections.abc import Iterator

from netplugin.models import Finding, PmdState
from netplugin.pmd.findings import findings
from netplugin.pmd.settings import read_settings
from netplugin.tuning.checks.scene import Scene
from netplugin.tuning.root import Unknown


def pmd(scene: Scene) -> Iterator[Finding]:
    """PMD findings; none if OVS was not queried or has no PMD threads."""
    live = scene.live.ovs
    if not isinstance(live, Unknown):
        settings = read_settings(live.other_config)
        yield from findings(
            PmdState(cpus="", cores=live.pmds, settings=settings, unpolled=live.unpolled)
        )
