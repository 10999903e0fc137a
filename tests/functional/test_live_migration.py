"""A guest under traffic migrates between two hypervisors: what is lost each way, and whether TCP goes on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.bench.live_migration import BACKENDS, booted, moved_under_traffic, row
from tests.lab.traveller import Traveller, Way
from tests.lab.two_hosts import two_hosts


@pytest.fixture(scope="module")
def travellers() -> Iterator[dict[str, Traveller]]:
    """A VM on each backend of the first of two hypervisors."""
    with two_hosts(BACKENDS) as hosts:
        yield booted(hosts)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_guest_migrates_under_traffic(
    travellers: dict[str, Traveller], backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = moved_under_traffic(travellers[backend], Way.PUT)
    with capsys.disabled():
        print(f"\n  {row([backend, *figures.cells()])}", end="")
    assert figures.stream_survived
