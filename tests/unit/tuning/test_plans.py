"""Plans that are known: the three machines, the arithmetic of buffers, and what cannot be planned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from netplugin.errors import HostError, InvalidRequest
from netplugin.host.cpus import format_list, from_mask
from netplugin.tuning.intent import Intent
from netplugin.tuning.planning.hugepages import buffer_bytes, pools_mb
from netplugin.tuning.planning.plan import make_plan
from netplugin.tuning.read import read_facts
from netplugin.tuning.steps import (
    File,
    OtherConfig,
)
from tests.unit.tuning.golden import arguments, facts_of, plan_of, planned, step, texts
from tests.unit.tuning.machines import DATA, MemoryRoot, load
from tests.unit.tuning.trees import tree

# -- golden plans --------------------------------------------------------------------------------


@pytest.mark.parametrize("file", texts())
def test_a_plan_is_as_it_was_read(file: str) -> None:
    """If it should be otherwise: ``python -m tests.unit.tuning.golden``, and read the difference."""
    assert texts()[file] == (DATA / "plans" / file).read_text()


def test_no_plan_is_kept_that_nobody_makes() -> None:
    assert {path.name for path in (DATA / "plans").iterdir()} == set(texts())


@pytest.mark.parametrize(
    ("cores", "pmd", "mask", "isolated"),
    [
        (2, "1-2,33-34", "0x600000006", "1-2,4-15,18-31,33-34,36-47,50-63"),
        (4, "1-4,33-36", "0x1e0000001e", "1-4,6-15,18-31,33-36,38-47,50-63"),
        (6, "1-6,33-38", "0x7e0000007e", "1-6,8-15,18-31,33-38,40-47,50-63"),
        (8, "1-8,33-40", "0x1fe000001fe", "1-8,10-15,18-31,33-40,42-47,50-63"),
    ],
)
def test_the_published_host(cores: int, pmd: str, mask: str, isolated: str) -> None:
    plan = plan_of(f"published-pmd-{cores}")
    assert format_list(plan.partition.pmd) == pmd
    assert format_list(plan.partition.isolated) == isolated
    assert plan.partition.pmd_nodes == (0,)
    assert step(plan, OtherConfig("pmd-cpu-mask")).wanted == mask
    assert frozenset(from_mask(mask)) == plan.partition.pmd
    assert step(plan, OtherConfig("dpdk-socket-mem")).wanted == "2048,2048"
    assert arguments(plan)["nohz_full"] == isolated
    assert arguments(plan)["isolcpus"] == f"managed_irq,domain,{isolated}"


def test_idle_siblings_have_no_pmd_thread_and_are_isolated() -> None:
    plan = plan_of("published-realtime")
    assert format_list(plan.partition.polling) == "1-2"
    assert plan.partition.isolated >= {33, 34}
    assert format_list(plan.partition.vcpus) == "4-11"
    assert step(plan, OtherConfig("pmd-cpu-mask")).wanted == "0x6"


def test_vm_cores_stay_on_the_nic_s_node_while_there_are_some() -> None:
    assert planned("published", pmd_cores=2, vm_cores=12).partition.vm_nodes == (0,)
    assert planned("published", pmd_cores=2, vm_cores=13).partition.vm_nodes == (0, 1)


def test_pmd_cores_are_spread_over_the_nodes_of_the_named_nics() -> None:
    plan = planned("amd-4-nodes", pmd_cores=3, nics=("ens2f0", "0000:41:00.0"))
    assert [len(share.pmd) for share in plan.partition.nodes] == [0, 2, 1, 0]


# -- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mtu", "size"), [(1500, 3008), (1800, 3008), (6000, 7104), (9000, 10176)])
def test_the_size_of_a_buffer_is_that_of_ovs(mtu: int, size: int) -> None:
    assert buffer_bytes(mtu) == size


def test_pools_of_mtus() -> None:
    assert pools_mb((1500,), 262144) == -(-788_529_152 // (1 << 20)) == 752
    assert pools_mb((9000,), 262144) == 2544
    assert pools_mb((1500, 1800), 262144) == 752  # one pool
    assert pools_mb((1500, 9000), 262144) == 752 + 2544
    assert pools_mb((1400,), 262144) == 47  # small frames have the small pool
    assert pools_mb((1400, 1500), 262144) == 752


def test_buffers_are_halved_where_memory_is_short() -> None:
    [pages] = planned("small", pmd_cores=1, mtus=(9000,), vm_memory_mb=1024).pages
    assert (pages.mbufs, pages.ovs_mb) == (131072, 1272 + 512)
    assert pages.pages == (1272 + 512 + 1024) // 2


@pytest.mark.parametrize(
    ("machine", "field", "intent"),
    [
        ("published", "pmd_cores", {"pmd_cores": 16}),
        ("published", "vm_cores", {"pmd_cores": 2, "vm_cores": 27}),
        ("published", "vm_memory_mb", {"pmd_cores": 2, "vm_memory_mb": 300_000}),
        ("published", "nics", {"pmd_cores": 2, "nics": ("eth7",)}),
        ("published", "hugepage_kb", {"pmd_cores": 2, "hugepage_kb": 64}),
        ("small", "hugepage_kb", {"pmd_cores": 1, "hugepage_kb": 1048576}),
        ("small", "vm_memory_mb", {"pmd_cores": 1, "vm_memory_mb": 4000}),
        ("small", "mtus", {"pmd_cores": 1, "mtus": tuple(range(1500, 9600, 1024)) * 3}),
    ],
)
def test_what_cannot_be_planned(machine: str, field: str, intent: dict[str, Any]) -> None:
    if field == "mtus":  # even the smallest pools want more than this
        facts = facts_of(machine)
        assert isinstance(facts.memory.nodes, tuple)
        nodes = tuple(replace(node, total_kb=1 << 20) for node in facts.memory.nodes)
        facts = replace(facts, memory=replace(facts.memory, nodes=nodes))
    else:
        facts = facts_of(machine)
    with pytest.raises(InvalidRequest) as refused:
        make_plan(facts, Intent(**intent))
    assert [wrong.field for wrong in refused.value.errors] == [field]
    assert refused.value.fix and refused.value.step == "plan"


@pytest.mark.parametrize(
    "path", ["/sys/devices/system/cpu/online", "/sys/devices/system/node/node0/meminfo"]
)
def test_no_plan_without_the_facts_it_stands_on(path: str) -> None:
    made = tree(load("small"))
    made.files[path] = "garbage"
    with pytest.raises(HostError, match=path):
        make_plan(read_facts(MemoryRoot(made)), Intent(pmd_cores=1))


def test_pages_that_are_there_beyond_the_plan_stay() -> None:
    plan = planned("amd-4-nodes", pmd_cores=1, vm_cores=1)
    path = "/sys/devices/system/node/node2/hugepages/hugepages-1048576kB/nr_hugepages"
    assert (step(plan, File(path)).now, step(plan, File(path)).wanted) == ("16", "16")
