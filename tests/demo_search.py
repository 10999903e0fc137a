"""The end of the demo: a short search on each backend, with real packets, and the table that it makes."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.demo_steps import WIDTH, Steps
from tests.lab.hypervisor import Hypervisor
from tests.lab.processes import LabError
from tests.lab.wires import NETWORKS, Wires, wires

PROGRAM = Path(__file__).resolve().parents[1] / "tools/trex/zeroloss.py"
#: Seconds of the trial that decides: a real one has 60.
FINAL_S = 2
PRECISION = 0.2
LABEL = (
    "A short search: {seconds:g} s without a lost frame make a rate zero-loss here, where it is 60 s by"
    " default, and the generator (tcpreplay), the switch, the VNF and everything else share"
    " {cpus} CPUs. It shows how it is done; what a backend can do is found on a real host with TRex:"
    " see docs/zeroloss.md."
)


def search(steps: Steps, host: Hypervisor, backends: Sequence[str], cpus: int) -> None:
    """Both networks get a wire, at whose far end the generator sits. Raises: LabError."""
    with wires() as wired:
        with steps.step("Two wires to a traffic generator"):
            host.agent.restart_with(wired.agent_options())
            steps.say(f"the agent has them as networks {' and '.join(NETWORKS)}")
        with steps.step("zeroloss: how many frames a second, without losing one"):
            description = host.directory / "matrix.yaml"
            description.write_text(yaml.safe_dump(described(host, backends, wired), sort_keys=False))
            folder = host.directory / "search"
            table = _run(steps, [str(description), "--folder", str(folder)])
        steps.say("")
        steps.say(table)
        steps.say("")
        steps.say(textwrap.fill(LABEL.format(seconds=FINAL_S, cpus=cpus), WIDTH))


def described(host: Hypervisor, backends: Sequence[str], wired: Wires) -> dict[str, Any]:
    """The run."""
    return {
        **wired.described("demo", host.agent.url, host.ovs.rundir),
        "search": {
            "final_duration": FINAL_S,
            "precision": PRECISION,
            "max_trials": 10,
            "line_rate_pps": 100_000,
        },
        "matrix": {"backends": list(backends), "pmd_cores": [1], "flows": [16]},
    }


def _run(steps: Steps, arguments: Sequence[str]) -> str:
    """The table; what it says meanwhile is shown. A Ctrl-C reaches it too, and it is waited for."""
    command = [sys.executable, "-W", "ignore", str(PROGRAM), "matrix", *arguments]
    steps.say(f"netplugin-zeroloss matrix {' '.join(arguments)}")
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None and running.stderr is not None
        try:
            for line in running.stderr:
                steps.say(line)
            table = running.stdout.read()
        except KeyboardInterrupt:
            running.communicate()
            raise
    # 1: a cell has no verdict, which the table says with the reason. On a busy machine that may be.
    if running.returncode not in (0, 1):
        raise LabError(f"netplugin-zeroloss ended with status {running.returncode}")
    return table
