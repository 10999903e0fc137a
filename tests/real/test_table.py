"""TRex sends, the agent plugs, VPP routes in a VM: cells of the table with all its real parts."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
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
RATE = {"final_duration": 10, "precision": 0.1}
#: More than the VM forwards, and no more than the generator sends beside it.
LINE_RATE_PPS = {"trex-stl": 400_000, "tcpreplay": 40_000}
#: Whether frames pass, at whatever verdict: VPP's workers poll on CPUs that the other programs need.
FEW = {"final_duration": 1, "precision": 0.5, "max_trials": 4, "line_rate_pps": 2_000}


@dataclass(frozen=True, slots=True)
class Hypervisor:
    """A host with its agent, two wires and the trees of the VNF and, if it sends, of TRex."""

    agent: PrivateAgent
    wired: Wires
    folder: Path
    vpp: Path
    trex: Path | None

    def cells(self, workers: int, search: dict[str, Any], queues: int = 1) -> list[CellRecord]:
        """Run the cells of all backends."""
        with vm_files(self.folder, workers + 1, memory_mb=2048, hugepages=128) as vm:
            sections = self._described(vm, workers)
            sections["search"] = search
            sections["matrix"] = {"backends": BACKENDS, "queues": [queues], "flows": [16]}
            path = self.folder / "run.yaml"
            path.write_text(yaml.safe_dump(sections))
            program = [
                sys.executable,
                "-W",
                "ignore",
                str(ROOT / "tools/trex/zeroloss.py"),
                "matrix",
                str(path),
            ]
            done = subprocess.run([*program, "--folder", str(self.folder / "run")], timeout=1500, check=False)
        assert done.returncode in (0, 1)
        assert self.agent.get("/v1/ports") == (200, [])
        records = list(read_run(self.folder / "run").records)
        assert [record.cell.backend for record in records] == BACKENDS
        return records

    def _described(self, vm: VmFiles, workers: int) -> dict[str, Any]:
        (plugins,) = (path for path in self.vpp.rglob("vpp_plugins") if path.is_dir())
        sections = self.wired.described("real", self.agent.url, BASE / "ovs")
        del sections["overrides"]
        if self.trex is not None:
            sections["generator"] = {
                "type": "trex-stl",
                "trex_dir": str(self.trex),
                "server": GENERATOR,
                "paths": [{"send": 0, "receive": 1}, {"send": 1, "receive": 0}],
            }
        cores: dict[str, Any] = {"main": 0} | ({"workers": f"1-{workers}"} if workers else {})
        return sections | {
            "vnf": {
                "type": "vpp",
                "binary": str(self.vpp / "bin/vpp"),
                "plugin_path": str(plugins),
                "machine": vm.ssh.machine(ADDRESS),
                "nics": list(NICS),
                "start_s": 240,
                "poll_sleep_us": None if workers else 100,
            },
            "vnf_cores": cores,
            "vm": {"domain": str(vm.domain)},
            "timeouts": {"boot": 240, "forwarding": 60, "active": 120, "shutdown": 1},
        }


@contextmanager
def _hypervisor(folder: Path, vpp: Path, trex: Path | None) -> Iterator[Hypervisor]:
    with ExitStack() as parts:
        wired = parts.enter_context(wires())
        options = {**wired.agent_options(), "agent": {"enabled_backends": ",".join(BACKENDS)}}
        ovs = parts.enter_context(PrivateOvs(BASE / "ovs"))
        parts.enter_context(PrivateLibvirt(BASE / "libvirt"))
        agent = parts.enter_context(PrivateAgent(BASE / "agent", ovs, options))
        if trex is not None:
            parts.enter_context(reachable(wired.netns))
            configuration = folder / "trex_cfg.yaml"
            configuration.write_text(trex_configuration(wired.ends))
            parts.enter_context(server(wired.netns, trex, configuration, folder / "trex.log"))
        yield Hypervisor(agent, wired, folder, vpp, trex)
    shutil.rmtree(BASE)


@pytest.mark.parametrize("sender", ["trex-stl", "tcpreplay"])
def test_a_search_ends_with_a_rate(
    request: pytest.FixtureRequest, vpp: Path, tmp_path: Path, sender: str
) -> None:
    """VPP's one thread sleeps between polls, as TRex and the PMD thread do: there are CPUs for all."""
    trex = request.getfixturevalue("trex") if sender == "trex-stl" else None
    with _hypervisor(tmp_path, vpp, trex) as host:
        records = host.cells(0, RATE | {"line_rate_pps": LINE_RATE_PPS[sender]})
    for record in records:
        assert record.verdict == "ndr", (record.error, record.result)
        assert record.result is not None and record.setup["vnf"]["name"] == "vpp"
        located = [trial["measured"]["evidence"] for trial in record.result["trial_log"]]
        assert [evidence["unexplained"] for evidence in located] == [0] * len(located)


@pytest.mark.parametrize(("workers", "queues"), [(1, 1), (2, 1), (4, 2)])
def test_each_worker_polls_a_queue(vpp: Path, tmp_path: Path, workers: int, queues: int) -> None:
    """As VPP prints where its threads run and what they poll."""
    with _hypervisor(tmp_path, vpp, None) as host:
        records = host.cells(workers, FEW, queues)
    for record in records:
        assert record.result is not None, record.error
        printed = record.setup["vnf"]["configuration"]
        polling = re.findall(r"^Thread (\d+) ", printed["show interface rx-placement"], re.MULTILINE)
        assert polling == [str(number) for number in range(1, workers + 1)], printed
        # Number, name, type, id of the thread, scheduling policy, CPU.
        cpus = re.findall(
            r"^\d+ +vpp_wk_\d+ +workers +\d+ +\S+ +\S+ +(\d+) ", printed["show threads"], re.MULTILINE
        )
        assert cpus == [str(number) for number in range(1, workers + 1)], printed
