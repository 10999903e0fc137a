"""Borrow 2 MB hugepages from the machine and return exactly what was borrowed.

Several borrowers may overlap, so a borrower adds to and subtracts from the pool and never
writes back an old total. What a killed borrower owes is in a small ledger and is given
back by the next one.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from tests.lab.processes import LabError

POOL = Path("/proc/sys/vm/nr_hugepages")
COMPACT = Path("/proc/sys/vm/compact_memory")
LEDGER = Path("/run/netplugin-lab")
#: Compaction does not always help at once, while others use the memory that it frees.
_TRIES = 5


class State(StrEnum):
    """How far a loan is; the two in motion say where the pool must end if their owner dies."""

    BORROWING = "borrowing"
    HELD = "held"
    RETURNING = "returning"


@dataclass(frozen=True, slots=True)
class Loan:
    """One borrower, known by its pid and start time (a pid alone may be used again)."""

    pid: int
    started: int
    pages: int
    state: State
    settled: int
    """The pool's size once a loan in motion is undone or returned."""


@contextmanager
def borrowed(pages: int) -> Iterator[None]:
    """Add `pages` to the machine's pool for the time of the block."""
    if pages == 0:
        with _locked():
            _repair()
        yield
        return
    _borrow(pages)
    try:
        yield
    finally:
        _release()


def own_pages() -> int:
    """The machine's pool without what is lent: what it must be when every borrower is gone."""
    with _locked():
        return _read_pool() - sum(loan.pages for loan in _loans() if loan.state is State.HELD)


def _borrow(pages: int) -> None:
    with _locked():
        _repair()
        before = _read_pool()
        LEDGER.mkdir(exist_ok=True)
        _write(Loan(os.getpid(), _start_time(os.getpid()), pages, State.BORROWING, before))
        for _ in range(_TRIES):
            if _write_pool(before + pages) >= before + pages:
                break
            # Fragmented memory is the usual reason, and compaction its cure.
            COMPACT.write_text("1")
        got = _read_pool() - before
        if got < pages:
            _write_pool(before)
            _forget(os.getpid())
            raise LabError(f"asked the kernel for {pages} hugepages and got {got}")
        _write(Loan(os.getpid(), _start_time(os.getpid()), pages, State.HELD, 0))


def _release() -> None:
    with _locked():
        _repair()
        loan = _load(LEDGER / f"{os.getpid()}.json")
        if loan is not None:
            _settle(loan)


def _repair() -> None:
    """Settle the loans of dead borrowers; one in motion first, as it knows the pool's size."""
    dead = [loan for loan in _loans() if not _alive(loan)]
    for loan in sorted(dead, key=lambda loan: loan.state is State.HELD):
        _settle(loan)


def _settle(loan: Loan) -> None:
    target = loan.settled
    if loan.state is State.HELD:
        target = max(0, _read_pool() - loan.pages)
        _write(Loan(loan.pid, loan.started, loan.pages, State.RETURNING, target))
    if _read_pool() > target:
        _write_pool(target)
    _forget(loan.pid)


def _loans() -> list[Loan]:
    found = (_load(path) for path in sorted(LEDGER.glob("*.json")))
    return [loan for loan in found if loan is not None]


def _load(path: Path) -> Loan | None:
    try:
        held = json.loads(path.read_text())
        return Loan(**{**held, "state": State(held["state"])})
    except FileNotFoundError:
        return None


def _write(loan: Loan) -> None:
    path = LEDGER / f"{loan.pid}.json"
    draft = path.with_suffix(".new")
    draft.write_text(json.dumps(asdict(loan)))
    draft.replace(path)


def _forget(pid: int) -> None:
    (LEDGER / f"{pid}.json").unlink(missing_ok=True)
    for draft in LEDGER.glob("*.new"):
        draft.unlink(missing_ok=True)
    try:
        LEDGER.rmdir()
    except OSError:
        pass  # another borrower's loan is still in it


def _alive(loan: Loan) -> bool:
    try:
        return _start_time(loan.pid) == loan.started
    except OSError:
        return False


def _start_time(pid: int) -> int:
    # The command name may hold spaces and brackets: count the fields after its end.
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def _read_pool() -> int:
    return int(POOL.read_text())


def _write_pool(pages: int) -> int:
    POOL.write_text(str(pages))
    return _read_pool()


@contextmanager
def _locked() -> Iterator[None]:
    # The directory that is always there is the lock: a lock file would have to be deleted.
    handle = os.open(LEDGER.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
