"""``netplugin-zeroloss matrix`` on ``vdpa`` in mode ``vduse``, next to ``dpdkvhostuser`` on the same OVS.

testpmd stands in the VM's place: it opens the devices of vhost_vdpa. tcpreplay sends, and veth pairs are the
wires. That shows that the command works, not how fast a backend is.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from netplugin_zeroloss.journal import CellRecord, Part, read_run

from tests.lab.agent import PrivateAgent
from tests.lab.matrix import check_trials, entries, write, zeroloss
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import Daemon
from tests.lab.wires import Wires, wires
from tests.nested import nics
from tests.nested.vduse_host import OPTIONS, assert_nothing_left, devices, served_by

pytestmark = [
    pytest.mark.long,
    # A guest of their own: the other tests in it have the machine's own OVS.
    pytest.mark.nested(cpus=2, memory_mb=2400, hugepages=400),
    pytest.mark.timeout(1800),
]

BACKENDS = ["dpdkvhostuser", "vdpa"]
VIF_TYPES = {"dpdkvhostuser": "vhostuser", "vdpa": "vhost_vdpa"}
#: Of what takes a second or two where nothing is emulated.
PATIENT_S = 300.0


@pytest.fixture(scope="module")
def ovs() -> Iterator[PrivateOvs]:
    with served_by("forky") as private:
        yield private


@pytest.fixture
def wired() -> Iterator[Wires]:
    nics.modprobe("veth")
    with wires() as made:
        yield made


@pytest.fixture
def agent(ovs: PrivateOvs, wired: Wires, tmp_path: Path) -> Iterator[PrivateAgent]:
    """No VF and no NIC of a certain make: ``[sriov] devices`` is empty."""
    options = wired.agent_options()
    options["ovs"]["timeout"] = OPTIONS["ovs"]["timeout"]
    options["vdpa"] = OPTIONS["vdpa"]
    enabled = {"enabled_backends": ",".join(BACKENDS), "operation_timeout": str(round(PATIENT_S))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.lab.agent.READY_DEADLINE_S", PATIENT_S)
        with PrivateAgent(tmp_path / "agent", ovs, {**options, "agent": enabled}) as private:
            yield private


def described(agent: PrivateAgent, ovs: PrivateOvs, wired: Wires, folder: Path) -> dict[str, Any]:
    """testpmd polls: it runs when nothing else wants its CPU."""
    program = folder / "testpmd"
    program.write_text('#!/bin/sh\nexec chrt --idle 0 dpdk-testpmd "$@"\n')
    program.chmod(0o755)
    run = wired.described("vduse-emulated", agent.url, ovs.rundir)
    del run["overrides"]
    return {
        **run,
        "vnf": {"type": "testpmd", "binary": str(program), "memory_mb": 128, "start_s": PATIENT_S},
        "search": {
            "final_duration": 0.5,
            "initial_duration": 0.3,
            "precision": 0.5,
            "max_trials": 3,
            "line_rate_pps": 400,
        },
        "matrix": {"backends": BACKENDS, "pmd_cores": ["1"], "flows": [16]},
        "timeouts": dict.fromkeys(("agent", "active", "counters", "forwarding"), PATIENT_S),
    }


def check(record: CellRecord) -> None:
    """Through ports of its kind, with a process behind them, whose frames OVS counts."""
    check_trials(record)
    backend, ports = record.cell.backend, record.setup["ports"]
    assert record.setup["vnf"]["name"] == "testpmd"
    assert [port["state"] for port in ports] == ["active"] * 2
    assert [port["binding"]["vif_type"] for port in ports] == [VIF_TYPES[backend]] * 2
    result = record.result
    assert result is not None
    for trial in result["trial_log"]:
        read, received = trial["measured"]["readings"], trial["measured"]["rx_packets"]
        # Each frame that the generator got back was forwarded by this process.
        assert read["vnf.port0.tx_packets"] + read["vnf.port1.tx_packets"] >= received > 0
        assert read["ovs.pmd_cores"] == record.cell.pmd_cores
        for port in ports:
            assert f"ovs.{port['binding']['device']}.tx_retries" in read, "it is a vhost port of OVS"


def test_a_run_is_killed_while_it_measures_and_resumed(
    agent: PrivateAgent, ovs: PrivateOvs, wired: Wires, tmp_path: Path
) -> None:
    path, folder = write(tmp_path, described(agent, ovs, wired, tmp_path)), tmp_path / "run"
    command = zeroloss(path, "--folder", folder)

    def on_vdpa() -> bool:
        return any(entry["cell"]["backend"] == "vdpa" for entry in entries(folder, "trial"))

    with Daemon("zeroloss", command, tmp_path / "log") as first:
        first.wait_for(on_vdpa, 4 * PATIENT_S, "a trial on vhost_vdpa was journalled")
        first.kill()
    assert len(agent.get("/v1/ports")[1]) == len(devices()[1]) == 2, "the ports that it left"
    trials = entries(folder, "trial")
    done = subprocess.run(
        [*command, "--resume"], capture_output=True, text=True, timeout=4 * PATIENT_S, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    print(done.stdout)
    assert entries(folder, "trial")[: len(trials)] == trials
    run = read_run(folder)
    assert [(record.part, record.cell.backend) for record in run.records] == [
        (Part.SEARCH, backend) for backend in BACKENDS
    ], done.stderr
    for record in run.records:
        check(record)
        assert f"| {record.cell.backend} |" in done.stdout
    assert agent.get("/v1/ports") == (200, [])
    assert_nothing_left(ovs)
