"""Input of the host checks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from netplugin.host.cpus import from_mask
from netplugin.tuning.facts import Cpus, Facts
from netplugin.tuning.live import Live
from netplugin.tuning.planning.plan import TuningPlan
from netplugin.tuning.root import known

T = TypeVar("T")


@dataclass(frozen=True)
class Scene:
    """A host's facts and live state, and its plan if an intent is configured."""

    facts: Facts
    live: Live = field(default_factory=Live)
    plan: TuningPlan | None = None

    def cpus_of(self, group: str) -> Cpus:
        """The plan's CPUs that processes in this cgroup need."""
        if self.plan is None:
            return frozenset()
        partition = self.plan.partition
        return _of(group, partition.pmd, partition.vm | partition.emulator) or frozenset()

    def hugepages_mb(self, group: str, size_kb: int) -> int:
        """The plan's memory, MB, in hugepages of this size that processes in this cgroup need."""
        pages = [p for p in self.plan.pages if p.size_kb == size_kb] if self.plan else []
        return _of(group, sum(p.ovs_mb for p in pages), sum(p.vm_mb for p in pages)) or 0

    @property
    def polling(self) -> Cpus:
        """CPUs of PMD threads: running, in pmd-cpu-mask, and planned."""
        ovs = known(self.live.ovs, None)
        planned = self.plan.partition.polling if self.plan else frozenset()
        if ovs is None or not ovs.dpdk_initialized:
            return planned
        try:
            mask = frozenset(from_mask(ovs.other_config.get("pmd-cpu-mask", "")))
        except ValueError:
            mask = frozenset()  # the ovs check reports this
        return planned | mask | self.running_pmds

    @property
    def running_pmds(self) -> Cpus:
        """CPUs of the running PMD threads."""
        ovs = known(self.live.ovs, None)
        return frozenset(pmd.cpu for pmd in ovs.pmds) if ovs else frozenset()

    @property
    def realtime(self) -> bool:
        return self.plan is not None and self.plan.intent.realtime


def _of(group: str, ovs: T, vms: T) -> T | None:
    """Choose by slice: systemd runs vswitchd in system.slice, libvirt runs VMs in machine.slice."""
    if group.startswith("/system.slice"):
        return ovs
    return vms if group.startswith("/machine.slice") else None
