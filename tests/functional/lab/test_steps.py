"""The layer that stops a process at each of its steps: it finds them all, and its faults happen."""

from __future__ import annotations

import os
import socket
import sqlite3
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.lab.processes import wait_for
from tests.lab.steps import host_state
from tests.lab.steps.faults import Fault, faults_of
from tests.lab.steps.watch import StepWatch

_WRITES = """
    file = os.open("one", os.O_CREAT | os.O_WRONLY)
    os.write(file, b"0123456789")
    print("written")
"""
_DEADLINE_S = 120.0


@contextmanager
def toy(
    directory: Path, text: str, fault: Fault | None = None
) -> Iterator[tuple[StepWatch, subprocess.Popen[str]]]:
    """A program that is followed from before its first line."""
    begin = "import os, sys, socket\nfrom tests.lab.steps import filter\nfilter.install()\n"
    lines = begin + textwrap.dedent(text)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    watch = StepWatch(own_port=-1, late_s=0.5)
    watch.arm(fault)
    with subprocess.Popen(
        [sys.executable, "-c", lines], cwd=directory, env=env, stdout=subprocess.PIPE, text=True
    ) as program:
        try:
            watch.attach(program.pid)
            yield watch, program
        finally:
            program.kill()


def done(directory: Path, text: str, fault: Fault | None = None) -> tuple[str, int, list[str]]:
    """What it printed, its status and its steps."""
    with toy(directory, text, fault) as (watch, program):
        printed, _ = program.communicate(timeout=_DEADLINE_S)
        return printed, program.returncode, [step.name for step, _ in watch.steps()]


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("os.mkfifo('new')", "call number 259"),
        ("os.setxattr('.', 'user.new', b'x')", "call number 188"),
        ("os.symlink('there', 'new')", "symlink there new"),
        ("os.truncate('/dev/null', 0)", "truncate dev/null"),
        ("import subprocess; subprocess.run(['/bin/true'])", "execve bin/true"),
        ("socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'new', ('127.0.0.1', 9))", "send new"),
        ("import sqlite3; sqlite3.connect('db').execute('CREATE TABLE new (x)')", "pwrite64 test/db"),
        ("import ctypes; ctypes.CDLL(None).rename(b'x', b'y')", "rename x y"),
    ],
)
def test_a_step_that_nobody_has_listed_is_found(short_path: Path, text: str, step: str) -> None:
    """Whatever makes it: Python, a library in C, or a child; of no such call is there a list here."""
    assert step in done(short_path, text)[2]


def test_what_stays_inside_a_process_is_no_step(short_path: Path) -> None:
    text = """
    one, other = socket.socketpair()
    one.send(b"x")
    os.listdir("/"), open("/etc/passwd").read()
    print(other.recv(1))
    """
    printed, status, steps = done(short_path, text)
    assert (printed, status, steps) == ("b'x'\n", 0, [])


@pytest.mark.parametrize(
    ("what", "content"), [("kill before", ""), ("kill in half", "01234"), ("kill after", "0123456789")]
)
def test_it_is_killed_at_a_write(short_path: Path, what: str, content: str) -> None:
    printed, status, _ = done(short_path, _WRITES, Fault("write test/one", 1, what))
    assert (printed, status) == ("", -9)
    assert (short_path / "one").read_text() == content


@pytest.mark.parametrize(("what", "there"), [("kill before", False), ("kill after", True)])
def test_it_is_killed_at_a_call_that_makes_a_directory(short_path: Path, what: str, there: bool) -> None:
    """After it means before whatever that thread would do next."""
    _, status, _ = done(short_path, "os.mkdir('new'); os.mkdir('next')", Fault("mkdir new", 1, what))
    assert (status, (short_path / "new").exists()) == (-9, there)
    assert not (short_path / "next").exists()


def test_a_call_fails_with_the_error_that_is_chosen(short_path: Path) -> None:
    text = "try: os.mkdir('new')\nexcept OSError as error: print(error.strerror)"
    printed, status, _ = done(short_path, text, Fault("mkdir new", 1, "error ENOSPC"))
    assert (printed, status) == ("No space left on device\n", 0) and not (short_path / "new").exists()


def test_only_the_nth_of_its_name_fails(short_path: Path) -> None:
    text = """
    for _ in range(3):
        try: os.mkdir('new'); os.rmdir('new'); print('made')
        except OSError: print('refused')
    """
    assert done(short_path, text, Fault("mkdir new", 2, "error EROFS"))[0].split() == [
        "made",
        "refused",
        "made",
    ]


_ASKS = """
    link = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    link.bind((0, 0))
    link.settimeout({timeout})
    body = __import__("struct").pack("=BBHiII", 0, 0, 0, {index}, 0, 0)
    link.send(__import__("struct").pack("=IHHII", 32, {kind}, 5, 7, 0) + body)
    try: print(__import__("struct").unpack_from("=IHHIIi", link.recv(9999))[1::2])
    except TimeoutError: print("late")
"""


def test_the_kernel_refuses_what_it_has_not_had(short_path: Path) -> None:
    """RTM_DELLINK of no device: its own answer is ENODEV (19), with the number of the request."""
    asks = _ASKS.format(timeout=90, index=99999, kind=17)
    assert done(short_path, asks)[0] == "(2, 7, -19)\n"
    refused = Fault("netlink DELLINK", 1, "refused EBUSY")
    assert done(short_path, asks, refused)[0] == "(2, 7, -16)\n"
    assert done(
        short_path, _ASKS.format(timeout=0.2, index=99999, kind=17), Fault("netlink DELLINK", 1, "hang")
    )[0] == ("late\n")


_SPEAKS = """
    end = socket.socket(socket.AF_UNIX)
    end.connect("peer")
    end.settimeout(0.2)
    try:
        end.sendall(b"first")
        print(end.recv(9))
    except OSError as error: print(type(error).__name__)
    sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("what", "received", "printed"),
    [
        ("connection lost", b"", "BrokenPipeError"),
        ("hang", b"", "TimeoutError"),
        ("late", b"first", "TimeoutError"),
        ("error ECONNRESET", b"", "ConnectionResetError"),
    ],
)
def test_a_peer_receives_nothing_or_later(short_path: Path, what: str, received: bytes, printed: str) -> None:
    got: list[bytes] = []
    printed_all = threading.Event()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(short_path / "peer"))
        listener.listen()

        def listen() -> None:
            end, _ = listener.accept()
            with end:
                got.append(end.recv(9))
                # Its end would be an answer to who still waits for one.
                printed_all.wait(_DEADLINE_S)

        peer = threading.Thread(target=listen)
        peer.start()
        fault = Fault("send peer first", 1, what)
        with toy(short_path, _SPEAKS, fault) as (watch, program):
            assert program.stdout is not None and program.stdout.readline().split() == [printed]
            printed_all.set()
            wait_for(lambda: not watch.delayed, _DEADLINE_S, "what is late has landed")
            assert watch.fired
        peer.join(_DEADLINE_S)
    assert got == [received]


def test_each_step_has_its_faults(short_path: Path) -> None:
    with toy(short_path, _WRITES) as (watch, program):
        program.communicate(timeout=_DEADLINE_S)
        steps = {step.name: list(faults_of(step)) for step, _ in watch.steps()}
    assert steps["write test/one"] == [
        *("kill before", "kill in half", "kill after"),
        *("error ENOSPC", "error EIO", "error EDQUOT", "late"),
    ]
    assert "error EROFS" in steps["openat one"] and "kill in half" not in steps["openat one"]


def test_a_store_that_an_agent_has_for_itself_is_read(tmp_path: Path) -> None:
    """SQLite opens a file so if it can make no memory to share (agents/store/database.py)."""
    path = tmp_path / "agent.db"
    owner = sqlite3.connect(path, isolation_level=None)
    try:
        owner.execute("PRAGMA locking_mode=EXCLUSIVE")
        owner.execute("PRAGMA journal_mode=WAL")
        for table, columns in host_state._STORED.items():
            owner.execute(f"CREATE TABLE {table} ({columns})")
        owner.execute("INSERT INTO quarantine VALUES ('vf', '0000:03:10.0')")
        assert list(host_state.of_store(path)) == ["stored quarantine ('vf', '0000:03:10.0')"]
    finally:
        owner.close()
