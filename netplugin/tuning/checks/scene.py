"""Input of the checks of a host."""

from __future__ import annotations

from dataclasses import dataclass, field

from netplugin.pmd.settings import MASK, masked
from netplugin.tuning.facts import Cpus, Facts, Live
from netplugin.tuning.planning.plan import TuningPlan
from netplugin.tuning.root import known


@dataclass(frozen=True)
class Scene:
    """A host's facts and live state, and its plan if an intent is configured."""

    facts: Facts
    live: Live = field(default_factory=Live)
    plan: TuningPlan | None = None

    @property
    def polling(self) -> Cpus:
        """CPUs of PMD threads: running, in pmd-cpu-mask, and planned."""
        ovs = known(self.live.ovs, None)
        planned = self.plan.partition.polling if self.plan else frozenset()
        if ovs is None or not ovs.dpdk_initialized:
            return planned
        # The rule of the mask reports one that cannot be parsed.
        mask = frozenset(masked(ovs.other_config.get(MASK)))
        return planned | mask | self.running_pmds

    @property
    def running_pmds(self) -> Cpus:
        """CPUs of the running PMD threads."""
        ovs = known(self.live.ovs, None)
        return frozenset(pmd.cpu for pmd in ovs.pmds) if ovs else frozenset()
