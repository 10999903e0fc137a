"""The VNF on the NUMA node of the NICs or on another one: on the published host, which has two, and on hosts
that cannot have it."""

from __future__ import annotations

import csv
import io
import re
import shutil
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from lxml import etree
from netplugin_zeroloss.journal import Cell, Part, control_cell
from netplugin_zeroloss.matrix import cells
from netplugin_zeroloss.matrix.bench import Stand
from netplugin_zeroloss.matrix.description import NumaPlacement, RunDescription, read
from netplugin_zeroloss.matrix.host import cores_on, node_of
from netplugin_zeroloss.report.figures import report_of
from netplugin_zeroloss.report.table import csv_text, grids
from netplugin_zeroloss.values import UnusableInput
from netplugin_zeroloss.vnf import choose as vnfs
from netplugin_zeroloss.vnf.contract import VnfCores

from netplugin.api.domain_models import DomainPolicy, RenderedDomain
from netplugin.api.errors import Conflict, HostError, NetpluginError
from tests.unit.tuning.golden import facts_of
from tests.unit.tuning.machines import load
from tests.unit.zeroloss.made_up_agent import MadeUpAgent
from tests.unit.zeroloss.matrix_runs import described, description, with_agent
from tests.unit.zeroloss.published_host import NICS, PublishedHost, with_pages
from tests.unit.zeroloss.report_runs import device, record, result, run_of

LOCAL, REMOTE = NumaPlacement.LOCAL, NumaPlacement.REMOTE
AXIS = ("  # bursts: [1, 32, 256]\n", "  numa: [local, remote]\n")


@pytest.fixture
def host(tmp_path: Path, agent: MadeUpAgent, monkeypatch: pytest.MonkeyPatch) -> PublishedHost:
    made = PublishedHost(tmp_path, agent, monkeypatch)
    return _with_pages_on_both(made)


def _with_pages_on_both(host: PublishedHost, remote: int = 16) -> PublishedHost:
    shutil.rmtree(host.root / "sys", ignore_errors=True)
    first, second = with_pages(load("published"), 16).nodes
    nodes = [first, {**second, "hugepages": {2048: 0, 1048576: remote}}]
    host.machine(replace(load("published"), nodes=nodes))
    return host


# -- which node, and which CPUs ------------------------------------------------------------------


def test_on_the_published_host_the_nics_are_on_node_0() -> None:
    facts = facts_of("published")
    assert [node_of(placement, facts, NICS) for placement in (LOCAL, REMOTE)] == [0, 1]


@pytest.mark.parametrize(("placement", "mine"), [(LOCAL, range(16)), (REMOTE, range(16, 32))])
def test_the_vnf_has_cores_of_the_plan_on_its_node_and_none_of_the_pmd_threads(
    placement: NumaPlacement, mine: range
) -> None:
    facts = facts_of("published")
    node = node_of(placement, facts, NICS)
    cores = cores_on(node, 4, facts, NICS, 8)
    assert len(set(cores.workers)) == 4 and cores.main not in cores.workers
    assert {*cores.workers, cores.main} <= set(mine)
    # The PMD cores of node 0 are CPUs 1-8, with their siblings 33-40.
    assert not {*cores.workers, cores.main} & set(range(1, 9))


def test_more_cores_than_the_plan_leaves_are_refused() -> None:
    facts = facts_of("published")
    with pytest.raises(Conflict, match="NUMA node 0 has 6 cores for the VNF next to 8 PMD cores, not 7"):
        cores_on(0, 7, facts, NICS, 8)
    assert len(cores_on(1, 7, facts, NICS, 8).workers) == 7


def test_nics_of_two_nodes_have_no_side() -> None:
    facts = facts_of("published")
    there = load("published")
    nics = [nic | ({"node": 1} if nic["address"] == NICS[1] else {}) for nic in there.nics]
    apart = replace(facts, network=_facts_with(nics).network)
    with pytest.raises(Conflict, match=r"not on one known NUMA node: 0000:3b:00\.0 on node 0, .* on node 1"):
        node_of(LOCAL, apart, NICS)
    with pytest.raises(Conflict, match="they are no PCI devices"):
        node_of(LOCAL, facts, [])
    with pytest.raises(Conflict, match=r"0000:99:00\.0 on an unknown node"):
        node_of(LOCAL, facts, ["0000:99:00.0"])


def _facts_with(nics: list[dict[str, Any]]) -> Any:
    from netplugin.tuning.read import read_facts
    from tests.unit.tuning.machines import MemoryRoot
    from tests.unit.tuning.trees import tree

    return read_facts(MemoryRoot(tree(replace(load("published"), nics=nics))))


# -- cells ---------------------------------------------------------------------------------------


def test_each_placement_is_a_cell() -> None:
    run = _local_testpmd(numa=["local", "remote"])
    assert [c.numa for c in cells.cells(run)] == ["local", "remote"]
    assert Cell("a", 1, numa="remote").key == "a,pmd=1,frame=64,flows=1024,queues=1,numa=remote"
    assert control_cell(Cell("a", 1, numa="remote"), Part.VNF).numa == "remote"
    assert control_cell(Cell("a", 1, numa="remote"), Part.LOOPBACK).numa == ""
    assert str(cells.tasks(run)[1]).endswith(", VNF remote to the NICs")
    less = _local_testpmd(numa=["local", "remote"], exclude=[{"numa": "remote"}])
    assert [c.numa for c in cells.cells(less)] == ["local"]


def _local_testpmd(numa: list[str], **sections: Any) -> RunDescription:
    return description(
        **with_agent(
            matrix={"backends": ["dpdkvhostuser"], "numa": numa}, vnf={"type": "testpmd"}, **sections
        )
    )


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (described(matrix={"backends": ["a"], "numa": ["local"]}), "matrix.numa: it needs an agent"),
        (
            with_agent(matrix={"backends": ["a"], "numa": ["local"]}),
            "matrix.numa: the run must place the VNF",
        ),
        (
            with_agent(
                matrix={"backends": ["a"], "numa": ["remote"]},
                vm={"domain": "vm.xml", "policy": {"numa_node": 1}},
            ),
            "matrix.numa: vm.policy.numa_node names one node",
        ),
        (with_agent(matrix={"backends": ["a"], "numa": ["far"]}), "numa"),
        (with_agent(matrix={"backends": ["a"], "numa": ["local", "local"]}), "once"),
    ],
)
def test_placements_that_do_not_fit(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(UnusableInput, match=words):
        read(yaml.safe_dump(sections), "run.yaml")


# -- on the host ---------------------------------------------------------------------------------


def test_the_shipped_run_with_both_placements_passes_its_checks(host: PublishedHost) -> None:
    run = host.description(AXIS)
    host.check(run)
    found = [f for f in host.bench(run).findings(host.tasks(run)) if f.part == "numa"]
    places = {f.found.partition(";")[0] for f in found}
    assert places == {"local is NUMA node 0", "remote is NUMA node 1"} and not any(f.missing for f in found)


def test_pages_are_needed_on_both_nodes(host: PublishedHost) -> None:
    _with_pages_on_both(host, remote=4)
    with pytest.raises(UnusableInput, match="8192 MB of hugepages on NUMA node 1, and 4096 MB are free"):
        host.check(host.description(AXIS))


def test_a_host_with_one_node_has_nothing_remote(host: PublishedHost) -> None:
    shutil.rmtree(host.root / "sys")
    one = with_pages(load("published"), 16)
    host.machine(replace(one, nodes=[{**one.nodes[0], "cpus": "0-31"}]))
    with pytest.raises(UnusableInput) as refused:
        host.check(host.description(AXIS))
    refusal = str(refused.value)
    assert "remote: this host has one NUMA node with CPUs, 0: nothing on it is remote to the NICs" in refusal
    assert "fix: leave remote out of matrix.numa" in refusal
    host.check(host.description((AXIS[0], "  numa: [local]\n")))


@pytest.mark.parametrize(("placement", "node"), [("local", 0), ("remote", 1)])
def test_the_vm_is_placed_by_the_agent_on_that_node(
    host: PublishedHost, monkeypatch: pytest.MonkeyPatch, placement: str, node: int
) -> None:
    asked: list[DomainPolicy | None] = []

    def render(vm_id: str, xml: str, policy: DomainPolicy | None = None) -> RenderedDomain:
        asked.append(policy)
        raise HostError("seen enough", step="test")

    # What is requested of the agent is all that is looked at; rendering has tests of its own.
    monkeypatch.setattr(host.agent, "render_domain", render)
    run = host.description(AXIS)
    [task] = [
        t
        for t in host.tasks(run)
        if (t.cell.backend, t.cell.pmd_cores, t.cell.frame) == ("dpdkvhostuser", 2, "64")
        and t.cell.numa == placement
    ]
    with pytest.raises(NetpluginError, match="seen enough"), host.bench(run).stand(task):
        pass
    assert asked == [DomainPolicy(pin=True, numa_node=node)]
    assert host.agent.ports == {}, "and all is given back"


@pytest.mark.parametrize(("placement", "node"), [("local", 0), ("remote", 1)])
def test_a_vnf_on_the_host_gets_cpus_of_that_node(
    host: PublishedHost, monkeypatch: pytest.MonkeyPatch, placement: str, node: int
) -> None:
    given: list[VnfCores] = []

    def make(chosen: Any, ports: Any, cores: VnfCores) -> Any:
        given.append(cores)
        raise HostError("seen enough", step="test")

    # The CPUs are all that is looked at: the published host's are not on this machine.
    monkeypatch.setattr(vnfs, "make", make)
    run = _without_vm(host, numa=["local", "remote"])
    [task] = [t for t in cells.tasks(run) if t.cell.numa == placement]
    with ExitStack() as parts, suppress(NetpluginError):
        stand: Stand = parts.enter_context(host.bench(run).stand(task))
        assert not stand, "it is not made"
    facts = facts_of("published")
    assert given == [cores_on(node, 2, facts, NICS, 4)]


def _without_vm(host: PublishedHost, **axes: Any) -> RunDescription:
    ends = [{"network": {"type": "flat", "physical_network": f"physnet{n}"}} for n in (1, 2)]
    return description(
        **with_agent(
            ends=ends,
            vnf={"type": "testpmd"},
            vnf_cores={"main": 0, "workers": "1-2"},
            matrix={"backends": ["dpdkvhostuser"], "pmd_cores": [4], **axes},
            evidence={"ovs_rundir": None},
        )
    )


def test_too_many_workers_are_found_in_the_dry_run(host: PublishedHost) -> None:
    run = _without_vm(host, numa=["local", "remote"])
    most = run.model_copy(update={"vnf_cores": run.vnf_cores.model_copy(update={"workers": "1-11"})})
    found = [f for f in host.bench(most).findings(cells.tasks(most)) if f.part == "numa" and f.missing]
    [one] = found
    assert re.match(r"local: NUMA node 0 has 10 cores for the VNF next to 4 PMD cores, not 11", one.found)
    assert "vnf_cores.workers" in (one.fix or "")


def test_the_report_has_a_table_for_each_placement() -> None:
    made = [Cell("dpdkvhostuser", 2, numa=placement) for placement in ("local", "remote")]
    report = report_of(run_of([record(cell, result(device())) for cell in made]))
    assert [grid.title.rpartition(", ")[2] for grid in grids(report)] == [
        "VNF local to the NICs",
        "VNF remote to the NICs",
    ]
    assert [row["numa"] for row in csv.DictReader(io.StringIO(csv_text(report)))] == ["local", "remote"]


def test_a_domain_is_xml_with_or_without_a_placement(host: PublishedHost) -> None:
    """The placement does not change the domain that the agent is given."""
    bench = host.bench(host.description(AXIS))
    assert bench._domain is not None
    assert etree.fromstring(bench._domain.template).find("numatune") is None
