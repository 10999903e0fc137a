"""The CPUs for a number of PMD cores (pure): those of the host's plan for this number."""

from __future__ import annotations

from collections.abc import Collection

from netplugin.api.errors import NetpluginError
from netplugin.host.cpus import format_list, parse_list
from netplugin.tuning.checks.scene import Scene
from netplugin.tuning.facts import Facts
from netplugin.tuning.intent import HostIntent
from netplugin.tuning.placing.pmd_cores import choose_cores, host_of
from netplugin.tuning.planning.plan import make_plan
from netplugin.tuning.root import known


def planned_cpus(count: int, facts: Facts, nics: Collection[str]) -> str:
    """Return one CPU on each of ``count`` whole cores, on the NUMA nodes of the NICs (PCI addresses).

    They are the PMD cores of the plan for so many (``netplugin host plan --pmd-cores``); on a host that
    has no plan, because it has a single core, those that the agent takes. Without NICs: the fastest.

    Raises: NetpluginError if the nodes have fewer cores, or the cores of the host are unknown.
    """
    there = {nic.address for nic in known(facts.network.nics, ())}
    mine = tuple(nic for nic in dict.fromkeys(nics) if nic in there)
    try:
        plan = make_plan(facts, HostIntent.model_validate({"pmd_cores": count, "nics": mine}))
    except NetpluginError:
        plan = None
    host = host_of(Scene(facts, plan=plan), {}, ())
    return format_list(cpu for core in choose_cores(count, False, host) for cpu in parse_list(core.cpus))


def unfit(cpus: str, facts: Facts) -> str | None:
    """Return why these CPUs cannot run one PMD thread on each of as many cores; None if they can."""
    named = frozenset(parse_list(cpus))
    online = known(facts.cpus.online, None)
    if online is not None and (offline := named - online):
        return f"CPU {format_list(offline)} of pmd_cores {cpus!r} is not on line"
    for core in known(facts.cpus.cores, ()):
        if len(both := core.cpus & named) > 1:
            return f"CPUs {format_list(both)} of pmd_cores {cpus!r} are threads of one core"
    return None
