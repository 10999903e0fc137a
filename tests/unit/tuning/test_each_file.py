"""Every file and folder of every machine in turn: gone, refused, garbled. Facts and findings come of it."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from functools import cache

import pytest

from netplugin.tuning.checks import check
from netplugin.tuning.checks.scene import Scene
from netplugin.tuning.facts import Facts
from netplugin.tuning.read import read_facts
from tests.unit.tuning.golden import facts_of
from tests.unit.tuning.machines import NAMES, MemoryRoot, Tree, load
from tests.unit.tuning.test_unknown import everything
from tests.unit.tuning.trees import tree

NONSENSE = ("", "garbage", "-1")


@cache
def made(machine: str) -> Tree:
    return tree(load(machine))


def places() -> Iterator[tuple[str, str]]:
    """A machine and a path of it: of files that differ by a number alone, the first is enough."""
    seen = set()
    for machine in reversed(NAMES):  # the small one first: it takes least time
        for path in [*made(machine).files, *MemoryRoot(made(machine))._folders]:
            kind = re.sub(r"[0-9a-f]*\d[0-9a-f]*", "N", path)
            if kind not in seen:
                seen.add(kind)
                yield machine, path


PLACES = sorted(places())
FILES = [(machine, path) for machine, path in PLACES if path in made(machine).files]


def read(machine: str, path: str, error: int) -> Facts:
    return read_facts(MemoryRoot(made(machine), {path: error}))


def test_all_kinds_of_files_are_there() -> None:
    assert len(FILES) > 80 and len(PLACES) > len(FILES) + 60


@pytest.mark.parametrize(("machine", "path"), PLACES)
def test_one_that_is_gone(machine: str, path: str) -> None:
    everything(read(machine, path, errno.ENOENT))


@pytest.mark.parametrize(("machine", "path"), PLACES)
def test_one_that_is_refused_is_reported_if_it_matters(machine: str, path: str) -> None:
    facts = read(machine, path, errno.EACCES)
    everything(facts)
    if facts == facts_of(machine):
        return  # nothing of it is read
    reported = facts.unknown()
    assert {unknown.reason for unknown in reported} == {"permission denied"}, reported
    findings = [f for f in check(Scene(facts)) if f.id == "unknown-fact"]
    assert findings and "permission denied" in findings[0].found


@pytest.mark.parametrize(("machine", "path"), FILES)
def test_one_that_is_garbled(machine: str, path: str) -> None:
    for text in NONSENSE:
        files = made(machine).files | {path: text}
        everything(read_facts(MemoryRoot(Tree(files, made(machine).links))))
