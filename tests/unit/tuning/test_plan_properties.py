"""What holds of every plan, on machines and for intents that chance made."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from netplugin.api.errors import InvalidRequest
from netplugin.host.cpus import parse_list
from netplugin.tuning.checks import check
from netplugin.tuning.checks.scene import Scene
from netplugin.tuning.facts import EFFICIENCY, PERFORMANCE, Facts
from netplugin.tuning.intent import HostIntent
from netplugin.tuning.output.text import as_json, plan_text
from netplugin.tuning.planning.network import are_sure
from netplugin.tuning.planning.plan import TuningPlan, make_plan
from netplugin.tuning.read import read_facts
from netplugin.tuning.read.kernel import sysctl_path
from netplugin.tuning.root import known
from netplugin.tuning.steps import Effect, File, Sysctl
from tests.unit.tuning.machines import Machine, MemoryRoot, Tree
from tests.unit.tuning.strategies import intents, machines, mend
from tests.unit.tuning.trees import tree

#: A machine has hundreds of files, so that fewer examples take as long.
SOME = settings(max_examples=settings().max_examples // 4)


@dataclass(frozen=True)
class Case:
    machine: Machine
    made: Tree
    facts: Facts
    intent: HostIntent


@st.composite
def cases(draw: st.DrawFn) -> Case:
    machine = draw(machines())
    made = tree(machine)
    return Case(machine, made, read_facts(MemoryRoot(made)), draw(intents()))


@st.composite
def mended(draw: st.DrawFn) -> Case:
    """Cases with a plan: where there is none, with what a person would read in the fixes."""
    case = draw(cases())
    return replace(case, intent=mend(case.facts, case.intent)[0])


@SOME
@given(cases())
def test_a_plan_or_an_error_that_names_a_field(case: Case) -> None:
    assert case.facts.unknown() == ()
    try:
        make_plan(case.facts, case.intent)
    except InvalidRequest as refused:
        [wrong] = refused.errors
        assert wrong.field in HostIntent.model_fields and refused.fix
        event(f"refused for {wrong.field}")
    else:
        event("a plan")


def poll_nics(case: Case, plan: TuningPlan) -> set[int]:
    """Nodes whose PMD threads poll NICs: the NICs' own, unless those have too little memory or no CPUs."""
    online = case.machine.online
    home = {n["number"]: online & set(parse_list(n["cpus"])) for n in case.machine.nodes}
    memory_kb = {n["number"]: n["memory_kb"] for n in case.machine.nodes}
    assert all(home[node] and memory_kb[node] for node in plan.nic_nodes)
    for node in {known(nic.node, None) for nic in plan.nics} - {None, *plan.nic_nodes}:
        assert node is not None
        few = 17 if case.intent.hugepage_kb == 1048576 else 5
        assert not home[node] or memory_kb[node] < few << 20 or node >= 32
        assert plan.nic_nodes or not case.intent.pmd_cores
    return set(plan.nic_nodes)


@SOME
@given(mended())
def test_performance_cores_have_the_work(case: Case) -> None:
    """An efficiency core has a PMD thread or vCPUs only if no performance core of its node has less to do."""
    for share in make_plan(case.facts, case.intent).partition.nodes:
        kinds = {role: [c.kind for c in getattr(share, role)] for role in ("pmd", "vm", "emulator")}
        rest = [core.kind for core in share.housekeeping if min(case.machine.online) not in core.cpus]
        if EFFICIENCY in kinds["pmd"]:
            assert PERFORMANCE not in (*kinds["vm"], *kinds["emulator"], *rest)
        if EFFICIENCY in kinds["vm"]:
            assert PERFORMANCE not in rest
        if PERFORMANCE in (*kinds["emulator"], *rest):
            assert EFFICIENCY not in (*kinds["pmd"], *kinds["vm"])


@SOME
@given(cases())
def test_the_fix_of_an_error_helps(case: Case) -> None:
    """The number that it names gives a plan, or at most the error of another option: three have one."""
    event(f"{len(mend(case.facts, case.intent)[1])} fixes")


@SOME
@given(mended())
def test_the_partition(case: Case) -> None:
    """Disjoint sets that cover all CPUs on line, of whole cores, each on its node, as many as asked."""
    plan = make_plan(case.facts, case.intent)
    partition = plan.partition
    parts = [partition.housekeeping, partition.pmd, partition.emulator, partition.vm]
    assert Counter(cpu for part in parts for cpu in part) == Counter(case.machine.online)
    assert isinstance(case.facts.cpus.cores, tuple)
    for core in case.facts.cpus.cores:
        assert sum(bool(core.cpus & part) for part in parts) == 1
    for share in partition.nodes:
        assert {c.node for c in (*share.housekeeping, *share.pmd, *share.emulator, *share.vm)} == {share.node}
        assert share.housekeeping
        assert len(share.emulator) == (case.intent.emulator_cores if share.vm else 0)
    assert min(case.machine.online) in partition.housekeeping
    near = poll_nics(case, plan)
    for share in partition.nodes:
        if share.node not in near:
            relay_cores = case.intent.vm_pmd_cores if case.intent.pmd_cores and share.vm else 0
            assert len(share.pmd) == relay_cores
    on_nics = sum(len(share.pmd) for share in partition.nodes if share.node in near)
    if are_sure(plan.nics, case.intent):
        assert on_nics == case.intent.pmd_cores
        assert not on_nics or all(share.pmd for share in partition.nodes if share.node in near)
    else:
        # A node that got none of them has one for its VMs, as one without a NIC.
        assert on_nics >= case.intent.pmd_cores
        bare = [share for share in partition.nodes if share.node in near and not share.pmd]
        assert not (case.intent.pmd_cores and case.intent.vm_pmd_cores) or not any(s.vm for s in bare)
    if case.intent.vm_cores is not None:
        assert sum(len(share.vm) for share in partition.nodes) == case.intent.vm_cores


@SOME
@given(mended())
def test_pmd_threads_are_on_the_nodes_of_nics_and_vms(case: Case) -> None:
    plan = make_plan(case.facts, case.intent)
    assert set(plan.partition.pmd_nodes) <= poll_nics(case, plan) | set(plan.partition.vm_nodes)


@SOME
@given(mended())
def test_every_core_is_busy_with_one_thread_or_all(case: Case) -> None:
    partition = make_plan(case.facts, case.intent).partition
    assert partition.polling <= partition.pmd and partition.vcpus <= partition.vm
    for core in (core for share in partition.nodes for core in (*share.pmd, *share.vm)):
        busy = core.cpus & (partition.polling | partition.vcpus)
        assert len(busy) == (1 if case.intent.idle_siblings else len(core.cpus))


@SOME
@given(mended())
def test_hugepages_fit_their_node_and_are_enough(case: Case) -> None:
    plan = make_plan(case.facts, case.intent)
    memory = {node["number"]: node for node in case.machine.nodes}
    for pages in plan.pages:
        node = memory[pages.node]
        others = sum(size * n for size, n in node["hugepages"].items() if size != pages.size_kb)
        if pages.pages:
            assert pages.pages * pages.size_kb + others < node["memory_kb"]
        assert pages.pages * pages.size_kb >= (pages.ovs_mb + pages.vm_mb) * 1024
    assert sum(pages.vm_mb for pages in plan.pages) >= case.intent.vm_memory_mb
    if size := case.intent.vm_size_mb:
        vms = sum(pages.vm_mb // size for pages in plan.pages)
        assert vms * size >= case.intent.vm_memory_mb, "there is room for that many whole VMs"
    with_ovs = {pages.node for pages in plan.pages if pages.ovs_mb}
    if case.intent.pmd_cores:
        assert {*plan.partition.pmd_nodes, *plan.partition.vm_nodes} <= with_ovs
    else:
        assert not with_ovs


@SOME
@given(mended())
def test_what_is_set_live_is_set_once(case: Case) -> None:
    """After the files were written there is nothing left of them, and the plan is the same."""
    plan = make_plan(case.facts, case.intent)
    files = {}
    for step in plan.steps:
        if isinstance(step.target, File):
            files[step.target.path] = step.desired or ""
        if isinstance(step.target, Sysctl):
            files[sysctl_path(step.target.name)] = step.desired or ""
    for path, text in files.items():
        assert path in case.made.files, f"{path} is not a file of the machine"
        if path.endswith("transparent_hugepage/enabled"):
            files[path] = f"always madvise [{text}]"
    after = read_facts(MemoryRoot(Tree(case.made.files | files, case.made.links)))
    again = make_plan(after, case.intent)
    written = [s for s in again.left(Effect.LIVE) if isinstance(s.target, File | Sysctl)]
    assert written == []
    assert (again.partition, again.pages) == (plan.partition, plan.pages)


@SOME
@given(mended())
def test_a_plan_can_be_shown_and_checked(case: Case) -> None:
    plan = make_plan(case.facts, case.intent)
    assert plan_text(plan).count("->") <= len(plan.steps)
    json.dumps(as_json(plan))
    findings = check(Scene(case.facts, plan=plan))
    assert {f.fix is None for f in findings if f.status == "ok"} <= {True}
    assert all(f.fix for f in findings if f.status != "ok")


@SOME
@pytest.mark.parametrize("field", ["pmd_cores", "vm_cores"])
@given(case=cases())
def test_more_cores_than_there_are(field: str, case: Case) -> None:
    less = {"pmd_cores": 0, "vm_memory_mb": 0, "mtus": (1500,), "hugepage_kb": None}
    intent = case.intent.model_copy(update=less | {field: len(case.machine.online) + 1})
    with pytest.raises(InvalidRequest) as refused:
        make_plan(case.facts, intent)
    assert [wrong.field for wrong in refused.value.errors] == [field]
