"""Two runs side by side: what the samples show is reported, and nothing else."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from netplugin.api.errors import BackendUnavailable, HostError, InvalidRequest, NotFound
from netplugin.tuning.verifying import plot, result
from netplugin.tuning.verifying.comparison import (
    FigureRow,
    FigureVerdict,
    MeasurementComparison,
    compare,
)
from netplugin.tuning.verifying.result import Histogram, LatencyRound
from netplugin.tuning.verifying.show import comparison_json, comparison_text, run_json, run_text
from tests.unit.tuning.runs import FAST, SLOW, latency, run, throughput


def rows(found: MeasurementComparison) -> dict[str, FigureRow]:
    return {row.before.name: row for row in found.rows}


def test_a_difference_that_the_samples_show() -> None:
    found = compare(run(throughput=throughput(SLOW)), run(throughput=throughput(FAST)))
    [row] = found.rows
    assert row.finding is FigureVerdict.BETTER
    assert (row.before.whole, row.after.whole) == (4.685e6, 5.205e6)
    assert row.p == pytest.approx(2 / 924)
    assert row.ratios[1] > 1.09 and row.ratios[2] < 1.14
    line = next(line for line in comparison_text(found).splitlines() if "(Mpps)" in line)
    assert line.split()[2:6] == ["4.685", "5.205", "6/6", "x1.11"] and line.endswith("0.0022  better")
    assert "Better: throughput." in comparison_text(found)


def test_the_other_way_it_is_worse() -> None:
    found = compare(run(throughput=throughput(FAST)), run(throughput=throughput(SLOW)))
    assert found.rows[0].finding is FigureVerdict.WORSE


def test_less_latency_is_better() -> None:
    before = run(latency=latency([1475, 900, 1100, 1300, 3000, 1200]))
    after = run(latency=latency([12, 30, 20, 25, 17, 19]))
    reported = rows(compare(before, after))
    assert reported["latency maximum"].finding is FigureVerdict.BETTER
    assert reported["latency average"].finding is FigureVerdict.BETTER
    assert reported["latency P99"].finding is FigureVerdict.SAME  # the same in all rounds
    assert reported["latency P99"].p == 1
    assert reported["latency P99.9"].before.whole == 14
    assert reported["latency maximum"].before.whole == 3000
    worse = rows(compare(after, before))
    assert worse["latency maximum"].finding is FigureVerdict.WORSE


def test_without_a_difference_none_is_claimed() -> None:
    """At most one in twenty of such pairs may have a claim, all figures together."""
    chance = random.Random(7)
    claims = 0
    for _ in range(400):
        pair = [
            run(
                throughput=throughput([chance.gauss(5e6, 4e5) for _ in range(6)]),
                latency=latency([chance.randrange(20, 400) for _ in range(6)]),
            )
            for _ in range(2)
        ]
        found = compare(*pair)
        claims += bool(found.of(FigureVerdict.BETTER) or found.of(FigureVerdict.WORSE))
    assert claims <= 20


def test_too_few_rounds_claim_nothing() -> None:
    found = compare(run(throughput=throughput(SLOW[:3])), run(throughput=throughput(FAST[:3])))
    assert found.rows[0].finding is FigureVerdict.UNDECIDED
    assert found.rows[0].p is None
    assert "cannot be decided: too few rounds" in comparison_text(found)


def test_one_sample_that_is_out_of_line_is_no_difference() -> None:
    mixed = (*FAST[:4], 4.0e6, 4.1e6)
    found = compare(run(throughput=throughput(SLOW)), run(throughput=throughput(mixed)))
    assert found.rows[0].finding is FigureVerdict.SAME


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        (throughput(SLOW), throughput(FAST, frame_size=512), "frame size is 64 in one and 512 in"),
        (latency([9] * 6), latency([9] * 6, round_s=100), "length of a round (s) is 10 in one"),
        (latency([9] * 6), latency([9] * 6, cpus="2-3"), "number of CPUs is 1 in one and 2 in"),
    ],
)
def test_figures_of_different_cells_are_not_compared(before: Any, after: Any, why: str) -> None:
    kind = type(before).__name__.lower()
    found = compare(run(**{kind: before}), run(**{kind: after}))
    assert {row.finding for row in found.rows} == {FigureVerdict.UNDECIDED}
    assert why in comparison_text(found)


def test_a_round_that_cannot_say_does_not_drop_out() -> None:
    few = Histogram(counts={9: 50}, min_us=9, average_us=9, max_us=9)
    short = latency([9] * 8)
    rounds = (*short.rounds[:7], LatencyRound(cpus={2: few}))
    short = short.model_copy(update={"rounds": rounds})
    reported = rows(compare(run(latency=short), run(latency=latency([9] * 8))))
    assert reported["latency P99"].why == "too few samples in a round"
    assert reported["latency maximum"].p == 1


def test_other_cpus_of_the_same_number_are() -> None:
    slow, fast = throughput(SLOW), throughput(FAST, host_cpu=6, hugepage_node=None)
    assert compare(run(throughput=slow), run(throughput=fast)).rows[0].p is not None


def test_what_only_one_run_has_is_not_compared() -> None:
    found = compare(run(throughput=throughput(SLOW)), run(latency=latency([9] * 6)))
    assert {row.finding for row in found.rows} == {FigureVerdict.UNDECIDED}
    assert "Cannot be decided: latency average" in comparison_text(found)


def test_what_differs_in_the_machine_is_reported() -> None:
    before = run(conditions={"isolated CPUs": "none", "kernel": "6.1", "turbo": "on"})
    after = run(conditions={"isolated CPUs": "2-5", "kernel": "6.1", "KSM": "0"})
    found = compare(before, after)
    assert [(d.name, d.before, d.after) for d in found.differences] == [
        ("isolated CPUs", "none", "2-5"),
        ("turbo", "on", None),
        ("KSM", None, "0"),
    ]
    text = comparison_text(found)
    assert "  isolated CPUs: none -> 2-5\n  turbo: on -> not set\n" in text
    assert "Nothing was measured in either run." in text


def test_for_programs() -> None:
    before = run(throughput=throughput((0.0, *SLOW[1:])), latency=latency([900] * 6))
    after = run(throughput=throughput(FAST), latency=latency([12] * 6))
    shown = json.loads(comparison_json(compare(before, after)))
    figures = {figure["name"]: figure for figure in shown["figures"]}
    assert figures["throughput"]["finding"] == "better"
    assert figures["throughput"]["samples_after"] == list(FAST)
    assert figures["latency maximum"]["ratio"] == pytest.approx(12 / 900)
    assert figures["throughput"]["ratio_high"] is None  # after nothing, no ratio
    one = json.loads(run_json(before, Path("/x/y.json")))
    assert one["latency_us"]["overall"]["max"] == 900 and one["file"] == "/x/y.json"
    assert one["latency_us"]["cpus"]["2"]["samples"] == 6006
    assert one["throughput_pps"]["max"] == max(SLOW)


def test_a_run_for_people() -> None:
    text = run_text(run("before", throughput=throughput(SLOW), latency=latency([900, 2500])))
    assert "priority 95, every 200 us, 2 times 10 s" in text
    assert text.splitlines()[4].split() == [
        "2",
        "5",
        "11.2",
        "14",
        "14",
        "-",
        "-",
        "2500",
        "2002",
        "1",
    ]
    assert "median 4.685, from 4.610 to 4.750 (6 times 2 s)" in text


def test_an_average_is_rounded_once() -> None:
    near = Histogram(counts={2: 551, 3: 449}, min_us=2, average_us=2.449, max_us=3)
    of = run(latency=latency([12]).model_copy(update={"rounds": (LatencyRound(cpus={2: near}),)}))
    assert run_text(of).splitlines()[4].split()[:3] == ["2", "2", "2.4"]
    assert json.loads(run_json(of, Path("/x")))["latency_us"]["overall"]["average"] == 2.45


# -- the folder ----------------------------------------------------------------------------------


def test_what_is_written_is_read(tmp_path: Path) -> None:
    first = run("before", throughput=throughput(SLOW, hugepage_node=None), latency=latency([900, 2500]))
    later = run("before", started=datetime(2026, 2, 1, tzinfo=UTC))
    other = run("after-all", started=datetime(2027, 1, 1, tzinfo=UTC))
    folder = tmp_path / "new" / "folder"
    result.prepare(folder)
    paths = [result.write(folder, each) for each in (later, first, other)]
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in paths)
    assert result.read(paths[1]) == first
    assert result.find(folder, "before") == paths[0]
    assert result.find(folder, "after-all") == paths[2]
    assert result.find(folder, paths[1].name) == result.find(folder, str(paths[1])) == paths[1]


def test_what_is_not_kept_is_named(tmp_path: Path) -> None:
    result.write(tmp_path, run("before"))
    with pytest.raises(NotFound, match="there are: before"):
        result.find(tmp_path, "after")
    with pytest.raises(NotFound, match=r"there is no file gone\.json"):
        result.find(tmp_path, "gone.json")
    for text, why in (
        (b"", "must be valid JSON"),
        (b"{}", "label: is required"),
        (b"\xff", "must be valid JSON|not text"),
        (b'{"format": 2, "label": "x"}', "format: must be 1"),
    ):
        (tmp_path / "broken.json").write_bytes(text)
        with pytest.raises(InvalidRequest, match=rf"broken\.json cannot be read as a run: .*({why})"):
            result.read(tmp_path / "broken.json")


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HostError, match="cannot be written"):
        result.prepare(tmp_path / "file")


# -- the picture ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "begin"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_a_picture(tmp_path: Path, kind: str, begin: bytes) -> None:
    both = run("before", throughput=throughput(SLOW), latency=latency([900, 2500]))
    found = compare(both, run("after", throughput=throughput(FAST), latency=latency([12, 2001])))
    path = tmp_path / f"picture.{kind}"
    plot.require_plot(path)
    plot.draw_plot(found, path)
    assert path.read_bytes().startswith(begin)
    if kind == "svg":
        text = path.read_text()
        assert "at most 2500 us" in text and "after" in text and "Mpps each way" in text
    for part in ({"latency": both.latency}, {"throughput": both.throughput}, {}):
        plot.draw_plot(compare(run(**part), run(**part)), path)


def test_a_picture_that_cannot_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequest, match=r"neither PNG nor SVG"):
        plot.require_plot(tmp_path / "picture.gif")
    with pytest.raises(HostError, match="cannot be written"):
        plot.draw_plot(compare(run(), run()), tmp_path / "gone" / "picture.png")
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    with pytest.raises(BackendUnavailable) as refused:
        plot.require_plot(tmp_path / "picture.png")
    assert refused.value.fix == "pip install 'netplugin[plot]'"


def test_findings_are_chosen_by_rows() -> None:
    found = compare(run(throughput=throughput(SLOW)), run(throughput=throughput(FAST)))
    assert replace(found, rows=()).of(FigureVerdict.BETTER) == ()
