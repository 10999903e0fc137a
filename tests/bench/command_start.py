"""How much CPU a command takes that asks the agent for little, beside a bare Python, in one run.

    python -m tests.bench.command_start

The agent is made up and answers at once with one port; CPU is user and system time of the process.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys

from tests.unit.agent import answering, served

ROUNDS = 15
#: The least that a command needs which reads JSON from a server.
BARE = [sys.executable, "-c", "import json, http.client, argparse"]
COMMANDS = ("port list", "port list -f json", "backend list", "port show p1", "port delete p1", "--version")
PORT = {"port_id": "p1", "spec": {"vm_id": "vm-1", "mac": "52:54:00:12:34:56"}, "state": "active"}


def main() -> None:
    rows: dict[str, list[float]] = {name: [] for name in ("bare Python", *COMMANDS)}
    with served(answering(200, [PORT])) as lists, served(answering(200, PORT)) as one:
        for _ in range(ROUNDS):  # interleaved: what else runs on the machine slows each of them
            rows["bare Python"].append(cpu_s(BARE, lists))
            for name in COMMANDS:
                url = lists if "list" in name else one
                rows[name].append(cpu_s([sys.executable, "-m", "netplugin.cli.main", *name.split()], url))
    bare = statistics.median(rows["bare Python"])
    print(f"| command | CPU, ms (median of {ROUNDS}) | times a bare Python |\n| --- | --- | --- |")
    for name, taken in rows.items():
        median = statistics.median(taken)
        print(f"| `{name}` | {median * 1e3:.0f} | {median / bare:.1f} |")


def cpu_s(command: list[str], url: str) -> float:
    """The CPU time of a command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment, nowhere = {**os.environ, "NETPLUGIN_URL": url}, subprocess.DEVNULL
    subprocess.run(command, env=environment, stdout=nowhere, stderr=nowhere, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
