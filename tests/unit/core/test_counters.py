"""From what a host counts to counters with a beginning: resets, wraps, and what is not known now."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netplugin.api.counter_models import Place, Traffic
from netplugin.counters import Source, Track, follow

PACKETS, DROPS = Traffic.PACKETS_FROM_VM, Place.POLICER_TO_VM
AGED = Source({PACKETS: 100}, "7", age_s=50.0)


def test_counters_began_when_the_host_shows_it_or_when_they_were_read_first() -> None:
    assert follow(None, AGED, 1000.0).since == 950.0
    assert follow(None, replace(AGED, age_s=None), 1000.0).since == 1000.0


def test_a_later_reading_of_the_same_counters_keeps_their_beginning() -> None:
    track = follow(follow(None, AGED, 1000.0), Source({PACKETS: 130}, "7", 60.4), 1010.0)
    assert (track.since, track.totals()) == (950.0, {PACKETS: 130})


@pytest.mark.parametrize(
    ("again", "since"),
    [
        (Source({PACKETS: 500}, "8", 3.0), 1007.0),  # another object, with more already
        (Source({PACKETS: 500}, "7", 3.0), 1007.0),  # vswitchd was restarted
        (Source({PACKETS: 5}, "7", 60.0), 1010.0),  # the device has begun again, and does not say when
        (Source({PACKETS: 5}, "7"), 1010.0),
    ],
)
def test_counters_that_begin_again_have_another_beginning(again: Source, since: float) -> None:
    track = follow(follow(None, AGED, 1000.0), again, 1010.0)
    assert (track.since, track.totals()) == (since, dict(again.values))


def test_a_counter_of_32_bits_goes_on_when_it_wraps() -> None:
    high, low = (Source({DROPS: n}, bits=32) for n in ((1 << 32) - 10, 5))
    track = follow(follow(None, high, 1.0), low, 2.0)
    assert (track.since, track.totals()) == (1.0, {DROPS: (1 << 32) + 5})
    again = follow(follow(track, high, 3.0), low, 4.0)
    assert (again.since, again.totals()) == (1.0, {DROPS: (2 << 32) + 5})
    fell = follow(follow(None, Source({DROPS: 1000}, bits=32), 1.0), low, 2.0)
    assert (fell.since, fell.totals()) == (2.0, {DROPS: 5}), "from there it cannot have wrapped"


def test_what_is_not_known_now_stays() -> None:
    track = follow(follow(None, AGED, 1000.0), Source({}, "7", 60.0), 1010.0)
    assert (track.since, track.totals()) == (950.0, {PACKETS: 100})


def test_a_difference_that_falls_is_no_beginning() -> None:
    derived = frozenset({DROPS})
    before = follow(None, Source({PACKETS: 10, DROPS: 8}, derived=derived), 1.0)
    after = follow(before, Source({PACKETS: 12, DROPS: 7}, derived=derived), 2.0)
    assert (after.since, after.totals()) == (1.0, {PACKETS: 12, DROPS: 8})


@given(st.lists(st.integers(0, (1 << 31) - 1), max_size=30))
def test_a_counter_that_wraps_counts_all(steps: list[int]) -> None:
    track: Track | None = None
    total = 0
    for step in steps:
        total += step
        track = follow(track, Source({DROPS: total % (1 << 32)}, bits=32), float(total))
    assert track is None or track.totals()[DROPS] == total
