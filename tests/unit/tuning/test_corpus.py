"""What check, plan and guest plan say of the hosts in tests/data/hosts is what was read line by line."""

from __future__ import annotations

import pytest

from tests.unit.tuning.corpus import NAMES, file_of, load, report


@pytest.mark.parametrize("name", NAMES)
def test_a_host_is_judged_and_planned_as_it_was_read(name: str) -> None:
    assert report(load(name)) == file_of(name).read_text()


def test_there_are_hosts_of_many_kinds() -> None:
    assert len(NAMES) >= 25
