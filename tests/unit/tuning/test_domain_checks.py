"""Findings of VMs that run: each is made where something is wrong, and not where nothing is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from netplugin.api.models import Finding
from netplugin.api.pmd_models import PmdCore
from netplugin.host.cpus import parse_list
from netplugin.tuning.checks import check
from netplugin.tuning.checks.scene import Scene
from netplugin.tuning.facts import DomainLive, Live, OvsLive
from netplugin.tuning.intent import HostIntent
from netplugin.tuning.planning.plan import make_plan
from netplugin.tuning.root import Unknown
from tests.unit.tuning.golden import facts_of

# Node 0 is 0-15,32-47; 1,33 are of PMD threads, 4-7,36-39 isolated for VMs.
FACTS = facts_of("published")
FACTS = replace(FACTS, cpus=replace(FACTS.cpus, isolated=frozenset(parse_list("1,33,4-7,36-39"))))
PMD = PmdCore(cpu=5, numa_node=0, isolated=False, busy_percent=None, queues=())
OVS = OvsLive("3.1.0", "DPDK 22.11.7", True, {"pmd-cpu-mask": "0x200000002"})


def cpus(text: str) -> frozenset[int]:
    return frozenset(parse_list(text))


def domain(
    *vcpus: str,
    name: str = "vm1",
    emulator: str = "0,2-3",
    memory: str = "",
    iothreads: tuple[str, ...] = (),
) -> DomainLive:
    return DomainLive(
        name, tuple(map(cpus, vcpus)), cpus(emulator), cpus(memory), tuple(map(cpus, iothreads))
    )


def found(*domains: DomainLive, ovs: OvsLive = OVS) -> dict[str, Finding]:
    findings = check(Scene(FACTS, Live(ovs=ovs, domains=domains)))
    return {finding.id: finding for finding in findings if finding.id.startswith("domain-")}


@pytest.mark.parametrize(
    "right",
    [
        domain("4", "36", memory="0"),
        domain("2-3", "2-3"),
        domain("16", "48", memory="1", emulator="17"),
        domain("4", iothreads=("5", "0,2-3")),
        domain("4", "20", memory="0-1"),
    ],
    ids=["pinned", "floats beside", "another node", "IO threads", "two nodes"],
)
def test_nothing_is_wrong_with_these(right: DomainLive) -> None:
    assert found(right) == {}


def test_two_that_share_nothing() -> None:
    assert found(domain("4", "5"), domain("6", "7", name="vm2")) == {}


def test_a_vcpu_on_a_pmd_core_fails() -> None:
    finding = found(domain("4", "33", "1,4-7"))["domain-pmd"]
    assert finding.status == "fail"
    assert finding.found == "vm1: vCPUs 1-2 may run on CPUs 1,33 of PMD threads"
    assert finding.fix and finding.fix.startswith("virsh vcpupin vm1 1 CPU ")


@pytest.mark.parametrize(
    ("ovs", "count"),
    [
        (replace(OVS, other_config={}), 0),
        (replace(OVS, other_config={"pmd-cpu-mask": "none"}), 0),
        (replace(OVS, dpdk_initialized=False), 0),
        (replace(OVS, other_config={}, pmds=(PMD,)), 1),
    ],
    ids=["no mask", "a mask that is none", "no DPDK", "a thread that runs"],
)
def test_which_cores_are_those_of_pmd_threads(ovs: OvsLive, count: int) -> None:
    findings = found(domain("1"), domain("5", name="vm2"), ovs=ovs)
    assert ("domain-pmd" in findings) == bool(count)


@pytest.mark.parametrize("ovs", [OVS, Unknown("db.sock", "there is no such file", missing=True)])
def test_the_cores_of_the_plan_count_too(ovs: OvsLive | Unknown) -> None:
    plan = make_plan(FACTS, HostIntent(pmd_cores=2))
    live = Live(ovs=ovs, domains=(domain(str(min(plan.partition.polling - {1, 33}))),))
    assert [f.status for f in check(Scene(FACTS, live, plan)) if f.id == "domain-pmd"] == ["fail"]
    assert not [f for f in check(Scene(FACTS, live)) if f.id == "domain-pmd"]


def test_a_vcpu_that_floats_over_isolated_cpus() -> None:
    finding = found(domain("4", "0,4-5", "2-3"))["domain-floating"]
    assert finding.status == "warn"
    assert finding.found == (
        "vm1: vCPUs 1 may run on isolated CPUs 4-5 and are not pinned to one each: nothing moves them"
    )


def test_memory_on_another_node() -> None:
    finding = found(domain("4", memory="1"))["domain-memory"]
    assert finding.found == "vm1: memory on NUMA node 1, vCPUs on 0"
    assert set(found(domain("4", "20", memory="0"))) == {"domain-memory"}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (domain("4", emulator="0-4"), "emulator threads may run on"),
        (domain("4", emulator="33"), "emulator threads may run on"),
        (domain("4", iothreads=("5", "1")), "IO threads may run on"),
    ],
)
def test_threads_other_than_vcpus(wrong: DomainLive, words: str) -> None:
    [finding] = found(wrong).values()
    assert (finding.id, finding.status) == ("domain-emulator", "warn") and words in finding.found


def test_the_emulator_on_a_pmd_core_that_is_not_isolated() -> None:
    ovs = replace(OVS, other_config={"pmd-cpu-mask": "0x4"})
    assert set(found(domain("4"), ovs=ovs)) == {"domain-emulator"}


def test_two_on_one_cpu() -> None:
    finding = found(domain("4", "5"), domain("5", "6", name="vm2"))["domain-shared"]
    assert finding.found == "CPU 5 is the only one of vCPU 1 of vm1 and vCPU 0 of vm2"
    assert "domain-shared" in found(domain("4", "4")), "two of one VM are no better"


def test_a_daemon_that_does_not_answer_is_reported_and_one_that_is_not_there_is_not() -> None:
    def unknown(missing: bool) -> list[str]:
        silent = Unknown("qemu:///system", "did not answer within 5 s", missing)
        findings = check(Scene(FACTS, Live(ovs=OVS, domains=silent)))
        return [f.found for f in findings if f.id == "unknown-fact"]

    absent = Unknown("qemu:///system", "is not installed", fix="pip install it")
    findings = check(Scene(FACTS, Live(ovs=OVS, domains=absent)))
    assert [f.fix for f in findings if f.id == "unknown-fact"] == ["pip install it"]
    assert unknown(missing=False) == ["qemu:///system: did not answer within 5 s"]
    assert unknown(missing=True) == []


@pytest.mark.parametrize(("memory", "count"), [({0, 2}, 0), ({2}, 0), ({1, 2}, 1), ({1}, 1)])
def test_memory_on_a_node_without_cpus(memory: set[int], count: int) -> None:
    """Nodes 2 and 3 are HBM."""
    live = Live(domains=(DomainLive("vm", (frozenset({2}),), frozenset({0}), frozenset(memory)),))
    findings = [f for f in check(Scene(facts_of("hbm"), live)) if f.id == "domain-memory"]
    assert len(findings) == count
