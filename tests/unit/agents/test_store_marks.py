"""The mark of the store on the host: when it is written, when it says that the store is an older copy."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents.store.port_table import Record
from agents.store.store import Store
from netplugin.api.models import PortSpec, PortState
from netplugin.host.names import CarriedMark
from tests.unit.agent import SPEC

OTHER = "00000000-0000-4000-8000-000000000000/7"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "agent.db"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    made = Store(path)
    yield made
    made.close()


def commit(store: Store, port_id: str) -> str:
    store.save([Record(port_id, PortSpec.model_validate(SPEC), state=PortState.ACTIVE)])
    return store.marks.own


def numbered(mark: str) -> str:
    """Without the name of the run."""
    return mark.rpartition("/")[0]


def test_the_mark_follows_the_commits_of_the_same_store(store: Store) -> None:
    marks = store.marks
    carried = CarriedMark(marks.after)
    assert carried.after("") == store.marks.own == f"{store.identity}/0"
    first = commit(store, "p1")
    assert carried.after("") == first and commit(store, "p2") != first
    assert carried.after(first) == store.marks.own
    assert numbered(store.marks.own) == f"{store.identity}/2"
    marks.compare("b", carried.found(first), [])
    assert marks.findings("b") == []


def test_an_older_copy_is_reported_until_somebody_has_compared(
    store: Store, path: Path, tmp_path: Path
) -> None:
    commit(store, "p1")
    shutil.copytree(path.parent, tmp_path / "copy")
    commit(store, "p2")
    newest = commit(store, "p3")
    older = Store(tmp_path / "copy" / path.name)
    marks = older.marks
    for number in range(4, 8):
        commit(older, f"p{number}")  # soon it has as many commits as the newest
    assert marks.after(newest) == newest, "it stays until it was compared"
    marks.compare("b", newest, ["p1"])
    [finding] = marks.findings("b")
    assert "an older copy: it lacks commit 3" in finding.found and finding.found.endswith(": p1")
    assert marks.findings("other") == []
    assert commit(older, "p8") == marks.after(newest)
    assert store.marks.after(older.marks.own) == older.marks.own, "the original has not this commit"
    marks.compare("b", newest, [])
    assert len(older.marks.findings("b")) == 1, "it outlives the process"
    marks.accept("b")
    assert marks.findings("b") == []
    older.close()


@pytest.mark.parametrize("found", [OTHER, "no mark of ours"])
def test_the_mark_of_another_store(store: Store, found: str) -> None:
    marks = store.marks
    commit(store, "p1")
    assert marks.after(found) == found
    marks.compare("b", found, [])
    [finding] = marks.findings("b")
    assert finding.found == f"another store changed the host last: {found.removesuffix('/7')}"
    assert marks.after(found) == store.marks.own


def test_every_backend_learns_what_was_there_before_the_first_write(store: Store) -> None:
    marks = store.marks
    carried = CarriedMark(marks.after)
    there = carried.after(OTHER)
    assert there == OTHER, "nobody has compared"
    marks.compare("first", carried.found(there), [])
    for number in range(3):
        commit(store, f"p{number}")
        there = carried.after(there)
        assert there == store.marks.own
    marks.compare("second", carried.found(there), [])
    assert [len(marks.findings(backend)) for backend in ("first", "second")] == [1, 1]
    assert carried.found("a third store's") == "a third store's", "it wrote since"


def test_an_older_copy_tells_every_backend(store: Store, path: Path, tmp_path: Path) -> None:
    commit(store, "p1")
    shutil.copytree(path.parent, tmp_path / "copy")
    newest = [commit(store, f"p{number}") for number in range(2, 5)][-1]
    older = Store(tmp_path / "copy" / path.name)
    marks = older.marks
    for backend in ("first", "second"):
        marks.compare(backend, newest, [])
        [finding] = marks.findings(backend)
        assert "an older copy: it lacks commit 4" in finding.found
    ours = commit(older, "p9")
    assert store.marks.after(ours) == ours, "the original has a commit of this number, and not this one"
    older.close()


def test_an_older_copy_that_has_overtaken_the_host_before_its_first_look(
    store: Store, path: Path, tmp_path: Path
) -> None:
    """It was restarted before it looked: nothing but the file says how it came to its number."""
    commit(store, "p1")
    shutil.copytree(path.parent, tmp_path / "copy")
    newest = [commit(store, f"p{number}") for number in range(2, 5)][-1]
    for _ in range(2):
        older = Store(tmp_path / "copy" / path.name)
        for number in range(5, 9):
            commit(older, f"p{number}")
        older.close()
    older = Store(tmp_path / "copy" / path.name)
    marks = older.marks
    assert marks.after(newest) == newest, "it stays until it was compared"
    marks.compare("b", newest, [])
    [finding] = marks.findings("b")
    assert "an older copy: it lacks commit 4" in finding.found
    older.close()


def test_what_one_backend_learned_another_learns_after_a_restart(
    store: Store, path: Path, tmp_path: Path
) -> None:
    commit(store, "p1")
    shutil.copytree(path.parent, tmp_path / "copy")
    newest = [commit(store, f"p{number}") for number in range(2, 5)][-1]
    older = Store(tmp_path / "copy" / path.name)
    older.marks.compare("first", newest, [])
    older.close()
    again = Store(tmp_path / "copy" / path.name)
    marks = again.marks
    marks.compare("second", newest, [])
    assert [len(marks.findings(backend)) for backend in ("first", "second")] == [1, 1]
    again.close()


def test_the_runs_of_years_are_forgotten(store: Store, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agents.store.marks._KEPT", 3)
    made = [commit(store, "p1")]
    store.close()
    for _ in range(6):
        again = Store(path)
        made.append(commit(again, "p1"))
        again.close()
    last = Store(path)
    marks = last.marks
    for mark in made:
        marks.compare("b", mark, [])
    assert marks.findings("b") == []
    kept = last.database.sql.execute("SELECT COUNT(*) FROM meta WHERE key LIKE 'run/%'").fetchone()[0]
    assert kept == 4, "and the one that was added last"
    marks.compare("b", made[-1].replace(made[-1].rpartition("/")[2], "another"), [])
    assert len(marks.findings("b")) == 1
    last.close()


def test_what_was_accepted_stays_so_after_a_restart(store: Store, path: Path) -> None:
    marks = store.marks
    marks.compare("b", OTHER, ["p1"])
    store.close()
    again = Store(path)
    marks = again.marks
    marks.compare("b", OTHER, [])
    [finding] = marks.findings("b")
    assert finding.found.endswith(": p1"), "as it was first reported"
    marks.accept("b")
    again.close()
    last = Store(path)
    marks = last.marks
    marks.compare("b", OTHER, [])
    assert marks.findings("b") == [] and marks.after(OTHER) == last.marks.own
    marks.compare("b", "00000000-0000-4000-8000-000000000000/8", [])
    assert len(marks.findings("b")) == 1, "the other store wrote since"
    last.close()


@pytest.mark.parametrize("number", ["9" * 5000, str(10**20), "٣", "-1", ""])
def test_a_garbled_number_is_another_stores_and_stops_nothing(store: Store, number: str) -> None:
    marks = store.marks
    found = f"{store.identity}/{number}"
    assert marks.after(found) == found
    marks.compare("b", found, [])
    [finding] = marks.findings("b")
    assert "another store" in finding.found and len(finding.found) < 200
    assert commit(store, "p1") == marks.after(found) == store.marks.own
    assert numbered(store.marks.own) == f"{store.identity}/1"
