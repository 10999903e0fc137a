"""Borrowed hugepages are given back exactly, also by the next borrower; on a pool of its own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.lab import hugepages
from tests.lab.hugepages import Loan, State, borrowed
from tests.lab.processes import LabError


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "nr_hugepages"
    path.write_text("5")
    monkeypatch.setattr(hugepages, "POOL", path)
    monkeypatch.setattr(hugepages, "COMPACT", tmp_path / "compact_memory")
    monkeypatch.setattr(hugepages, "LEDGER", tmp_path / "ledger")
    return path


def dead_pid() -> int:
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    return ended.pid


def owe(pid: int, pages: int, state: State, settled: int = 0) -> None:
    hugepages.LEDGER.mkdir(exist_ok=True)
    loan = {"pid": pid, "started": 1, "pages": pages, "state": state, "settled": settled}
    (hugepages.LEDGER / f"{pid}.json").write_text(json.dumps(loan))


def test_what_was_added_is_subtracted(pool: Path) -> None:
    with borrowed(10):
        assert pool.read_text() == "15"
        pool.write_text("22")  # another borrower came
    assert pool.read_text() == "12"
    assert not hugepages.LEDGER.exists()


def test_an_error_in_the_block_returns_what_was_taken(pool: Path) -> None:
    with pytest.raises(RuntimeError), borrowed(10):
        raise RuntimeError
    assert pool.read_text() == "5"


def test_a_kernel_short_of_memory_keeps_nothing(pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stingy(pages: int) -> int:
        pool.write_text(str(min(pages, 8)))
        return min(pages, 8)

    monkeypatch.setattr(hugepages, "_write_pool", stingy)
    with pytest.raises(LabError, match="10 hugepages and got 3"), borrowed(10):
        pass
    assert pool.read_text() == "5"
    assert not hugepages.LEDGER.exists()


@pytest.mark.parametrize(
    ("state", "settled", "at_death"),
    [
        (State.HELD, 0, "15"),
        (State.BORROWING, 5, "5"),
        (State.BORROWING, 5, "15"),
        (State.RETURNING, 5, "15"),
        (State.RETURNING, 5, "5"),
    ],
)
def test_the_next_borrower_repairs(pool: Path, state: State, settled: int, at_death: str) -> None:
    owe(dead_pid(), 10, state, settled)
    pool.write_text(at_death)
    with borrowed(2):
        assert pool.read_text() == "7"
    assert pool.read_text() == "5"


def test_a_reused_pid_is_not_the_borrower(pool: Path) -> None:
    owe(os.getppid(), 10, State.HELD)
    pool.write_text("15")
    with borrowed(0):
        assert pool.read_text() == "5"


def test_a_living_borrower_keeps_its_pages(pool: Path) -> None:
    with borrowed(10):
        loans = hugepages._loans()
        assert loans == [Loan(os.getpid(), loans[0].started, 10, State.HELD, 0)]
        hugepages._repair()
        assert pool.read_text() == "15"
        assert hugepages.own_pages() == 5
