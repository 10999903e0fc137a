"""Directions, queues and threads: what is dead ends a search in seconds, what limits is named."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from netplugin_zeroloss.cli.main import main
from netplugin_zeroloss.generators.contract import Generator, GeneratorInfo
from netplugin_zeroloss.generators.devices import DeviceSpec
from netplugin_zeroloss.generators.sim import SimFamily, SimGenerator, sim_generator
from netplugin_zeroloss.judge import Cause, judge
from netplugin_zeroloss.report.figures import _named
from netplugin_zeroloss.search import parts, result
from netplugin_zeroloss.search.search import SearchResult, replayed, search
from netplugin_zeroloss.search.trials import Outcome, SearchPlan, SearchVerdict
from netplugin_zeroloss.values import OTHER_GOALS, Direction, Goal, Measurement, TrialRequest, headline

from tests.unit.zeroloss.helpers import asked, plan, run_search, search_family, traffic

CLEAN = DeviceSpec(capacity_pps=2.1e6)
#: What a search may spend until it names a dead direction.
MOST_S = 10.0
#: Seconds after which a loss is seen.
SEEN_S = 0.05
#: Changes what came back in each direction.
Change = Callable[[list[Direction], TrialRequest], Sequence[Direction]]


def unchanged(ways: list[Direction], request: TrialRequest) -> Sequence[Direction]:
    return ways


class TwoWays(Generator):
    """A device of 2.1 Mpps in each direction, of which a test changes what comes back."""

    def __init__(
        self,
        change: Change = unchanged,
        out_s: tuple[float, float] = (0, 0),
        *,
        totals: bool = False,
        can_abort: bool = True,
        **info: float,
    ) -> None:
        """``out_s``: seconds of traffic between which direction 1 is dead."""
        self._device = SimGenerator(SimFamily("two", (CLEAN, CLEAN)), random.Random(0), can_abort)
        self._change, self._out_s, self._totals, self._info = change, out_s, totals, info
        self._seconds = 0.0

    @property
    def info(self) -> GeneratorInfo:
        return replace(self._device.info, **self._info)  # type: ignore[arg-type]

    def run(self, request: TrialRequest) -> Measurement:
        whole = self._device.run(request)
        begin, takes_s = self._seconds, whole.elapsed_s
        out = [max(at, begin) for at in self._out_s]
        ways = self._change(list(whole.directions), request)
        aborted = whole.aborted
        if request.abort_on_loss and self.info.can_abort:
            loses = out[0] if out[0] < min(out[1], begin + takes_s) else math.inf
            if any(way.rx_packets < way.tx_packets for way in ways):
                loses = begin
            if loses + SEEN_S < begin + takes_s:
                aborted, takes_s = True, loses + SEEN_S - begin
        kept = takes_s / whole.elapsed_s
        alive = 1 - max(0.0, min(out[1], begin + takes_s) - out[0]) / takes_s
        ways = [Direction(int(way.tx_packets * kept), int(way.rx_packets * kept)) for way in ways]
        ways[1] = replace(ways[1], rx_packets=int(ways[1].rx_packets * alive))
        self._seconds += takes_s
        return Measurement(
            sum(way.tx_packets for way in ways),
            sum(way.rx_packets for way in ways),
            takes_s,
            aborted,
            directions=() if self._totals else tuple(ways),
        )


def searched(generator: Generator, the_plan: SearchPlan | None = None) -> SearchResult:
    info = generator.info
    the_plan = the_plan or plan(can_abort=info.can_abort, min_trial_s=info.min_trial_s)
    found = run_search(the_plan, generator)
    assert replayed(search(the_plan), [(t.request, t.measured) for t in found.trials]) == found
    return found


def back(count: Callable[[Direction, float], float]) -> Change:
    """Of direction 1 so many frames come back, of what is sent within the seconds of a trial."""

    def change(ways: list[Direction], request: TrialRequest) -> Sequence[Direction]:
        came = min(ways[1].tx_packets, int(count(ways[1], request.duration_s)))
        return [ways[0], replace(ways[1], rx_packets=came)]

    return change


def nothing(ways: list[Direction], request: TrialRequest) -> Sequence[Direction]:
    return [replace(way, rx_packets=0) for way in ways]


DEAD = back(lambda way, seconds: 0)


def is_named(outcome: Outcome, *directions: int) -> None:
    assert outcome.verdict is SearchVerdict.DEAD_DIRECTION, outcome.reason
    assert outcome.dead == directions and outcome.answer_pps is None and outcome.lower_pps == 0
    assert f"direction {' and '.join(map(str, directions))} is dead" in outcome.reason


# -- dead directions -----------------------------------------------------------------------------


@pytest.mark.parametrize("final", [2.0, 60.0, 300.0])
@pytest.mark.parametrize("can_abort", [True, False])
def test_a_dead_direction_is_named_within_seconds(final: float, can_abort: bool) -> None:
    the_plan = SearchPlan((headline(final),), 14.88e6, can_abort=can_abort)
    found = searched(TwoWays(DEAD, can_abort=can_abort), the_plan)
    is_named(found.headline, 1)
    assert traffic(found) <= MOST_S and len(found.trials) <= 7
    assert "0 of 1000 in direction 1" in found.headline.reason


def test_the_dead_direction_of_a_slow_line() -> None:
    found = searched(TwoWays(DEAD), plan(line=150.0))
    is_named(found.headline, 1)
    assert traffic(found) <= MOST_S


def test_all_directions_may_be_dead() -> None:
    is_named(searched(TwoWays(nothing)).headline, 0, 1)


def test_the_answer_the_json_and_the_exit_status_name_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    status = main(["search", "--generator", "sim", "--sim-device", "dead-direction", "--json", str(file)])
    found = json.loads(file.read_text())
    assert (status, found["verdict"], found["zero_loss_pps"]) == (1, "dead_direction", None)
    assert found["evidence"]["dead_directions"] == [1] and found["traffic_s"] <= MOST_S
    assert found["evidence"]["invalid_causes"] == {"control": 5}
    assert "direction 1 is dead" in capsys.readouterr().out
    assert main(["replay", str(file)]) == 0


def test_strict_rfc9971_runs_no_controls() -> None:
    found = searched(TwoWays(DEAD), SearchPlan((headline(),), 14.88e6, strict_rfc9971=True))
    assert found.headline.verdict is SearchVerdict.FAILED and all(t.valid for t in found.trials)


def test_every_goal_has_the_verdict() -> None:
    found = searched(TwoWays(DEAD), SearchPlan((headline(), OTHER_GOALS["csit-ndr"](0.005)), 14.88e6))
    assert [o.verdict for o in found.outcomes] == [SearchVerdict.DEAD_DIRECTION] * 2
    assert traffic(found) <= MOST_S


def test_a_goal_that_allows_loss_sees_it_too() -> None:
    found = searched(TwoWays(DEAD), SearchPlan((Goal("some", max_loss_ratio=0.4),), 14.88e6))
    is_named(found.headline, 1)
    assert traffic(found) <= MOST_S


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("frames of others: TRex counts each that arrives at a port", back(lambda way, seconds: 4 * seconds)),
        (
            "a latency stream alone is alive",
            back(lambda way, seconds: min(1000 * seconds, way.tx_packets // 10)),
        ),
        (
            "the frames come back where they were sent",
            lambda ways, request: [
                Direction(ways[0].tx_packets, ways[0].rx_packets + ways[1].rx_packets),
                Direction(ways[1].tx_packets, 0),
            ],
        ),
    ],
)
def test_what_else_arrives_does_not_hide_it(what: str, change: Change) -> None:
    found = searched(TwoWays(change))
    is_named(found.headline, 1)
    assert traffic(found) <= MOST_S, what


def test_a_generator_whose_trials_are_long_needs_two() -> None:
    """As a stateful batch of TRex, which lasts at least 10 s."""
    found = searched(TwoWays(DEAD, min_trial_s=10.0, can_abort=False))
    is_named(found.headline, 1)
    assert traffic(found) <= 20 and len(found.trials) == 2


@pytest.mark.parametrize("can_abort", [True, False])
@pytest.mark.parametrize("dies_s", [0.5, 15.0, 40.0])
def test_a_direction_that_dies_during_a_search(dies_s: float, can_abort: bool) -> None:
    found = searched(TwoWays(out_s=(dies_s, math.inf), can_abort=can_abort))
    is_named(found.headline, 1)
    ends_s = dies_s if can_abort else 61.0
    assert traffic(found) <= ends_s + MOST_S


# -- what is not dead ----------------------------------------------------------------------------


@pytest.mark.parametrize("up_s", [0.1, 0.4, 0.9, 2.0, 4.0])
@pytest.mark.parametrize("can_abort", [True, False])
def test_a_direction_that_is_slow_to_come_up(up_s: float, can_abort: bool) -> None:
    """Its addresses are learned, or its port has only just come up: nothing of that counts."""
    found = searched(TwoWays(out_s=(0, up_s), can_abort=can_abort))
    assert found.headline.answer_pps == pytest.approx(4.2e6, rel=0.005), found.headline.reason
    assert traffic(found) <= 75 if can_abort else 300
    controls = [t for t in found.trials if t.judgement.cause is Cause.CONTROL]
    assert controls or up_s < 0.4


def test_a_one_way_profile_is_meant_to_be_one_way() -> None:
    """All frames go in direction 0; nothing is sent in the other one."""

    def one_way(ways: list[Direction], request: TrialRequest) -> Sequence[Direction]:
        both = (sum(w.tx_packets for w in ways), sum(w.rx_packets for w in ways))
        return [Direction(*both), Direction(0, 0)]

    found = searched(TwoWays(one_way))
    assert found.headline.verdict is SearchVerdict.NDR and len(found.trials) == 4


def test_a_direction_that_overload_starves_is_alive() -> None:
    """Above 2 Mpps, the device is busy with the other direction alone."""

    def starved(ways: list[Direction], request: TrialRequest) -> Sequence[Direction]:
        return ways if request.rate_pps <= 2e6 else [ways[0], Direction(ways[1].tx_packets, 0)]

    found = searched(TwoWays(starved))
    assert found.headline.answer_pps == pytest.approx(2e6, rel=0.0051), found.headline.reason
    assert traffic(found) <= 140, "two trials of a minute are those of any such search"


def test_what_the_generators_own_receiver_drops_is_not_dead() -> None:
    class Deaf(TwoWays):
        def run(self, request: TrialRequest) -> Measurement:
            found = super().run(request)
            return replace(found, rx_errors=found.directions[1].tx_packets)

    found = run_search(plan(), Deaf(DEAD))
    assert found.headline.verdict is SearchVerdict.GENERATOR_LIMITED


def test_a_port_that_sends_nothing_is_the_generators() -> None:
    """TRex does not send on a port without a link; that is named, and is no result of the device."""
    found = searched(TwoWays(lambda ways, request: [ways[0], Direction(0, 0)]))
    assert found.headline.verdict is SearchVerdict.GENERATOR_LIMITED
    assert "direction 1 sent none" in found.headline.reason


@pytest.mark.parametrize("name", ["noisy", "glitch-random", "warm-up", "wire-speed", "one-direction"])
def test_others_see_no_control(name: str) -> None:
    found = search_family(name, "controls")
    assert not any(t.judgement.cause is Cause.CONTROL for t in found.trials)


# -- a share that is lost at any load --------------------------------------------------------------


def test_a_generator_that_counts_only_totals_cannot_name_it() -> None:
    found = searched(TwoWays(DEAD, totals=True))
    assert found.headline.verdict is SearchVerdict.FLOOR
    assert found.headline.reason.endswith("the generator counts no directions: is one dead?")
    assert found.headline.floor is not None and found.headline.floor.loss_ratio == pytest.approx(0.5)
    assert traffic(found) <= MOST_S


def test_a_device_that_forwards_nothing_by_totals() -> None:
    found = searched(TwoWays(nothing, totals=True))
    assert found.headline.verdict is SearchVerdict.FAILED and "next to nothing" in found.headline.reason
    assert traffic(found) <= MOST_S


def test_one_cable_of_a_bond_is_out() -> None:
    """A third of the flows of one direction is lost, at any load."""
    found = searched(TwoWays(back(lambda way, seconds: way.rx_packets * 2 // 3)))
    assert found.headline.verdict is SearchVerdict.FLOOR
    assert "in direction 1" in found.headline.reason and traffic(found) <= MOST_S


def test_a_bond_that_comes_up_late_is_no_floor() -> None:
    """Half of the flows are lost for 3 s, of a generator that counts only totals."""
    found = searched(TwoWays(out_s=(0, 3), totals=True))
    assert found.headline.answer_pps == pytest.approx(4.2e6, rel=0.005), found.headline.reason


# -- what limits -----------------------------------------------------------------------------------


def reported(found: SearchResult, the_plan: SearchPlan) -> result.ResultEntry:
    return result.result_of(the_plan, [found], {})


def test_the_direction_that_limits_is_named() -> None:
    entry = reported(search_family("one-direction", 1), plan())
    assert entry["reason"].endswith("; direction 1 limits")
    assert list(entry["evidence"]["limiting_directions"]) == [1]


class OneHit(Generator):
    """Two directions of a noisy device; all that is lost is of direction 1."""

    def __init__(self, seed: int) -> None:
        self._device = sim_generator("noisy", str(seed))

    @property
    def info(self) -> GeneratorInfo:
        return self._device.info

    def run(self, request: TrialRequest) -> Measurement:
        found = self._device.run(request)
        half, lost = found.tx_packets // 2, found.tx_packets - found.rx_packets
        ways = (
            Direction(found.tx_packets - half, found.tx_packets - half),
            Direction(half, max(0, half - lost)),
        )
        received = sum(way.rx_packets for way in ways)
        return replace(found, rx_packets=received, directions=ways)


def test_what_chance_hits_does_not_limit() -> None:
    """A stall of a CPU that both directions share hits one or the other, late in a trial."""
    for seed in range(3):
        found = run_search(plan(), OneHit(seed))
        assert found.headline.verdict is SearchVerdict.NDR
        assert sum(reported(found, plan())["evidence"]["lost_by_direction"]) > 0
        assert not reported(found, plan())["evidence"]["limiting_directions"]


@pytest.mark.parametrize(
    ("lost", "limits"),
    [
        ([], ()),
        ([0, 0], ()),
        ([0, 9], (1,)),
        ([7, 9], ()),
        ([900, 3], (0,)),
        ([800, 300], ()),
        ([0, 50, 0, 40], (1, 3)),
        ([5], ()),
    ],
)
def test_a_path_limits_if_the_others_lose_next_to_nothing(lost: list[int], limits: tuple[int, ...]) -> None:
    assert parts.limiting(lost) == limits


@pytest.mark.parametrize(
    ("readings", "full"),
    [
        ({"ovs.pmd1.busy_share": 0.99, "ovs.pmd3.busy_share": 0.2}, ["ovs.pmd1"]),
        ({"ovs.pmd1.busy_share": 0.99, "ovs.pmd3.busy_share": 0.97}, []),
        ({"ovs.pmd1.busy_share": 0.99, "ovs.pmd_busy_share": 0.1}, []),
        ({"vnf.vpp_wk_0.vectors_per_call": 250.0, "vnf.vpp_wk_1.vectors_per_call": 0.0}, ["vnf.vpp_wk_0"]),
        ({"vnf.vectors_per_call": 250.0}, []),
        ({"ovs.nic0.rxq0.packets": 0.0, "ovs.nic0.rxq1.packets": 970.0}, ["ovs.nic0.rxq1"]),
        ({"vnf.port0.rxq0.packets": 0.0, "vnf.port0.rxq1.packets": 0.0}, []),
        ({"vnf.port0.rxq0.packets": 970.0, "vnf.port1.rxq0.packets": 0.0}, []),
        ({"host.cpu0.softirq_share": 0.96, "host.cpu3.softirq_share": 0.1}, ["host.cpu0"]),
    ],
)
def test_a_part_is_full_while_others_of_its_kind_idle(readings: dict[str, float], full: list[str]) -> None:
    assert list(parts.full(readings)) == full


def test_a_full_thread_is_in_the_answer() -> None:
    class Loaded(TwoWays):
        def run(self, request: TrialRequest) -> Measurement:
            loads = {"ovs.pmd1.busy_share": 0.98, "ovs.pmd2.busy_share": 0.03}
            return replace(super().run(request), readings=loads)

    found = run_search(plan(), Loaded())
    entry = reported(found, plan())
    assert entry["evidence"]["full"] == {"ovs.pmd1": 0.98}
    assert entry["reason"] == "bracketed; ovs.pmd1 is full (98%) while others idle"


def test_a_report_has_the_names_of_the_paths() -> None:
    evidence: Any = {"limiting_directions": [1], "dead_directions": [], "lost_by_direction": [0, 9]}
    assert _named(evidence, ["a", "b"]) == " (path 1 (b to a))"
    assert _named(evidence, []) == _named(evidence | {"limiting_directions": []}, ["a", "b"]) == ""


def test_a_direction_that_cannot_be_counted_is_not_judged() -> None:
    for odd in (Direction(1000, -5), Direction(1000, 1001), Direction(0, 0), Direction(10, 0)):
        measured = Measurement(2000, 1000, 1.0, directions=(Direction(1000, 1000), odd))
        assert not parts.silent(measured) and not parts.dead(measured)
    nothing = Measurement(2000, 1000, math.nan, directions=(Direction(1000, 1000), Direction(1000, 0)))
    assert not parts.silent(nothing)


def test_a_direction_that_sends_nothing_is_named_in_the_reason() -> None:
    half = Measurement(
        30_000_000, 30_000_000, 60.0, directions=(Direction(30_000_000, 30_000_000), Direction(0, 0))
    )
    assert judge(asked(), half, 0.005).reason.endswith("less than asked; direction 1 sent none")
