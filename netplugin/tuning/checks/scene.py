"""What the checks look at."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from netplugin.host.cpus import from_mask
from netplugin.tuning.facts import Cpus, Facts
from netplugin.tuning.live import Live
from netplugin.tuning.planning.plan import Plan
from netplugin.tuning.root import known

T = TypeVar("T")


@dataclass(frozen=True)
class Scene:
    """A machine, and the plan for it if it is known what it is wanted for."""

    facts: Facts
    live: Live = field(default_factory=Live)
    plan: Plan | None = None

    def cpus_of(self, group: str) -> Cpus:
        """The CPUs of the plan that what runs in a control group needs."""
        if self.plan is None:
            return frozenset()
        partition = self.plan.partition
        return _of(group, partition.pmd, partition.vm | partition.emulator) or frozenset()

    def hugepages_mb(self, group: str, size_kb: int) -> int:
        """The memory of the plan in pages of this size that what runs in a control group needs."""
        pages = [p for p in self.plan.pages if p.size_kb == size_kb] if self.plan else []
        return _of(group, sum(p.ovs_mb for p in pages), sum(p.vm_mb for p in pages)) or 0

    @property
    def polling(self) -> Cpus:
        """The CPUs of PMD threads: those that run, those to come with the mask, and the plan's."""
        ovs = known(self.live.ovs, None)
        planned = self.plan.partition.polling if self.plan else frozenset()
        if ovs is None or not ovs.dpdk_initialized:
            return planned
        try:
            mask = frozenset(from_mask(ovs.other_config.get("pmd-cpu-mask", "")))
        except ValueError:
            mask = frozenset()  # a finding of its own
        return planned | mask | self.running_pmds

    @property
    def running_pmds(self) -> Cpus:
        """The CPUs of PMD threads that run now."""
        ovs = known(self.live.ovs, None)
        return frozenset(pmd.cpu for pmd in ovs.pmds) if ovs else frozenset()

    @property
    def realtime(self) -> bool:
        return self.plan is not None and self.plan.intent.realtime


def _of(group: str, ovs: T, vms: T) -> T | None:
    """systemd has vswitchd below system.slice, libvirt has VMs below machine.slice."""
    if group.startswith("/system.slice"):
        return ovs
    return vms if group.startswith("/machine.slice") else None
