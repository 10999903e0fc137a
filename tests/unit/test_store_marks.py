"""The mark of the store on the host: when it is written, when it says that the store is an older copy."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents.store import Record, Store
from agents.store_marks import StoreMarks
from netplugin.models import PortSpec, PortState
from tests.unit.agent import SPEC


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "agent.db"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    made = Store(path)
    yield made
    made.close()


def commit(store: Store, port_id: str) -> str:
    store.save([Record(port_id, PortSpec.model_validate(SPEC), PortState.ACTIVE)])
    return store.mark


def test_the_mark_follows_the_commits_of_the_same_store(store: Store) -> None:
    marks = StoreMarks(store)
    assert marks.after("") == store.mark == f"{store.identity}/0"
    first = commit(store, "p1")
    assert marks.after("") == first and commit(store, "p2") != first
    assert marks.after(first) == store.mark == f"{store.identity}/2"
    marks.compare("b", first, [])
    assert marks.findings("b") == []


def test_an_older_copy_says_so_until_somebody_has_compared(
    store: Store, path: Path, tmp_path: Path
) -> None:
    commit(store, "p1")
    shutil.copytree(path.parent, tmp_path / "copy")
    commit(store, "p2")
    newest = commit(store, "p3")
    older = Store(tmp_path / "copy" / path.name)
    marks = StoreMarks(older)
    commit(older, "p4")
    assert marks.after(newest) == newest, "it stays until it was compared"
    marks.compare("b", newest, ["p1"])
    [finding] = marks.findings("b")
    assert "an older copy: it was at commit 2" in finding.found
    assert "last changed by commit 3" in finding.found and finding.found.endswith(": p1")
    assert marks.findings("other") == []
    assert commit(older, "p5") == marks.after(newest) == f"{store.identity}/4", "no number twice"
    marks.compare("b", newest, [])
    assert len(StoreMarks(older).findings("b")) == 1, "it outlives the process"
    marks.accept("b")
    assert marks.findings("b") == []
    older.close()


@pytest.mark.parametrize("found", ["00000000-0000-4000-8000-000000000000/7", "no mark of ours"])
def test_the_mark_of_another_store(store: Store, found: str) -> None:
    marks = StoreMarks(store)
    commit(store, "p1")
    assert marks.after(found) == found
    marks.compare("b", found, [])
    [finding] = marks.findings("b")
    assert finding.found == f"another store changed the host last: {found.removesuffix('/7')}"
    assert marks.after(found) == store.mark
