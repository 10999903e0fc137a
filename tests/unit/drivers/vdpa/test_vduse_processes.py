"""Processes that may never end: with real ones in place of those that wait in the kernel."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from drivers.vdpa import vduse_step
from drivers.vdpa.vduse_processes import DeviceProcesses, DeviceStep
from netplugin.api.errors import Conflict, HostError, TryAgain

STEP = DeviceStep("delete", "npd0123456789a")
OTHER = DeviceStep("create", "npdba987654321")


def runs(program: str) -> Callable[[DeviceStep], Sequence[str]]:
    return lambda step: [sys.executable, "-I", "-S", "-c", program]


def later() -> float:
    return time.monotonic() + 60


@pytest.fixture
def nowhere(tmp_path: Path) -> Path:
    """No processes of before."""
    return tmp_path / "proc"


def test_the_words_of_one_that_fails(nowhere: Path) -> None:
    program = "import sys; sys.exit('netlink answers: Invalid argument')"
    processes = DeviceProcesses(proc=nowhere, command=runs(program), wait_s=60)
    with pytest.raises(HostError, match="Invalid argument"):
        processes.run(STEP, later())
    assert processes.pending() is None


def test_a_device_that_is_held_is_a_conflict(nowhere: Path) -> None:
    program = f"import sys; sys.exit({vduse_step.HELD})"
    with pytest.raises(Conflict, match="delete vDPA device npd"):
        DeviceProcesses(proc=nowhere, command=runs(program), wait_s=60).run(STEP, later())


def test_one_that_is_late_is_left_alone_and_no_other_begins(nowhere: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    program = f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.02)"
    processes = DeviceProcesses(proc=nowhere, command=runs(program), wait_s=0.05)
    with pytest.raises(TryAgain, match="has not finished: delete"):
        processes.run(STEP, later())
    assert processes.pending() == STEP
    with pytest.raises(TryAgain, match="has not finished: delete"):
        processes.run(OTHER, later())
    gate.touch()
    until = later()
    while processes.pending() is not None and time.monotonic() < until:
        time.sleep(0.02)
    assert processes.pending() is None
    DeviceProcesses(proc=nowhere, command=runs("pass"), wait_s=60).run(OTHER, later())


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ([sys.executable, "-I", "-S", "/opt/np/vduse_step.py", "delete", STEP.name], STEP),
        (["vdpa", "dev", "del", STEP.name], STEP),
        (["/usr/sbin/vdpa", "dev", "add", "name", OTHER.name, "mgmtdev", "vduse"], OTHER),
        (["vdpa", "dev", "del", "vdpa0"], None),
        (["vdpa", "dev", "show"], None),
        ([""], None),
    ],
)
def test_those_of_before_are_found_by_their_arguments(
    tmp_path: Path, arguments: list[str], found: DeviceStep | None
) -> None:
    """A process of before, as /proc shows it."""
    with subprocess.Popen(["sleep", "60"]) as process:
        place = tmp_path / str(process.pid)
        place.mkdir()
        (place / "cmdline").write_bytes("\0".join([*arguments, ""]).encode())
        (tmp_path / "self").mkdir()
        processes = DeviceProcesses(proc=tmp_path, command=runs("pass"))
        assert processes.pending() == found
        process.kill()
    assert processes.pending() is None


def test_the_program_has_all_steps() -> None:
    assert DeviceStep("bind", "npd1", "vhost_vdpa").command[3:] == [
        str(vduse_step.__file__),
        "bind",
        "npd1",
        "vhost_vdpa",
    ]
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(vduse_step.__file__), "no", "npd1"], capture_output=True, check=False
    )
    assert done.returncode == vduse_step.REFUSED and b"unknown step" in done.stderr
