"""Render a plan as human-readable text: CPU map, memory, and steps by effect."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from netplugin.tuning.output.cpu_map import cpu_map
from netplugin.tuning.planning.plan import Plan
from netplugin.tuning.planning.sources import PAGES, PARTITION
from netplugin.tuning.root import known
from netplugin.tuning.steps import Effect, Step

_HEADS = {
    Effect.LIVE: "Now, while everything runs",
    Effect.OVS_RESTART: "With a restart of OVS (VMs lose their network meanwhile)",
    Effect.REBOOT: "With a reboot",
}


def plan_text(plan: Plan, explain: bool = False) -> str:
    """Render the plan; ``explain`` adds the source of each line."""
    return "\n".join(_lines(plan, explain)) + "\n"


def _lines(plan: Plan, explain: bool) -> Iterator[str]:
    for nic in plan.nics:
        node = known(nic.node, None)
        names = " ".join((nic.address, *nic.interfaces))
        yield f"NIC {names}: {nic.driver or 'no driver'}, NUMA node {'not known' if node is None else node}"
    yield from cpu_map(plan.partition)
    if explain:
        yield from (f"  source of {what}: {source}" for what, source in PARTITION.items())
    for pages in plan.pages:
        more = f", and {pages.beyond} more that are there" if pages.beyond else ""
        yield (
            f"node {pages.node}: {pages.pages} pages of {pages.size_kb} KB "
            f"({pages.ovs_mb} MB for OVS, {pages.vm_mb} MB for VMs){more}"
        )
    if explain:
        yield f"  source: {PAGES}"
    for effect in Effect:
        steps = plan.left(effect)
        if steps:
            yield ""
            yield _HEADS[effect]
            yield from _steps(steps, explain)
    done = sum(step.done for step in plan.steps)
    yield ""
    yield f"{done} of {len(plan.steps)} settings are as planned already."


def _steps(steps: tuple[Step, ...], explain: bool) -> Iterator[str]:
    """Render steps; consecutive steps with the same change and reason become one entry."""
    for (group, now, wanted, why, source), same in groupby(steps, key=_alike):
        targets = [str(step.target) for step in same]
        more = f" and {len(targets) - 1} more like it" if len(targets) > 1 else ""
        yield f"  [{group}] {targets[0]}{more}"
        yield f"      {now} -> {wanted}"
        yield f"      {why}"
        if explain:
            yield f"      source: {source}"


def _alike(step: Step) -> tuple[str, str, str, str, str]:
    now, wanted = ("not set" if value is None else str(value) for value in (step.now, step.wanted))
    return step.group, now, wanted, step.why, step.source
