"""Every kind of simulated device ends with the verdict that is right, and at a bounded cost."""

from __future__ import annotations

import statistics
from collections import Counter

import pytest
from netplugin_zeroloss.generators.sim import FAMILIES
from netplugin_zeroloss.search.search import SearchResult
from netplugin_zeroloss.search.trials import SearchVerdict

from tests.unit.zeroloss.helpers import search_family, traffic

SHARP = sorted(
    name
    for name, family in FAMILIES.items()
    if family.verdict == "ndr" and not any(device.stalls for device in family.devices)
)
LIMITED = sorted(name for name, family in FAMILIES.items() if family.verdict == "generator_limited")
NOISY = ("noisy", "rare-stalls", "heavy-stalls")


def runs(name: str, count: int, seed: int = 1) -> list[SearchResult]:
    return [search_family(name, f"{seed}/{run}") for run in range(count)]


def verdicts(found: list[SearchResult]) -> Counter[SearchVerdict]:
    return Counter(one.headline.verdict for one in found)


def answers(found: list[SearchResult]) -> list[float]:
    return [one.headline.answer_pps for one in found if one.headline.answer_pps is not None]


def p60(name: str, found: list[SearchResult]) -> float:
    family = FAMILIES[name]
    return statistics.fmean(family.loss_probability(answer, 60) for answer in answers(found))


def relative_std(values: list[float]) -> float:
    return statistics.stdev(values) / statistics.fmean(values)


def test_all_families_are_here() -> None:
    floors = {"glitch", "glitch-window", "glitch-random", "frame-errors"}
    assert set(SHARP) | set(LIMITED) | set(NOISY) | floors | {"dead-direction"} == set(FAMILIES)


@pytest.mark.parametrize("name", SHARP)
def test_a_sharp_limit_is_found_within_the_precision(name: str) -> None:
    known = min(FAMILIES[name].limit_pps(60) or 0.0, 14.88e6)
    for found in runs(name, 6):
        outcome = found.headline
        assert outcome.verdict is SearchVerdict.NDR, (name, outcome.reason)
        assert outcome.lower_pps == pytest.approx(known, rel=0.0051)
        assert outcome.lower_pps <= known * 1.0001


@pytest.mark.parametrize("name", LIMITED)
def test_a_generator_at_its_end_is_not_a_device_that_loses(name: str) -> None:
    for found in runs(name, 20):
        outcome = found.headline
        assert outcome.verdict is SearchVerdict.GENERATOR_LIMITED, (name, outcome.reason)
        assert outcome.answer_pps is None
        # It did 3 Mpps and passed; that is the bound, and what is above is not known.
        assert outcome.lower_pps == pytest.approx(3e6, rel=0.006)
        assert outcome.upper_pps == 14.88e6
        assert not any(trial.lossy for trial in found.trials if trial.rate < 4.2e6)


def test_a_clean_device_takes_a_minute() -> None:
    [found] = runs("clean", 1)
    assert traffic(found) <= 61 and len(found.trials) == 4


def test_a_noisy_device() -> None:
    """The targets in small: 40 runs, and room for their luck. In full: the long test below."""
    found = runs("noisy", 40)
    assert set(verdicts(found)) == {SearchVerdict.NDR}
    assert statistics.fmean(map(traffic, found)) <= 420
    assert relative_std(answers(found)) <= 0.12
    assert p60("noisy", found) <= 0.54
    known = FAMILIES["noisy"].limit_pps(60)
    assert statistics.median(answers(found)) == pytest.approx(known, rel=0.1)


@pytest.mark.parametrize("name", ["rare-stalls", "heavy-stalls"])
def test_other_stalls_have_a_rate_too(name: str) -> None:
    found = runs(name, 20)
    assert verdicts(found)[SearchVerdict.NDR] >= 17, verdicts(found)
    assert verdicts(found)[SearchVerdict.FAILED] == 0


def test_every_answer_has_passed_for_its_full_time_and_failed_just_above() -> None:
    for name in NOISY:
        for found in runs(name, 5):
            outcome = found.headline
            if outcome.verdict is not SearchVerdict.NDR:
                continue
            passed = [t for t in found.trials if t.rate == outcome.lower_pps and t.passed]
            lost = [t for t in found.trials if t.rate == outcome.upper_pps and t.lossy]
            assert any(t.request.duration_s == 60 for t in passed) and lost
            assert outcome.upper_pps <= outcome.lower_pps * 1.005 + 0.02
            assert not any(
                t.lossy and t.rate <= outcome.lower_pps and t.traffic_before_s >= 10 for t in found.trials
            )


@pytest.mark.parametrize("name", ["glitch", "glitch-window"])
def test_a_glitch_a_minute_is_a_floor(name: str) -> None:
    found = runs(name, 20)
    assert verdicts(found)[SearchVerdict.FLOOR] >= 19, verdicts(found)
    for one in found:
        outcome = one.headline
        if outcome.verdict is SearchVerdict.FLOOR:
            assert outcome.answer_pps is None
            assert outcome.floor is not None and outcome.floor.place == "link"
            # 100 us of each minute; trials that stop at a glitch make it look like more.
            assert 5e-7 <= outcome.floor.loss_ratio <= 2e-5


def test_frame_errors_are_a_floor() -> None:
    for found in runs("frame-errors", 5):
        outcome = found.headline
        assert outcome.verdict is SearchVerdict.FLOOR, outcome.reason
        assert outcome.floor is not None and outcome.floor.place == "frame_errors"


def test_a_random_glitch_is_seen_once_it_shows() -> None:
    """A full trial passes with 1/e, and then nothing tells this device from a clean one."""
    found = runs("glitch-random", 20)
    first_full = [next(t for t in f.trials if t.request.duration_s == 60) for f in found]
    for one, trial in zip(found, first_full, strict=True):
        if trial.passed:
            assert one.headline.verdict is SearchVerdict.NDR
    shown = [one for one, trial in zip(found, first_full, strict=True) if trial.lossy]
    assert verdicts(shown)[SearchVerdict.FLOOR] >= len(shown) / 2


def test_a_cold_device_is_warmed_up_first() -> None:
    for found in runs("warm-up", 5):
        assert any(t.request.purpose == "warming up" for t in found.trials)
        assert traffic(found) < 80


def test_what_a_cold_device_lost_is_not_held_against_it() -> None:
    """It loses every other second for longer than the first tenth of a trial, and then never."""
    for found in runs("slow-warm-up", 8):
        assert found.headline.answer_pps == pytest.approx(4.2e6, rel=0.005)


# -- the targets in full -------------------------------------------------------------------------


@pytest.mark.long
def test_targets_noisy() -> None:
    found = runs("noisy", 400, seed=7)
    assert set(verdicts(found)) == {SearchVerdict.NDR}
    assert statistics.fmean(map(traffic, found)) <= 390
    assert relative_std(answers(found)) <= 0.09
    assert p60("noisy", found) <= 0.5


@pytest.mark.long
@pytest.mark.parametrize("name", ["glitch", "glitch-window"])
def test_targets_glitch(name: str) -> None:
    found = runs(name, 400, seed=7)
    assert verdicts(found)[SearchVerdict.FLOOR] >= 380, verdicts(found)


@pytest.mark.long
def test_targets_generators() -> None:
    for name in LIMITED:
        found = runs(name, 1000, seed=7)
        assert verdicts(found) == {SearchVerdict.GENERATOR_LIMITED: 1000}, name
    for name in ("flaky-generator", "negative-counters", "more-than-sent"):
        for one in runs(name, 1000, seed=7):
            # Three bad trials in a row are the generator's limit, never the device's.
            outcome = one.headline
            assert outcome.verdict in (SearchVerdict.NDR, SearchVerdict.GENERATOR_LIMITED)
            assert outcome.lower_pps <= 4.2e6 * 1.0001
            if outcome.verdict is SearchVerdict.NDR:
                assert outcome.upper_pps >= 4.2e6


@pytest.mark.long
def test_targets_clean() -> None:
    assert all(traffic(found) <= 61 for found in runs("clean", 100, seed=7))
