"""A run that is killed again and again ends as one that was not: nothing is repeated, nothing is lost."""

from __future__ import annotations

import json
import random
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from netplugin_zeroloss.journal import FILE, read_run

from tests.lab.processes import wait_for
from tests.unit.zeroloss.matrix_runs import ROOT, call, call_here, command, described, findings, write

#: Devices of which each part of the search is needed, and one whose luck is its own.
_SIMULATED: dict[str, Any] = described(
    matrix={"backends": ["linuxbridge", "dpdkvhostuser"], "pmd_cores": [1, 2]},
    search={"repeats": 2, "goals": ["csit-pdr"], "latency_duration": 5, "soak_duration": 600},
    overrides=[
        {"cells": {"backend": "linuxbridge"}, "generator": {"type": "sim", "device": "glitch"}},
        {"cells": {"pmd_cores": 2}, "generator": {"type": "sim", "device": "noisy"}},
    ],
    controls={"loopback": {"generator": {"type": "sim", "device": "flaky-generator"}}},
)
#: A device of 3.3 Mpps; each trial that it runs is a line in a file.
_PROGRAM = """
import json, sys
log = open(sys.argv[1], "a")
for line in sys.stdin:
    ask = json.loads(line)
    if ask["op"] == "hello":
        answer = {"ok": True, "name": "counting", "virtual_time": True}
    elif ask["op"] == "trial":
        print(ask["rate_pps"], ask["duration_s"], file=log, flush=True)
        sent = round(ask["rate_pps"] * ask["duration_s"])
        lost = max(0, round((ask["rate_pps"] - 3.3e6) * ask["duration_s"]))
        answer = {"tx_packets": sent, "rx_packets": sent - lost, "elapsed_s": ask["duration_s"]}
    else:
        break
    print(json.dumps(answer), flush=True)
"""


def _lines(folder: Path) -> int:
    path = folder / FILE
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _killed_again_and_again(
    description: Path, folder: Path, luck: random.Random, most: int, lines: int
) -> int:
    """Kill it at a random moment after up to so many more lines, until it ends. How often it was killed."""
    for kills in range(most):
        goal = _lines(folder) + luck.randint(0, lines)
        with subprocess.Popen(
            command(description, "--folder", folder, "--resume", "--quiet"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        ) as running:
            wait_for(
                lambda p=running, g=goal: p.poll() is not None or _lines(folder) > g,  # type: ignore[misc]
                120,
                "the journal grows",
            )
            time.sleep(luck.random() * 0.02)
            running.send_signal(signal.SIGKILL)
            assert running.stderr is not None
            printed = running.stderr.read()
        if running.returncode == 0:
            return kills
        assert running.returncode == -signal.SIGKILL, printed
    done = call(description, "--folder", folder, "--resume", "--quiet")
    assert done.returncode == 0, done.stderr
    return most


def _trials(folder: Path) -> Counter[str]:
    """How often each trial is in the journal."""
    entries = [json.loads(line) for line in (folder / FILE).open()]
    return Counter(
        json.dumps([e["cell"], e["part"], e["repeat"], e["number"]]) for e in entries if e["entry"] == "trial"
    )


def _check_killed_simulation(tmp_path: Path, seed: int, kills: int, lines: int) -> None:
    description = write(tmp_path, _SIMULATED)
    whole = call_here(description, "--folder", tmp_path / "whole", "--quiet")
    assert whole.returncode == 0, whole.stderr
    broken = tmp_path / "broken"
    killed = _killed_again_and_again(description, broken, random.Random(seed), kills, lines)
    assert killed >= 2, "it was not killed often enough to say anything"
    assert findings(read_run(broken)) == findings(read_run(tmp_path / "whole"))
    assert _trials(broken) == _trials(tmp_path / "whole")
    assert set(_trials(broken).values()) == {1}


def test_a_simulation_that_is_killed_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    _check_killed_simulation(tmp_path, seed=5, kills=5, lines=45)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
def test_the_same_killed_all_the_time(tmp_path: Path, seed: int) -> None:
    _check_killed_simulation(tmp_path, seed, kills=60, lines=8)


def test_no_trial_that_is_done_is_run_again(tmp_path: Path) -> None:
    """The generator counts: what is more than the journal has was under way when it was killed."""
    log = tmp_path / "log"
    program = tmp_path / "device.py"
    program.write_text(_PROGRAM)
    words = [sys.executable, str(program), str(log)]
    sections = described(
        generator={"type": "exec", "command": shlex.join(words)},
        search={"goals": ["csit-ndr"]},
    )
    folder = tmp_path / "run"
    kills = _killed_again_and_again(write(tmp_path, sections), folder, random.Random(2), 4, 20)
    ran = Counter(log.read_text().splitlines())
    record = read_run(folder).records[0]
    assert record.result is not None
    kept = Counter(f"{t['rate_pps']} {t['duration_s']}" for t in record.result["trial_log"])
    assert set(ran) == set(kept)
    assert sum(kept.values()) <= sum(ran.values()) <= sum(kept.values()) + kills
    assert record.verdict == "ndr" and 3.28e6 < (record.zero_loss_pps or 0) <= 3.3e6


def test_a_disk_that_is_full_ends_the_run_and_loses_nothing(tmp_path: Path) -> None:
    description = write(tmp_path, described(matrix={"backends": ["a", "b"]}))
    folder = tmp_path / "run"
    words = shlex.join(command(description, "--folder", folder, "--quiet"))
    full = subprocess.run(
        ["bash", "-c", f"ulimit -f 8; exec {words}"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=120,
    )
    assert full.returncode == 2 and "cannot be written" in full.stderr, full.stderr
    assert (folder / FILE).stat().st_size == 8192, "the last line is torn"
    assert call_here(description, "--folder", folder, "--resume", "--quiet").returncode == 0
    assert [record.verdict for record in read_run(folder).records] == ["ndr", "ndr"]
    assert set(_trials(folder).values()) == {1}


def test_a_run_that_is_done_is_not_run_again(tmp_path: Path) -> None:
    description = write(tmp_path, described())
    first = call_here(description, "--folder", tmp_path / "run", "--quiet")
    before = _trials(tmp_path / "run")
    second = call_here(description, "--folder", tmp_path / "run", "--resume", "--quiet")
    assert (second.returncode, second.stdout) == (0, first.stdout)
    assert _trials(tmp_path / "run") == before


def test_another_description_is_not_gone_on_with(tmp_path: Path) -> None:
    call_here(write(tmp_path, described()), "--folder", tmp_path / "run", "--quiet")
    before = (tmp_path / "run" / FILE).read_bytes()
    other = write(tmp_path, described(search={"precision": 0.02}), "other.yaml")
    refused = call_here(other, "--folder", tmp_path / "run", "--resume")
    assert refused.returncode == 2
    assert "search.precision: 0.005 before, 0.02 now" in refused.stderr
    assert (tmp_path / "run" / FILE).read_bytes() == before
