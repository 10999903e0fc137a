"""A control group that gives less than the machine has, and commands that run in it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.lab.processes import run

CGROUPS = Path("/sys/fs/cgroup")
NAME = "np-limited"
# Joins the group, and becomes the command.
_JOIN = "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid())); os.execv(sys.argv[2], sys.argv[2:])"


@dataclass(frozen=True)
class Cgroup:
    version: int
    path: Path

    def run(self, command: Sequence[str | Path], timeout: float) -> subprocess.CompletedProcess[str]:
        joined = [sys.executable, "-c", _JOIN, self.path / "cgroup.procs", *command]
        return subprocess.run(joined, capture_output=True, text=True, timeout=timeout, check=False)


@contextmanager
def of_cpu_0() -> Iterator[Cgroup]:
    """A group with CPU 0 alone, of the version that this machine has its cpusets in."""
    lines = (line.split() for line in Path("/proc/cgroups").read_text().splitlines())
    version = 2 if {words[0]: words[1] for words in lines}["cpuset"] == "0" else 1
    top = CGROUPS / "cpuset" if version == 1 else CGROUPS
    with ExitStack() as undone:

        def mount(kind: str, on: Path, *options: str) -> None:
            on.mkdir(exist_ok=True)
            run(["mount", "--no-mtab", "-t", kind, *options, kind, on])
            undone.callback(run, ["umount", "--no-mtab", on])

        if version == 1:  # the hierarchy is the machine's, wherever it is mounted
            mount("tmpfs", CGROUPS)
            mount("cgroup", top, "-o", "cpuset")
        else:
            if not (top / "cgroup.controllers").exists():
                mount("cgroup2", top)
            (top / "cgroup.subtree_control").write_text("+cpuset")
        group = top / NAME
        group.mkdir()
        undone.callback(group.rmdir)
        for name in ("cpuset.cpus", "cpuset.mems"):
            (group / name).write_text("0")
        yield Cgroup(version, group)
