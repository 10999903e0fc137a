"""A matrix on real parts: tcpreplay, ports of two backends, VNFs on them, loss attribution that closes."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from netplugin_zeroloss.journal import Part, read_run

from tests.functional.conftest import BASE
from tests.lab.agent import PrivateAgent
from tests.lab.matrix import check_trials, entries, write, zeroloss
from tests.lab.namespaces import connect
from tests.lab.ovs import DATAPATH_TAP, PrivateOvs
from tests.lab.processes import Daemon
from tests.lab.wires import Wires, wires

BACKENDS = ["dpdkvhostuser", "linuxbridge"]


@pytest.fixture
def wired() -> Iterator[Wires]:
    with wires() as made:
        yield made


@pytest.fixture
def agent(ovs: PrivateOvs, wired: Wires) -> Iterator[PrivateAgent]:
    options = {**wired.agent_options(), "agent": {"enabled_backends": ",".join(BACKENDS)}}
    with PrivateAgent(BASE / "agent", ovs, options) as private:
        yield private
    shutil.rmtree(BASE / "agent")


def described(agent: PrivateAgent, ovs: PrivateOvs, wired: Wires) -> dict[str, Any]:
    """More frames than there is room for, and few trials."""
    return {
        **wired.described("real", agent.url, ovs.rundir),
        "search": {
            "final_duration": 1.0,
            "initial_duration": 0.3,
            "precision": 0.5,
            "max_trials": 8,
            "line_rate_pps": 80_000,
        },
        "matrix": {"backends": BACKENDS, "flows": [16]},
    }


def check_given_back(agent: PrivateAgent, ovs: PrivateOvs, wired: Wires, pmd: Any) -> None:
    assert agent.get("/v1/ports") == (200, [])
    assert ovs.vsctl("list-br").split() == []
    links = {path.parent.name for path in Path("/sys/class/net").glob("*/ifindex")}
    assert links - {DATAPATH_TAP} == {"lo", *wired.nics}
    assert agent.get("/v1/pmd")[1]["cpus"] == pmd["cpus"]


def test_two_backends_are_searched_with_real_packets(
    agent: PrivateAgent, ovs: PrivateOvs, wired: Wires, tmp_path: Path
) -> None:
    pmd = agent.get("/v1/pmd")[1]
    assert (pmd["cpus"], pmd["cores"]) == ("1", []), "without a bridge there are no PMD threads"
    description = write(tmp_path, described(agent, ovs, wired))
    done = subprocess.run(
        zeroloss(description, "--folder", tmp_path / "run"),
        capture_output=True,
        text=True,
        timeout=480,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    run = read_run(tmp_path / "run")
    assert [record.cell.backend for record in run.records] == BACKENDS, done.stderr
    for record in run.records:
        check_trials(record)
        assert len(record.setup["ports"]) == 2
        assert f"| {record.cell.backend} |" in done.stdout
    vhost, bridge = run.records
    assert vhost.setup["vnf"]["name"] == "testpmd" and vhost.setup["pmd"]["cores"]
    assert bridge.setup["vnf"]["name"] == "taps" and "pmd" not in bridge.setup
    check_given_back(agent, ovs, wired, pmd)


def test_a_run_that_is_killed_leaves_nothing_once_it_was_resumed(
    agent: PrivateAgent, ovs: PrivateOvs, wired: Wires, tmp_path: Path
) -> None:
    """Its ports are those of its own id: they are taken away, and the trials that it had stay."""
    pmd = agent.get("/v1/pmd")[1]
    sections = described(agent, ovs, wired)
    sections["matrix"]["backends"] = ["dpdkvhostuser"]
    sections["search"] |= {"repeats": 3, "line_rate_pps": 8000}
    description, folder = write(tmp_path, sections), tmp_path / "run"
    command = zeroloss(description, "--folder", folder)
    # Who is killed leaves its files behind.
    with Daemon("zeroloss", command, tmp_path / "log", {"TMPDIR": str(tmp_path)}) as first:
        first.wait_for(lambda: len(entries(folder, "trial")) >= 1, 180, "a trial was journalled")
        first.kill()
    before = entries(folder, "trial")
    assert len(agent.get("/v1/ports")[1]) == 2
    taken = subprocess.run(
        zeroloss(description, "--folder", tmp_path / "other"),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert taken.returncode == 2 and "port zeroloss-1 is there already" in taken.stderr
    done = subprocess.run(
        zeroloss(description, "--folder", folder, "--resume"),
        capture_output=True,
        text=True,
        timeout=480,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    after = entries(folder, "trial")
    assert after[: len(before)] == before and len(after) > len(before)
    numbers = [(entry["repeat"], entry["number"]) for entry in after]
    assert len(set(numbers)) == len(numbers) and numbers == sorted(numbers)
    (record,) = read_run(folder).records
    check_trials(record)
    check_given_back(agent, ovs, wired, pmd)


@pytest.mark.long
def test_controls_bound_what_a_cell_can_show(
    agent: PrivateAgent, ovs: PrivateOvs, wired: Wires, tmp_path: Path
) -> None:
    """The generator on a wire of its own, and testpmd on the NICs themselves, which no port has then."""
    pmd = agent.get("/v1/pmd")[1]
    connect(wired.netns, "zlloop0", wired.netns, "zlloop1")
    sections = described(agent, ovs, wired)
    sections["matrix"]["backends"] = ["dpdkvhostuser"]
    loop = {**sections["generator"], "paths": [{"send": "zlloop0", "receive": "zlloop1"}]}
    ports = [
        {
            "attachment": "netdev",
            "device": nic,
            "mac": f"52:54:00:5a:00:0{number}",
            "peer_mac": f"52:54:00:5a:01:0{number}",
        }
        for number, nic in enumerate(wired.nics, 1)
    ]
    sections["controls"] = {
        "loopback": {"generator": loop},
        "vnf": {"generator": sections["generator"], "ports": ports},
        "final_duration": 1,
    }
    done = subprocess.run(
        zeroloss(write(tmp_path, sections), "--folder", tmp_path / "run"),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    run = read_run(tmp_path / "run")
    assert [record.part for record in run.records] == [Part.LOOPBACK, Part.VNF, Part.SEARCH]
    for record in run.records:
        assert record.result is not None, record.error
    (cell,) = run.cells
    loopback, vnf = run.control(cell, Part.LOOPBACK), run.control(cell, Part.VNF)
    assert loopback is not None and vnf is not None
    assert "vnf" not in loopback.setup and vnf.setup["vnf"]["name"] == "testpmd"
    check_given_back(agent, ovs, wired, pmd)
