"""What requests for PMD threads write, and what is refused with the field that is wrong."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from netplugin.api.errors import Conflict, InvalidRequest
from netplugin.api.pmd_models import PmdRequest, PmdState
from netplugin.pmd.change import PmdChange, change
from tests.unit.core.pmd_states import SHARED, core, queue, state

ONLINE = tuple(range(8))
NONE = dict.fromkeys(("nic", "vm", "br0"))
SETTINGS = {"mask": "0xc"}


def now(*, shared: bool = False, **more: Any) -> PmdState:
    """Two threads on CPUs 2 and 3; ``nic`` has two queues and ``vm`` one."""
    settings = (SHARED if shared else state().settings).model_copy(update=SETTINGS)
    return state(
        core(2, queue("nic", 0, 60), queue("nic", 1, 35)),
        core(3, queue("vm")),
        settings=settings,
        **more,
    )


def asked(request: dict[str, Any], pins: dict[str, str | None] | None = None, **more: Any) -> PmdChange:
    """``count`` comes to the CPUs 6 and 7."""
    known = {**NONE, **(pins or {})}
    return change(PmdRequest.model_validate(request), now(**more), known, ONLINE, (6, 7))


def refused(request: dict[str, Any], field: str, pins: dict[str, str | None] | None = None) -> str:
    with pytest.raises(InvalidRequest) as wrong:
        asked(request, pins)
    assert [error.field for error in wrong.value.errors] == [field]
    return wrong.value.detail


# -- what is written -----------------------------------------------------------------------------


def test_cores_are_a_mask() -> None:
    assert asked({"cpus": "2-5"}) == PmdChange({"pmd-cpu-mask": "0x3c"}, cores=(2, 3, 4, 5))
    assert asked({"count": 2}) == PmdChange({"pmd-cpu-mask": "0xc0"}, cores=(6, 7))


def test_pinnings_are_added_to_those_there_are() -> None:
    found = asked({"affinity": {"nic": {"1": 3}}}, {"nic": "0:3,5:3"})
    assert found == PmdChange({}, {"nic": "0:3,1:3,5:3"}, None, {("nic", 1): 3})
    found = asked({"affinity": {"nic": {"0": None}}}, {"nic": "0:3,5:3"})
    assert found == PmdChange({}, {"nic": "5:3"}), "a queue that is not there now keeps its own"
    assert asked({"affinity": {"nic": {"0": 3}}}, {"nic": "0:3"}).affinity == {}


def test_pinnings_are_taken_away_before_others_are_set() -> None:
    pins: dict[str, str | None] = {"nic": "0:3,1:3", "vm": "0:3", "br0": "not read by ovs"}
    assert asked({"clear_affinity": ["nic"]}, pins).affinity == {"nic": None}
    assert asked({"clear_all_affinity": True}, pins).affinity == {"nic": None, "vm": None}
    found = asked({"clear_affinity": ["nic"], "affinity": {"nic": {"1": 3}}}, pins)
    assert found == PmdChange({}, {"nic": "1:3"}, None, {("nic", 1): 3})


def test_balancing_changes_what_is_given() -> None:
    assert asked({"auto_load_balance": {"enabled": True}}) == PmdChange({"pmd-auto-lb": "true"})
    given = {
        "enabled": False,
        "load_threshold": 70,
        "improvement_threshold": 0,
        "interval_minutes": 2,
    }
    assert asked({"auto_load_balance": given}).other_config == {
        "pmd-auto-lb": "false",
        "pmd-auto-lb-load-threshold": "70",
        "pmd-auto-lb-improvement-threshold": "0",
        "pmd-auto-lb-rebal-interval": "2",
    }


def test_the_proposal_is_set_with_what_it_needs() -> None:
    found = asked({"proposed": True, "auto_load_balance": {"enabled": False}})
    assert found.other_config == {
        "pmd-auto-lb": "false",
        "pmd-rxq-assign": "group",
        "pmd-rxq-isolate": "false",
    }
    assert found.affinity == {"nic": "0:2,1:3"}
    assert found.places == {("nic", 0): 2, ("nic", 1): 3}


def test_nothing_better_changes_nothing() -> None:
    even = state(core(2, queue("nic", 0, 60)), core(3, queue("vm", 0, 60)))
    assert change(PmdRequest(proposed=True), even, NONE, ONLINE) == PmdChange()
    unmeasured = state(core(2, queue("nic", 0, None)))
    with pytest.raises(Conflict, match="not measured"):
        change(PmdRequest(proposed=True), unmeasured, NONE, ONLINE)


# -- what is refused -----------------------------------------------------------------------------


def test_a_pinning_that_cannot_be_is_refused() -> None:
    assert "no such port" in refused({"affinity": {"nik": {"0": 3}}}, "affinity.nik")
    assert "no such port" in refused({"affinity": {"br0": {"0": 3}}}, "affinity.br0")
    assert "2 receive queues now, 0-1" in refused({"affinity": {"nic": {"2": 3}}}, "affinity.nic.2")
    assert "CPU 4 is not among those of PMD threads, 2-3" in refused(
        {"affinity": {"nic": {"1": 4}}}, "affinity.nic.1"
    )
    # in the same call it would be: and then it may
    assert asked({"cpus": "2-4", "affinity": {"nic": {"1": 4}}}).affinity == {"nic": "1:4"}
    assert "no interface" in refused({"clear_affinity": ["vm", "nik"]}, "clear_affinity.1")


def test_pinnings_that_leave_no_thread_for_others_are_refused() -> None:
    """Also where every queue of today is pinned: the next port's would not be polled."""
    for pins, request in (
        ({}, {"affinity": {"nic": {"0": 2, "1": 3}}}),
        ({"vm": "0:3"}, {"affinity": {"nic": {"0": 2, "1": 2}}}),
    ):
        assert "none would poll" in refused(request, "affinity", dict(pins))
    assert "none would poll" in refused({"cpus": "3"}, "cpus", {"nic": "0:3"})
    assert asked({"affinity": {"nic": {"0": 2, "1": 3}}}, shared=True).places
    assert asked({"affinity": {"nic": {"0": 2, "1": 2}}}).places
    both: dict[str, str | None] = {"nic": "0:2,1:3", "vm": "0:3"}
    assert asked({"affinity": {"nic": {"1": None}}}, both).affinity == {"nic": "0:2"}, "a step out of it"


def test_a_cpu_of_the_mask_without_a_thread_counts_for_nothing() -> None:
    """It is off line, and OVS skips it: it does not poll what is not pinned."""
    alone = state(core(2, queue("nic", 0, 60), queue("nic", 1, 35)), settings=now().settings)
    request: dict[str, Any] = {"affinity": {"nic": {"0": 2}}}
    with pytest.raises(InvalidRequest, match="none would poll"):
        change(PmdRequest.model_validate(request), alone, NONE, ONLINE)
    more = change(PmdRequest.model_validate(request | {"cpus": "2-3"}), alone, NONE, ONLINE)
    assert more.affinity == {"nic": "0:2"}, "with a thread for the rest"


def test_cores_that_queues_are_pinned_to_are_not_taken_away() -> None:
    detail = refused({"cpus": "3-4"}, "cpus", {"nic": "1:2"})
    assert "nic queue 1 is pinned to CPU 2" in detail
    refused({"count": 2}, "count", {"nic": "1:2"})
    assert asked({"cpus": "3-4", "clear_affinity": ["nic"]}, {"nic": "1:2"}).cores == (3, 4)
    assert asked({"cpus": "3-4", "affinity": {"nic": {"1": 4}}}, {"nic": "1:2"}).cores == (3, 4)
    assert asked({"cpus": "3-4"}, {"nic": "1:77"}).cores == (3, 4), "that was in vain before"


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"cpus": "1", "count": 1},
        {"siblings": True},
        {"cpus": "1", "siblings": True},
        {"proposed": True, "count": 1},
        {"proposed": True, "affinity": {"nic": {"0": 1}}},
        {"proposed": False},
        {"affinity": {}},
        {"proposed": True, "clear_all_affinity": True},
        {"clear_affinity": []},
        {"affinity": {"a b": {"0": 1}}},
        {"affinity": {"nic": {"-1": 1}}},
        {"affinity": {"nic": {"01": 1}}},
        {"affinity": {"nic": {"0": "1"}}},
        {"affinity": {"nic": {"0": -1}}},
        {"affinity": {"nic": {"0": 8192}}},
        {"auto_load_balance": {}},
        {"auto_load_balance": {"load_threshold": 101}},
        {"auto_load_balance": {"interval_minutes": 0}},
        {"clear_affinity": ["a\n"]},
    ],
)
def test_requests_that_say_nothing_or_too_much(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        PmdRequest.model_validate(wrong)
