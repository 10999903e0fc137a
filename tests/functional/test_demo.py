"""The demo as a user runs it: it shows its pings, and leaves nothing behind, interrupted or not."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.demo_traces import Traces
from tests.lab import sandbox
from tests.lab.processes import LabTimeout, wait_for

pytestmark = pytest.mark.outside

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 540.0
MARK = "NETPLUGIN_DEMO_MARK"
PINGED = "5 packets transmitted, 5 packets received"
NOTHING = "Left behind\n  nothing:"


@contextmanager
def demo() -> Iterator[subprocess.Popen[str]]:
    """The demo, running; afterwards the machine must be as it was."""
    assert not sandbox.inside()
    mark = str(uuid.uuid4())
    before = Traces.now()
    # A directory of its own: others on the machine have temporary files too.
    with tempfile.TemporaryDirectory(prefix="np-") as temporary:
        with subprocess.Popen(
            [sys.executable, "-m", "tests.demo"],
            cwd=ROOT,
            env={**os.environ, MARK: mark, "TMPDIR": temporary},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as running:
            try:
                yield running
            finally:
                running.kill()
        wait_for(lambda: not marked(mark), 30, "every process of the demo has ended")
        assert os.listdir(temporary) == []
    check_same(before)


def check_same(before: Traces) -> None:
    """Nothing is more than it was; others on the machine may come and go for a moment."""
    try:
        wait_for(lambda: Traces.now() == before, 30, "the machine is as it was")
    except LabTimeout:
        now = Traces.now()
        assert now.pages <= before.pages
        assert not now.mounts - before.mounts
        assert not now.links - before.links
        assert not now.files - before.files


def marked(mark: str) -> list[int]:
    """The processes with the mark in their environment."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if f"{MARK}={mark}".encode() in _environment(pid)]


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def test_the_demo_pings_and_searches_over_each_backend() -> None:
    with demo() as running:
        output, _ = running.communicate(timeout=DEADLINE_S)
    assert running.returncode == 0, output
    assert output.count(PINGED) == 4, output
    for backend in ("dpdkvhostuser", "linuxbridge"):
        assert f"{backend}: the guests ping each other" in output
        assert re.search(rf"\| {backend} \| .*no frame lost, 1 x 2 s", output), output
    assert output.count("<interface ") == 2
    assert "A short search: 2 s without a lost frame" in output
    assert NOTHING in output


@pytest.mark.parametrize(
    "step", ["A private OVS-DPDK", "two guests boot", pytest.param("trial 1.1", marks=pytest.mark.long)]
)
def test_an_interrupted_demo_leaves_nothing(step: str) -> None:
    with demo() as running:
        assert running.stdout is not None
        seen = ""
        while step not in seen:
            line = running.stdout.readline()
            assert line, seen
            seen += line
        # As a terminal does: to the whole foreground group.
        os.killpg(running.pid, signal.SIGINT)
        rest, _ = running.communicate(timeout=DEADLINE_S)
    assert running.returncode == 128 + signal.SIGINT, seen + rest
    assert NOTHING in rest
    assert "Traceback" not in rest
