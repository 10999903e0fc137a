"""Plan a host (pure): from facts and an intent to partition, hugepages and steps."""

from __future__ import annotations

from dataclasses import dataclass

from netplugin.tuning.facts import Facts, HostNic, Live
from netplugin.tuning.intent import HostIntent
from netplugin.tuning.planning.hugepages import NodePages, able_nodes, plan_pages
from netplugin.tuning.planning.kernel_arguments import kernel_arguments, page_steps
from netplugin.tuning.planning.kernel_work import kernel_work, latency, tuned_steps
from netplugin.tuning.planning.network import are_sure, chosen_nics, nodes_of, ovs_settings, vf_steps
from netplugin.tuning.planning.partition import Partition, divide, l3_caches, ranks
from netplugin.tuning.root import known
from netplugin.tuning.steps import Effect, Step, needed


@dataclass(frozen=True)
class TuningPlan:
    """``steps`` are all settings of the plan, including those already in place. ``nic_nodes`` are the nodes
    whose PMD threads poll the NICs: their own, or the nearest one that can have PMD threads."""

    intent: HostIntent
    nics: tuple[HostNic, ...]
    nic_nodes: tuple[int, ...]
    partition: Partition
    pages: tuple[NodePages, ...]
    steps: tuple[Step, ...]

    def left(self, effect: Effect) -> tuple[Step, ...]:
        """Pending steps with this effect."""
        return tuple(step for step in self.steps if not step.done and step.effect is effect)


def make_plan(facts: Facts, intent: HostIntent, live: Live | None = None) -> TuningPlan:
    """Make the plan. Raises: InvalidRequest naming the field that requests too much, HostError for a missing
    fact."""
    live = live or Live()
    cores = needed(facts.cpus.cores)
    nics = chosen_nics(facts, intent)
    able = able_nodes(facts, intent)
    distances = known(facts.cpus.distances, {})
    nodes = nodes_of(nics, able, distances)
    away = ranks(cores, nodes, distances)
    order = tuple(sorted(able, key=lambda node: (away[node], node)))
    l3 = l3_caches(known(facts.cpus.caches, ()))
    partition = divide(cores, l3, order, nodes, intent, sure=are_sure(nics, intent))
    pages = plan_pages(facts, partition, able, intent, nics, live)
    steps = (
        *page_steps(facts, pages),
        *ovs_settings(live, partition, pages, intent),
        *kernel_work(facts, partition),
        *latency(facts, partition, intent),
        *tuned_steps(facts, partition, intent),
        *vf_steps(facts, intent),
        *kernel_arguments(facts, partition, pages, intent),
    )
    return TuningPlan(intent, nics, nodes, partition, pages, steps)
