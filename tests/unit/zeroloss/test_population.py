"""The figures of the search on the population of simulated devices, next to those of other searches."""

from __future__ import annotations

import random

import pytest
from netplugin_zeroloss.evaluation import algorithms
from netplugin_zeroloss.evaluation.evaluate import AlgorithmRow, evaluate
from netplugin_zeroloss.evaluation.population import CLASSES, device_of
from netplugin_zeroloss.generators.sim import SimGenerator
from netplugin_zeroloss.search.trials import SearchVerdict
from netplugin_zeroloss.values import UnusableInput

from tests.unit.zeroloss.helpers import asked, plan, run_search, traffic

ALL = list(CLASSES)


def rows(devices: list[str], searches: list[str], runs: int) -> dict[tuple[str, str], AlgorithmRow]:
    found = evaluate(plan(), devices, searches, runs, 5, 1)
    return {(row.device, row.algorithm): row for row in found}


def needs_mlrsearch() -> None:
    try:
        algorithms.usable(["mlrsearch"])
    except UnusableInput as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", ALL)
def test_the_population_is_fixed_and_differs_by_number(name: str) -> None:
    def measured(number: int) -> object:
        return SimGenerator(device_of(name, number), random.Random(1)).run(asked(3e6, 1.0))

    assert measured(3) == measured(3)
    capacities = {device_of(name, number).devices[0].capacity_pps for number in range(40)}
    assert len(capacities) == 40
    # It was fixed before anything was tuned: a changed draw makes old figures void.
    first = {
        "class-clean": 1_589_683,
        "class-frequent-stalls": 1_534_026,
        "class-rare-stalls": 4_289_660,
        "class-heavy-stalls": 13_789_887,
        "class-steps": 544_424,
        "class-drift": 3_671_316,
        "class-generator": 8_554_628,
    }
    assert round(device_of(name, 0).devices[0].capacity_pps) == first[name]


@pytest.mark.parametrize("name", ALL)
def test_each_device_has_an_answer_or_a_limited_generator(name: str) -> None:
    for number in range(200):
        family = device_of(name, number)
        assert (family.limit_pps(60) is None) == (family.verdict == "generator_limited")


def test_few_verdicts_are_wrong_and_clean_devices_are_found() -> None:
    found = rows(ALL, ["zeroloss"], 20)
    assert sum(row.wrong_verdicts for row in found.values()) == 0
    error = found["class-clean", "zeroloss"].error_95
    assert error is not None and error <= 0.01


def test_control_trials_are_not_repeated_while_the_bound_falls() -> None:
    """A slow device with heavy stalls: each new bound asked for new controls, without end."""
    name, number = "class-heavy-stalls", 118
    generator = SimGenerator(device_of(name, number), random.Random(f"1/{number}/{name}"))
    found = run_search(plan(line=14_880_952.38), generator)
    assert found.headline.verdict is SearchVerdict.NDR
    assert traffic(found) < 1000


def test_a_device_that_changes_is_found_more_closely_than_by_mlrsearch() -> None:
    """Why the search is no MLRsearch with early abort and our judgement; docs/zeroloss/method.md."""
    needs_mlrsearch()
    for device in ("class-steps", "class-drift"):
        found = rows([device], ["zeroloss", "mlrsearch-judged"], 150)
        ours, theirs = found[device, "zeroloss"].error_95, found[device, "mlrsearch-judged"].error_95
        assert ours is not None and theirs is not None and ours < theirs / 2


def test_without_extensions_it_takes_no_more_than_mlrsearch() -> None:
    needs_mlrsearch()
    for device, runs in (("clean", 2), ("class-clean", 40)):
        found = rows([device], ["strict-rfc9971", "mlrsearch"], runs)
        assert found[device, "strict-rfc9971"].traffic_s <= found[device, "mlrsearch"].traffic_s


def test_our_judgement_shows_mlrsearch_the_limit_of_a_generator() -> None:
    needs_mlrsearch()
    found = rows(["class-generator"], ["mlrsearch", "mlrsearch-judged"], 30)
    assert found["class-generator", "mlrsearch-judged"].wrong_verdicts == 0
    assert found["class-generator", "mlrsearch"].wrong_verdicts > 3


def test_trex_counts_frames_in_flight_as_lost() -> None:
    """So that it finds no rate where nothing may be lost, and a rate too high where loss is rare."""
    found = rows(["clean", "noisy"], ["trex-ndr", "trex-ndr-zero"], 3)
    assert found["clean", "trex-ndr-zero"].verdicts == {"failed": 3}
    clean, noisy = found["clean", "trex-ndr"], found["noisy", "trex-ndr"]
    assert clean.error is not None and abs(clean.error) <= 0.01 and clean.traffic_s == 160
    assert noisy.p_soak is not None and noisy.p_soak > 0.99


@pytest.mark.long
def test_targets_population() -> None:
    """At most two wrong verdicts of 1,000, and 95 % of clean devices within 1 %."""
    found = rows(ALL, ["zeroloss"], 150)
    assert sum(row.wrong_verdicts for row in found.values()) <= 2
    error = found["class-clean", "zeroloss"].error_95
    assert error is not None and error <= 0.01
