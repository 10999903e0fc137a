"""`zeroloss matrix` as a program: what it refuses, how it exits, what it shows, and how it is stopped."""

from __future__ import annotations

import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from netplugin_zeroloss.journal import FILE, Cell, Part, read_run
from netplugin_zeroloss.matrix import session
from netplugin_zeroloss.matrix.cells import CellTask, TimeEstimate
from netplugin_zeroloss.report.words import seconds as seconds_in_words

from tests.lab.processes import wait_for
from tests.unit.zeroloss.matrix_runs import (
    ROOT,
    call,
    call_here,
    command,
    described,
    description,
    with_agent,
    write,
)

#: Trials of real time that never end by themselves; it says where it is.
_SLOW = """
import json, sys, time
for line in sys.stdin:
    ask = json.loads(line)
    if ask["op"] == "hello":
        answer = {"ok": True, "name": "slow"}
    elif ask["op"] == "trial" and ask["duration_s"] > 1:
        time.sleep(600)
    elif ask["op"] == "trial":
        sent = round(ask["rate_pps"] * ask["duration_s"])
        answer = {"tx_packets": sent, "rx_packets": sent, "elapsed_s": ask["duration_s"]}
    else:
        open(sys.argv[1], "w").write("bye")
        break
    print(json.dumps(answer), flush=True)
"""
#: Answers a trial with what no parser takes.
_DIES = "print('{\"ok\": true}', flush=True); input(); input(); print('[' * 300_000, flush=True)"


def _program(folder: Path, text: str, *arguments: str | Path) -> dict[str, Any]:
    path = folder / "generator.py"
    path.write_text(text)
    words = [sys.executable, str(path), *map(str, arguments)]
    return {"type": "exec", "command": shlex.join(words)}


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (described(matrix={"backends": []}), "line 4: matrix.backends"),
        (described(exclude=[{"backend": "dpdkvhostuser"}]), "exclude leaves no cell"),
        (described(generator={"type": "sim", "device": "none"}), "no 'none'; there are"),
        (described(generator={"type": "exec", "command": "/none/generator"}), "/none/generator"),
        (described(generator={"type": "trex-stl", "trex_dir": "/none/trex"}), "/none/trex"),
        (described(generator={"type": "trex-stf", "trex_dir": "/none/trex"}), "/none/trex"),
        (
            described(generator={"type": "tcpreplay", "paths": [{"send": "zl0", "receive": "zl1"}]}),
            "zl0",
        ),
        (with_agent(), "the agent at http://127.0.0.1:1 cannot be reached"),
        (with_agent(agent={"url": "nowhere"}), "'nowhere' is not the URL of an agent"),
        (with_agent(agent={"token_file": "/none/token"}), "/none/token"),
    ],
)
def test_what_cannot_be_is_reported_before_anything_is_done(
    tmp_path: Path, sections: dict[str, Any], words: str
) -> None:
    refused = call_here(write(tmp_path, sections), "--folder", tmp_path / "run")
    assert refused.returncode == 2, refused.stderr
    assert words in refused.stderr and "Traceback" not in refused.stderr
    assert not (tmp_path / "run").exists() and refused.stdout == ""


def test_a_folder_that_is_not_empty(tmp_path: Path) -> None:
    path = write(tmp_path, described())
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "letter").write_text("dear")
    for options in ([], ["--resume"]):
        refused = call_here(path, "--folder", folder, *options)
        assert refused.returncode == 2 and str(folder) in refused.stderr
    assert [file.name for file in folder.iterdir()] == ["letter"]
    (folder / "letter").unlink()
    assert call_here(path, "--folder", folder).returncode == 0
    again = call_here(path, "--folder", folder)
    assert again.returncode == 2 and "--resume" in again.stderr


def test_the_table_is_on_standard_output_and_lines_are_on_standard_error(tmp_path: Path) -> None:
    sections = described(matrix={"backends": ["linuxbridge", "dpdkvhostuser"], "pmd_cores": [1, 2]})
    done = call(write(tmp_path, sections), "--folder", tmp_path / "run")
    assert done.returncode == 0
    assert "| dpdkvhostuser | - | 4.19 | 4.19 |" in done.stdout
    assert "[3/3] dpdkvhostuser, 2 PMD, 64-byte frames, 1,024 flows" in done.stderr
    assert re.search(r"trial 1\.3 .* passed +full length", done.stderr)
    assert "\n  ndr: 4.19 Mpps\n" in done.stderr
    quiet = call_here(write(tmp_path, sections), "--folder", tmp_path / "quiet", "--quiet")
    assert (quiet.stdout, quiet.stderr) == (done.stdout, "")


def test_a_cell_that_fails_says_why_and_the_others_go_on(tmp_path: Path) -> None:
    sections = described(
        matrix={"backends": ["broken", "dpdkvhostuser"]},
        overrides=[{"cells": {"backend": "broken"}, "generator": _program(tmp_path, _DIES)}],
    )
    path = write(tmp_path, sections)
    done = call(path, "--folder", tmp_path / "run")
    assert done.returncode == 1 and "failed: " in done.stderr
    run = read_run(tmp_path / "run")
    broken, other = run.records
    assert "nested too deeply" in str(broken.error) and broken.result is None
    assert other.verdict == "ndr"
    # Once it is repaired, the run is whole: only the cell that failed is measured again.
    _program(tmp_path, _SLOW.replace("> 1", "> 1000"), tmp_path / "bye")
    again = call_here(path, "--folder", tmp_path / "run", "--resume")
    assert again.returncode == 0, again.stderr
    run = read_run(tmp_path / "run")
    assert [(r.cell.backend, r.error is None) for r in run.records] == [
        ("broken", False),
        ("dpdkvhostuser", True),
        ("broken", True),
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_cleanly_and_it_says_how_to_go_on(tmp_path: Path, number: signal.Signals) -> None:
    path = write(tmp_path, described(generator=_program(tmp_path, _SLOW, tmp_path / "bye")))
    folder = tmp_path / "run"
    with subprocess.Popen(
        command(path, "--folder", folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    ) as running:
        wait_for(lambda: _trials(folder) == 1, 60, "the first trial is in the journal")
        running.send_signal(number)
        output, errors = running.communicate(timeout=60)
    assert running.returncode == 130 and output == "", errors
    assert f"matrix {path} --folder {folder} --resume" in errors and "Traceback" not in errors
    assert _trials(folder) == 1 and read_run(folder).records == ()


def _trials(folder: Path) -> int:
    path = folder / FILE
    return path.read_text().count('"entry": "trial"') if path.exists() else 0


def test_a_terminal_has_a_bar_with_the_time_left(tmp_path: Path) -> None:
    path = write(tmp_path, described(generator=_program(tmp_path, _SLOW, tmp_path / "bye")))
    primary, secondary = pty.openpty()
    shown = b""
    try:
        with subprocess.Popen(
            command(path, "--folder", tmp_path / "run"),
            stdout=subprocess.DEVNULL,
            stderr=secondary,
            cwd=ROOT,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
        ) as running:
            os.close(secondary)
            while not re.search(rb"\d+%, about \d+ s left.*trial 1\.1", shown, re.DOTALL):
                assert select.select([primary], [], [], 60)[0], shown
                shown += os.read(primary, 4096)
            running.send_signal(signal.SIGINT)
            while select.select([primary], [], [], 60)[0]:
                try:
                    shown += os.read(primary, 4096)
                except OSError:  # the other end is closed
                    break
    finally:
        os.close(primary)
    assert running.returncode == 130
    assert b"--resume" in shown and shown.rstrip().endswith(b"interrupted")
    assert b"\x1b[?25h" in shown, "the cursor is shown again"


def test_a_dry_run_says_what_there_is_to_do_and_does_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, described(controls={"loopback": {"generator": {"type": "sim"}}}))
    done = call(path, "--folder", tmp_path / "run", "--dry-run")
    assert done.returncode == 0 and "2 of 2 to do" in done.stdout
    assert "control: the generator, 64-byte frames" in done.stdout
    assert not (tmp_path / "run").exists()


# -- how long it takes ---------------------------------------------------------------------------


def _estimate(**took: float) -> TimeEstimate:
    run = description(matrix={"backends": ["a", "b"]}, search={"repeats": 2, "goals": ["csit-ndr"]})
    tasks = tuple(CellTask(Cell(name, 1), Part.SEARCH) for name in ("a", "b"))
    return TimeEstimate(run, tasks, {CellTask(Cell(name, 1), Part.SEARCH): s for name, s in took.items()})


def test_before_anything_is_done_the_goals_say_how_long_it_takes() -> None:
    fresh = _estimate()
    assert fresh.left_s() == 2 * (10 + 2 * (1.5 * 60 + 25))
    assert fresh.done_share() == 0
    fresh.virtual = frozenset(fresh.tasks)
    assert fresh.left_s() == 0 and fresh.done_share() == 0


def test_a_preset_says_how_long_it_takes() -> None:
    preset = description(matrix={"backends": ["a"]}, search={"preset": "csit-ndr"})
    task = CellTask(Cell("a", 1), Part.SEARCH)
    assert TimeEstimate(preset, (task,)).left_s() == 10 + 1.5 * 21


def test_what_is_done_says_how_long_the_rest_takes() -> None:
    half = _estimate(a=40.0)
    other = half.tasks[1]
    assert half.left_s() == 40 and half.done_share() == 0.5
    assert half.left_s(other, 10) == 60, "a trial of full length at least"
    assert _estimate(a=400.0).left_s(other, 100) == 300
    assert _estimate(a=400.0).done_share(other, 100) == pytest.approx(5 / 8)
    assert _estimate(a=1.0, b=1.0).left_s() == 0


def test_a_simulation_says_nothing_about_the_time_of_a_real_generator() -> None:
    mixed = _estimate()
    simulated, real = mixed.tasks
    mixed.virtual = frozenset({simulated})
    assert mixed.left_s() == mixed.expected_s(real) == 10 + 2 * (1.5 * 60 + 25)
    assert mixed.left_s(simulated) == mixed.expected_s(real), "its trials take no time"
    mixed.took_s[simulated] = 0.1
    assert mixed.left_s() == 10 + 2 * (1.5 * 60 + 25)


def test_each_task_has_the_time_of_its_own_generator(tmp_path: Path) -> None:
    sim, real = {"type": "sim"}, _program(tmp_path, _SLOW, tmp_path / "bye")
    for default, other in ((real, sim), (sim, real)):
        sections = described(
            generator=default,
            matrix={"backends": ["a", "b"]},
            overrides=[{"cells": {"backend": "b"}, "generator": other}],
        )
        path = write(tmp_path, sections)
        printed = session.dry_run(session.RunOptions(path, tmp_path / "run"))
        assert printed.splitlines()[-3] == "2 of 2 to do, about 100 s"
    controlled = described(generator=sim, controls={"loopback": {"generator": real}})
    printed = session.dry_run(session.RunOptions(write(tmp_path, controlled), tmp_path / "run"))
    assert printed.splitlines()[-3] == "2 of 2 to do, about 25 s"
    assert printed.splitlines()[-1].startswith("Next: netplugin-zeroloss matrix ")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0.4 s"), (99, "99 s"), (120, "2 min"), (3600, "60 min"), (12_000, "3.3 h")],
)
def test_times_are_printed_for_people(seconds: float, words: str) -> None:
    assert seconds_in_words(seconds) == words
