"""Locks on what one agent at a time may work at: two processes, and names that nobody else uses."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from netplugin.host.locks import Holder, Locks

_OTHER = """
import sys
from netplugin.host.locks import Locks
locks = Locks()
print(locks.take(sys.argv[1]), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def name() -> str:
    return f"test-{uuid.uuid4()}"


@contextmanager
def other_process(name: str) -> Iterator[subprocess.Popen[str]]:
    """One that holds the lock, or has tried to."""
    command = [sys.executable, "-c", _OTHER, name]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def printed(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_one_process_has_it_and_the_next_takes_over(name: str) -> None:
    with closing(Locks()) as locks:
        with other_process(name) as process:
            assert printed(process) == "None"
            holder = locks.take(name)
            assert holder == Holder(process.pid, os.geteuid())
            held = locks.hold(name, "the thing", "use another")
            assert not held.usable and held.reason is not None and held.fix is not None
            assert held.reason.startswith(f"process {process.pid} (python") and "the thing" in held.reason
            assert held.fix.endswith("; or use another")
        assert locks.take(name) is None, "the process has ended"
        assert locks.take(name) is None, "it stays ours"
        with other_process(name) as process:
            assert printed(process).startswith(f"process {os.getpid()} ")
    with other_process(name) as process:
        assert printed(process) == "None", "it was given back"


def test_any_number_may_ask(name: str) -> None:
    with closing(Locks()) as mine, closing(Locks()) as other:
        assert mine.take(name) is None
        for _ in range(3):
            for _ in range(100):  # fewer than may wait
                assert other.take(name) == Holder(os.getpid(), os.geteuid())
            assert mine.take(name) is None


def test_who_does_not_listen_is_not_known(name: str) -> None:
    with socket.socket(socket.AF_UNIX) as silent, closing(Locks()) as locks:
        silent.bind(f"\0netplugin/{name}")
        assert locks.take(name) == Holder()
        held = locks.hold(name, "the thing", "use another")
        assert held.fix is not None and held.fix.startswith("find it with: ss -xap")


def test_without_a_free_descriptor_it_is_not_ours(name: str) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with closing(Locks()) as locks:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        try:
            held = locks.hold(name, "the thing", "use another")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert not held.usable and held.reason is not None and "Too many open files" in held.reason
        assert locks.hold(name, "the thing", "use another").usable


@pytest.mark.parametrize(
    ("holder", "words", "fix"),
    [
        (Holder(0, 0), "another PID namespace", "end that agent"),
        (Holder(1, 12345), "process 1 ", "it is no agent: end it (kill 1)"),
        (Holder(0, 12345), "user 12345", "it is no agent"),
    ],
)
def test_who_it_is_and_what_to_do(holder: Holder, words: str, fix: str) -> None:
    assert words in str(holder) and fix in holder.fix
