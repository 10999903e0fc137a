"""Work that must not end: after an error it is logged, counted, and done again."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from netplugin.host import supervisor as module
from netplugin.host.supervisor import Supervisor

DEADLINE_S = 90.0


def test_a_thread_goes_on_after_an_error(caplog: pytest.LogCaptureFixture) -> None:
    supervisor, done = Supervisor(), threading.Event()
    errors: list[Exception] = [OSError(24, "Too many open files"), ValueError("filedescriptor")]

    def work() -> None:
        if errors:
            raise errors.pop(0)
        done.set()

    with caplog.at_level(logging.ERROR):
        thread = supervisor.thread("watch", work, threading.Event())
        assert done.wait(DEADLINE_S)
        thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert supervisor.failures() == {"watch": 2} and supervisor.reasons() == []
    assert [record.exc_info is not None for record in caplog.records] == [True, True]


class Unhurried(threading.Event):
    """Keeps the pauses instead of waiting for them."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.pauses.append(timeout)
        return False


def test_a_thread_that_ran_for_long_begins_the_back_off_again() -> None:
    now, stopped = 0.0, Unhurried()
    runs_s = [0.0, 0.0, 29.0, 86400.0, 86400.0, 0.0, 30.0]

    def work() -> None:
        nonlocal now
        if runs_s:
            now += runs_s.pop(0)
            raise OSError(24, "Too many open files")

    Supervisor(lambda: now).thread("watch", work, stopped).join(DEADLINE_S)
    assert stopped.pauses == [0.1, 0.2, 0.4, 0.1, 0.1, 0.2, 0.1]


def test_one_that_does_not_go_on_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BACKOFF_FIRST_S", 3600.0)
    supervisor, stopped, called = Supervisor(), threading.Event(), threading.Semaphore(0)

    def work() -> None:
        called.release()
        raise RuntimeError("unexpected")

    thread = supervisor.thread("watch", work, stopped)
    assert called.acquire(timeout=DEADLINE_S)
    while not supervisor.reasons():  # the error is on its way
        assert thread.is_alive()
    assert supervisor.reasons() == ["watch does not go on: RuntimeError('unexpected')"]
    stopped.set()
    thread.join(DEADLINE_S)
    assert not thread.is_alive() and not called.acquire(blocking=False)


def test_one_that_ends_itself_is_a_reason() -> None:
    supervisor = Supervisor()

    def work() -> None:
        raise SystemExit

    supervisor.thread("watch", work, threading.Event()).join(DEADLINE_S)
    assert supervisor.reasons() == ["watch does not go on: SystemExit()"]


def test_a_loop_goes_on_after_an_error() -> None:
    supervisor = Supervisor()

    async def run() -> int:
        turns = 0
        done = asyncio.Event()

        async def turn() -> None:
            nonlocal turns
            turns += 1
            if turns == 1:
                raise OSError(24, "Too many open files")
            if turns == 3:
                done.set()

        loop = asyncio.create_task(supervisor.every("compare", 0.0, turn))
        await asyncio.wait_for(done.wait(), DEADLINE_S)
        loop.cancel()
        return turns

    assert asyncio.run(run()) >= 3
    assert supervisor.failures() == {"compare": 1} and supervisor.reasons() == []
