"""Checks of a host, from its facts or against a plan (pure): rules by what they are about."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from netplugin.api.models import Finding
from netplugin.api.pmd_models import PmdState
from netplugin.pmd import findings as pmd
from netplugin.pmd import parts
from netplugin.pmd.settings import read_settings
from netplugin.tuning.checks import links, machine, nodes, running, scopes
from netplugin.tuning.checks.frame import Scope
from netplugin.tuning.checks.scene import Scene
from netplugin.tuning.root import known

T = TypeVar("T")


def _threads(of: Callable[[PmdState], Iterable[T]]) -> Callable[[Scene], Iterator[T]]:
    """Values of a running OVS; none if it was not queried or has no PMD threads."""

    def made(scene: Scene) -> Iterator[T]:
        ovs = known(scene.live.ovs, None)
        if ovs is not None and ovs.pmds:
            settings = read_settings(ovs.other_config)
            yield from of(PmdState(cpus="", cores=ovs.pmds, settings=settings, unpolled=ovs.unpolled))

    return made


#: Each rule sees one value of its scope, and nothing of the others.
SCOPES: tuple[Scope[Any], ...] = (
    Scope(
        "host",
        scopes.hosts,
        (
            machine.unknown,
            machine.offline,
            machine.isolation,
            machine.latency,
            machine.budget,
            machine.hugepages,
            machine.iommu,
        ),
    ),
    Scope("control group", scopes.cgroups, (machine.limits,)),
    Scope(
        "node",
        scopes.nodes,
        (
            nodes.hugepages,
            nodes.bare,
            nodes.socket_memory,
            nodes.vm_memory,
            nodes.nics,
            nodes.queues,
            nodes.vms,
        ),
    ),
    Scope("interface", scopes.links, (links.below, links.peer)),
    Scope("NIC", scopes.nics, (links.carries,)),
    Scope("bridge", scopes.bridges, (links.ports, links.bridge_mtu)),
    Scope("bond", scopes.bonds, (links.spreads, links.members)),
    Scope("OVS", scopes.switches, (running.lcores, running.mask, running.masked)),
    Scope("PMD threads", _threads(lambda state: (state,)), (pmd.pins, pmd.unpolled)),
    Scope("node", _threads(parts.nodes), (pmd.numa,)),
    Scope("node", _threads(pmd.balances), (pmd.uneven,)),
    Scope("port", _threads(parts.ports), (running.queues,)),
    Scope("domain", scopes.domains, (running.on_pmd, running.floating, running.memory, running.emulator)),
    Scope("CPU", scopes.pinned_cpus, (running.shared,)),
    Scope("steps", scopes.step_groups, (machine.planned,)),
)


def check(scene: Scene) -> tuple[Finding, ...]:
    return tuple(finding for scope in SCOPES for finding in scope.findings(scene))
