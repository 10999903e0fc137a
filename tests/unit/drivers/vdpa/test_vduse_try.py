"""How the kernel is asked for the devices that it makes, with rules of the kernel's source in its place."""

from __future__ import annotations

import errno
import fcntl
import os
import termios
from collections.abc import Callable
from pathlib import Path

import pytest

from drivers.vdpa import vduse_step
from drivers.vdpa.vduse_step import MOST_PAIRS, at_the_end

_SET_VERSION, _CREATE, _DESTROY = 0x40088101, 0x41508102, 0x41008103
_CTRL_VQ, _MQ, _VERSION_1, _PLATFORM = (1 << bit for bit in (17, 22, 32, 33))


class Kernel:
    """``vduse_ioctl`` and ``features_is_valid`` in drivers/vdpa/vdpa_user/vduse_dev.c.

    ``kinds``: the devices that it makes. ``control_queues``: whether it takes one with a control queue.
    """

    def __init__(self, *, kinds: tuple[int, ...] = (1, 2), control_queues: bool = False) -> None:
        self.kinds = kinds
        self.control_queues = control_queues
        self.version: int | None = None
        self.requests: list[tuple[int, int]] = []
        self.made: list[str] = []

    def ioctl(self, control: object, request: int, argument: memoryview) -> int:
        if request == _SET_VERSION:
            self.version = int.from_bytes(argument, "little")
        elif request == _CREATE:
            self._create(argument)
        elif request == _DESTROY:
            self.made.remove(bytes(argument).rstrip(b"\0").decode())
        else:
            raise OSError(errno.EINVAL, "no such request")
        return 0

    def _create(self, argument: memoryview) -> None:
        number = lambda first, size: int.from_bytes(argument[first : first + size], "little")  # noqa: E731
        kind, features, queues, size = number(260, 4), number(264, 8), number(272, 4), number(332, 4)
        self.requests.append((features, queues))
        valid = features & _PLATFORM and features & _VERSION_1 and not any(argument[280:332])
        if kind not in self.kinds or not valid or (features & _CTRL_VQ and not self.control_queues):
            raise OSError(errno.EINVAL, "Invalid argument")
        source, sink = os.pipe()
        try:
            if os.write(sink, argument[336 : 336 + size]) == size:
                self.made.append(bytes(argument[:256]).rstrip(b"\0").decode())
        finally:
            os.close(source)
            os.close(sink)


@pytest.fixture
def printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[Kernel], str]:
    (tmp_path / "control").touch()
    monkeypatch.setattr(vduse_step, "_CONTROL", str(tmp_path / "control"))

    def ask(kernel: Kernel) -> str:
        monkeypatch.setattr(fcntl, "ioctl", kernel.ioctl)
        assert vduse_step.main(["try", "npd-try"]) == 0
        assert (kernel.made, kernel.version) == ([], 0)
        return capsys.readouterr().out.strip()

    return ask


def test_a_kernel_that_refuses_a_control_queue(printed: Callable[[Kernel], str]) -> None:
    kernel = Kernel()
    assert printed(kernel) == "1"
    several, one = kernel.requests
    assert several == (_CTRL_VQ | _MQ | _VERSION_1 | _PLATFORM, 2 * MOST_PAIRS + 1)
    assert one == (_VERSION_1 | _PLATFORM, 2)


def test_a_kernel_that_takes_it(printed: Callable[[Kernel], str]) -> None:
    assert printed(Kernel(control_queues=True)) == str(MOST_PAIRS)


def test_a_kernel_whose_devices_are_disks(printed: Callable[[Kernel], str]) -> None:
    assert printed(Kernel(kinds=(2,))) == "0"


def test_a_kernel_that_is_not_to_be_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vduse_step, "_CONTROL", str(tmp_path / "control"))
    assert vduse_step.main(["try", "npd-try"]) == vduse_step.REFUSED
    assert "No such file" in capsys.readouterr().err


def test_the_kernel_cannot_read_what_follows_a_request() -> None:
    """By a request of terminals, whose argument ends before or behind the last byte."""
    master, terminal = os.openpty()
    try:
        placed = at_the_end(bytes(64))
        assert fcntl.ioctl(terminal, termios.TIOCSWINSZ, placed[56:]) == 0
        with pytest.raises(OSError) as refused:
            fcntl.ioctl(terminal, termios.TIOCSWINSZ, placed[60:])
        assert refused.value.errno == errno.EFAULT
    finally:
        os.close(master)
        os.close(terminal)
