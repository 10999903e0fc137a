"""The rank test against counting all cases, the interval, and many tests at once."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate

from netplugin import statistics
from netplugin.statistics import can_reach, change, holm, least_p, p_lower, sign_odds

few = st.lists(st.integers(0, 4).map(float), min_size=1, max_size=5)


@given(few, few)
def test_p_is_that_of_counting_all_ways_to_deal(before: list[float], after: list[float]) -> None:
    """Ties included: the sum of mid-ranks is as low or lower in so many of all choices."""
    values = [*before, *after]
    ranks = [sum(v < x for v in values) + (sum(v == x for v in values) + 1) / 2 for x in values]
    mine = sum(ranks[len(before) :])
    ways = list(itertools.combinations(ranks, len(after)))
    assert p_lower(before, after) == pytest.approx(sum(sum(w) <= mine for w in ways) / len(ways))


def test_p_of_known_tables() -> None:
    """Mann and Whitney's own small cases: U = 0 and U = 1 with 3 and 4."""
    assert p_lower([4.0, 5, 6, 7], [1.0, 2, 3]) == pytest.approx(1 / 35)
    assert p_lower([3.0, 5, 6, 7], [1.0, 2, 4]) == pytest.approx(2 / 35)
    assert p_lower([1.0] * 5, [1.0] * 5) == 1
    assert p_lower([1.0], [2.0]) == 1 and p_lower([2.0], [1.0]) == 0.5 == least_p(1, 1)


def test_many_answers_are_taken_for_normal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Near the exact ones, ties included."""
    rng = random.Random(1)
    before = [round(rng.gauss(1, 0.1), 2) for _ in range(30)]
    after = [round(rng.gauss(0.97, 0.1), 2) for _ in range(28)]
    found, interval = p_lower(before, after), change(before, after)
    assert p_lower([1.0] * 30, [1.0] * 30) == 1
    assert p_lower([2.0] * 30, [1.0] * 30) < 1e-9
    monkeypatch.setattr(statistics, "_EXACT", 30)
    assert found == pytest.approx(p_lower(before, after), abs=0.003) and 0.01 < found < 0.5
    assert (interval.low, interval.high) == pytest.approx(
        (change(before, after).low, change(before, after).high), abs=0.005
    )


@given(st.integers(1, 40), st.integers(1, 40))
def test_the_least_p_is_reached_when_all_are_apart(before: int, after: int) -> None:
    p = p_lower([2.0 + n for n in range(before)], [-float(n) for n in range(after)])
    assert p == pytest.approx(least_p(before, after), rel=1e-9) or max(before, after) > 25


def test_the_change_and_its_interval() -> None:
    found = change([1.0] * 5, [0.95] * 5)
    assert found.ratio == found.low == found.high == pytest.approx(-0.05)
    assert found.confidence >= 0.95
    single = change([2.0], [1.0])
    assert (single.ratio, single.confidence) == (-0.5, 0.0)
    assert change([2.0], [0.0]).ratio == -1 and change([0.0], [2.0]).ratio == math.inf
    assert change([0.0], [0.0]).ratio == 0


@pytest.mark.parametrize("count", [4, 6, 9, 30])
def test_the_interval_has_the_true_change_as_often_as_it_says(count: int) -> None:
    """Draws of a skewed distribution, 7 % lower."""
    rng = random.Random(count)
    runs, covered = 300, 0
    for _ in range(runs):
        before = [rng.lognormvariate(0, 0.1) for _ in range(count)]
        found = change(before, [0.93 * rng.lognormvariate(0, 0.1) for _ in range(count)])
        covered += found.low <= -0.07 <= found.high
        assert found.confidence >= (0.95 if count > 4 else 0.94)
    # Not below by more than chance (three standard deviations), and not far too wide.
    assert covered >= runs * 0.94 - 3 * math.sqrt(runs * 0.05)
    assert count < 9 or covered < runs


def test_what_can_reach_the_level_depends_on_counts_alone() -> None:
    assert can_reach([(1, 1), (2, 2)], 0.05) == [False, False]
    assert can_reach([(3, 3)], 0.05) == [True]
    # Two of these would need 0.025 each, and 3 against 3 has 0.05 at best.
    assert can_reach([(3, 3), (3, 3)], 0.05) == [False, False]
    assert can_reach([(3, 3), (7, 7)], 0.05) == [False, True]
    assert can_reach([(5, 5)] * 12, 0.05) == [True] * 12
    assert can_reach([], 0.05) == []


def test_holm() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0] and holm([]) == []


@pytest.mark.parametrize("trials", [1, 8, 30, 200])
def test_the_odds_are_the_likelihood_ratio_mixed_over_all_alternatives(trials: int) -> None:
    for successes in {0, trials // 2, trials - 1, trials}:

        def ratio(p: float, won: int = successes) -> float:
            return float((2 * p) ** won * (2 - 2 * p) ** (trials - won) * p**4 * 5 / (1 - 0.5**5))

        expected, _ = integrate.quad(ratio, 0.5, 1, epsrel=1e-10, points=[max(0.51, successes / trials)])
        assert sign_odds(successes, trials) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("level", [0.05, 0.01, 0.01 / 12])
def test_the_odds_rarely_mislead_however_long_one_looks(level: float) -> None:
    """Exactly, over all ways that 150 tosses of a fair coin go, stopped at the first that seems to tell."""
    going, stopped = {0: 1.0}, 0.0
    for trials in range(1, 151):
        following: dict[int, float] = {}
        for successes, p in going.items():
            for more in (0, 1):
                following[successes + more] = following.get(successes + more, 0.0) + p / 2
        stopped += sum(p for won, p in following.items() if sign_odds(won, trials) >= 1 / level)
        going = {won: p for won, p in following.items() if sign_odds(won, trials) < 1 / level}
    assert level / 4 < stopped <= level
    assert sign_odds(8, 8) > 100 > sign_odds(7, 7)
