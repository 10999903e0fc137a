"""``python -m tests.functional.vm_cell IMAGE FOLDER``, in a sandbox: a run with testpmd in a VM on an image,
killed in its first search and resumed; prints as JSON what was seen of it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from netplugin_zeroloss.journal import read_run
from netplugin_zeroloss.machines.contract import SshMachine
from netplugin_zeroloss.machines.ssh import Ssh

from tests.functional.conftest import BASE
from tests.lab.agent import PrivateAgent
from tests.lab.libvirtd import PrivateLibvirt
from tests.lab.matrix import check_trials, entries, write, zeroloss
from tests.lab.processes import Daemon
from tests.lab.wires import wires

BOOT_S, RUN_S = 420.0, 1500.0
#: Each process of the VM by its name, one on a line.
PROCESSES = ("sh", "-c", "cat /proc/[0-9]*/comm")


def described(image: Path) -> dict[str, Any]:
    """The VM is emulated, so few frames and few trials, and much time for all that it does."""
    return {
        "vnf": {"type": "testpmd", "memory_mb": 128, "start_s": 300},
        "vm": {"image": str(image), "emulate": True, "policy": {"pin": False}},
        "search": {
            "final_duration": 3,
            "initial_duration": 1,
            "precision": 0.5,
            "max_trials": 4,
            "repeats": 2,
            "line_rate_pps": 400,
        },
        "matrix": {"backends": ["linuxbridge"], "flows": [4]},
        "timeouts": {"boot": BOOT_S, "forwarding": 120, "shutdown": 120},
    }


def processes(machine: SshMachine) -> list[str]:
    there = Ssh(machine, time.monotonic() + BOOT_S)
    try:
        return there.run(PROCESSES).split()
    finally:
        there.close()


def run(image: Path, folder: Path) -> dict[str, Any]:
    with wires() as wired, PrivateLibvirt(BASE / "libvirt") as libvirt:
        with PrivateAgent(BASE / "agent", options=wired.agent_options()) as agent:
            sections = wired.described("testpmd-in-a-vm", agent.url, BASE)
            del sections["overrides"], sections["vnf_cores"]
            command = zeroloss(write(folder, sections | described(image)), "--folder", folder / "run")
            with Daemon("zeroloss", command, folder / "log") as first:
                first.wait_for(
                    lambda: len(entries(folder / "run", "trial")) >= 1, RUN_S, "a trial was journalled"
                )
                first.kill()
            (vnf,) = (entry["setup"]["vnf"] for entry in entries(folder / "run", "begin"))
            machine = SshMachine.model_validate(
                {
                    "type": "ssh",
                    "host": "127.0.0.1",
                    "port": 22022,
                    "key": str(image / "key"),
                    "known_hosts": str(image / "known_hosts"),
                }
            )
            after_kill = processes(machine)
            done = subprocess.run(
                [*command, "--resume"], capture_output=True, text=True, timeout=RUN_S, check=False
            )
            (record,) = read_run(folder / "run").records
            check_trials(record)
            ports = agent.get("/v1/ports")
        domains = [each.name() for each in libvirt.connect().listAllDomains()]
    return {
        "status": done.returncode,
        "printed": done.stdout,
        "errors": done.stderr,
        "vnf": vnf,
        "after_kill": after_kill,
        "verdict": record.verdict,
        "result": record.result,
        "ports": ports,
        "domains": domains,
    }


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]).resolve(), Path(sys.argv[2]))))
