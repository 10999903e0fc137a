"""Frames offered in bursts: what each generator sends, which refuse, and the axis of a run."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import replace
from pathlib import Path

import pytest
from netplugin_zeroloss.cli.main import main
from netplugin_zeroloss.generators.choose import Exec, TrexStl, make
from netplugin_zeroloss.generators.exec import ExecGenerator
from netplugin_zeroloss.generators.trex_stl import TrexPath
from netplugin_zeroloss.generators.trex_streams import burst_s, in_bursts
from netplugin_zeroloss.journal import Cell, Part, control_cell, read_run
from netplugin_zeroloss.matrix import cells, findings
from netplugin_zeroloss.matrix.bench import BareBench
from netplugin_zeroloss.report.figures import report_of
from netplugin_zeroloss.report.published import zstack
from netplugin_zeroloss.report.table import csv_text, grids, markdown
from netplugin_zeroloss.search.follow_up import follow_up
from netplugin_zeroloss.search.search import carry_out
from netplugin_zeroloss.search.trials import SearchVerdict
from netplugin_zeroloss.values import TrialRequest, UnusableInput, line_rate_pps

from tests.unit.zeroloss.helpers import asked, hard_cap, plan, run_search
from tests.unit.zeroloss.matrix_runs import call_here, described, description, write
from tests.unit.zeroloss.test_exec import GOOD, MEASURING, Program
from tests.unit.zeroloss.trex import TREE, Trex

LINE = line_rate_pps(10e9, 64)


# -- trex-stl ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("burst", "rate", "seconds"), [(32, 1e6, 1.0), (7, 999.0, 0.4), (256, 300, 0.4), (2, 14e6, 60)]
)
def test_the_streams_of_a_burst_are_the_frames_of_the_trial_at_the_mean_rate(
    burst: int, rate: float, seconds: float
) -> None:
    request = TrialRequest(2 * rate, seconds, burst=burst)
    made = list(in_bursts([{"port": 0, "size": 64}], request, 2, {0: 10.0}))
    trains = [one["mode"][1] for one in made]
    assert sum(t["pkts_per_burst"] * t["count"] for t in trains) == round(rate * seconds)
    assert all(train["pps"] == LINE for train in trains), "back to back on the wire"
    starts = [
        one["isg"] / 1e6 + n * ((t["pkts_per_burst"] - 1) / t["pps"] + t["ibg"] / 1e6)
        for one, t in zip(made, trains, strict=True)
        for n in range(min(t["count"], 1000))
    ]
    period = burst / rate
    assert all(at == pytest.approx(n * period, abs=1e-9) for n, at in enumerate(starts[:1000]))
    sizes = [t["pkts_per_burst"] for t in trains]
    assert sizes[:-1] in ([], [burst]) and sizes[-1] <= burst
    assert burst_s(request, 2) == pytest.approx(period)


def test_above_the_speed_of_the_port_there_is_no_gap_and_none_is_negative() -> None:
    request = TrialRequest(30e6, 1.0, burst=64)
    [one] = list(in_bursts([{"port": 0, "size": 64}], request, 1, {0: 10.0}))
    train = one["mode"][1]
    assert train["ibg"] == pytest.approx(1 / 30) and train["pps"] == 30e6


def test_a_port_without_a_speed_and_latency_streams_in_the_rate() -> None:
    request = TrialRequest(2e6, 1.0, burst=32, latency=True)
    trains = (one["mode"][1] for one in in_bursts([{"port": 0, "size": 64}], request, 1, {0: 0.0}))
    one, rest = trains
    assert one["pps"] == LINE
    assert one["count"] * 32 + rest["pkts_per_burst"] == 2_000_000 - 1000


def test_trex_gets_the_bursts_and_changes_nothing(trex: Trex) -> None:
    request = TrialRequest(380_000, 0.5, burst=19)
    paths = (TrexPath(send=0, receive=1),)
    with make(TrexStl(trex_dir=TREE, paths=paths)) as tool:
        assert tool.info.bursts and not tool.info.bursts_of_mixes
        found = tool.run(request)
        tool.run(replace(request, rate_pps=370_000.0))
        tool.run(replace(request, burst=1))
    assert found.elapsed_uncertainty_s > burst_s(request, 1), "counts go up by bursts"
    first, second, rest, plain = trex.calls("stream")
    assert first["mode"] == {
        "pps": pytest.approx(LINE),
        "pkts_per_burst": 19,
        "ibg": pytest.approx(50 - 18e6 / LINE),
        "count": 10_000,
    }
    assert first["isg"] == 0 and second["mode"]["count"] == 185_000 // 19
    assert rest["mode"]["pkts_per_burst"] == 185_000 % 19 and rest["isg"] > 0
    assert plain["mode"].keys() == {"pps"}
    assert [c["mult"] for c in trex.calls("start")] == ["1", "1", "380000.0000pps"]


def test_a_profile_has_its_own_streams(trex: Trex) -> None:
    profile = Path(__file__).resolve().parents[3] / "tools/trex/stl_imix.py"
    with make(TrexStl(trex_dir=TREE, profile=profile)) as tool:
        with pytest.raises(UnusableInput, match="cannot send frames in bursts"):
            tool.info.check_burst(2, "")
        tool.info.check_burst(1, "imix")


# -- exec and sim --------------------------------------------------------------------------------


def test_bursts_are_requested_of_a_program_that_has_them(tmp_path: Path) -> None:
    able = Program(tmp_path, MEASURING.replace('"latency": True', '"bursts": True'))
    with ExecGenerator(able.command, 10) as generator:
        generator.info.check_burst(64, "imix")
        generator.run(asked(1e6, 1.0))
        generator.run(asked(1e6, 1.0, burst=64))
    first, second = able.questions()[1:3]
    assert "burst" not in first and second["burst"] == 64


@pytest.mark.parametrize("burst", [256, 1024])
def test_a_burst_that_the_ring_takes_costs_its_share_of_the_ring(burst: int) -> None:
    """Just above the limit the ring is full when its room without the burst has been filled."""
    device = hard_cap(1e6, ring=1024)
    without = device.run(asked(1.1e6, 1.0)).elapsed_s
    within = device.run(asked(1.1e6, 1.0, burst=burst)).elapsed_s
    assert without == pytest.approx(math.ceil(1025 / 0.1e6 / 0.01) * 0.01)
    assert within == pytest.approx(math.ceil((1024 - (burst - 1) + 1) / 0.1e6 / 0.01) * 0.01)
    assert device.run(asked(0.999e6, 60.0, burst=burst)).rx_packets == 59_940_000


def test_a_burst_that_the_ring_does_not_take_is_lost_at_any_rate() -> None:
    found = hard_cap(1e6, ring=1024).run(asked(1000, 60.0, burst=1030, abort_on_loss=False))
    assert found.tx_packets - found.rx_packets == 6 * math.floor(60_000 / 1030)
    search = run_search(plan(burst=1030), hard_cap(1e6, ring=1024))
    assert search.headline.verdict is SearchVerdict.FLOOR
    assert {trial.request.burst for trial in search.trials} == {1030}


def test_what_follows_a_search_is_sent_in_the_same_bursts() -> None:
    whole = replace(plan(burst=16), latency_s=1.0, soak_s=2.0, measures_latency=True)
    found = carry_out(follow_up(whole, 1e5), hard_cap(1e6))
    assert [trial.request.burst for trial in found.trials] == [16] * 4


# -- the axis ------------------------------------------------------------------------------------


def test_bursts_are_cells_and_have_controls_of_their_own() -> None:
    run = description(
        matrix={"backends": ["a", "b"], "bursts": [1, 32]},
        controls={"loopback": {"generator": {"type": "sim"}}},
        exclude=[{"backend": "b", "burst": 32}],
    )
    assert [(c.backend, c.burst) for c in cells.cells(run)] == [("a", 1), ("a", 32), ("b", 1)]
    assert Cell("a", 1, burst=32).key == "a,pmd=1,frame=64,flows=1024,queues=1,burst=32"
    assert ",burst" not in Cell("a", 1).key
    assert control_cell(Cell("a", 1, burst=32), Part.LOOPBACK).burst == 32
    assert sum(task.part is Part.LOOPBACK for task in cells.tasks(run)) == 2
    task = next(t for t in cells.tasks(run) if t.cell.burst == 32 and t.part is Part.SEARCH)
    assert str(task).endswith("1,024 flows, 1 queue, bursts of 32 frames")
    info = hard_cap(1e6).info
    assert cells.plan(run, task, info, cells.Ceilings()).burst == 32


@pytest.mark.parametrize("bursts", [[0], [70_000], [], [2, 2]])
def test_bursts_that_cannot_be(bursts: list[int]) -> None:
    with pytest.raises(UnusableInput, match="bursts"):
        description(matrix={"backends": ["a"], "bursts": bursts})


def test_a_generator_without_bursts_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    unable = Program(tmp_path, GOOD)
    generator = {"type": "exec", "command": unable.command}
    run = description(generator=generator, matrix={"backends": ["a"], "bursts": [1, 8]})
    with pytest.raises(UnusableInput, match="burst 8: the generator small cannot send frames in bursts"):
        BareBench(run).check(cells.tasks(run))
    chosen = [(Exec(command=unable.command), cell) for cell in cells.cells(run)]
    [finding] = findings.about_generators(chosen)
    assert finding.missing and "burst 8" in finding.found and "exclude" in (finding.fix or "")
    assert all(question["op"] != "trial" for question in unable.questions())


def test_trex_has_no_bursts_of_a_mix(trex: Trex) -> None:
    run = description(
        generator={"type": "trex-stl", "trex_dir": str(TREE)},
        matrix={"backends": ["a"], "bursts": [8], "frames": [64, "imix"]},
    )
    with pytest.raises(
        UnusableInput, match=r"a burst of the generator TRex .* has frames of one size, not imix"
    ):
        BareBench(run).check(cells.tasks(run))
    BareBench(run).check([t for t in cells.tasks(run) if t.cell.frame == "64"])
    assert not trex.calls("start")


def test_the_dry_run_and_the_command_refuse_with_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unable = Program(tmp_path, GOOD).command
    sections = described(
        generator={"type": "exec", "command": unable}, matrix={"backends": ["a"], "bursts": [8]}
    )
    done = call_here(write(tmp_path, sections), "--folder", tmp_path / "run", "--dry-run")
    assert done.returncode == 2 and "cannot send frames in bursts" in done.stderr
    assert main(["search", "--generator", "exec", "--exec-cmd", unable, "--burst", "8"]) == 2
    assert "cannot send frames in bursts" in capsys.readouterr().err


def test_published_figures_are_not_shown_for_what_was_not_published() -> None:
    cell = Cell("dpdkvhostuser", 2)
    assert zstack().rate_pps(cell) == zstack().rate_pps(replace(cell, numa="local")) is not None
    assert zstack().rate_pps(replace(cell, burst=32)) is None
    assert zstack().rate_pps(replace(cell, numa="remote")) is None


def test_a_run_reports_each_size_of_bursts_by_itself(tmp_path: Path) -> None:
    sections = described(
        generator={"type": "sim", "device": "clean"},
        matrix={"backends": ["a"], "without_pmd": ["a"], "bursts": [1, 32, 2048]},
    )
    done = call_here(write(tmp_path, sections), "--folder", tmp_path / "run", "--quiet")
    assert done.returncode == 0, done.stderr
    report = report_of(read_run(tmp_path / "run"))
    rows = list(csv.DictReader(io.StringIO(csv_text(report))))
    assert [(row["burst"], row["verdict"]) for row in rows] == [
        ("1", "ndr"),
        ("32", "ndr"),
        ("2048", "floor"),
    ]
    assert [grid.title.rpartition(", ")[2] for grid in grids(report)][1:] == [
        "bursts of 32 frames",
        "bursts of 2048 frames",
    ]
    assert "bursts of 32 frames" in markdown(report)
