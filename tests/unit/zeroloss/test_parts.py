"""The small parts: hazard model, simulated devices, intervals, values."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from netplugin_zeroloss.generators.devices import DEVICES, DeviceSpec, Glitches, SimulatedDevice
from netplugin_zeroloss.generators.sim import FAMILIES, sim_generator
from netplugin_zeroloss.search.chance import TARGET, HazardModel
from netplugin_zeroloss.search.result import spread
from netplugin_zeroloss.values import TrialRequest, line_rate_pps

from tests.unit.zeroloss.helpers import asked

# -- simulated devices ---------------------------------------------------------------------------


def device(seed: int = 0, **what: object) -> SimulatedDevice:
    return SimulatedDevice(DeviceSpec(**what), random.Random(seed))  # type: ignore[arg-type]


@given(rate=st.floats(1e4, 14e6), duration=st.floats(0.01, 60), ring=st.floats(0, 5000))
def test_a_hard_limit_by_hand(rate: float, duration: float, ring: float) -> None:
    passage = device(ring_packets=ring).run(rate, duration, abort=False)
    lost = max(0.0, (rate - 4.2e6) * duration - ring)
    assert passage.sent == round(rate * duration)
    assert passage.lost == pytest.approx(lost, abs=2)
    assert not passage.aborted and passage.elapsed_s == duration


def test_it_stops_at_the_next_look_after_the_first_loss() -> None:
    """1,024 frames of the ring at 21 kpps too much, and looked at each 10 ms."""
    passage = device().run(4.221e6, 60.0, abort=True)
    first = 1025 / 21e3
    assert passage.aborted and first <= passage.elapsed_s <= first + 0.0101
    assert passage.lost == pytest.approx(21e3 * passage.elapsed_s - 1024, abs=2)
    assert not device().run(4.19e6, 60.0, abort=True).aborted


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("noisy", 2.0e6),
        ("noisy", 2.3e6),
        ("noisy", 2.6e6),
        ("rare-stalls", 2.4e6),
        ("heavy-stalls", 2.6e6),
        ("clean", 4.1e6),
        ("glitch-random", 1e6),
    ],
)
def test_the_known_probability_of_loss_is_that_of_the_simulation(name: str, rate: float) -> None:
    count = 400
    lost = sum(
        SimulatedDevice(DEVICES[name], random.Random(run)).run(rate, 60.0, abort=True).aborted
        for run in range(count)
    )
    known = DEVICES[name].loss_probability(rate, 60.0)
    assert abs(lost / count - known) <= 4.5 * math.sqrt(known * (1 - known) / count) + 1e-9


def test_the_known_limit_is_where_half_of_the_minutes_lose() -> None:
    for name in ("noisy", "rare-stalls", "heavy-stalls"):
        limit = DEVICES[name].limit_pps(60)
        assert limit is not None
        assert DEVICES[name].loss_probability(limit, 60) == pytest.approx(0.5, abs=1e-6)
    assert DEVICES["clean"].limit_pps(60) == 4.2e6
    for name in ("glitch", "glitch-random", "frame-errors"):
        assert DEVICES[name].limit_pps(60) is None


def test_a_glitch_comes_once_in_each_minute_of_traffic() -> None:
    one = device(seed=3, glitches=Glitches())
    assert [one.run(1e6, 60.0, abort=False).lost for _ in range(20)] == [100] * 20


def test_a_glitch_in_each_window_and_at_random() -> None:
    window = device(seed=3, glitches=Glitches(when="window"))
    assert sum(window.run(1e6, 7.0, abort=False).lost for _ in range(6000)) in range(69_900, 70_101)
    by_chance = device(seed=3, glitches=Glitches(when="random"))
    lost = sum(by_chance.run(1e6, 7.0, abort=False).lost for _ in range(6000))
    assert abs(lost / 100 - 700) < 4.5 * math.sqrt(700)


def test_warm_up_is_over_when_it_is_over() -> None:
    one = device(warm_up_s=8.0)
    assert one.run(1000, 8.0, abort=False).lost > 200
    assert one.run(1000, 60.0, abort=False).lost == 0


def test_drift_settles() -> None:
    one = device(drift=0.1, drift_s=10.0)
    assert one.run(4.5e6, 0.4, abort=True).lost == 0
    one.run(1e6, 100.0, abort=True)
    assert one.run(4.5e6, 0.4, abort=True).aborted


def test_the_direction_that_stops_first_stops_the_other() -> None:
    measured = sim_generator("one-direction", "1").run(asked(3.9e6, 60.0))
    assert measured.aborted and measured.elapsed_s < 1
    there, back = measured.directions
    assert there.tx_packets == back.tx_packets
    assert there.tx_packets == there.rx_packets and back.rx_packets < back.tx_packets


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_luck_is_that_of_the_seed(name: str) -> None:
    requests = [TrialRequest(rate, 7.0) for rate in (5e6, 4.1e6, 3e6, 2e6)]
    one, same, other = (sim_generator(name, seed) for seed in ("1", "1", "2"))
    assert [one.run(r) for r in requests] == [same.run(r) for r in requests]
    random_ones = ("noisy", "frame-errors", "warm-up")
    if name in random_ones:
        assert [one.run(r) for r in requests] != [other.run(r) for r in requests]


# -- the hazard model ----------------------------------------------------------------------------


def teach(model: HazardModel, rate: float, hazard: float, rng: random.Random) -> None:
    at = rng.expovariate(hazard)
    model.saw(rate, min(at, 60.0), at < 60.0)


def test_the_model_finds_a_limit_that_there_is() -> None:
    """Loss at a power of the load: once in a minute at 2 Mpps, 6.5 the exponent."""
    errors = []
    for seed in range(10):
        rng, model = random.Random(seed), HazardModel(4e6, 60.0)
        for rate in (4e6, 3.4e6, 2.9e6, 2.6e6, 2.4e6, 2.2e6, 2.1e6, 2e6, 2e6, 1.9e6):
            teach(model, rate, TARGET / 60 * (rate / 2e6) ** 6.5, rng)
        seen = model.estimate()
        errors.append(math.log(seen.limit_pps / 2e6))
        assert seen.floor < 0.5
    assert abs(statistics.fmean(errors)) < 0.1 and max(map(abs, errors)) < 0.35


def test_the_model_sees_a_floor() -> None:
    rng, model = random.Random(1), HazardModel(4e6, 60.0)
    before = model.estimate().floor
    for rate in (4e6, 3.5e6, 3e6, 0.4e6, 0.4e6, 0.4e6, 0.4e6):
        teach(model, rate, 1 / 10, rng)
    assert before < 0.25 and model.estimate().floor > 0.5


def test_when_it_lost_tells_how_often_it_does() -> None:
    """After 1 s, or somewhere in 60: the first is the worse sign for the rates below."""
    at_once, at_some_time = HazardModel(4e6, 60.0), HazardModel(4e6, 60.0)
    for rate in (4e6, 3.5e6, 3e6):
        at_once.saw(rate, 1.0, True)
        at_some_time.saw(rate, 60.0, True, stopped=False)
    assert at_once.estimate().spread < at_some_time.estimate().spread


def test_more_passes_raise_the_limit_and_losses_lower_it() -> None:
    model = HazardModel(4e6, 60.0)
    limits = [model.estimate().limit_pps]
    for _ in range(3):
        model.saw(3e6, 60.0, False)
        limits.append(model.estimate().limit_pps)
    assert limits == sorted(limits)
    model.saw(3e6, 5.0, True)
    assert model.estimate().limit_pps < limits[-1]


# -- intervals -----------------------------------------------------------------------------------


def test_the_interval_of_few_answers_is_their_range_with_its_own_confidence() -> None:
    found = spread([3.0, 1.0, 2.0])
    assert found is not None
    assert (found.median_pps, found.interval_pps, found.confidence) == (2.0, (1.0, 3.0), 0.75)
    assert spread([]) is None
    one = spread([5.0])
    assert one is not None and (one.confidence, one.relative_std) == (0.0, None)


def test_the_interval_by_counting() -> None:
    """Of all ways in which ten answers can fall around the median."""
    found = spread([float(n) for n in range(10)])
    assert found is not None and found.interval_pps == (1.0, 8.0)
    inside = sum(2 <= sum(way) <= 8 for way in itertools.product((0, 1), repeat=10))
    assert found.confidence == pytest.approx(inside / 2**10) and found.confidence >= 0.95


@given(st.integers(6, 60), st.integers(0, 10**6))
@settings(max_examples=30)
def test_the_interval_covers_as_often_as_it_says(count: int, seed: int) -> None:
    rng = random.Random(seed)
    found = spread([rng.expovariate(1) for _ in range(count)])
    assert found is not None and found.confidence >= 0.95
    assert found.interval_pps[0] <= found.median_pps <= found.interval_pps[1]


# -- values --------------------------------------------------------------------------------------


def test_the_line_rate_of_64_bytes() -> None:
    assert line_rate_pps(10e9, 64) == pytest.approx(14.88e6, rel=1e-4)
    assert line_rate_pps(10e9, 1518) == pytest.approx(812_744, rel=1e-4)
