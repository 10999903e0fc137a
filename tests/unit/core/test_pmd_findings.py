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
