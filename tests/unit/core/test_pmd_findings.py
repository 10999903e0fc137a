"""What is reported of queues on PMD threads."""

from __future__ import annotations

from netplugin.api.models import Finding
from netplugin.api.pmd_models import PmdState, UnpolledQueue
from netplugin.tuning.checks import check
from netplugin.tuning.checks.scene import Scene
from netplugin.tuning.facts import Live, OvsLive
from netplugin.tuning.read import read_facts
from tests.unit.core.pmd_states import core, queue, state
from tests.unit.tuning.machines import MemoryRoot, load
from tests.unit.tuning.trees import tree

FACTS = read_facts(MemoryRoot(tree(load("small"))))
IDS = {"pmd-numa", "pmd-pinned", "pmd-unpolled", "pmd-balance"}


def found(now: PmdState) -> dict[str, Finding]:
    ovs = OvsLive("3.1.0", "22.11", True, {}, pmds=now.cores, unpolled=now.unpolled)
    return {finding.id: finding for finding in check(Scene(FACTS, Live(ovs=ovs))) if finding.id in IDS}


def test_nothing_is_wrong() -> None:
    assert found(state()) == {}
    assert found(state(core(2, queue("a", 0, 60, port_numa_node=0)), core(3, queue("b", 0, 60)))) == {}


def test_queues_on_other_nodes() -> None:
    away = queue("nic", 1, 20, port_numa_node=1)
    finding = found(state(core(2, away), core(18, node=1)))["pmd-numa"]
    assert finding.status == "warn" and "nic queue 1" in finding.found
    assert finding.fix == 'PUT /v1/pmd {"proposed": true}'
    bare = found(state(core(2, away), core(3)))["pmd-numa"]
    assert "add CPUs of NUMA node 1" in str(bare.fix)
    off = away.model_copy(update={"enabled": False})
    assert "pmd-numa" not in found(state(core(2, off), core(18, node=1)))


def test_each_node_has_its_own_fix() -> None:
    """The ports of node 1 have a thread there, those of node 2 have none."""
    queues = queue("nic", 0, 20, port_numa_node=1), queue("other", 0, 20, port_numa_node=2)
    live = Live(ovs=OvsLive("3.1.0", "22.11", True, {}, pmds=(core(2, *queues), core(18, node=1))))
    fixes = [(f.found[-11:], f.fix) for f in check(Scene(FACTS, live)) if f.id == "pmd-numa"]
    assert fixes == [
        ("nic queue 0", 'PUT /v1/pmd {"proposed": true}'),
        ("her queue 0", "add CPUs of NUMA node 2 to those of PMD threads (PUT /v1/pmd)"),
    ]


def test_a_node_whose_threads_are_all_isolated() -> None:
    pinned = core(2, queue("a", 0, 10, pinned_to=2), isolated=True)
    away = found(state(pinned, core(18, node=1)))["pmd-numa"]
    assert "all PMD threads of NUMA node 0 are isolated" in away.found
    assert "pmd-numa" not in found(state(pinned, core(3), core(18, node=1)))
    assert "pmd-numa" not in found(state(pinned)), "pmd-unpolled has that"


def test_an_uneven_node_next_to_a_full_one() -> None:
    other = core(18, queue("b", 0, 40, port_numa_node=1), queue("b", 1, 40, port_numa_node=1), node=1)
    full = core(2, queue("a", 0, 95, port_numa_node=0))
    uneven = found(state(full, other, core(19, node=1)))["pmd-balance"]
    assert uneven.found == "the fullest PMD thread of NUMA node 1 has a load of 80 %"
    assert uneven.expected.startswith("40 %, with 1 queues elsewhere")


def test_uneven_load() -> None:
    finding = found(state(core(2, queue("a", 0, 60), queue("b", 0, 35)), core(3)))["pmd-balance"]
    assert finding.found == "the fullest PMD thread has a load of 95 %"
    assert finding.expected.startswith("60 %, with 1 queues elsewhere")
    assert 'PUT /v1/pmd {"auto_load_balance": ' in str(finding.fix)
    pinned = [queue("a", 0, 60, pinned_to=2), queue("b", 0, 35, pinned_to=2)]
    finding = found(state(core(2, *pinned, isolated=True), core(3)))["pmd-balance"]
    assert finding.fix == 'PUT /v1/pmd {"proposed": true}'
    assert found(state(core(2, queue("a", 0, 30), queue("b", 0, 15)), core(3))) == {}


def test_queues_that_nobody_polls() -> None:
    one = core(2, queue("a", 0, 10, pinned_to=2), isolated=True)
    lost = (UnpolledQueue(port="c", queue=1),)
    finding = found(state(one, unpolled=lost))["pmd-unpolled"]
    assert finding.status == "fail" and "c queue 1" in finding.found
    finding = found(state(one))["pmd-unpolled"]
    assert finding.status == "warn" and "the next port" in finding.found
    assert "pmd-unpolled" not in found(state(one, core(3)))


def test_pinnings_where_no_thread_runs() -> None:
    finding = found(state(core(2, queue("a", 0, 10, pinned_to=9))))["pmd-pinned"]
    assert "a queue 0 to CPU 9" in finding.found
    assert "pmd-pinned" not in found(state(core(2, queue("a", 0, 10, pinned_to=2)), core(3)))


def test_they_are_among_the_checks_of_a_host() -> None:
    pinned = core(2, queue("a", 0, 10, pinned_to=2), isolated=True)
    live = OvsLive("3.1.0", "22.11", True, {}, pmds=(pinned,), unpolled=(UnpolledQueue(port="c", queue=1),))
    ids = [finding.id for finding in check(Scene(FACTS, Live(ovs=live)))]
    assert ids.count("pmd-unpolled") == 1
    shared = Live(ovs=OvsLive("3.1.0", "22.11", True, {}, pmds=(core(2, queue("a", 0, 10)),)))
    assert "pmd-unpolled" not in [finding.id for finding in check(Scene(FACTS, shared))]
