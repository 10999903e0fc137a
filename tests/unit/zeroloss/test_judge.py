"""The judgement of a trial: invalid before lossy, in every way that a generator can be wrong."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from netplugin_zeroloss.judge import Cause, Verdict, judge
from netplugin_zeroloss.values import Direction, Measurement

from tests.unit.zeroloss.helpers import asked, measured

PRECISION = 0.005
N = 60_000_000  # what is asked: 1 Mpps for 60 s

INVALID = [
    ("sent 0.06 % less", measured(int(N * 0.9994)), Cause.SHORT),
    ("sent less and lost", measured(int(N * 0.9994), lost=5), Cause.SHORT),
    ("says that it is short", measured(tx_shortfall=40_000), Cause.SHORT),
    ("sent nothing", measured(0), Cause.SHORT),
    ("0.06 % late", measured(elapsed=60.036), Cause.LATE),
    ("late and lost", measured(elapsed=94.0, lost=9), Cause.LATE),
    ("stretched, with a coarse clock", measured(elapsed=94.0, elapsed_uncertainty_s=2.5), Cause.LATE),
    ("in half the time", measured(elapsed=30.0), Cause.FAST),
    ("sent 1 % more", measured(int(N * 1.01)), Cause.FAST),
    ("own receiver dropped", measured(lost=643, rx_errors=643), Cause.RECEIVER),
    ("own receiver dropped one", measured(lost=900, rx_errors=1), Cause.RECEIVER),
    ("own queue dropped", measured(queue_drops=7), Cause.QUEUE),
    ("own queue was full", measured(queue_full=7), Cause.QUEUE),
    ("received more than sent", measured(lost=-1), Cause.COUNTERS),
    ("a negative counter", measured(lost=N + 5), Cause.COUNTERS),
    ("a 32-bit counter wrapped", Measurement(N, N - 2**32, 60.0), Cause.COUNTERS),
    ("negative receive errors", measured(rx_errors=-3), Cause.COUNTERS),
    ("no elapsed time", measured(elapsed=math.nan), Cause.COUNTERS),
    ("negative elapsed time", measured(elapsed=-1.0), Cause.COUNTERS),
    ("counters still moved", measured(lost=3, settled=False), Cause.UNSETTLED),
    ("may be in flight", measured(lost=800, in_flight_packets=1024), Cause.UNSETTLED),
    ("stopped for nothing", measured(100, elapsed=1e-4, aborted=True), Cause.CONTRADICTION),
    ("stopped before it sent", measured(0, elapsed=0.0, aborted=True), Cause.NOTHING_SENT),
    (
        "stopped, and its receiver dropped",
        measured(1000, lost=10, elapsed=1e-3, aborted=True, rx_errors=10),
        Cause.RECEIVER,
    ),
    (
        "one direction got what the other lost",
        Measurement(N, N, 60.0, directions=(Direction(N // 2, N // 2 - 9), Direction(N // 2, N // 2 + 9))),
        Cause.COUNTERS,
    ),
    (
        "directions that do not add up",
        Measurement(N, N, 60.0, directions=(Direction(5, 5), Direction(6, 6))),
        Cause.COUNTERS,
    ),
]

VALID = [
    ("all came back", measured(), Verdict.PASSED),
    ("0.04 % less was sent", measured(int(N * 0.9996)), Verdict.PASSED),
    ("0.04 % late", measured(elapsed=60.024), Verdict.PASSED),
    ("late by what the clock cannot tell", measured(elapsed=60.4, elapsed_uncertainty_s=0.5), Verdict.PASSED),
    ("flows that were finished", measured(N + 50), Verdict.PASSED),
    ("one frame is missing", measured(lost=1), Verdict.LOSSY),
    ("more than can be in flight", measured(lost=1025, in_flight_packets=1024), Verdict.LOSSY),
    ("stopped with loss", measured(5000, lost=3, elapsed=5e-3, aborted=True), Verdict.LOSSY),
    (
        "stopped, and had sent less than its time",
        measured(4000, lost=3, elapsed=5e-3, aborted=True),
        Verdict.LOSSY,
    ),
    (
        "one direction lost",
        Measurement(N, N - 4, 60.0, directions=(Direction(N // 2, N // 2), Direction(N // 2, N // 2 - 4))),
        Verdict.LOSSY,
    ),
]


@pytest.mark.parametrize(("what", "measurement", "cause"), INVALID, ids=[row[0] for row in INVALID])
def test_a_trial_that_says_nothing_of_the_device(what: str, measurement: Measurement, cause: Cause) -> None:
    found = judge(asked(), measurement, PRECISION)
    assert (found.verdict, found.cause) == (Verdict.INVALID, cause), found.reason
    assert found.reason


@pytest.mark.parametrize(("what", "measurement", "verdict"), VALID, ids=[row[0] for row in VALID])
def test_a_trial_that_says_something(what: str, measurement: Measurement, verdict: Verdict) -> None:
    found = judge(asked(), measurement, PRECISION)
    assert (found.verdict, found.cause) == (verdict, None), found.reason
    assert found.reason


def test_loss_is_that_of_the_worst_direction() -> None:
    """1 % of one direction, 0.05 % of the whole: a ratio of 0.1 % must not pass."""
    measurement = Measurement(
        N, N - 30_000, 60.0, directions=(Direction(57_000_000, 57_000_000), Direction(3_000_000, 2_970_000))
    )
    found = judge(asked(), measurement, PRECISION, max_loss_ratio=0.001)
    assert found.lossy and found.loss_ratio == pytest.approx(0.01)
    assert "direction 1" in found.reason


def test_loss_within_the_ratio_passes_and_is_reported() -> None:
    found = judge(asked(), measured(lost=3000), PRECISION, max_loss_ratio=1e-4)
    assert found.verdict is Verdict.PASSED and found.lost_packets == 3000


def test_a_few_packets_are_not_a_share() -> None:
    """10 pps for 0.45 s is 4 or 5 frames."""
    for sent in (4, 5):
        assert judge(asked(10, 0.45), measured(sent, elapsed=0.45), PRECISION).valid
    assert not judge(asked(10, 0.45), measured(3, elapsed=0.45), PRECISION).valid


@given(
    tx=st.integers(-(2**33), 2**33),
    rx=st.integers(-(2**33), 2**33),
    elapsed=st.floats(0, 200),
    aborted=st.booleans(),
    rx_errors=st.integers(-2, 5),
    queue_drops=st.integers(-2, 5),
)
def test_what_is_lossy_is_beyond_doubt(
    tx: int, rx: int, elapsed: float, aborted: bool, rx_errors: int, queue_drops: int
) -> None:
    measurement = Measurement(tx, rx, elapsed, aborted, rx_errors=rx_errors, queue_drops=queue_drops)
    found = judge(asked(), measurement, PRECISION)
    if found.valid:
        assert 0 <= rx <= tx and rx_errors == queue_drops == 0
        assert found.lossy == (rx < tx)
        assert aborted or elapsed <= 60 * 1.0005 + 1e-6
        assert aborted or tx >= N * 0.9995 - 1
