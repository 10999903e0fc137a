"""When loss is certain, when frames went out in bursts, and when counters have come to rest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from netplugin_zeroloss.generators.contract import PaceWatch, TrialWatch, at_rest
from netplugin_zeroloss.values import Direction, Measurement

from tests.unit.zeroloss.helpers import asked


def loses(watch: TrialWatch, now: float, sent: int, received: int) -> bool:
    return watch.stops(now, [Direction(sent, received)])


def test_frames_in_flight_are_not_lost() -> None:
    """A device that gets a little too much fills its rings first."""
    watch = TrialWatch(asked(), 1, 2048, 1.0)
    for step in range(2049):
        assert not loses(watch, 0.01 * step, 1000 * step, 999 * step)
    assert not loses(watch, 20.49, 2_049_000, 2_049_000 - 2049)
    assert not loses(watch, 20.5, 2_050_000, 2_050_000 - 2050)
    assert loses(watch, 20.55, 2_055_000, 2_055_000 - 2055)


def test_a_moment_in_which_the_counters_were_apart_is_no_loss() -> None:
    """Read late, one more than in flight; the next time they are together again."""
    watch = TrialWatch(asked(), 1, 10, 1.0)
    assert not loses(watch, 1.0, 100, 50)
    assert not loses(watch, 1.04, 100, 90)
    assert not loses(watch, 1.06, 200, 150)
    assert not loses(watch, 1.10, 200, 150)
    assert loses(watch, 1.12, 200, 150)


def test_a_false_alarm_shows_that_more_may_be_in_flight() -> None:
    watch = TrialWatch(asked(), 1, 2048, 1.0)
    assert not watch.stops(1.0, [Direction(10_000, 5_000)])
    assert watch.stops(1.1, [Direction(20_000, 10_000)])
    assert watch.finish(Measurement(20_000, 20_000, 1.0)).aborted
    assert watch.in_flight == 16_384


def test_loss_raises_no_limit() -> None:
    watch = TrialWatch(asked(), 2, 100, 1.0)
    for now in (1.0, 1.1):
        stopped = watch.stops(now, [Direction(1000, 1000), Direction(1000, 800)])
    assert stopped and watch.finish(Measurement(2000, 1800, 1.0)).aborted
    assert watch.in_flight == 100


def test_a_trial_that_is_late_is_stopped_and_not_for_loss() -> None:
    watch = TrialWatch(asked(duration=0.0), 1, 100, -1.0)
    assert watch.stops(1.0, [Direction(1000, 0)]) and watch.stops(2.0, [Direction(1000, 0)])
    assert not watch.finish(Measurement(1000, 0, 1.0)).aborted


def looked(*counts: tuple[float, int]) -> int:
    pace = PaceWatch(rate_pps=100_000)
    for now, sent in counts:
        pace.look(now, sent)
    return pace.burst_packets


def test_a_steady_pace_has_no_burst() -> None:
    assert looked(*((0.002 * n, 200 * n) for n in range(500))) == 0
    # The first frames come when the program has started, however long that takes.
    assert looked((0.0, 0), (0.5, 0), (0.502, 200), (0.504, 400)) == 0


def test_a_pause_that_is_made_up_for_is_a_burst() -> None:
    assert looked((0.0, 100), (0.01, 1100), (0.02, 1100), (0.022, 2300), (0.024, 2500)) == 1000


def test_being_late_for_good_is_no_burst() -> None:
    assert looked(*((0.002 * n, 150 * n) for n in range(500))) == 0


def counters(*values: int) -> Iterator[int]:
    yield from values


def test_counters_come_to_rest() -> None:
    reads = counters(5, 7, 9, 9)
    assert at_rest(lambda: next(reads), lambda n: n >= 9, 0.0) == (9, True)


def test_even_complete_counters_are_read_twice() -> None:
    """A device that sends frames twice: more may come."""
    reads = counters(9, 10, 10)
    assert at_rest(lambda: next(reads), lambda n: n >= 9, 0.0) == (10, True)


def test_counters_that_never_rest_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("netplugin_zeroloss.generators.contract._DRAIN_S", 0.05)
    reads = iter(range(10**9))
    last, settled = at_rest(lambda: next(reads), lambda _: False, 0.001)
    assert not settled and last > 0
