"""The shell of a lab guest obeys the first line, however slowly it comes; here on a terminal."""

from __future__ import annotations

import base64
import os
import select
import signal
import subprocess
import time
import tty
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab import initramfs

DEADLINE_S = 60.0
COMMAND = b"lab 7 30 " + base64.b64encode(b"echo heard") + b"\n"


class Shell:
    """The host's end of the port."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._received = b""

    def says(self, data: bytes) -> None:
        os.write(self._port, data)

    def line(self) -> str:
        end = time.monotonic() + DEADLINE_S
        while b"\n" not in self._received:
            readable, _, _ = select.select([self._port], [], [], max(0.0, end - time.monotonic()))
            assert readable, f"no whole line, but {self._received!r}"
            self._received += os.read(self._port, 4096)
        line, _, self._received = self._received.partition(b"\n")
        return line.decode().rstrip("\r")

    def answer(self) -> str:
        """The next line that is no READY."""
        while (line := self.line()) == initramfs.READY:
            pass
        return line


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    ours, its = os.openpty()
    tty.setraw(its)
    script = initramfs.OBEY.replace("/tmp/", f"{tmp_path}/")
    program = subprocess.Popen(
        [initramfs.BUSYBOX, "sh", "-c", script], stdin=its, stdout=its, start_new_session=True
    )
    try:
        yield Shell(ours)
    finally:
        os.killpg(program.pid, signal.SIGKILL)
        program.wait()
        os.close(its)
        os.close(ours)


def test_a_first_line_in_two_parts_is_obeyed(shell: Shell) -> None:
    """It says READY between them: with a time limit of its own the shell would forget the first part."""
    assert shell.line() == initramfs.READY
    shell.says(COMMAND[:9])
    assert [shell.line() for _ in range(3)] == [initramfs.READY] * 3
    shell.says(COMMAND[9:])
    word, number, status, output = shell.answer().split()
    assert (word, number, status) == ("lab", "7", "0")
    assert base64.b64decode(output) == b"heard\n"


def test_it_says_ready_until_the_first_line_and_never_after(shell: Shell) -> None:
    assert [shell.line() for _ in range(2)] == [initramfs.READY] * 2
    shell.says(COMMAND)
    assert shell.answer().startswith("lab 7 0 ")
    slow = base64.b64encode(b"sleep 2.5")
    shell.says(b"lab 8 30 " + slow + b"\n")
    assert shell.line().startswith("lab 8 0")
