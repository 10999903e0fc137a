"""TRex sends, the agent plugs, VPP routes in a VM: cells of the table with all its real parts."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from netplugin_zeroloss.journal import CellRecord, read_run

from tests.functional.conftest import BASE
from tests.lab.agent import PrivateAgent
from tests.lab.libvirtd import PrivateLibvirt
from tests.lab.ovs import PrivateOvs
from tests.lab.wires import Wires, wires
from tests.real.test_trex import ADDRESS as GENERATOR
from tests.real.test_trex import ROOT, reachable, server, trex_configuration
from tests.real.vm import ADDRESS, NICS, VmFiles, vm_files

BACKENDS = ["linuxbridge", "dpdkvhostuser"]
WORKERS = (1, 2, 4)


@pytest.fixture
def wired() -> Iterator[Wires]:
    with wires() as made:
        yield made


def _vm(folder: Path, workers: int) -> Any:
    return vm_files(folder, BASE / "console", vcpus=workers + 1, memory_mb=2048, hugepages=128)


def _description(
    agent: PrivateAgent, wired: Wires, vm: VmFiles, vpp: Path, machine: dict[str, str], workers: int
) -> dict[str, Any]:
    (plugins,) = (path for path in vpp.rglob("vpp_plugins") if path.is_dir())
    sections = wired.described("real", agent.url, BASE / "ovs")
    del sections["overrides"]
    return sections | {
        "vnf": {
            "type": "vpp",
            "binary": str(vpp / "bin/vpp"),
            "plugin_path": str(plugins),
            "machine": machine,
            "nics": list(NICS),
            "start_s": 240,
        },
        "vnf_cores": {"main": 0, "workers": f"1-{workers}"},
        "vm": {"domain": str(vm.domain)},
        "timeouts": {"boot": 240, "forwarding": 60, "active": 120, "shutdown": 1},
    }


def _run(description: dict[str, Any], folder: Path) -> list[CellRecord]:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(description))
    program = [sys.executable, "-W", "ignore", str(ROOT / "tools/trex/zeroloss.py"), "matrix", str(path)]
    done = subprocess.run(
        [*program, "--folder", str(folder / "run")], capture_output=True, text=True, timeout=1500, check=False
    )
    print(done.stdout, done.stderr)
    assert done.returncode in (0, 1), done.stderr
    return list(read_run(folder / "run").records)


@pytest.mark.parametrize(
    ("sender", "workers", "way"),
    [
        ("tcpreplay", 1, "console"),
        ("trex-stl", 1, "console"),
        *(("trex-stl", workers, "ssh") for workers in WORKERS),
    ],
)
def test_cells_of_the_table(
    request: pytest.FixtureRequest,
    vpp: Path,
    wired: Wires,
    tmp_path: Path,
    sender: str,
    workers: int,
    way: str,
) -> None:
    trex = request.getfixturevalue("trex") if sender == "trex-stl" else None
    options = {**wired.agent_options(), "agent": {"enabled_backends": ",".join(BACKENDS)}}
    with ExitStack() as parts:
        ovs = parts.enter_context(PrivateOvs(BASE / "ovs"))
        parts.enter_context(PrivateLibvirt(BASE / "libvirt"))
        agent = parts.enter_context(PrivateAgent(BASE / "agent", ovs, options))
        vm = parts.enter_context(_vm(tmp_path, workers))
        machine = vm.ssh.machine(ADDRESS) if way == "ssh" else {"type": "console", "path": str(vm.console)}
        sections = _description(agent, wired, vm, vpp, machine, workers)
        if trex is not None:
            parts.enter_context(reachable(wired.netns))
            configuration = tmp_path / "trex_cfg.yaml"
            configuration.write_text(trex_configuration(wired.ends))
            parts.enter_context(server(wired.netns, trex, configuration, tmp_path / "trex.log"))
            sections["generator"] = {
                "type": "trex-stl",
                "trex_dir": str(trex),
                "server": GENERATOR,
                "paths": [{"send": 0, "receive": 1}, {"send": 1, "receive": 0}],
            }
        sections["search"] = {
            "final_duration": 5,
            "initial_duration": 1,
            "precision": 0.2,
            "max_trials": 8,
            "line_rate_pps": 60_000,
        }
        sections["matrix"] = {"backends": BACKENDS, "queues": [1], "flows": [16]}
        records = _run(sections, tmp_path)
        assert agent.get("/v1/ports") == (200, [])
    shutil.rmtree(BASE)
    assert [record.cell.backend for record in records] == BACKENDS
    for record in records:
        assert record.result is not None, record.error
        assert record.setup["vnf"]["name"] == "vpp"
        listed = "1" if workers == 1 else f"1-{workers}"
        assert f"corelist-workers {listed}\n" in record.setup["vnf"]["configuration"]["startup.conf"]
        located = [trial["evidence"] for trial in record.result["trial_log"]]
        assert all("unexplained" in evidence for evidence in located)
