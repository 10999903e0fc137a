"""Comparisons: equal runs are not worse, worse ones are, and what cannot be decided is reported as such."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from netplugin_zeroloss.cli.main import main
from netplugin_zeroloss.journal import Cell, RunRecord
from netplugin_zeroloss.report.compare import CellVerdict, Comparison, ComparisonLimits, compare
from netplugin_zeroloss.report.comparison_text import json_text, text
from netplugin_zeroloss.report.figures import answers_of
from netplugin_zeroloss.values import headline

from tests.unit.zeroloss.report_runs import (
    ENVIRONMENT,
    answering,
    device,
    merged,
    mission,
    record,
    result,
    run_of,
    write_run,
)

OVS = Cell("dpdkvhostuser", 2)


def one(found: dict[str, Any] | None, error: str | None = None, **fields: Any) -> RunRecord:
    return run_of([record(OVS, found, error=error)], **fields)


def judged(before: dict[str, Any] | None, after: dict[str, Any] | None) -> tuple[CellVerdict, int]:
    found = compare(one(before, "an error"), one(after, "an error"))
    [cell] = found.cells
    return cell.finding, found.status


# -- equal, lower, higher -------------------------------------------------------------------------

rates = st.lists(st.floats(1e4, 1e8), min_size=1, max_size=12)


@settings(max_examples=60)
@given(rates, st.booleans(), st.randoms())
def test_equal_runs_never_regress(values: list[float], late: bool, rng: random.Random) -> None:
    other = rng.sample(values, len(values))
    found = compare(one(answering(values, late=late)), one(answering(other, late=late)))
    assert (found.cells[0].finding, found.status) == (CellVerdict.SAME, 0)


def test_a_run_with_everything_in_it_is_no_worse_than_itself() -> None:
    run = mission(4)
    found = compare(run, run)
    # One cell was never measured, so it has no figure: never 0 by omission.
    assert {cell.finding for cell in found.cells} == {CellVerdict.SAME, CellVerdict.NO_BASELINE}
    assert found.status == 0


@settings(max_examples=40)
@given(st.lists(st.floats(1e4, 1e8), min_size=6, max_size=10), st.floats(0.0, 0.9))
def test_what_got_faster_is_never_a_regression(values: list[float], more: float) -> None:
    found = compare(one(answering(values)), one(answering([v * (1 + more) for v in values])))
    assert found.status == 0


@pytest.mark.parametrize("late", [True, False])
def test_all_answers_5_percent_lower_is_a_regression(late: bool) -> None:
    before = [4.2e6 + 1e3 * n for n in range(7)]
    found = compare(one(answering(before, late=late)), one(answering([0.95 * r for r in before], late=late)))
    [cell] = found.cells
    assert (cell.finding, found.status, cell.tested) == (CellVerdict.REGRESSION, 1, (7, 7))
    assert cell.p == pytest.approx(1 / math.comb(14, 7))
    assert cell.change is not None and cell.change.ratio == pytest.approx(-0.05, abs=1e-3)
    assert cell.change.low < -0.05 < cell.change.high < -0.04


def test_a_drop_within_the_tolerance_is_none() -> None:
    before, after = answering([4.2e6] * 7), answering([4.17e6] * 7)
    assert compare(one(before), one(after)).status == 0
    assert compare(one(before), one(after), ComparisonLimits(tolerance=0.006)).status == 1
    # Bounds 0.5 % apart: answers that close are the same answer, whatever is requested.
    near = answering([4.195e6] * 7)
    assert compare(one(before), one(near), ComparisonLimits(tolerance=0.0)).status == 0


def test_a_single_result_of_a_sharp_device_is_compared_by_its_bounds() -> None:
    before = result(device())
    assert judged(before, result(device("clean", 4.2e6 * 0.97))) == (CellVerdict.REGRESSION, 1)
    assert judged(before, result(device("clean", 4.2e6 * 0.99))) == (CellVerdict.SAME, 0)
    assert judged(before, result(device("clean", 4.2e6 * 1.03))) == (CellVerdict.FASTER, 0)


def test_a_single_result_of_a_noisy_device_needs_to_be_far_apart() -> None:
    before = result(device("noisy"))
    assert not answers_of(record(OVS, before)).sharp
    assert judged(before, result(device("noisy", slower=0.1), seed=7)) == (CellVerdict.SAME, 0)
    assert judged(before, result(device("noisy", slower=0.35), seed=7)) == (CellVerdict.UNDECIDED, 2)
    assert judged(before, result(device("noisy", slower=0.6), seed=7)) == (
        CellVerdict.REGRESSION,
        1,
    )


def test_how_sharp_a_limit_is() -> None:
    def sharp(**fields: Any) -> bool:
        name = fields.pop("name", "clean")
        return answers_of(record(OVS, result(device(name, **fields.pop("of", {})), **fields))).sharp

    assert sharp() and not sharp(name="noisy")
    # A slow device's rings hide the loss for longer; that is not chance.
    assert sharp(of={"capacity_pps": 1e5})
    # Without early abort a full trial does not tell when it lost.
    assert not sharp(name="noisy", can_abort=False)


# -- verdicts -------------------------------------------------------------------------------------


def limited() -> dict[str, Any]:
    return result(device("short-generator"))


@pytest.mark.parametrize(
    ("before", "after", "finding", "status"),
    [
        (lambda: result(device()), lambda: result(device("glitch")), CellVerdict.REGRESSION, 1),
        (lambda: result(device()), lambda: None, CellVerdict.REGRESSION, 1),
        (lambda: result(device("glitch")), lambda: None, CellVerdict.REGRESSION, 1),
        (lambda: result(device("glitch")), lambda: result(device("glitch")), CellVerdict.SAME, 0),
        (lambda: result(device("glitch")), lambda: result(device()), CellVerdict.FASTER, 0),
        (lambda: None, lambda: result(device()), CellVerdict.NO_BASELINE, 2),
        # The generator of the new run ended below what the old one found.
        (lambda: result(device()), limited, CellVerdict.UNDECIDED, 2),
        (lambda: result(device("clean", 2e6)), limited, CellVerdict.FASTER, 0),
        (limited, limited, CellVerdict.SAME, 0),
        (limited, lambda: result(device()), CellVerdict.SAME, 0),
        (limited, lambda: result(device("clean", 2e6)), CellVerdict.REGRESSION, 1),
        (limited, lambda: result(device("glitch")), CellVerdict.REGRESSION, 1),
        (
            lambda: result(device(), vnf_ceiling_pps=4.25e6),
            lambda: result(device("clean", 3e6)),
            CellVerdict.REGRESSION,
            1,
        ),
    ],
)
def test_verdicts(
    before: Callable[[], dict[str, Any] | None],
    after: Callable[[], dict[str, Any] | None],
    finding: CellVerdict,
    status: int,
) -> None:
    assert judged(before(), after()) == (finding, status)


def test_floors_among_the_repeats_count_as_no_rate() -> None:
    before = answering([4.2e6 + n for n in range(9)])
    after = answering([4.2e6 + n for n in range(5)] + [None] * 4)
    assert after["verdict"] == "ndr"
    assert answers_of(record(OVS, after)).rates.count(0.0) == 4
    [cell] = compare(one(before), one(after)).cells
    assert cell.why.endswith("4 of 9 repeats found a floor, before 0 of 9")
    # As ranks they are the lowest: half of the rates by themselves would not do.
    lower: list[float | None] = [4.1e6 + n for n in range(3)]
    assert compare(one(before), one(answering([*lower, 4.3e6, 4.3e6]))).status == 0
    assert compare(one(before), one(answering([*lower, 4.0e6, 4.0e6]))).status == 1
    assert compare(one(before), one(answering([*lower, None, None]))).status == 1


# -- what may be compared -------------------------------------------------------------------------


def test_another_goal_is_refused() -> None:
    found = compare(one(result(device())), one(result(device(), goals=(headline(10.0),))))
    assert found.status == 2 and "1 x 60 s" in found.refusals[0] and "1 x 10 s" in found.refusals[0]
    assert text(found).startswith("unusable: ") and "Mpps" not in text(found)


def test_no_cell_in_common_is_refused() -> None:
    other = run_of([record(Cell("sriov"), result(device()))])
    found = compare(one(result(device())), other)
    assert found.status == 2 and "no cell in common" in found.refusals[0]


def test_a_cell_that_the_new_run_lacks_is_not_passed_over() -> None:
    both = [record(OVS, result(device())), record(Cell("sriov"), result(device()))]
    before, after = run_of(both), run_of(both[:1], Cell("sriov"))
    assert compare(before, after).status == 2
    assert any("the new run is incomplete" in doubt for doubt in compare(before, after).doubts)
    assert compare(after, before).status == 0
    # A regression is one whatever else is missing.
    worse = run_of([record(OVS, result(device("clean", 3e6)))], Cell("sriov"))
    assert compare(before, worse).status == 1


def test_what_is_doubtful_is_reported_and_does_not_decide() -> None:
    other = {**ENVIRONMENT, "kernel": "6.12", "host": "lab-2", "netplugin": "0.2.0", "started": "x"}
    before = one(result(device()))
    moved = one(result(device(), environment={**ENVIRONMENT, "generator": "exec"}), environment=other)
    found = compare(before, moved)
    assert found.status == 0
    assert "host: lab-1, then lab-2" in found.doubts and "kernel: 6.1.0, then 6.12" in found.doubts
    assert any(doubt.startswith("generator: sim:lab, then exec") for doubt in found.doubts)
    assert found.changes == ("netplugin: 0.1.0, then 0.2.0",)
    vnf = [replace(r, setup={"vnf": {"name": "vpp", "version": "25.10"}}) for r in before.records]
    doubts = compare(before, run_of(vnf)).doubts
    assert any(doubt.startswith("VNF's name: testpmd, then vpp") for doubt in doubts)


def test_a_virtual_host_is_doubtful_and_an_earlier_version_did_not_record_it() -> None:
    unknown, real, virtual = (
        one(result(device()), environment={**ENVIRONMENT, **more})
        for more in ({}, {"virtual": False}, {"virtual": True})
    )
    assert compare(real, virtual).doubts == ("virtual: False, then True",)
    found = compare(unknown, virtual)
    assert found.doubts == found.changes == ()


# -- the rates of error ---------------------------------------------------------------------------


def pool(name: str, slower: float, count: int) -> list[dict[str, Any]]:
    return [result(device(name, slower=slower), seed=f"{slower}/{n}") for n in range(count)]


def regressions(
    before: Sequence[dict[str, Any]],
    after: Sequence[dict[str, Any]],
    repeats: int,
    cells: int,
    runs: int,
) -> float:
    """How many of so many pairs of runs are called one; answers are drawn from those of searches."""
    rng = random.Random(repeats)

    def drawn(answers: Sequence[dict[str, Any]]) -> RunRecord:
        return run_of(
            [record(Cell("a", n), merged(rng.sample(list(answers), repeats))) for n in range(1, cells + 1)]
        )

    return sum(compare(drawn(before), drawn(after)).status == 1 for _ in range(runs)) / runs


def test_false_alarms_and_power_on_a_noisy_device() -> None:
    """Cells of real searches; 5 % is the level for all four cells of a run together."""
    same, lower = pool("noisy", 0.0, 40), pool("noisy", 0.25, 20)
    runs = 100
    alarms = regressions(same, same, 7, 4, runs)
    found = regressions(same, lower, 7, 1, runs)
    print(f"false alarms {alarms:.3f}, a drop of 25 % found {found:.3f}")
    assert alarms <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs)
    assert found >= 0.8


def test_equal_sharp_devices_give_no_alarm_and_a_small_drop_is_found() -> None:
    same, lower = pool("clean", 0.0, 3), pool("clean", 0.03, 3)
    assert regressions(same, same, 1, 4, 30) == 0
    assert regressions(same, lower, 1, 1, 30) == 1


# -- the command ----------------------------------------------------------------------------------


def folders(tmp_path: Path, before: RunRecord, after: RunRecord) -> tuple[str, str]:
    return str(write_run(before, tmp_path / "old")), str(write_run(after, tmp_path / "new"))


def test_the_exit_status_and_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = folders(tmp_path, one(result(device())), one(result(device("clean", 3e6))))
    assert main(["compare", old, new]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("regression: 1 cell: 1 regression\n")
    assert re.search(r"4\.19 Mpps -> 2\.99 Mpps  -28\.\d %", printed)
    assert "1 cell with too few repeats for a test" in printed
    assert main(["compare", new, old]) == 0
    assert main(["compare", old, new, "--tolerance", "0.4"]) == 0
    assert main(["compare", old, str(tmp_path / "none")]) == 2
    capsys.readouterr()
    assert main(["compare", old, new, "--json", "-"]) == 1
    whole = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (whole["verdict"], whole["status"]) == ("regression", 1)
    assert whole["cells"][0]["finding"] == "regression"
    file = tmp_path / "found.json"
    assert main(["compare", old, new, "--json", str(file)]) == 1
    assert json.loads(file.read_text()) == whole
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["compare", old, new, "--json", str(tmp_path / "no" / "file")])
    assert main(["compare", old, new, "--json", "/proc/no-file"]) == 2


def test_json_has_no_infinity() -> None:
    found: Comparison = compare(one(limited()), one(limited()))
    whole = json.loads(json_text(found), parse_constant=pytest.fail)
    assert whole["cells"][0]["old"]["bounds_pps"][1] is None
    assert whole["cells"][0]["change"] is None


def test_the_test_and_its_adjustment_are_named() -> None:
    before = run_of([record(Cell("a", n), answering([4.2e6 + n for n in range(5)])) for n in (1, 2)])
    printed = text(compare(before, before))
    assert "2 cells tested (rank sum, exact; p adjusted by Holm): at most 5 %" in printed
