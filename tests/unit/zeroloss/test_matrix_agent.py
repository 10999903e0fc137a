"""The bench of a hypervisor against a made-up agent: what it asks for, returns, and refuses."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from netplugin_zeroloss.generators import choose as generators
from netplugin_zeroloss.journal import Cell, Part
from netplugin_zeroloss.loss import choose as evidence
from netplugin_zeroloss.loss.contract import CounterReading, DropCounters
from netplugin_zeroloss.matrix import cells, ports, session
from netplugin_zeroloss.matrix.agent_bench import addressed
from netplugin_zeroloss.matrix.bench import CellError
from netplugin_zeroloss.matrix.cells import CellTask
from netplugin_zeroloss.matrix.progress import view
from netplugin_zeroloss.values import TrialRequest, UnusableInput
from netplugin_zeroloss.vnf import choose as vnfs
from netplugin_zeroloss.vnf.contract import Attachment, Vnf, VnfCores, VnfPort

from netplugin.api.client import Readiness
from netplugin.api.errors import Conflict, HostError
from netplugin.api.models import BackendInfo, Features, PortState
from tests.unit.zeroloss.made_up_agent import MadeUpAgent, bench_on, cell_description, search_of
from tests.unit.zeroloss.matrix_runs import with_agent, write

_ASKED = TrialRequest(1e5, 0.4)


def test_a_cell_is_set_up_through_the_agent_and_given_back(agent: MadeUpAgent) -> None:
    run = cell_description()
    task = search_of(run)
    bench = bench_on(run)
    facts = bench.check([task])
    assert (facts["run_id"], facts["pmd_cpus"]) == ("id", "1") and agent.calls == []
    with bench.stand(task) as stand:
        assert agent.cpus == "2-3"
        specs = [port.spec for port in agent.ports.values()]
        assert [(s.backend, s.queues, s.mac[-2:]) for s in specs] == [
            ("dpdkvhostuser", 2, "01"),
            ("dpdkvhostuser", 2, "02"),
        ]
        assert [s.network.physical_network for s in specs] == ["left", "right"]
        assert len({s.vm_id for s in specs}) == 1
        assert stand.generator.run(_ASKED).evidence["unexplained"] == 0
        assert [p["port_id"] for p in stand.setup["ports"]] == ["zeroloss-1", "zeroloss-2"]
        assert stand.setup["pmd"]["cpus"] == "2-3" and stand.setup["vnf"]["name"] == "external"
    assert agent.ports == {} and agent.cpus == "1"


def test_ports_of_a_vnf_that_spoofs_have_no_port_security(agent: MadeUpAgent) -> None:
    ends = [
        {"network": {"type": "flat", "physical_network": name}, "port_security": secured}
        for name, secured in (("left", False), ("right", True))
    ]
    run = cell_description(ends=ends)
    with bench_on(run).stand(search_of(run)):
        assert [port.spec.port_security.enabled for port in agent.ports.values()] == [False, True]


@pytest.mark.parametrize("fails", [("put", 1), ("put", 2), ("put", 3), ("pmd", 1), ("delete", 1), ("pmd", 2)])
def test_whatever_fails_the_rest_is_given_back(agent: MadeUpAgent, fails: tuple[str, int]) -> None:
    run = cell_description()
    bench = bench_on(run, "1")
    agent.fails = fails
    with pytest.raises(HostError), bench.stand(search_of(run)):
        pass
    left = {"delete": 1}.get(fails[0], 0)
    assert len(agent.ports) == left and agent.cpus == ("2-3" if fails == ("pmd", 2) else "1")


def test_an_interruption_gives_everything_back(agent: MadeUpAgent) -> None:
    run = cell_description()
    with pytest.raises(KeyboardInterrupt), bench_on(run, "1").stand(search_of(run)):
        raise KeyboardInterrupt
    assert agent.ports == {} and agent.cpus == "1"


def test_ports_of_a_run_that_was_killed_are_taken_away_and_those_of_others_are_not(
    agent: MadeUpAgent,
) -> None:
    run = cell_description()
    bench = bench_on(run, "1")
    task = search_of(run)
    spec = bench._ports._spec(bench._ports.ends[0], task.cell)
    agent.put_port("zeroloss-1", spec)
    bench.check([task])
    with bench.stand(task):
        pass
    assert agent.ports == {}
    agent.put_port("zeroloss-1", spec.model_copy(update={"vm_id": "somebody"}))
    with pytest.raises(CellError, match="of VM somebody"), bench.stand(task):
        pass
    assert list(agent.ports) == ["zeroloss-1"], "it is not ours to delete"
    with pytest.raises(UnusableInput, match="port zeroloss-1 is there already"):
        bench.check([task])


def test_a_port_is_deleted_again_until_nobody_holds_it(
    agent: MadeUpAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The VNF of a run that was killed may still be ending."""
    monkeypatch.setattr(ports, "_HELD_S", 0.01)
    run = cell_description(timeouts={"active": 60, "forwarding": 0.2})
    task = search_of(run)
    with bench_on(run, "1").stand(task):
        agent.held = 3
    assert agent.ports == {} and agent.cpus == "1"
    left = bench_on(run, "1")
    agent.put_port("zeroloss-1", left._ports._spec(left._ports.ends[0], task.cell))
    agent.held = 3
    left.recover()
    assert agent.ports == {}


def test_a_port_that_stays_held_is_reported_with_the_agents_error(agent: MadeUpAgent) -> None:
    run = cell_description()
    with pytest.raises(Conflict, match="zeroloss-1 open"), bench_on(run, "1").stand(search_of(run)):
        agent.held = 1_000_000
    assert agent.cpus == "1", "the rest is given back"


def test_a_port_that_does_not_become_active_is_reported(agent: MadeUpAgent) -> None:
    run = cell_description()
    agent.state = PortState.DEGRADED
    with pytest.raises(CellError, match=r"zeroloss-1 is degraded and not active after 0\.2 s"):
        with bench_on(run, "1").stand(search_of(run)):
            pass
    assert agent.ports == {}


def test_a_trial_in_which_a_port_went_is_no_trial(agent: MadeUpAgent) -> None:
    run = cell_description()
    with bench_on(run, "1").stand(search_of(run)) as stand:
        agent.state = PortState.FAILED
        with pytest.raises(CellError, match="zeroloss-1 became failed in a trial"):
            stand.generator.run(_ASKED)


def test_a_backend_without_pmd_threads_leaves_the_cores_alone(agent: MadeUpAgent) -> None:
    run = cell_description(matrix={"backends": ["linuxbridge"]})
    bench = bench_on(run)
    assert bench.check([search_of(run)])["pmd_cpus"] is None
    with bench.stand(search_of(run)) as stand:
        assert "pmd" not in stand.setup
    assert "pmd" not in agent.calls


_TOY = """
from netplugin.data_path import DataPath

class Toy:
    data_path = DataPath("tap", "nic", links=("nic",), pmd_threads={pmd})
"""


@pytest.mark.parametrize("pmd", [True, False])
def test_a_backend_of_another_package_is_measured_by_what_it_declares(
    agent: MadeUpAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pmd: bool
) -> None:
    installed = tmp_path / "netplugin_toy-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: netplugin-toy\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[netplugin.backends]\ntoy = netplugin_toy:Toy\n")
    (tmp_path / "netplugin_toy.py").write_text(_TOY.format(pmd=pmd))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "netplugin_toy", raising=False)
    agent.infos.append(BackendInfo(name="toy", usable=True, features=Features(networks=("flat",))))

    run = cell_description(matrix={"backends": ["toy"], "pmd_cores": ["2", "3-4"]})
    assert [cell.pmd_cores for cell in cells.cells(run)] == ([1, 2] if pmd else [None])
    bench = bench_on(run)
    bench.check([search_of(run)])
    monkeypatch.setattr(evidence, "LinkCounters", lambda devices: _Links(sorted(devices)))
    with bench.stand(search_of(run)) as stand:
        assert stand.generator.run(_ASKED).readings["links.dev-zeroloss-2"] == 0
        assert ("pmd" in stand.setup) is pmd


@pytest.mark.parametrize(
    ("vif_type", "attachment"),
    [("vhostuser", Attachment.VHOST_USER), ("vhost_vdpa", Attachment.VHOST_VDPA)],
)
def test_the_binding_tells_how_a_port_of_several_kinds_is_attached(
    agent: MadeUpAgent, monkeypatch: pytest.MonkeyPatch, vif_type: str, attachment: Attachment
) -> None:
    _vdpa(agent, vif_type)
    run = cell_description(matrix={"backends": ["vdpa"], "pmd_cores": ["2-3"]})
    attached: list[VnfPort] = []
    real = vnfs.make

    def make(description: vnfs.Description, ports: Sequence[VnfPort], cores: VnfCores) -> Vnf:
        attached.extend(ports)
        return real(description, ports, cores)

    monkeypatch.setattr(vnfs, "make", make)
    with bench_on(run, "1").stand(search_of(run)) as stand:
        assert stand.setup["pmd"]["cpus"] == "2-3"
    assert [(port.attachment, port.device) for port in attached] == [
        (attachment, "dev-zeroloss-1"),
        (attachment, "dev-zeroloss-2"),
    ]


def test_a_port_that_no_vnf_can_take_fails_its_cell(agent: MadeUpAgent) -> None:
    _vdpa(agent, "virtio_vdpa")
    run = cell_description(matrix={"backends": ["vdpa"], "pmd_cores": ["2-3"]})
    with pytest.raises(CellError, match="vif_type virtio_vdpa has no data_path"):
        with bench_on(run, "1").stand(search_of(run)):
            pass
    assert agent.ports == {}


def _vdpa(agent: MadeUpAgent, vif_type: str) -> None:
    agent.vif_types["vdpa"] = vif_type
    agent.infos.append(BackendInfo(name="vdpa", usable=True, features=Features(networks=("flat",))))


class _Links(DropCounters):
    """Counts nothing, by the names of the devices."""

    name = "links"

    def __init__(self, devices: list[str]) -> None:
        self._devices = devices

    def read(self) -> CounterReading:
        return CounterReading({}, dict.fromkeys(self._devices, 0.0))


def test_a_backend_that_is_not_installed_here_is_refused_with_those_that_are(agent: MadeUpAgent) -> None:
    run = cell_description(matrix={"backends": ["mine"]})
    agent.infos.append(agent.infos[0].model_copy(update={"name": "mine"}))
    words = "no backend .mine. is installed with .*; there is dpdkvhostuser, linuxbridge, sriov, vdpa"
    with pytest.raises(UnusableInput, match=words):
        bench_on(run).check([search_of(run)])
    assert agent.calls == []


def _without_a_mask(agent: MadeUpAgent, running: tuple[int, ...]) -> None:
    agent.cpus, agent.running = "", running


@pytest.mark.parametrize(
    ("running", "left", "words"),
    [((1, 4), "1,4", "ran PMD threads on CPUs 1,4"), ((), "2-3", "ran no PMD thread")],
)
def test_a_mask_that_cannot_be_removed_is_reported(
    agent: MadeUpAgent, running: tuple[int, ...], left: str, words: str
) -> None:
    run = cell_description()
    _without_a_mask(agent, running)
    bench = bench_on(run)
    assert bench.check([search_of(run)])["pmd_mask"] is False
    with bench.stand(search_of(run)):
        assert agent.cpus == "2-3" and bench.restore() == []
    assert agent.cpus == left
    [warning] = bench.restore()
    assert f"stays set to CPUs {left}" in warning and words in warning
    assert "ovs-vsctl remove Open_vSwitch . other_config pmd-cpu-mask" in warning


def test_where_there_was_no_mask_none_is_made_by_a_cell_that_was_refused(
    agent: MadeUpAgent,
) -> None:
    run = cell_description()
    _without_a_mask(agent, (1,))
    bench = bench_on(run)
    bench.check([search_of(run)])
    agent.fails = ("pmd", 1)
    with pytest.raises(HostError), bench.stand(search_of(run)):
        pass
    assert agent.cpus == "" and bench.restore() == []


def test_a_mask_that_is_restored_is_not_spoken_of(agent: MadeUpAgent) -> None:
    run = cell_description()
    bench = bench_on(run)
    assert bench.check([search_of(run)])["pmd_mask"] is True
    with bench.stand(search_of(run)):
        pass
    assert agent.cpus == "1" and bench.restore() == []


def _carry_out(monkeypatch: pytest.MonkeyPatch, path: Path, folder: Path, resume: bool = False) -> str:
    """Run it as the command does; returns what it warns of."""
    shown = io.StringIO()
    monkeypatch.setattr(session, "view", lambda estimate, quiet: view(estimate, quiet, shown))
    session.carry_out(session.RunOptions(path, folder, resume, quiet=True), io.StringIO())
    return shown.getvalue()


def test_the_run_says_at_its_end_that_a_mask_stays_also_after_a_resume(
    agent: MadeUpAgent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sections = with_agent(
        matrix={"backends": ["dpdkvhostuser"], "pmd_cores": ["2-3"]}, evidence={"ovs_rundir": None}
    )
    path = write(tmp_path, sections)
    _without_a_mask(agent, (1,))
    agent.fails = ("put", 1)
    assert _carry_out(monkeypatch, path, tmp_path / "run") == ""
    # The first session found no mask. What the second finds is that of a cell that was killed.
    agent.fails, agent.cpus = None, "2-3"
    printed = _carry_out(monkeypatch, path, tmp_path / "run", resume=True)
    assert printed.startswith("warning: pmd-cpu-mask stays set to CPUs 1: ") and printed.count("\n") == 1
    assert agent.cpus == "1"


def test_a_simulation_recalls_trials_also_on_a_hypervisor(agent: MadeUpAgent) -> None:
    run = cell_description(generator={"type": "sim", "device": "noisy"})
    requests = [TrialRequest(2.6e6, 60.0, abort_on_loss=False)] * 3
    with bench_on(run, "1").stand(search_of(run)) as stand:
        whole = [stand.generator.run(request) for request in requests]
    with bench_on(run, "1").stand(search_of(run)) as stand:
        for request in requests[:-1]:
            stand.generator.recall(request)
        resumed = stand.generator.run(requests[-1])
    assert resumed.rx_packets == whole[-1].rx_packets != whole[0].rx_packets


def test_controls_need_no_port(agent: MadeUpAgent) -> None:
    sim = {"type": "sim"}
    ports = [
        {
            "attachment": "netdev",
            "device": f"veth{n}",
            "mac": f"52:54:00:00:00:0{n}",
            "peer_mac": f"52:54:00:00:01:0{n}",
        }
        for n in (1, 2)
    ]
    run = cell_description(
        controls={"loopback": {"generator": sim}, "vnf": {"generator": sim, "ports": ports}}
    )
    for part in (Part.LOOPBACK, Part.VNF):
        with bench_on(run, "1").stand(CellTask(Cell("none"), part)) as stand:
            assert ("vnf" in stand.setup) is (part is Part.VNF)
    assert agent.calls == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"readiness": Readiness(ready=False, reasons=["no DPDK"])}, "not ready: no DPDK"),
        ({"infos": []}, "it has no backend 'dpdkvhostuser'; it has none"),
        (
            {"infos": [BackendInfo(name="dpdkvhostuser", usable=False, reason="r", fix="f")]},
            r"not usable there: r\n  fix: f",
        ),
        (
            {"infos": [BackendInfo(name="dpdkvhostuser", usable=True)]},
            r"has no flat networks (.*\n)*.* has 1 queues at most, not 2\n  fix: .*_queues",
        ),
    ],
)
def test_what_the_agent_has_not_is_reported_before_anything_is_sent(
    agent: MadeUpAgent, change: dict[str, Any], words: str
) -> None:
    run = cell_description()
    for name, value in change.items():
        setattr(agent, name, value)
    with pytest.raises(UnusableInput, match=words):
        bench_on(run).check([search_of(run)])
    assert agent.calls == []


def test_a_vnf_that_is_not_installed_is_reported(agent: MadeUpAgent) -> None:
    run = cell_description(vnf={"type": "testpmd", "binary": "/none/testpmd"})
    with pytest.raises(UnusableInput, match="/none/testpmd is not installed"):
        bench_on(run).check([search_of(run)])


def test_frames_have_the_addresses_of_the_ends_unless_they_have_their_own() -> None:
    run = cell_description()
    assert run.ends is not None
    given = {"frames": {"destination_mac": "52:54:00:00:00:77"}}
    chosen = generators.Tcpreplay.model_validate(
        {
            "type": "tcpreplay",
            "paths": [{"send": "a", "receive": "b"}, {"send": "b", "receive": "a", **given}],
        }
    )
    found = addressed(chosen, run.ends)
    assert isinstance(found, generators.Tcpreplay)
    there, back = (path.frames for path in found.paths)
    assert (there.source_mac, there.destination_mac) == (run.ends[0].peer_mac, run.ends[0].mac)
    assert (back.source_mac, back.destination_mac) == (run.ends[1].peer_mac, "52:54:00:00:00:77")
    assert addressed(generators.Sim(), run.ends) == generators.Sim()
