"""One run of ``netplugin-zeroloss matrix`` over all four backends, on emulated parts.

The NIC under test is QEMU's 82576, whose wire leads to another one of the guest: two VLANs on it are the
two ends. testpmd stands behind each pair of ports, in the VM's place: on taps, on vhost-user sockets
and on VFs. That shows that the command works, not how fast a backend is.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from netplugin_zeroloss.cli.main import main
from netplugin_zeroloss.journal import Part, RunRecord, read_run

from tests.lab.agent import PrivateAgent
from tests.lab.matrix import check_trials, entries, write, zeroloss
from tests.lab.namespaces import namespace, within
from tests.lab.ovs import DATAPATH_TAP, PrivateOvs
from tests.lab.processes import Daemon, run, wait_for
from tests.nested import nics
from tests.nested.nics import PF, WIRE
from tests.nested.vfs import FAR, driver, functions, whole_state

pytestmark = [pytest.mark.nested(cpus=2, memory_mb=2560, hugepages=480), pytest.mark.timeout(900)]

BACKENDS = ("linuxbridge", "dpdkvhostuser", "vdpa", "sriov")
VLANS = (101, 102)
#: Of what takes a second or two where nothing is emulated.
PATIENT_S = 300.0
SEARCH = {
    "final_duration": 0.5,
    "initial_duration": 0.3,
    "precision": 0.5,
    "max_trials": 3,
    "line_rate_pps": 400,
}

#: A run description, as it is written to its file.
Sections: TypeAlias = dict[str, Any]


@pytest.fixture
def ends(pf: str) -> Iterator[tuple[str, ...]]:
    """The far ends of the wire in a namespace, one for each VLAN; its kernel sends nothing by itself."""
    names = tuple(f"wire.{vlan}" for vlan in VLANS)
    with namespace(FAR):
        run(within(FAR, ["sysctl", "-qw", "net.ipv6.conf.default.disable_ipv6=1"]))
        run(["ip", "link", "set", nics.interface(WIRE.pci), "netns", FAR, "name", "wire"])
        for words in (
            ["set", "wire", "addrgenmode", "none", "up"],
            *(
                ["add", "link", "wire", "name", name, "up", "type", "vlan", "id", str(vlan)]
                for name, vlan in zip(names, VLANS, strict=True)
            ),
        ):
            run(within(FAR, ["ip", "link", *words]))
        yield names
        for name in names:
            run(within(FAR, ["ip", "link", "del", name]))
        run(within(FAR, ["ip", "link", "set", "wire", "netns", "1"]))


@contextmanager
def agent_of(pf: str, uplink: str, ovs: PrivateOvs, folder: Path) -> Iterator[PrivateAgent]:
    """One NIC for all backends. ``uplink``: the same NIC, as OVS takes it."""
    options = {
        "agent": {"enabled_backends": ",".join(BACKENDS), "operation_timeout": str(round(PATIENT_S))},
        "ovs": {
            "bridge_mappings": "physnet1:br-phys1",
            "uplinks": f"'\"physnet1:{uplink}\"'",
            "timeout": "60",
        },
        "linuxbridge": {"physical_interfaces": f"physnet1:{pf}"},
        "sriov": {"devices": f"physnet1:{PF.pci}"},
        "vdpa": {"guest_hugepages": "false"},
    }
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.lab.agent.READY_DEADLINE_S", PATIENT_S)
        with PrivateAgent(folder, ovs, options) as private:
            yield private


@pytest.fixture
def agent(pf: str, ovs: PrivateOvs, tmp_path: Path) -> Iterator[PrivateAgent]:
    """OVS has the NIC by DPDK's driver of kernel devices."""
    uplink = f"net_af_packet0,iface={pf},qdisc_bypass=1,framesz=2048,framecnt=4096,blocksz=16384"
    with agent_of(pf, uplink, ovs, tmp_path / "agent") as private:
        yield private


@pytest.fixture
def testpmd(tmp_path: Path) -> Path:
    """testpmd polls: it gets what the others leave, with whom it shares a CPU."""
    program = tmp_path / "testpmd"
    program.write_text('#!/bin/sh\nexec nice -n 19 dpdk-testpmd "$@"\n')
    program.chmod(0o755)
    return program


def described(agent: PrivateAgent, ovs: PrivateOvs, pf: str, ends: Sequence[str], testpmd: Path) -> Sections:
    """All but the search."""
    one, other = ends
    network = {"type": "vlan", "physical_network": "physnet1"}
    return {
        "name": "all-four-emulated",
        "agent": {"url": agent.url},
        "ends": [{"network": {**network, "vlan_id": vlan}} for vlan in VLANS],
        "vnf": {"type": "testpmd", "binary": str(testpmd), "memory_mb": 128, "start_s": PATIENT_S},
        "vnf_cores": {"main": 0, "workers": "0"},
        "evidence": {"ovs_rundir": str(ovs.rundir), "devices": [pf]},
        "generator": {
            "type": "tcpreplay",
            "netns": FAR,
            "paths": [{"send": one, "receive": other}, {"send": other, "receive": one}],
        },
        "matrix": {"backends": list(BACKENDS), "pmd_cores": ["1"], "flows": [16]},
        "timeouts": dict.fromkeys(("agent", "active", "counters", "forwarding"), PATIENT_S),
    }


def found(agent: PrivateAgent, ovs: PrivateOvs, pf: str) -> Any:
    """What must be after a run as it was before."""
    # A VF's interface may come back by another name.
    links = [path.parent for path in Path("/sys/class/net").glob("*/ifindex")]
    made = {link.name for link in links if not (link / "device").exists()}
    pmd = agent.get("/v1/pmd")[1]["cpus"]
    return (
        made - {DATAPATH_TAP},
        ovs.vsctl("list-br"),
        pmd,
        agent.get("/v1/ports"),
        whole_state(pf, functions()),
    )


def check(run: RunRecord, output: str, backends: Sequence[str]) -> None:
    """A row and an honest verdict for each backend, through ports of its kind and a process behind them."""
    assert [record.part for record in run.records] == [Part.SEARCH] * len(backends), run
    assert [record.cell.backend for record in run.records] == list(backends)
    for record in run.records:
        check_trials(record)
        assert f"| {record.cell.backend} |" in output
        assert record.setup["vnf"]["name"] == "testpmd"
        assert [port["state"] for port in record.setup["ports"]] == ["active"] * 2
        assert ("pmd" in record.setup) == (record.cell.pmd_cores is not None)
        result = record.result
        assert result is not None
        for trial in result["trial_log"]:
            read, received = trial["measured"]["readings"], trial["measured"]["rx_packets"]
            # Each frame that the generator got back was forwarded by this process.
            assert read["vnf.port0.tx_packets"] + read["vnf.port1.tx_packets"] >= received > 0
            assert read.get("ovs.pmd_cores") == record.cell.pmd_cores
        check_binding(record.cell.backend, record.setup["ports"][0]["binding"])


def check_binding(backend: str, binding: Mapping[str, Any]) -> None:
    if backend == "linuxbridge":
        assert binding["device"]
    elif backend == "sriov":
        assert binding["pci_address"] in functions()
    else:
        assert binding["socket_path"]
    if backend == "vdpa":
        assert (binding["vif_type"], binding["mode"]) == ("vhostuser", "relay")
        assert binding["pci_address"] in functions()


def test_all_four_backends_in_one_run(
    agent: PrivateAgent,
    ovs: PrivateOvs,
    pf: str,
    ends: Sequence[str],
    testpmd: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = found(agent, ovs, pf)
    sections = described(agent, ovs, pf, ends, testpmd)
    path = write(tmp_path, {**sections, "search": SEARCH})
    # The command without the time it takes to start.
    status = main(["matrix", str(path), "--folder", str(tmp_path / "run"), "--quiet"])
    printed = capsys.readouterr()
    assert status in (0, 1) and printed.err == "", printed
    check(read_run(tmp_path / "run"), printed.out, BACKENDS)
    assert found(agent, ovs, pf) == before


def proof_of(folder: Path, pf: str) -> dict[str, str]:
    """The outcome of each step; what is attached to an issue has no address of this NIC."""
    text, report = (folder / "proof.md").read_text(), json.loads((folder / "proof.json").read_text())
    assert text.startswith("# netplugin on 8086:10c9, igb, firmware ")
    mac = Path(f"/sys/class/net/{pf}/address").read_text().strip()
    assert not re.search(rf"52:54:00|{mac}|\b{pf}\b|physnet1|{folder}", text + json.dumps(report)), text
    return {step["name"]: step["outcome"] for step in report["steps"]}


def provable(agent: PrivateAgent, ovs: PrivateOvs, pf: str, ends: Sequence[str], testpmd: Path) -> Sections:
    sections = described(agent, ovs, pf, ends, testpmd)
    sections["matrix"]["backends"] = ["sriov", "dpdkvhostuser"]
    return {**sections, "search": SEARCH}


def test_what_a_nic_shows_is_reported_and_undone(
    agent: PrivateAgent, ovs: PrivateOvs, pf: str, ends: Sequence[str], testpmd: Path, tmp_path: Path
) -> None:
    """One cell, which takes long here: the other backend has no generator for it."""
    before = found(agent, ovs, pf)
    missing = {"cells": {"backend": "dpdkvhostuser"}, "generator": {"type": "exec", "command": "/missing"}}
    sections = {**provable(agent, ovs, pf, ends, testpmd), "overrides": [missing]}
    path, folder = write(tmp_path, sections), tmp_path / "proof"
    assert main(["prove", str(path), "--folder", str(folder)]) == 0
    outcomes = proof_of(folder, pf)
    assert outcomes.pop("dpdkvhostuser: frames pass a cell") == "not shown"
    assert set(outcomes.values()) == {"shown"} and len(outcomes) == 10, outcomes
    assert found(agent, ovs, pf) == before


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_proof_that_is_killed_leaves_nothing_when_it_is_repeated(
    agent: PrivateAgent, ovs: PrivateOvs, pf: str, ends: Sequence[str], testpmd: Path, tmp_path: Path
) -> None:
    before = found(agent, ovs, pf)
    path, folder = write(tmp_path, provable(agent, ovs, pf, ends, testpmd)), tmp_path / "proof"
    command = zeroloss(path, "--folder", folder, command="prove")
    moments = (
        lambda: len(agent.get("/v1/ports")[1]) > 3,  # in the ledger
        lambda: entries(folder / "dpdkvhostuser", "trial"),
    )
    for number, moment in enumerate(moments):
        with Daemon("zeroloss", command, tmp_path / f"log{number}") as killed:
            killed.wait_for(moment, 4 * PATIENT_S, "it has come so far")
            killed.kill()
        assert agent.get("/v1/ports")[1] and not (folder / "proof.md").exists()
    done = subprocess.run(command, capture_output=True, text=True, timeout=4 * PATIENT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert set(proof_of(folder, pf).values()) == {"shown"}
    wait_for(lambda: found(agent, ovs, pf) == before, PATIENT_S, "all is as it was before")


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_nic_is_bound_for_each_backend_and_put_back_also_after_a_kill(
    ovs: PrivateOvs, pf: str, ends: Sequence[str], testpmd: Path, tmp_path: Path
) -> None:
    """The kernel has the NIC for Linux bridge and VFs, DPDK's own driver for OVS between them."""
    backends = ("linuxbridge", "dpdkvhostuser", "sriov")
    with agent_of(pf, PF.pci, ovs, tmp_path / "agent") as agent:
        before = found(agent, ovs, pf)
        sections = described(agent, ovs, pf, ends, testpmd)
        sections["matrix"]["backends"] = list(backends)
        path, folder = write(tmp_path, {**sections, "search": SEARCH, "rebind": True}), tmp_path / "run"
        command = zeroloss(path, "--folder", folder)

        def on_ovs() -> bool:
            return any(entry["cell"]["backend"] == "dpdkvhostuser" for entry in entries(folder, "trial"))

        with Daemon("zeroloss", command, tmp_path / "log") as first:
            first.wait_for(on_ovs, 4 * PATIENT_S, "a trial on OVS was journalled")
            first.kill()
        assert driver(PF.pci) == "vfio-pci" and not (nics.device(PF.pci) / "virtfn0").exists()
        trials = entries(folder, "trial")
        done = subprocess.run(
            [*command, "--resume"], capture_output=True, text=True, timeout=6 * PATIENT_S, check=False
        )
        assert done.returncode in (0, 1), done.stderr
        assert entries(folder, "trial")[: len(trials)] == trials
        check(read_run(folder), done.stdout, backends)
        wait_for(lambda: found(agent, ovs, pf) == before, PATIENT_S, "all is as it was before")
