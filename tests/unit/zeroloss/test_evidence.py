"""Loss attribution: the sum closes, what is not explained is shown, and counts that go back are an error."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from netplugin_zeroloss.generators.contract import Generator, GeneratorInfo
from netplugin_zeroloss.generators.sim import sim_generator
from netplugin_zeroloss.loss.contract import (
    UNEXPLAINED,
    AttributedGenerator,
    AttributionError,
    CounterChanges,
    CounterReading,
    DropCounters,
    closed,
)
from netplugin_zeroloss.search import result
from netplugin_zeroloss.search.search import replay, run_search
from netplugin_zeroloss.search.trials import SearchPlan
from netplugin_zeroloss.values import GeneratorError, Measurement, TrialRequest, headline

ASKED = TrialRequest(1000, 1.0)


class Counted(DropCounters):
    """A place with the counts of each reading given beforehand; the last one stays."""

    def __init__(self, name: str, *readings: CounterReading) -> None:
        self._name, self._readings = name, list(readings)

    @property
    def name(self) -> str:
        return self._name

    def read(self) -> CounterReading:
        return self._readings.pop(0) if len(self._readings) > 1 else self._readings[0]


class FixedGenerator(Generator):
    """Answers each trial with the same measurement."""

    def __init__(self, measured: Measurement) -> None:
        self.measured, self.closed = measured, 0
        self.recalled: list[TrialRequest] = []

    @property
    def info(self) -> GeneratorInfo:
        return GeneratorInfo("told", max_pps=7.0)

    def run(self, request: TrialRequest) -> Measurement:
        return self.measured

    def recall(self, request: TrialRequest) -> None:
        self.recalled.append(request)

    def close(self) -> None:
        self.closed += 1


def _lost(**counts: int) -> CounterReading:
    return CounterReading(counts)


def _attributed(measured: Measurement, *places: DropCounters, settle_s: float = 0.0) -> Measurement:
    with AttributedGenerator(FixedGenerator(measured), places, settle_s) as attributed:
        return attributed.run(ASKED)


def test_what_places_found_and_what_nobody_explains() -> None:
    measured = _attributed(
        Measurement(1000, 900, 1.0),
        Counted("ovs", _lost(vm0=5, vm1=7), _lost(vm0=65, vm1=7)),
        Counted("vnf", _lost(port0=0), _lost(port0=30)),
    )
    assert measured.evidence == {"ovs.vm0": 60, "vnf.port0": 30, UNEXPLAINED: 10}


def test_more_found_than_missing_is_not_hidden() -> None:
    measured = _attributed(Measurement(1000, 990, 1.0), Counted("ovs", _lost(a=0), _lost(a=25)))
    assert measured.evidence == {"ovs.a": 25, UNEXPLAINED: -15}


def test_the_generators_own_losses_are_not_the_devices() -> None:
    own = {"generator.rx": 40.0, "generator.queue": 8.0, "switch": 10.0}
    reported = Measurement(1000, 900, 1.0, rx_errors=40, queue_drops=8, evidence=own)
    assert closed(reported, reported.evidence) == {**own, UNEXPLAINED: 50}


def test_a_count_that_comes_late_is_waited_for() -> None:
    late = Counted("ovs", _lost(a=0), _lost(a=0), _lost(a=0), _lost(a=100))
    measured = _attributed(Measurement(1000, 900, 1.0), late, settle_s=30.0)
    assert measured.evidence == {"ovs.a": 100, UNEXPLAINED: 0}


@pytest.mark.parametrize(
    ("before", "after", "word"),
    [
        (_lost(a=5), _lost(a=4), "a went back by 1"),
        (_lost(a=5), _lost(b=5), "a is not counted any more"),
        (
            CounterReading({}, {"cpu_s": 2.5}),
            CounterReading({}, {"cpu_s": 2.0}),
            "cpu_s went back by 0.5",
        ),
    ],
)
def test_counts_that_went_back(before: CounterReading, after: CounterReading, word: str) -> None:
    place = Counted("ovs", before, after)
    with pytest.raises(AttributionError, match=word):
        place.between(before, after, 1.0)
    # In a search it ends with the reason, and not with a number.
    with pytest.raises(GeneratorError, match=word):
        _attributed(Measurement(1000, 1000, 1.0), place)


def test_a_counter_that_appears_began_at_nothing() -> None:
    assert Counted("ovs", _lost()).between(_lost(), _lost(a=3), 1.0) == CounterChanges({"a": 3})


def test_readings_are_recorded_with_those_of_the_generator() -> None:
    place = Counted("host", CounterReading({}, {"cpu_s": 1.0}), CounterReading({}, {"cpu_s": 3.0}))
    measured = _attributed(Measurement(10, 10, 1.0, readings={"generator.burst": 4.0}), place)
    assert measured.readings == {"generator.burst": 4.0, "host.cpu_s": 2.0}


def test_it_is_the_generator_to_all_others() -> None:
    generator = FixedGenerator(Measurement(1, 1, 1.0))
    with AttributedGenerator(generator, []) as attributed:
        assert attributed.info.max_pps == 7.0
        attributed.recall(ASKED)
    assert (generator.closed, generator.recalled) == (1, [ASKED])
    with pytest.raises(ValueError, match="one name"):
        AttributedGenerator(generator, [Counted("ovs", _lost()), Counted("ovs", _lost())])


class Half(DropCounters):
    """Claims half of what a simulated device loses; the other half nobody explains."""

    def __init__(self, generator: Generator) -> None:
        self.generator, self.lost = generator, 0

    @property
    def name(self) -> str:
        return "ring"

    def read(self) -> CounterReading:
        return _lost(full=self.lost)


class Watched(Generator):
    """Tells a place of what was lost, and leaves it out of the measurement."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self.place = Half(generator)

    @property
    def info(self) -> GeneratorInfo:
        return self._generator.info

    def run(self, request: TrialRequest) -> Measurement:
        measured = self._generator.run(request)
        self.place.lost += (measured.tx_packets - measured.rx_packets) // 2
        kept: Mapping[str, object] = {
            name: getattr(measured, name)
            for name in ("tx_packets", "rx_packets", "elapsed_s", "aborted", "directions")
        }
        return Measurement(**kept)  # type: ignore[arg-type]


def test_a_search_with_attribution_is_replayed_from_its_file() -> None:
    watched = Watched(sim_generator("clean", "1"))
    plan = SearchPlan((headline(),), 14_880_952.0)
    found = run_search(plan, AttributedGenerator(watched, [watched.place], 0.0))
    reported = result.result_of(plan, [found], {})
    places = reported["evidence"]["places_at_upper"]
    assert places["ring.full"] > 0
    assert places["ring.full"] + places[UNEXPLAINED] == reported["evidence"]["lost_at_upper"]
    text = result.dumps(reported)
    again, repeats, _ = result.load(text, "file")
    replayed = [type(found)(replay(again, trials), found.wall_s) for trials in repeats]
    assert result.dumps(result.result_of(again, replayed, {})) == text
