"""Each rule sees one value of its scope: in a scene with two, it finds what is wrong with one of them."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from netplugin.api.models import Finding
from netplugin.api.pmd_models import PmdCore, UnpolledQueue
from netplugin.tuning.checks import SCOPES, links, machine, nics, nodes, pmd, running
from netplugin.tuning.checks.frame import Scope
from netplugin.tuning.checks.scene import Scene
from netplugin.tuning.facts import DomainLive, InterfaceFacts, KernelBond, Live, OvsLive, OvsPortLive
from netplugin.tuning.intent import HostIntent
from netplugin.tuning.planning.plan import make_plan
from netplugin.tuning.read import read_facts
from tests.unit.core.pmd_states import core, queue
from tests.unit.tuning.golden import OVS, facts_of
from tests.unit.tuning.machines import Machine, MemoryRoot, load
from tests.unit.tuning.trees import tree

Rule = Callable[[Any], Iterable[Finding]]


def scene(made: str | Machine = "published", live: Live = OVS, **intent: Any) -> Scene:
    facts = facts_of(made) if isinstance(made, str) else read_facts(MemoryRoot(tree(made)))
    return Scene(facts, live, make_plan(facts, HostIntent(**intent), live) if intent else None)


def with_links(*interfaces: InterfaceFacts, bonds: tuple[KernelBond, ...] = (), nics: str = "small") -> Scene:
    facts = facts_of(nics)
    network = replace(facts.network, interfaces=interfaces, bonds=bonds)
    return Scene(replace(facts, network=network), Live())


def interface(name: str, mtu: int, *lowers: str, **more: Any) -> InterfaceFacts:
    fields = {"speed_mbps": None, "rx_queues": 1, "tx_queues": 1, "master": None, **more}
    return InterfaceFacts(name=name, mtu=mtu, lowers=lowers, **fields)


def ovs(*threads: PmdCore, ports: tuple[OvsPortLive, ...] = (), lost: int = 0, **settings: str) -> Scene:
    config = {key.replace("_", "-"): value for key, value in settings.items()}
    unpolled = tuple(UnpolledQueue(port="lost", queue=n) for n in range(lost))
    return scene(live=Live(ovs=OvsLive("3.1.0", "22.11", True, config, ports, threads, unpolled)))


def vms(*domains: DomainLive, isolated: str = "2-9") -> Scene:
    polling = Live(ovs=OvsLive("3.1.0", "22.11", True, {"pmd-cpu-mask": "0x4"}), domains=domains)
    return scene(replace(load("published"), isolated=isolated), polling)


def vm(name: str, *vcpus: set[int], emulator: int = 0, **more: Any) -> DomainLive:
    fields = {"memory_nodes": frozenset(), **more}
    return DomainLive(name, tuple(map(frozenset, vcpus)), frozenset({emulator}), **fields)


def paged(*pages: int, size: int = 1048576) -> Machine:
    """The machine of two nodes, with so many hugepages on each."""
    rows = [
        node | {"hugepages": {size: count}}
        for node, count in zip(load("published").nodes, pages, strict=True)
    ]
    return replace(load("published"), nodes=rows)


REFUSED = Scene(read_facts(MemoryRoot(tree(load("small")), {"/proc/irq/default_smp_affinity": errno.EACCES})))
DOWN = replace(
    load("amd-4-nodes"), nics=[nic | {"speed": -1, "driver": "ice"} for nic in load("amd-4-nodes").nics]
)
#: A NIC that DPDK uses with its kernel driver alone is on vfio-pci, and another is not.
VFIO = replace(
    load("published"), nics=[load("published").nics[0] | {"driver": "vfio-pci"}, *load("published").nics[1:2]]
)
VFS = replace(
    load("published"),
    nics=[
        nic | {"vfs": 2, "vf_drivers": ["vfio-pci", driver]}
        for nic, driver in zip(load("published").nics[:2], ("mlx5_core", "uio_pci_generic"), strict=True)
    ],
)
FLAGS = replace(load("published"), cmdline="isolcpus=nohz,2-5")
#: Port a has more queues than its node has threads, port b has not.
QUEUES = ovs(
    core(2, *(queue("a", n, port_numa_node=0) for n in range(2))),
    core(18, *(queue("b", n, port_numa_node=1) for n in range(2)), node=1),
    core(19, node=1),
)
JUMBO = scene(pmd_cores=2, mtus=(9000,))
TWO = (core(2, queue("a", port_numa_node=0)), core(18, queue("b", port_numa_node=1), node=1))
BOTH_NODES = {"pmd_cores": 2, "vm_cores": 20}

#: The scenes of each rule, and which values of its scope in them, by number, are not as they should be.
CASES: dict[Rule, tuple[tuple[Scene, ...], set[int]]] = {
    machine.unknown: ((scene("small"), REFUSED), {1}),
    machine.offline: ((scene(), scene("amd-4-nodes")), {1}),
    machine.isolation: ((scene(), scene("amd-4-nodes"), scene(FLAGS)), {1, 2}),
    machine.latency: ((scene(pmd_cores=2), scene(pmd_cores=2, realtime=True)), {1}),
    machine.budget: ((scene(pmd_cores=2), scene(pmd_cores=1)), {1}),
    machine.hugepages: ((scene(paged(1, 0)), scene()), {1}),
    machine.iommu: ((scene(), scene(replace(load("published"), iommu_groups=0))), {1}),
    machine.limits: ((scene("amd-4-nodes"),), {0}),
    machine.planned: ((scene("small", pmd_cores=1),), {0, 1, 2, 5, 6}),
    nodes.hugepages: ((scene(paged(99, 0), vm_memory_mb=65536, **BOTH_NODES),), {1}),
    nodes.bare: ((Scene(scene(paged(9, 0)).facts, ovs(*TWO).live),), {1}),
    nodes.socket_memory: (
        (
            Scene(scene(paged(9, 0)).facts, ovs(*TWO, dpdk_socket_mem="1024").live),
            Scene(scene(paged(9, 9)).facts, ovs(TWO[0], dpdk_socket_mem="9999,0").live),
        ),
        {1, 2},
    ),
    nodes.vm_memory: ((scene(vm_memory_mb=16384, vm_size_mb=16384, **BOTH_NODES),), {1}),
    nodes.nics: ((scene(DOWN, pmd_cores=1, vm_cores=1),), {2}),
    nodes.queues: (
        (scene("amd-4-nodes", pmd_cores=3, nics=("ens2f0", "eno8303"), vm_cores=0, queues=4),),
        {2},
    ),
    nodes.vms: ((scene(**BOTH_NODES),), {1}),
    nics.model: ((scene(VFIO, pmd_cores=2, nics=("ens1f1np1",)), scene(VFIO)), {0, 2}),
    nics.vfs: ((scene(VFS),), {1}),
    nics.memory: ((scene("one-socket-memory", pmd_cores=2),), {1}),
    links.next_hops: (
        (
            with_links(
                interface("eth0", 1500),
                interface("vx0", 1450, "eth0", kind="vxlan"),
                interface("vx1", 1500, "eth0", kind="vxlan"),
            ),
        ),
        {2},
    ),
    links.carries: (
        (
            replace(
                with_links(interface("ens1f0np0", 1500), interface("ens1f1np1", 9000), nics="published"),
                plan=JUMBO.plan,
            ),
        ),
        {0},
    ),
    links.ports: (
        (
            ovs(
                ports=(
                    OvsPortLive("p0", "p0", "dpdk", 1500, bridge="br-a"),
                    OvsPortLive("p1", "p1", "dpdk", 9000, bridge="br-b"),
                    OvsPortLive("vm0", "vm0", "dpdkvhostuserclient", 9000, bridge="br-a"),
                    OvsPortLive("vm1", "vm1", "dpdkvhostuserclient", 9000, bridge="br-b"),
                )
            ),
        ),
        {0},
    ),
    links.bridge_mtu: (
        (
            with_links(
                interface("br0", 1500, kind="bridge"),
                interface("br1", 9000, kind="bridge"),
                interface("tap0", 1500, master="br0"),
                interface("tap1", 9000, master="br0"),
                interface("tap2", 1500, master="br1"),
            ),
        ),
        {1},
    ),
    links.spreads: (
        (
            with_links(
                bonds=(
                    KernelBond("bond0", "802.3ad", "layer2", ()),
                    KernelBond("bond1", "802.3ad", "layer3+4", ()),
                )
            ),
        ),
        {0},
    ),
    links.members: (
        (
            with_links(
                interface("eth0", 1500, state="up"),
                interface("eth1", 1500, state="down"),
                bonds=(
                    KernelBond("bond0", "active-backup", "layer2", ("eth0",)),
                    KernelBond("bond1", "active-backup", "layer2", ("eth1",)),
                ),
            ),
            ovs(
                ports=tuple(
                    OvsPortLive(f"p{n}", "bond", "dpdk", 1500, "balance-tcp", "br", link=n == 0)
                    for n in range(2)
                )
            ),
        ),
        {1, 2},
    ),
    running.lcores: ((ovs(), ovs(dpdk_lcore_mask="0x1")), {1}),
    running.mask: ((ovs(core(2), pmd_cpu_mask="0x4"), ovs(core(2), pmd_cpu_mask="0x14")), {1}),
    running.slow_core: ((Scene(facts_of("hybrid"), ovs(core(2), core(16)).live),), {1}),
    running.masked: ((vms(), vms(isolated="8")), {1}),
    pmd.queues: ((QUEUES,), {0}),
    running.on_pmd: ((vms(vm("a", {2}), vm("b", {3})),), {0}),
    running.by_pmd: ((vms(vm("a", {34}), vm("b", {3}, {35}), isolated="2-9,34-41"),), {0}),
    running.floating: ((vms(vm("a", {3, 4}), vm("b", {3})),), {0}),
    running.memory: (
        (vms(vm("a", {17}, memory_nodes=frozenset({0})), vm("b", {3}, memory_nodes=frozenset({0}))),),
        {0},
    ),
    running.emulator: ((vms(vm("a", {3}, emulator=4), vm("b", {3})),), {0}),
    running.shared: ((vms(vm("a", {3}), vm("b", {3}, {4})),), {0}),
    pmd.pins: ((ovs(core(2, queue("a", pinned_to=2))), ovs(core(2, queue("a", pinned_to=9)))), {1}),
    pmd.unpolled: ((ovs(core(2)), ovs(core(2), lost=1), ovs(core(2, isolated=True))), {1, 2}),
    pmd.numa: (
        (
            ovs(core(2, queue("a", port_numa_node=1), queue("b", port_numa_node=0)), core(18, node=1)),
            ovs(core(2, isolated=True), core(18, node=1)),
        ),
        {1, 2},
    ),
    pmd.uneven: (
        (
            ovs(
                core(2, queue("a", 0, 50)),
                core(18, queue("b", 0, 40), queue("b", 1, 40), node=1),
                core(19, node=1),
            ),
        ),
        {1},
    ),
}
BOUND_RULES = [
    pytest.param(scope, rule, id=f"{scope.name}-{rule.__name__}") for scope in SCOPES for rule in scope.rules
]


def judged(scope: Scope[Any], rule: Rule) -> list[list[Finding]]:
    """What the rule finds wrong with each value of its scope in its scenes."""
    values = [value for one in CASES[rule][0] for value in scope.make(one)]
    return [[finding for finding in rule(value) if finding.status != "ok"] for value in values]


@pytest.mark.parametrize(("scope", "rule"), BOUND_RULES)
def test_a_rule_finds_one_and_not_the_other(scope: Scope[Any], rule: Rule) -> None:
    assert rule in CASES, (
        "a rule needs a scene in which it holds of one value of its scope and not of another"
    )
    found = judged(scope, rule)
    assert {number for number, findings in enumerate(found) if findings} == CASES[rule][1]
    assert 0 < len(CASES[rule][1]) < len(found)


def test_the_documentation_says_what_each_finding_is_about() -> None:
    text = (Path(__file__).parents[3] / "docs/tuning.md").read_text()
    rows = re.findall(r"^\| (`[^|]+) \| ([^|]+) \|", text, re.MULTILINE)
    about = {name: scope for names, scope in rows for name in re.findall(r"`([^`]+)`", names)}
    for scope in SCOPES:
        for finding in (f for rule in scope.rules for found in judged(scope, rule) for f in found):
            name = "plan-*" if finding.id.startswith("plan-") else finding.id
            assert scope.name in about[name].split(", "), (finding.id, scope.name)
