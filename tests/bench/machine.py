"""Which machine and which programs a run was measured on."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path

from tests.bench.values import Machine
from tests.lab.ovs import PrivateOvs

ROOT = Path(__file__).resolve().parents[2]


def load() -> float:
    """The load average over the last minute."""
    return round(os.getloadavg()[0], 2)


def describe(ovs: PrivateOvs, paths: Sequence[Path], load_before: float) -> Machine:
    """``paths`` have os-vif, and ovsdbapp with it."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(
        cpu=_cpu(),
        cpus=len(os.sched_getaffinity(0)),
        memory_gb=round(memory / 2**30),
        kernel=platform.release(),
        open_vswitch=ovs.appctl("version").split("\n")[0].split()[-1],
        dpdk=ovs.get("Open_vSwitch", ".", "dpdk_version"),
        python=platform.python_version(),
        ovsdbapp=_version_in(paths, "ovsdbapp"),
        os_vif=_version_in(paths, "os-vif"),
        libvirt=_printed(["libvirtd", "--version"]).split()[-1],
        load=load_before,
    )


def revision() -> str:
    """The commit of this tree, with ``+`` if it has changes."""
    name = _printed(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"])
    changed = _printed(["git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no"])
    return f"{name}+" if changed and name != _UNKNOWN and changed != _UNKNOWN else name


_UNKNOWN = "unknown"


def _printed(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return _UNKNOWN
    return done.stdout.strip()


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version_in(paths: Sequence[Path], name: str) -> str:
    where = [*map(str, paths), *sys.path]
    found = next(iter(distributions(name=name, path=where)), None)
    return found.version if found else _UNKNOWN
