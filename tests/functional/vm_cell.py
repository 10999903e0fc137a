"""``python -m tests.functional.vm_cell IMAGE FOLDER --backends NAME..``, in a sandbox: runs testpmd in a VM
on an image, killed in its search and resumed; prints as JSON what was seen. OVS takes 700 hugepages."""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from netplugin_zeroloss.journal import CellRecord, read_run
from netplugin_zeroloss.machines import Ssh, SshMachine
from netplugin_zeroloss.matrix.description import RunDescription, vm_of
from netplugin_zeroloss.search.result import dumps, load

from tests.functional.conftest import BASE
from tests.lab.agent import PrivateAgent
from tests.lab.libvirtd import PrivateLibvirt
from tests.lab.matrix import check_trials, entries, write, zeroloss
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import Daemon
from tests.lab.wires import wires

BOOT_S, RUN_S = 420.0, 1500.0
#: Each process of the VM by its name, one on a line.
PROCESSES = ("sh", "-c", "cat /proc/[0-9]*/comm")


def described(image: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The VM is emulated, so few frames and few trials, and much time for all that it does."""
    return {
        "vnf": {"type": "testpmd", "memory_mb": 128, "start_s": 300},
        "vm": {"image": str(image), "emulate": True, "policy": {"pin": False}},
        "search": {
            "final_duration": 3,
            "initial_duration": 1,
            "precision": 0.5,
            "max_trials": options.trials,
            "line_rate_pps": options.rate,
        },
        "matrix": {"backends": options.backends, "flows": [4]},
        "timeouts": {"boot": BOOT_S, "forwarding": 120, "shutdown": 120},
    }


def processes(machine: SshMachine) -> list[str]:
    there = Ssh(machine, time.monotonic() + BOOT_S)
    try:
        return there.run(PROCESSES).split()
    finally:
        there.close()


def run(options: argparse.Namespace) -> dict[str, Any]:
    image, folder = options.image.resolve(), options.folder
    with ExitStack() as parts:
        dpdk = "dpdkvhostuser" in options.backends
        ovs = parts.enter_context(PrivateOvs(BASE / "ovs")) if dpdk else None
        wired = parts.enter_context(wires())
        libvirt = parts.enter_context(PrivateLibvirt(BASE / "libvirt"))
        backends = {"agent": {"enabled_backends": ",".join(options.backends)}}
        agent = parts.enter_context(PrivateAgent(BASE / "agent", ovs, wired.agent_options() | backends))
        sections = wired.described("testpmd-in-a-vm", agent.url, BASE / "ovs")
        del sections["overrides"], sections["vnf_cores"]
        whole = RunDescription.model_validate(sections | described(image, options))
        command = zeroloss(write(folder, sections | described(image, options)), "--folder", folder / "run")
        with Daemon("zeroloss", command, folder / "log", {"TMPDIR": str(folder)}) as first:
            first.wait_for(lambda: bool(entries(folder / "run", "trial")), RUN_S, "a trial was journalled")
            first.kill()
        assert whole.vnf is not None
        machine = vm_of(whole.vnf)
        assert isinstance(machine, SshMachine)
        after_kill = processes(machine)
        done = subprocess.run(
            [*command, "--resume"], capture_output=True, text=True, timeout=RUN_S, check=False
        )
        records = read_run(folder / "run").records
        for record in records:
            check_trials(record)
        ports = agent.get("/v1/ports")
        domains = [each.name() for each in libvirt.connect().listAllDomains()]
    return {
        "status": done.returncode,
        "printed": done.stdout,
        "errors": done.stderr,
        "after_kill": after_kill,
        "cells": [about(record) for record in records],
        "ports": ports,
        "domains": domains,
    }


def about(record: CellRecord) -> dict[str, Any]:
    """What was searched, with the frames that came back in all trials, and each trial."""
    assert record.result is not None
    trials = [trial for repeat in load(dumps(record.result), "result")[1] for trial in repeat]
    return {
        "backend": record.cell.backend,
        "vnf": record.setup["vnf"],
        "verdict": record.verdict,
        "zero_loss_pps": record.zero_loss_pps,
        "forwarded": sum(measured.rx_packets for _, measured in trials),
        "trials": [
            {
                "pps": asked.rate_pps,
                "seconds": asked.duration_s,
                "sent": measured.tx_packets,
                "received": measured.rx_packets,
                "lost": {place: count for place, count in measured.evidence.items() if count},
            }
            for asked, measured in trials
        ],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("image", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--backends", nargs="+", required=True)
    parser.add_argument("--rate", type=float, default=400.0, help="line rate, frames per second")
    parser.add_argument("--trials", type=int, default=4, help="trials per cell at most")
    print(json.dumps(run(parser.parse_args())))
