"""What is forked from a process that has imported it runs as if it had been started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.agent import with_capabilities
from tests.lab.namespaces import entered, namespace
from tests.lab.preloaded import Program, Run
from tests.lab.processes import wait_for

DEADLINE_S = 120.0
SLEEPS = "import time; time.sleep(300)"


@pytest.fixture(scope="module")
def timeit() -> Program:
    """It runs any statements."""
    return Program("timeit", "decimal")


@pytest.fixture
def run(timeit: Program, tmp_path: Path) -> Iterator[Run]:
    started = start(timeit, SLEEPS, tmp_path / "log")
    yield started
    if started.poll() is None:
        os.kill(started.pid, signal.SIGKILL)
        started.wait(DEADLINE_S)


def start(program: Program, statement: str, log: Path, **env: str) -> Run:
    with log.open("ab") as file:
        return program.start(["-n1", "-r1", statement], {**os.environ, **env}, file.fileno())


def printed(program: Program, statement: str, log: Path, **env: str) -> str:
    run = start(program, statement, log, **env)
    assert run.wait(DEADLINE_S) == 0, log.read_text()
    return log.read_text().splitlines()[0]


def test_it_runs_where_and_with_what_it_was_started(
    timeit: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    what = "import os, sys; print(os.getcwd(), os.environ['NAMED'], 'decimal' in sys.modules)"
    assert printed(timeit, what, tmp_path / "log", NAMED="so") == f"{tmp_path} so True"
    where = "import os; print(os.readlink('/proc/self/ns/net'))"
    with namespace("np-preloaded") as name, entered(name):
        there = printed(timeit, where, tmp_path / "there")
    assert there != printed(timeit, where, tmp_path / "here") == os.readlink("/proc/self/ns/net")


def test_it_has_the_powers_that_setpriv_would_leave_it(timeit: Program, tmp_path: Path) -> None:
    powers = ["CAP_NET_ADMIN", "CAP_CHOWN", "CAP_BPF"]
    text = "[line for line in open('/proc/self/status') if line.startswith(('Cap', 'NoNewPrivs'))]"
    with (tmp_path / "log").open("ab") as file:
        run = timeit.start(["-n1", "-r1", f"print({text})"], os.environ, file.fileno(), capabilities=powers)
    assert run.wait(DEADLINE_S) == 0
    command = with_capabilities(powers, [sys.executable, "-c", f"print({text})"])
    expected = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert (tmp_path / "log").read_text().splitlines()[0] == expected.strip()
    assert "CapEff:\\t0000008000001001" in expected


def test_its_end_is_reported_as_by_subprocess(timeit: Program, tmp_path: Path, run: Run) -> None:
    assert run.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        run.wait(0.1)
    assert os.getsid(run.pid) == run.pid
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait(DEADLINE_S) == run.poll() == -signal.SIGTERM
    for statement, status in (("import os; os._exit(3)", 3), ("1 / 0", 1)):
        assert start(timeit, statement, tmp_path / "log").wait(DEADLINE_S) == status
    assert "ZeroDivisionError" in (tmp_path / "log").read_text()


def test_nothing_stays_of_one_that_died(tmp_path: Path) -> None:
    """Killed as a crash would: neither the imported process nor its runs are left."""
    code = f"""
import os
from pathlib import Path
from tests.functional.lab.test_preloaded import SLEEPS, start
from tests.lab.preloaded import Program
program = Program("timeit")
print(program._process.pid, start(program, SLEEPS, Path({str(tmp_path / "log")!r})).pid, flush=True)
os.abort()
"""
    died = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert died.returncode == -signal.SIGABRT
    pids = died.stdout.split()
    assert len(pids) == 2, died.stderr
    wait_for(lambda: not any(map(_lives, pids)), DEADLINE_S, "both have ended")


def _lives(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
