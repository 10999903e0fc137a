"""What follows a search at its rate: latency and a soak; recorded, replayed, resumed and reported."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from netplugin_zeroloss.cli.main import main
from netplugin_zeroloss.generators.contract import Generator, GeneratorInfo, TrialWatch
from netplugin_zeroloss.generators.sim import sim_generator
from netplugin_zeroloss.generators.trex_streams import latency_pps, summary
from netplugin_zeroloss.journal import Cell
from netplugin_zeroloss.report.figures import report_of
from netplugin_zeroloss.report.page import page
from netplugin_zeroloss.report.table import csv_text, markdown
from netplugin_zeroloss.search import result as results
from netplugin_zeroloss.search.follow_up import FollowUp, describe, follow_up
from netplugin_zeroloss.search.recorded import PastTrial
from netplugin_zeroloss.search.search import carry_out, replayed, run_repeats
from netplugin_zeroloss.search.trials import SearchPlan
from netplugin_zeroloss.values import (
    Direction,
    GeneratorError,
    LatencySummary,
    Measurement,
    Progress,
    ReplayError,
    TrialRequest,
)

from tests.unit.zeroloss.helpers import hard_cap, plan
from tests.unit.zeroloss.report_runs import device, record, result, run_of

OPTIONS: Mapping[str, Any] = {"latency_s": 5.0, "soak_s": 600.0, "measures_latency": True}


class RecordingGenerator(Generator):
    """Forwards everything, and keeps what it was asked. ``spoilt``: so many trials are short at first."""

    def __init__(self, spoilt: int = 0, **answers: Any) -> None:
        self.asked: list[TrialRequest] = []
        self._spoilt, self._answers = spoilt, answers

    @property
    def info(self) -> GeneratorInfo:
        return GeneratorInfo("told")

    def run(self, request: TrialRequest) -> Measurement:
        self.asked.append(request)
        short = 2 if len(self.asked) <= self._spoilt else 1
        sent = round(request.packets / short)
        return replace(Measurement(sent, sent, request.duration_s), **self._answers)


def followed(tool: Generator, rate: float | None = 4e6, **options: Any) -> tuple[SearchPlan, FollowUp]:
    whole = plan(**OPTIONS | options)
    return whole, carry_out(follow_up(whole, rate), tool)


def described(tool: Generator, rate: float | None = 4e6, **options: Any) -> dict[str, Any]:
    return describe(*followed(tool, rate, **options))


# -- what is asked -------------------------------------------------------------------------------


def test_latency_at_parts_of_the_rate_and_then_a_soak() -> None:
    tool = RecordingGenerator()
    followed(tool, flows=7, frame_size=128)
    assert [(a.rate_pps, a.duration_s, a.latency, a.readings) for a in tool.asked] == [
        (0.4e6, 5, True, 0),
        (2.0e6, 5, True, 0),
        (3.6e6, 5, True, 0),
        (4e6, 600, False, 60),
    ]
    assert {(a.flows, a.frame_size, a.abort_on_loss) for a in tool.asked} == {(7, 128, False)}


@pytest.mark.parametrize(
    ("options", "rate"), [({"latency_s": 0.0, "soak_s": 0.0}, 4e6), ({}, None)], ids=["not-asked", "no-rate"]
)
def test_nothing_is_sent(options: dict[str, float], rate: float | None) -> None:
    tool = RecordingGenerator()
    found = described(tool, rate, **options)
    assert tool.asked == []
    if options:
        assert found == {"latency": None, "soak": None}
    else:
        assert found["latency"] == {"reason": "there is no rate", "loads": []}
        assert (found["soak"]["verdict"], found["soak"]["reason"]) == (None, "there is no rate")


def test_a_generator_without_latency_is_reported_and_soaks() -> None:
    tool = RecordingGenerator()
    found = described(tool, measures_latency=False)
    assert [asked.purpose for asked in tool.asked] == ["soak"]
    assert found["latency"] == {"reason": "the generator measures no latency", "loads": []}
    assert found["soak"]["verdict"] == "passed"


def test_an_invalid_trial_is_repeated_a_few_times() -> None:
    tool = RecordingGenerator(spoilt=1)
    _, found = followed(tool, soak_s=0.0)
    assert [t.valid for t in found.trials] == [False, True, True, True]
    tool = RecordingGenerator(spoilt=100)
    found_ = described(tool, latency_s=0.0)
    assert len(tool.asked) == 3
    assert found_["soak"]["verdict"] == "invalid"


def test_without_extensions_it_is_judged_as_the_search_is() -> None:
    tool = RecordingGenerator(spoilt=100)
    found = described(tool, latency_s=0.0, strict_rfc9971=True)
    assert len(tool.asked) == 1
    assert (found["soak"]["verdict"], found["soak"]["loss_ratio"]) == ("lossy", 0.5)


# -- what is found -------------------------------------------------------------------------------


def test_the_slower_direction_counts() -> None:
    fast, slow = LatencySummary(10, 1, 5, 6, 7), LatencySummary(20, 2, 3, 9, 99)
    load = described(RecordingGenerator(latencies=(fast, slow)))["latency"]["loads"][0]
    assert [load[n] for n in ("part", "samples", "p50_us", "p90_us", "p99_us", "max_us")] == [
        0.1,
        30,
        2,
        5,
        9,
        99,
    ]
    assert [one["samples"] for one in load["directions"]] == [10, 20]


def test_a_load_without_samples_has_no_percentile() -> None:
    load = described(RecordingGenerator())["latency"]["loads"][0]
    assert (load["samples"], load["p50_us"]) == (0, None)


def test_missing_frames_over_time_end_with_what_was_lost() -> None:
    readings = (Progress(200, 100, 90), Progress(400, 200, 180), Progress(600, 300, 250))
    soak = described(RecordingGenerator(rx_packets=2_399_999_950, progress=readings))["soak"]
    assert (soak["verdict"], soak["lost_packets"]) == ("lossy", 50)
    assert [(r["elapsed_s"], r["missing_packets"]) for r in soak["readings"]] == [
        (200, 10),
        (400, 20),
        (600, 50),
    ]


def test_a_simulated_device_is_slower_the_more_it_has_to_do() -> None:
    loads = described(sim_generator("clean", "1"))["latency"]["loads"]
    medians = [load["p50_us"] for load in loads]
    assert medians == sorted(medians) and medians[0] < medians[-1]
    assert all(load["p50_us"] < load["p90_us"] < load["p99_us"] < load["max_us"] for load in loads)
    assert {load["samples"] for load in loads} == {5000}


def test_a_simulated_soak_loses_as_one_trial_does() -> None:
    """Above the capacity: what the readings say adds up to the whole."""
    soak = described(hard_cap(3e6), latency_s=0.0)["soak"]
    assert soak["verdict"] == "lossy" and len(soak["readings"]) == 60
    missing = [reading["missing_packets"] for reading in soak["readings"]]
    assert missing == sorted(missing) and missing[-1] == soak["lost_packets"]
    assert soak["loss_ratio"] == pytest.approx(0.25, rel=1e-3)


def test_readings_are_evenly_spaced_from_the_first_frame_on() -> None:
    def readings(requested: int) -> list[float]:
        watch = TrialWatch(TrialRequest(1000, 10.0, readings=requested), 1, 2**20, 1e6)
        for tick in range(0, 130):
            watch.stops(100 + tick / 10, [Direction(max(0, 100 * (tick - 20)), 0)])
        return [round(r.elapsed_s, 1) for r in watch.finish(Measurement(1, 0, 1.0)).progress]

    assert readings(5) == [2.0, 4.0, 6.0, 8.0, 10.0]
    assert readings(0) == []


# -- TRex's histograms ---------------------------------------------------------------------------


def test_percentiles_are_the_upper_edges_of_buckets() -> None:
    found = summary({"0": 40, "10": 20, "90": 35, "100": 4, "2000": 1}, 2111.0)
    assert found == LatencySummary(100, 20.0, 100.0, 200.0, 2111.0)
    assert summary({"30": 5}, 33.0) == LatencySummary(5, 33.0, 33.0, 33.0, 33.0)
    assert summary({}, 0.0) is None
    with pytest.raises(GeneratorError, match="histogram"):
        summary({"many": 1}, 1.0)


def test_latency_streams_are_a_small_part_of_the_load() -> None:
    assert latency_pps(TrialRequest(4e6, 1), 2) == 1000
    assert latency_pps(TrialRequest(2000, 1), 2) == 100


# -- recorded, replayed, resumed -----------------------------------------------------------------


def test_a_result_is_replayed_with_what_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "found.json"
    words = ["--latency-duration", "5", "--soak-duration", "600", "--json", str(file), "--quiet"]
    assert main(["search", "--generator", "sim", "--sim-device", "noisy", *words]) == 0
    printed = capsys.readouterr().out
    assert "latency    at 90% of it: p50 " in printed and "soak       10 min at " in printed
    assert main(["replay", str(file)]) == 0
    again = capsys.readouterr().out
    assert [line for line in again.splitlines() if line.startswith(("latency", "soak"))] == [
        line for line in printed.splitlines() if line.startswith(("latency", "soak"))
    ]
    found = json.loads(file.read_text())
    found["follow_up_log"][-1]["rate_pps"] += 1
    file.write_text(json.dumps(found))
    assert main(["replay", str(file)]) == 1
    del found["follow_up_log"][-1]["measured"]
    file.write_text(json.dumps(found))
    assert main(["replay", str(file)]) == 2
    assert "follow_up_log" in capsys.readouterr().err


def test_a_result_of_an_earlier_version_is_replayed() -> None:
    found = result(device())
    for name in ("follow_up_log", "latency", "soak"):
        del found[name]
    for trial in found["trial_log"]:
        for name in ("latency", "readings"):
            del trial[name]
        for name in ("latencies", "progress"):
            del trial["measured"][name]
    for name in ("latency_s", "soak_s", "measures_latency"):
        del found["plan"][name]
    whole, [trials], after, _ = results.load(json.dumps(found), "old")
    assert trials
    assert replayed(follow_up(whole, 4e6), after).trials == ()


def test_a_recording_of_something_else_is_refused() -> None:
    whole, found = followed(RecordingGenerator())
    recorded = [(t.request, t.measured) for t in found.trials]
    assert replayed(follow_up(whole, 4e6), recorded) == found
    with pytest.raises(ReplayError):
        replayed(follow_up(whole, 3e6), recorded)


@pytest.mark.parametrize("left_out", range(5))
def test_a_run_that_was_killed_repeats_no_trial(left_out: int) -> None:
    """At each step of what follows: the trials that were recorded are those of the whole run."""
    whole = plan(**OPTIONS)

    def run(past: list[PastTrial]) -> tuple[list[PastTrial], FollowUp]:
        trials = list(past)
        generator = sim_generator("clean", "1")
        _, after = run_repeats(whole, generator, 2, lambda _, trial: trials.append(trial), past)
        return trials, after

    trials, after = run([])
    assert [t.repeat for t in trials][-4:] == [2, 2, 2, 2]
    again, resumed = run(trials[: len(trials) - left_out])
    assert [(t.repeat, t.request, t.measured) for t in again] == [
        (t.repeat, t.request, t.measured) for t in trials
    ]
    assert resumed == after


# -- reported ------------------------------------------------------------------------------------


def reported(*found: dict[str, Any]) -> Any:
    cells = [Cell("linuxbridge", None, flows=number + 1) for number in range(len(found))]
    return run_of([record(cell, one) for cell, one in zip(cells, found, strict=True)])


def test_the_report_has_latency_and_soak_with_the_rate() -> None:
    with_all = result(device("noisy"), **OPTIONS)
    without = result(device(), latency_s=5.0)
    run = reported(with_all, without, result(device()))
    report = report_of(run)
    text = markdown(report)
    assert "latency at 10 %: p50 20" in text and "(5,000 samples)" in text
    assert "latency: not measured: the generator measures no latency" in text
    assert text.count("soak: 10 min at") == 1
    first, second, third = csv.DictReader(io.StringIO(csv_text(report)))
    for part, load in zip(("10", "50", "90"), with_all["latency"]["loads"], strict=True):
        assert float(first[f"latency_{part}_p99_us"]) == load["p99_us"]
        assert int(first[f"latency_{part}_samples"]) == 5000
    assert int(first["soak_lost_packets"]) == with_all["soak"]["lost_packets"]
    assert (first["soak_s"], first["soak_verdict"]) == ("600.0", with_all["soak"]["verdict"])
    for row in (second, third):
        assert {value for name, value in row.items() if name.startswith(("latency_", "soak"))} == {""}
    html = page(report)
    assert "Missing frames during the soak" in html and "not measured: the generator" in html


def test_a_report_of_an_earlier_run_has_none() -> None:
    found = result(device())
    for name in ("follow_up_log", "latency", "soak"):
        del found[name]
    run = reported(found)
    report = report_of(run)
    assert not re.search("latency at|soak at|>soak<|, soak:", markdown(report) + page(report))
