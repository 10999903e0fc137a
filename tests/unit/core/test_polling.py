"""How often something is looked at, and what is returned when it does not become ready."""

from __future__ import annotations

from itertools import count

import pytest

from netplugin.programs.polling import polled


def test_it_looks_until_it_is_ready_and_returns_that() -> None:
    seen = count(1)
    assert polled(lambda: next(seen), lambda value: value == 3, 60, 0) == 3
    assert next(seen) == 4, "and no more"


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_without_time_it_looks_once_and_returns_what_it_saw(seconds: float) -> None:
    seen = count(1)
    assert polled(lambda: next(seen), lambda _: False, seconds, 0.01) <= 2
    assert next(seen) <= 3


def test_what_the_look_raises_is_raised() -> None:
    with pytest.raises(ValueError, match="gone"):
        polled(lambda: int("gone"), bool, 60, 0)
