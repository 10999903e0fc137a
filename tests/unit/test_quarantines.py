"""When a thing in quarantine gets a new chance."""

from __future__ import annotations

from agents.quarantines import FIRST_S, LONGEST_S, Quarantines
from netplugin.backend import Claim

VF = Claim("vf", "0000:03:10.1")
FINE = {VF.key: "available"}


def test_each_is_longer_than_the_last_up_to_a_limit() -> None:
    quarantines, now, term = Quarantines(), 1000.0, FIRST_S
    for _ in range(10):
        assert quarantines.ended([VF], FINE, now) == {}
        assert quarantines.ended([VF], FINE, now + term - 1) == {}
        now += term
        assert quarantines.ended([VF], FINE, now) == {VF: "it is tried again"}
        term = min(2 * term, LONGEST_S)
    assert term == LONGEST_S


def test_what_was_out_of_order_is_tried_when_it_is_in_order() -> None:
    quarantines = Quarantines()
    assert quarantines.ended([VF], {VF.key: "unusable"}, 1000.0) == {}
    assert quarantines.ended([VF], {VF.key: "unusable"}, 1000.0 + 2 * LONGEST_S) == {}
    assert quarantines.ended([VF], FINE, 1001.0 + 2 * LONGEST_S) == {VF: "it is tried again"}


def test_what_has_gone_begins_anew() -> None:
    quarantines, now = Quarantines(), 1000.0
    assert quarantines.ended([VF], FINE, now) == {}
    assert quarantines.ended([VF], FINE, now + FIRST_S)
    assert "gone" in quarantines.ended([VF], {}, now + FIRST_S)[VF]
    now += 2 * FIRST_S
    assert quarantines.ended([VF], FINE, now) == {}
    assert quarantines.ended([VF], FINE, now + FIRST_S), "the first term again"
