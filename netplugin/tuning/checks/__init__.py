"""Checks of a host, from its facts or against a plan (pure): rules by what they are about."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from netplugin.api.models import Finding
from netplugin.api.pmd_models import PmdState
from netplugin.pmd import parts
from netplugin.tuning.checks import link_scopes, links, machine, nics, nodes, pmd, running, scopes
from netplugin.tuning.checks.frame import Scope
from netplugin.tuning.checks.scene import Scene

T = TypeVar("T")


def _each(split: Callable[[PmdState], Iterable[T]]) -> Callable[[Scene], Iterator[T]]:
    return lambda scene: (one for state in scopes.pmd_states(scene) for one in split(state))


#: Each rule sees one value of its scope, and nothing of the others.
SCOPES: tuple[Scope[Any], ...] = (
    Scope("host", scopes.hosts, (machine.unknown, machine.offline, machine.isolation, machine.latency)),
    Scope("host", scopes.hosts, (machine.budget, machine.hugepages, machine.iommu)),
    Scope("control group", scopes.cgroups, (machine.limits,)),
    Scope("node", scopes.nodes, (nodes.hugepages, nodes.bare, nodes.socket_memory, nodes.vm_memory)),
    Scope("node", scopes.nodes, (nodes.nics, nodes.queues, nodes.vms)),
    Scope("NIC", scopes.nics, (nics.model, nics.vfs, nics.memory)),
    Scope("interface", link_scopes.links, (links.next_hops, links.carries)),
    Scope("bridge", link_scopes.bridges, (links.ports, links.bridge_mtu)),
    Scope("bond", link_scopes.bonds, (links.spreads, links.members)),
    Scope("OVS", scopes.switches, (running.lcores, running.mask, running.masked)),
    Scope("PMD thread", scopes.pmd_threads, (running.slow_core,)),
    Scope("PMD threads", scopes.pmd_states, (pmd.pins, pmd.unpolled)),
    Scope("node", _each(parts.nodes), (pmd.numa,)),
    Scope("node", _each(pmd.balances), (pmd.uneven,)),
    Scope("port", _each(parts.ports), (pmd.queues,)),
    Scope("domain", scopes.domains, (running.on_pmd, running.by_pmd, running.floating)),
    Scope("domain", scopes.domains, (running.memory, running.emulator)),
    Scope("CPU", scopes.pinned_cpus, (running.shared,)),
    Scope("steps", scopes.step_groups, (machine.planned,)),
)


def check(scene: Scene) -> tuple[Finding, ...]:
    return tuple(finding for scope in SCOPES for finding in scope.findings(scene))
