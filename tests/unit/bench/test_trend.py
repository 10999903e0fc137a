"""The judge of a soak: a leak is found, and what goes up and down is none."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.long.soak_picture import draw
from tests.long.soak_record import LATENCY, Soak
from tests.long.trend import BLOCKS, trend

#: A soak of an hour, looked at every five seconds.
TIMES = [5.0 * n for n in range(720)]
#: Hours after the warm-up.
JUDGED_H = 2 / 3


def noise(seed: int) -> list[float]:
    """Each sample is its own."""
    rng = random.Random(seed)
    return [80 + rng.gauss(0, 0.5) for _ in TIMES]


def wandering(seed: int) -> list[float]:
    """Each sample is near the one before, as resident memory is."""
    rng, values, at = random.Random(seed), [], 0.0
    for _ in TIMES:
        at = 0.9 * at + rng.gauss(0, 0.3)
        values.append(80 + at)
    return values


def sawtooth(seed: int) -> list[float]:
    """Up for a minute, and back: a kill each minute."""
    rng = random.Random(seed)
    return [80 + (at % 60) / 30 + rng.gauss(0, 0.2) for at in TIMES]


def warming_up(seed: int) -> list[float]:
    """Twice as much after five minutes, and then no more."""
    return [value - 40 * max(0.0, 1 - at / 300) for at, value in zip(TIMES, noise(seed), strict=True)]


def outlier(seed: int) -> list[float]:
    """For a minute near the end there was much more."""
    return [value + (50 if 3400 < at < 3460 else 0) for at, value in zip(TIMES, noise(seed), strict=True)]


SHAPES = [noise, wandering, sawtooth, warming_up, outlier]


@pytest.mark.parametrize("shape", SHAPES)
def test_what_goes_up_and_down_is_steady(shape: Callable[[int], list[float]]) -> None:
    found = [trend(TIMES, shape(seed), bound=0.0).steady for seed in range(100)]
    assert found.count(False) <= 3, "the alarms that its confidence allows"


@pytest.mark.parametrize("shape", SHAPES)
def test_a_leak_is_found(shape: Callable[[int], list[float]]) -> None:
    """8 MB an hour, in noise of half a megabyte."""
    for seed in range(20):
        leaking = [value + 8 * at / 3600 for at, value in zip(TIMES, shape(seed), strict=True)]
        found = trend(TIMES, leaking, bound=1.0)
        assert not found.steady, str(found)
        assert found.low <= 8 * JUDGED_H <= found.high, str(found)


def test_a_descriptor_lost_at_each_kill_is_found() -> None:
    found = trend(TIMES, [40.0 + at // 60 for at in TIMES], bound=0.5)
    assert not found.steady and found.growth == pytest.approx(60 * JUDGED_H, rel=0.05)


def test_one_descriptor_more_for_good_is_no_leak() -> None:
    assert trend(TIMES, [40.0 if at < 2000 else 41.0 for at in TIMES], bound=0.5).low <= 0


def test_what_never_changes_is_steady() -> None:
    found = trend(TIMES, [7.0] * len(TIMES), bound=0.0)
    assert found.steady and (found.low, found.growth, found.high) == (0, 0, 0)


def test_a_slow_growth_below_the_bound_is_allowed() -> None:
    values = [80 + 0.5 * at / 3600 for at in TIMES]
    assert trend(TIMES, values, bound=1.0).steady
    assert not trend(TIMES, values, bound=0.1).steady


def test_too_few_samples_are_not_judged() -> None:
    with pytest.raises(ValueError, match=f"{3 * BLOCKS} are needed"):
        trend(TIMES[:50], noise(1)[:50], bound=0.0)


def soaked(**more: list[float]) -> Soak:
    samples = {"RSS, MB": noise(1), "descriptors": [40.0] * len(TIMES), LATENCY: noise(2), **more}
    return Soak(
        started="2026-01-01T00:00:00+00:00",
        seconds=3600,
        revision="abc",
        done={"plug": 14400, "kill": 60},
        refused={"backend_unavailable": 30},
        times_s=tuple(TIMES),
        samples={name: tuple(values) for name, values in samples.items()},
    )


def test_a_soak_names_what_grows() -> None:
    leaking = soaked(threads=[6 + at / 600 for at in TIMES])
    assert [name for name, found in leaking.trends().items() if not found.steady] == ["threads"]
    assert all(found.steady for found in soaked().trends().values())


def test_a_latency_may_grow_by_a_part_of_itself() -> None:
    assert soaked().trends()[LATENCY].bound == pytest.approx(12, rel=0.01)


def test_a_picture_shows_what_grows(tmp_path: Path) -> None:
    draw(soaked(threads=[6 + at / 600 for at in TIMES]), tmp_path / "soak.svg")
    picture = (tmp_path / "soak.svg").read_text()
    assert picture.count("GROWS") == 1 and "minutes" in picture
