"""``netplugin host verify`` measures this machine with real programs, keeps it, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from netplugin.programs.program import own_directory
from netplugin.tuning.verifying import loop
from netplugin.tuning.verifying.result import ThroughputSettings
from tests.lab.processes import cpu_seconds, stop, wait_for

COMMAND = (sys.executable, "-m", "netplugin.cli.main", "host", "verify")
PROGRAMS = ("cyclictest", "dpdk-testpmd")


def running() -> set[str]:
    """Which of the programs run, in this sandbox: nobody else's."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue  # it has ended since
            found.add(Path(words[0]).name)
    return found & set(PROGRAMS)


@pytest.fixture(autouse=True)
def scratch(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """/tmp has what others measure at the same time."""
    monkeypatch.setenv("TMPDIR", str(tmp_path_factory.mktemp("scratch")))


def left() -> list[Path]:
    return [*Path("/run").glob("netplugin-*"), *Path(os.environ["TMPDIR"]).glob("*")]


def test_a_short_run_of_both_is_kept_and_compared(tmp_path: Path) -> None:
    before = left()
    words = [
        "--cpus",
        "0-1",
        "--rounds",
        "2",
        "--duration",
        "2",
        "--window",
        "5",
        "--label",
        "before",
    ]
    done = subprocess.run(
        [*COMMAND, *words, "--results", str(tmp_path), "-f", "json"],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    printed = done.stderr.splitlines()
    assert [line.split(",")[0] for line in printed] == [
        *["testpmd on CPU 0 and 1"] * 2,
        *["cyclictest on CPU 0-1"] * 2,
    ]
    shown = json.loads(done.stdout)
    cpus = shown["latency_us"]["cpus"]
    assert set(cpus) == {"0", "1"}
    for found in cpus.values():
        assert 0 < found["min"] <= found["average"] <= found["max"]
        assert found["min"] <= found["P99"] <= found["P99.9"] <= found["max"]
        assert found["samples"] > 1000
    assert shown["latency_us"]["overall"]["samples"] == sum(c["samples"] for c in cpus.values())
    # Far less than any CPU passes, also one that is taken away for most of the window: what is asked is
    # whether the frames go round.
    assert len(shown["throughput_pps"]["samples"]) == 2
    assert shown["throughput_pps"]["min"] > 1000
    assert shown["throughput_pps"]["settings"]["hugepage_node"] == 0
    assert shown["conditions"]["kernel"] == os.uname().release

    [kept] = tmp_path.iterdir()
    assert str(kept) == shown["file"] and kept.name.endswith("-before.json")
    histogram = json.loads(kept.read_text())["latency"]["rounds"][0]["cpus"]["0"]
    assert max(map(int, histogram["counts"])) < 2000
    compared = subprocess.run(
        [*COMMAND, "compare", "before", kept.name, "--results", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert compared.returncode == 0, compared.stderr
    assert "The machine was set alike in both runs" in compared.stdout
    assert "Cannot be decided: latency average" in compared.stdout  # two rounds are too few
    assert (running(), left()) == (set(), before)


def test_a_window_in_which_a_side_is_stopped_lasts_until_it_goes_on(tmp_path: Path) -> None:
    settings = ThroughputSettings(host_cpu=0, guest_cpu=1, hugepage_node=0, window_s=1, frame_size=64)
    folder, own = own_directory(), {0, 1}
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        host = loop.side(stack, folder, "host", loop.host_arguments(settings, folder, own))
        guest = loop.side(stack, folder, "guest", loop.guest_arguments(settings, folder, own))
        wait_for(guest.frames, 60, "frames come round")
        pid = guest.program.pid
        assert pid is not None
        stopped: list[int] = []

        def seen() -> int:
            """The host's frames. The guest stands still from the first question until after the window."""
            if not stopped:
                stop(pid)
                drain(host)
            elif len(stopped) == 3:
                os.kill(pid, signal.SIGCONT)
            stopped.append(host.frames())
            return stopped[-1]

        rate = loop.in_window(guest.program, seen, settings.window_s)
    assert stopped[:3] == [stopped[0]] * 3, "no frame came in the window, nor after it while it was stopped"
    counted = stopped[-1] - stopped[0]
    assert counted > 0
    assert counted / rate > settings.window_s


def drain(side: loop.Side) -> None:
    """Wait until this side, whose peer is stopped, has polled in vain: for 0.2 s of its own CPU time,
    whatever else the machine does meanwhile."""
    pid = side.program.pid
    assert pid is not None
    polled, taken = cpu_seconds(pid), side.frames()

    def in_vain() -> bool:
        nonlocal polled, taken
        if (now := side.frames()) != taken:
            polled, taken = cpu_seconds(pid), now
        return cpu_seconds(pid) - polled >= 0.2

    wait_for(in_vain, 60, "it polls in vain")


@pytest.mark.parametrize(("part", "program"), list(zip(("latency", "throughput"), PROGRAMS, strict=True)))
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_ends_what_it_started(
    tmp_path: Path, part: str, program: str, number: signal.Signals
) -> None:
    before = left()
    words = ["--cpus", "0-1", "--duration", "600", "--window", "600", "--only", part]
    run = subprocess.Popen(
        [*COMMAND, *words, "--results", str(tmp_path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: program in running(), 60, f"{program} runs")
        run.send_signal(number)
        run.wait(60)
    finally:
        run.kill()
        run.wait()
    wait_for(lambda: not running(), 30, f"{program} ends")
    assert list(tmp_path.iterdir()) == []
    if number == signal.SIGTERM:
        assert run.returncode == 128 + number
        assert left() == before
    for folder in set(left()) - set(before):  # nobody can clear up after a SIGKILL
        shutil.rmtree(folder)
