"""Apply and undo, killed before and after everything they write, and amid each line of the journal."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from netplugin.tuning.applying import journal as journals
from netplugin.tuning.applying.apply import BAD
from netplugin.tuning.steps import Effect
from tests.unit.tuning.fake_kernel import MANAGED
from tests.unit.tuning.fake_machine import FakeMachine, Killed


class Points:
    """Counts the points of a sequence and kills it at one of them; a line may be written by half."""

    def __init__(self, kill_at: int | None = None) -> None:
        self.kill_at, self.passed = kill_at, 0

    def __call__(self, what: str) -> None:
        self.passed += 1
        if self.passed == self.kill_at:
            raise Killed(what)

    def write(self, descriptor: int, data: bytes) -> int:
        self("before a line")
        os.write(descriptor, data[: len(data) // 2])
        self("amid a line")
        os.write(descriptor, data[len(data) // 2 :])
        self("after a line")
        return len(data)

    def ftruncate(self, descriptor: int, length: int) -> None:
        self("before the end goes")
        os.ftruncate(descriptor, length)
        self("after the end went")


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine itself stays up here: what was written can be read."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


class _Os:
    """``os`` as the journal sees it, with points."""

    def __init__(self, points: Points) -> None:
        self.write, self.ftruncate = points.write, points.ftruncate

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def run_until(
    kill_at: int | None,
    host: FakeMachine,
    monkeypatch: pytest.MonkeyPatch,
    command: Callable[[], Any],
) -> Points:
    points = Points(kill_at)
    host.crash_at(points)
    with monkeypatch.context() as patch:
        patch.setattr(journals, "os", _Os(points))
        try:
            command()
        except Killed:
            assert kill_at is not None
        else:
            assert kill_at is None or points.passed < kill_at
    host.crash_at(lambda what: None)
    return points


def fresh(journal: Path, applied: bool, refused: bool = False) -> FakeMachine:
    """Two VFs where four are requested, so that what is between is none."""
    journal.unlink(missing_ok=True)
    host = FakeMachine(vfs=2)
    if refused:
        host.kernel.pages = 37
        host.kernel.refusing = {MANAGED: errno.EIO}
    if applied:
        host.apply(journal)
    return host


def undone(host: FakeMachine, journal: Path, before: Any) -> None:
    assert not BAD & {result.outcome for result in host.undo(journal)}
    assert host.state() == before
    assert journal.read_bytes() == b""


@pytest.mark.parametrize("refused", [False, True], ids=["all goes", "pages and an interrupt do not"])
def test_apply_killed_at_every_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: bool) -> None:
    """Then undone, at every other point after an apply that goes on where that one ended."""
    journal = tmp_path / "journal"
    host = fresh(journal, False, refused)
    before, steps = host.state(), len(host.plan().left(Effect.LIVE))
    last = run_until(None, host, monkeypatch, lambda: host.apply(journal)).passed
    assert last > 5 * steps
    for kill_at in range(1, last + 1):
        host = fresh(journal, False, refused)
        run_until(kill_at, host, monkeypatch, lambda host=host: host.apply(journal))  # type: ignore[misc]
        if (kill_at + refused) % 2:
            host.apply(journal)
            assert len(host.plan().left(Effect.LIVE)) == (2 if refused else 0)
        undone(host, journal, before)


def test_undo_killed_at_every_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = tmp_path / "journal"
    before = fresh(journal, applied=False).state()
    host = fresh(journal, applied=True)
    last = run_until(None, host, monkeypatch, lambda: host.undo(journal)).passed
    assert host.state() == before and last > 100
    for kill_at in range(1, last + 1):
        host = fresh(journal, applied=True)
        run_until(kill_at, host, monkeypatch, lambda host=host: host.undo(journal))  # type: ignore[misc]
        if kill_at % 3 == 0:  # or an apply comes between
            host.apply(journal)
            assert host.plan().left(Effect.LIVE) == ()
        undone(host, journal, before)
