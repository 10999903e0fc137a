"""The figures of a run and their table: a number only where there is one, marked with what it is."""

from __future__ import annotations

import csv
import io
import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from netplugin_zeroloss.journal import NO_BACKEND, Cell, CellRecord, Part, RunRecord, read_run
from netplugin_zeroloss.report import words
from netplugin_zeroloss.report.figures import Report, report_of
from netplugin_zeroloss.report.page import FILES, page, write
from netplugin_zeroloss.report.published import PublishedRelation, relation_of, zstack
from netplugin_zeroloss.report.table import (
    COLUMNS,
    choice,
    conditions,
    cpu_text,
    csv_text,
    escape,
    figure_text,
    grids,
    interval_text,
    json_text,
    markdown,
    price_text,
    short_text,
    status_text,
    values,
)
from netplugin_zeroloss.values import headline

from tests.unit.zeroloss.report_runs import ENVIRONMENT, SETUP, device, mission, record, result, run_of

ROOT = Path(__file__).resolve().parents[3]
GOLDEN = ROOT / "tests" / "data" / "zeroloss-run"


@pytest.fixture(scope="module")
def report() -> Report:
    return report_of(mission(7))


def text_of(report: Report, backend: str, cores: int | None) -> str:
    [figure] = [f for f in report.figures if f.cell == Cell(backend, cores)]
    return figure_text(figure)


def test_each_verdict_has_its_mark_and_only_some_a_number(report: Report) -> None:
    assert text_of(report, "dpdkvhostuser", 2) == "4.39"
    assert text_of(report, "vdpa", 1) == ">= 2.99 (generator limit)"
    assert text_of(report, "vdpa", 4) == "3.99 (VNF limit)"
    floor = text_of(report, "vdpa", 2)
    assert re.fullmatch(r"floor: 1\.\d frames in a million lost at any load, at link", floor)
    assert text_of(report, "sriov", None).startswith("failed: the port could not be plugged")
    [missing] = report.missing
    assert (missing.cell.frame, figure_text(missing)) == ("imix", "not measured")
    for figure in report.figures:
        assert (figure.rate_pps is not None) == (figure.verdict in ("ndr", "vnf_limited"))
        assert figure.at_least_pps is None or figure.verdict == "generator_limited"


def test_a_failed_search_shows_no_number() -> None:
    found = result(device("noisy"), max_trials=5)
    assert found["verdict"] == "failed" and found["bounds_pps"][1] > 0
    [figure] = report_of(run_of([record(Cell("linuxbridge"), found)])).figures
    assert figure_text(figure).startswith("failed: ") and figure.rate_pps is None
    assert "Mpps" not in figure_text(figure)


def test_the_table_is_backends_by_cores(report: Report) -> None:
    first, second = grids(report)
    assert first.columns == (None, 1, 2, 4)
    assert [name for name, _ in first.rows] == [
        "linuxbridge",
        "dpdkvhostuser",
        "vdpa",
        "sriov",
    ]
    assert [f is not None for f in first.rows[0][1]] == [True, False, False, False]
    assert (second.title, second.columns) == ("imix, 1,024 flows, 1 queue", (None,))


def test_the_goal_is_printed_with_each_number(report: Report) -> None:
    lines = [line for line in markdown(report).splitlines() if line.startswith("| ")]
    details = [line for line in lines if "no frame lost, 1 x 60 s, bounds within 0.500%" in line]
    assert len(details) == sum(1 for figure in report.figures if figure.goal)
    [other] = [line for line in markdown(report).splitlines() if "csit-pdr" in line and "pmd=2" in line]
    assert "(loss ratio <= 0.005 in 50% of the time, 21 x 1 s" in other and "Mpps" in other


def test_scaling_is_relative_to_the_fewest_cores_with_a_rate(report: Report) -> None:
    found = {f.cell.pmd_cores: f for f in report.figures if f.cell.backend == "dpdkvhostuser"}
    assert found[1].efficiency is None
    one, four = found[1].rate_pps, found[4].rate_pps
    assert one and four and found[4].efficiency == pytest.approx(four / 4 / one)
    [alone] = [f for f in report.figures if f.cell == Cell("vdpa", 4)]
    assert alone.efficiency is None  # the others of its backend have no rate
    [bridge] = [f for f in report.figures if f.cell.backend == "linuxbridge"]
    assert bridge.efficiency is None and bridge.rate_per_core_pps is None


def test_the_interval_is_that_of_the_repeats(report: Report) -> None:
    [noisy] = [f for f in report.figures if f.cell == Cell("dpdkvhostuser", 1)]
    assert noisy.spread is not None and noisy.spread["answers"] == 7
    low, high = noisy.spread["interval_pps"]
    assert low < noisy.spread["median_pps"] < high
    assert interval_text(noisy) == f"{words.mpps(low)} to {words.mpps(high)} (98 %, 7 results)"
    [single] = report_of(run_of([record(Cell("sriov"), result(device()))])).figures
    assert interval_text(single) == "one result"


def test_cpu_of_the_host_is_distinguished(report: Report) -> None:
    by_cell = {f.cell: f for f in report.figures}
    bridge, ovs = by_cell[Cell("linuxbridge")], by_cell[Cell("dpdkvhostuser", 4)]
    assert cpu_text(bridge) == "1.05 (0.93 softirq; 0.12 system)"
    assert cpu_text(ovs) == "4.07 (4 PMD, 97 % busy; 0.02 softirq; 0.05 system)"
    # Nothing was read: the cores that PMD threads hold are known all the same, the rest is not.
    assert cpu_text(by_cell[Cell("vdpa", 4)]) == "4.00 (4 PMD)"
    assert by_cell[Cell("vdpa", 4)].cpu.softirq is None
    # The price is then a lower limit.
    assert (price_text(ovs), price_text(by_cell[Cell("vdpa", 4)])) == ("0.51", ">= 1.00")
    assert price_text(by_cell[Cell("sriov")]) == "-"


def test_controls_are_printed_with_the_cells_they_bound(report: Report) -> None:
    by_cell = {f.cell: f for f in report.figures}
    control = by_cell[Cell("linuxbridge")].loopback
    assert control is not None and control.known_pps == 14.88e6
    assert by_cell[Cell("linuxbridge")].vnf is None
    broken = record(Cell(NO_BACKEND), None, part=Part.VNF, error="no VPP")
    [figure] = report_of(run_of([record(Cell("sriov"), result(device())), broken])).figures
    assert figure.vnf is not None
    assert (figure.vnf.known_pps, figure.vnf.reason) == (None, "no VPP")


def test_a_later_record_takes_the_place_of_a_failed_one() -> None:
    cell = Cell("linuxbridge")
    run = run_of([record(cell, None, error="no agent"), record(cell, result(device()))])
    [figure] = report_of(run).figures
    assert figure.verdict == "ndr"


def test_different_goals_are_both_named() -> None:
    short = result(device(), goals=(headline(final_s=10),))
    run = run_of([record(Cell("a"), result(device())), record(Cell("b"), short)])
    report = report_of(run)
    assert len(report.goals) == 2
    assert all(goal in markdown(report) for goal in report.goals)


# -- the answer ------------------------------------------------------------------------------------


def chosen(run: RunRecord) -> str:
    report = report_of(run)
    return choice(report, grids(report)[0])


def with_cpus(cell: Cell, rate: float, cpus: float, **fields: Any) -> CellRecord:
    readings = {"host.softirq_cpus": cpus, "host.system_cpus": 0.0}
    return record(cell, result(device("clean", rate), readings=readings, **fields))


def test_the_choice_is_the_highest_rate_with_its_price(report: Report) -> None:
    text = choice(report, grids(report)[0])
    assert text.startswith(
        "Choose dpdkvhostuser with 4 PMD cores, 7.98 Mpps for 4.07 CPUs of the host (0.51 CPUs for each Mpps)"
    )
    assert "For the fewest CPUs for each Mpps, choose vdpa with 1 PMD core, >= 2.99 Mpps" in text
    assert re.search(
        r"linuxbridge, 0\.89\d Mpps for 1\.05 CPUs of the host \(1\.17 CPUs for each Mpps\)", text
    )
    assert "does not decide whether vdpa with 4 PMD cores is as fast" in text  # the VNF was the limit
    assert "Not in the choice: sriov (failed: the port could not be plugged" in text
    assert "Cells without a rate: 2 of 8. Simulated: not valid for hardware." in text


def test_of_equal_rates_the_fewest_cores_are_chosen() -> None:
    cells = [Cell("dpdkvhostuser", 1), Cell("dpdkvhostuser", 4), Cell("sriov")]
    text = chosen(run_of([with_cpus(cell, 9e6 if cell.pmd_cores else 4e6, 0.5) for cell in cells]))
    assert "Choose dpdkvhostuser with 1 PMD core," in text and "4 PMD cores" not in text
    assert "whether" not in text
    same = chosen(run_of([with_cpus(cell, 9e6, 0.5) for cell in cells]))
    assert "does not decide whether" in same


def test_without_a_rate_nothing_is_chosen() -> None:
    long = "no agent" + "x" * 1000
    run = run_of([record(Cell("sriov"), None, error=long)], Cell("vdpa", 2))
    text = chosen(run)
    assert text.startswith("No backend can be chosen: none has a rate.") and len(text) < 400
    assert "vdpa with 2 PMD cores (not measured)" in text
    assert status_text(report_of(run)) == "Incomplete: 1 of 2 cells was not measured, 1 failed."
    assert conditions(report_of(run)) == ["Nothing was measured."]
    alone = chosen(run_of([record(Cell("sriov"), result(device()))]))
    assert alone.startswith("There is nothing to choose: one backend was measured. sriov, 4.19 Mpps")
    assert "CPUs not measured" in alone
    last = chosen(run_of([record(Cell("sriov"), result(device())), *run.records]))
    assert "no agent" in last or "no other backend has a rate" in last


@pytest.mark.parametrize(("kind", "where"), [("qemu", "Emulated"), ("kvm", "Virtual"), ("kvm", "")])
def test_rates_of_an_emulated_machine_are_called_so(kind: str, where: str) -> None:
    real = {**ENVIRONMENT, "generator": "trex-stl"}
    entry = record(Cell("sriov"), result(device(), environment=real))
    entry = replace(entry, setup={**SETUP, "vm": f"<domain id='1' type='{kind}'><name/></domain>"})
    run = run_of([entry], environment={**real, "virtual": where == "Virtual"})
    report = report_of(run)
    assert ("valid for hardware" in chosen(run)) == bool(where)
    for text in (markdown(report), json_text(report)):
        assert bool(re.search("Simulated: |Emulated: the VM|Virtual: the host", text)) == bool(where)
        assert f"{where}: the" in text or not where


def test_what_is_not_known_is_reported(report: Report) -> None:
    text = " ".join(conditions(report))
    assert "no frame lost, 1 x 60 s" in text and "Linux 6.1.0, 8 CPUs, generator sim:lab" in text
    assert "VNF without backend" in text and "3 cells of 9 without a rate: 1 floor" in text
    assert "generator by itself" not in text  # there is such a control
    assert "No place counted them" not in text  # the simulation finds every frame


def test_a_run_that_was_resumed_elsewhere_is_not_called_one_machine() -> None:
    sessions = [{"host": "lab-1"}, {"host": "lab-2"}]
    run = run_of([record(Cell("sriov"), result(device()))], environment={**ENVIRONMENT, "sessions": sessions})
    assert "on lab-1 and lab-2, under" in chosen(run)
    assert "Several machines, so cells may not be comparable: lab-1, lab-2" in markdown(report_of(run))


def test_a_rate_is_the_same_text_everywhere(report: Report) -> None:
    everything = page(report), markdown(report), csv_text(report), json_text(report)
    for figure in report.figures:
        if figure.number is not None:
            assert figure.number in short_text(figure)
            assert all(figure.number in text for text in everything), figure.number
            assert values(figure)["zero_loss_mpps"] == figure.number
            assert figure.rate_pps is None or float(figure.number) * 1e6 <= figure.rate_pps


def test_many_cells_are_reported_soon(tmp_path: Path) -> None:
    found = result(device())
    cells = [Cell(name, cores, queues=q) for name in "ab" for cores in range(1, 11) for q in range(1, 11)]
    report = report_of(run_of([record(cell, found) for cell in cells]))
    began = time.process_time()
    paths = write(report, tmp_path)
    assert time.process_time() - began < 20 and all(path.stat().st_size for path in paths)
    assert (tmp_path / "table.csv").read_text().count("\n") == 201


# -- published figures -----------------------------------------------------------------------------


def test_published_figures_are_never_the_runs_own() -> None:
    run = mission()
    assert relation_of(run, zstack(), False) is PublishedRelation.NOT_SHOWN
    assert relation_of(run, zstack(), True) is PublishedRelation.OTHER
    same = replace(run, description="name: lab\ncomparable_to: [zstack-4.4]\n")
    assert relation_of(same, zstack(), False) is PublishedRelation.COMPARABLE
    for text in ("", ": [", "comparable_to: 5", "- a", "comparable_to: [another]"):
        assert relation_of(replace(run, description=text), zstack(), False) is PublishedRelation.NOT_SHOWN
    plain = markdown(report_of(run))
    shown = markdown(report_of(run, zstack(), PublishedRelation.OTHER))
    assert "published" not in plain and "published, other hardware" in shown
    assert "Mellanox ConnectX-6 Dx" in shown and "TRex 2.81" in shown


def test_the_published_table_is_the_one_that_was_published() -> None:
    table = zstack()
    assert len(table.rates_pps) == 10
    assert table.rate_pps(Cell("linuxbridge")) == 800_000
    assert table.rate_pps(Cell("dpdkvhostuser", 8, flows=1, queues=8)) == 8_400_000
    assert table.rate_pps(Cell("vdpa", 6)) == 8_300_000
    assert table.rate_pps(Cell("sriov")) == 8_300_000
    assert table.rate_pps(Cell("sriov", frame="imix")) is None
    assert table.rate_pps(Cell("dpdkvhostuser", 3)) is None


# -- for programs ----------------------------------------------------------------------------------


def test_csv_has_a_row_for_each_cell(report: Report) -> None:
    rows = list(csv.DictReader(io.StringIO(csv_text(report))))
    assert len(rows) == len(report.figures)
    assert list(rows[0]) == list(COLUMNS)
    by_cell = {(row["backend"], row["pmd_cores"], row["frame"]): row for row in rows}
    assert float(by_cell["dpdkvhostuser", "2", "64"]["zero_loss_pps"]) == pytest.approx(4.39e6, 0.01)
    limited = by_cell["vdpa", "1", "64"]
    assert limited["zero_loss_pps"] == "" and float(limited["at_least_pps"]) == 2992500
    assert by_cell["vdpa", "2", "64"]["floor_place"] == "link"
    assert by_cell["sriov", "", "imix"]["verdict"] == "missing"


def test_csv_is_no_formula() -> None:
    run = run_of([record(Cell("=cmd()"), None, error='+1,"2"\n@x')])
    [row] = csv.DictReader(io.StringIO(csv_text(report_of(run))))
    assert row["backend"] == "'=cmd()" and row["reason"] == '\'+1,"2"\n@x'


def test_json_has_the_columns_and_what_csv_cannot_hold(report: Report) -> None:
    whole = json.loads(json_text(report), parse_constant=pytest.fail)
    assert whole["complete"] is False and len(whole["cells"]) == len(report.figures)
    cell = whole["cells"][1]
    assert cell["key"] == "dpdkvhostuser,pmd=1,frame=64,flows=1024,queues=1"
    assert cell["verdicts"] == {"ndr": 7} and cell["others"][0]["name"] == "csit-pdr"
    assert set(COLUMNS) <= set(cell)


def test_markdown_cannot_be_broken_out_of() -> None:
    nasty = "a|b\n| c <script>x</script> **bold** `code` [x](y) &amp;"
    run = run_of([record(Cell(nasty), None, error=nasty)], name=nasty)
    text = markdown(report_of(run))
    assert "<script" not in text.replace("\\<", "")
    heads = [line for line in text.splitlines() if line.startswith("| backend")]
    for head in heads:
        columns = len(re.findall(r"(?<!\\)\|", head))
        position = text.splitlines().index(head)
        row = text.splitlines()[position + 2]
        assert len(re.findall(r"(?<!\\)\|", row)) == columns


def test_escaped_text_is_still_readable() -> None:
    plain = "loss ratio <= 0.005 & more > 1, at rx_ring_full"
    assert escape(plain) == plain and escape("_a_ b_c") == "\\_a\\_ b_c"


# -- numbers as words ------------------------------------------------------------------------------


@given(st.floats(1.0, 1e9), st.integers(2, 6))
def test_a_rate_is_never_rounded_up(rate: float, digits: int) -> None:
    shown = float(words.mpps(rate, digits)) * 1e6
    assert shown <= rate * (1 + 1e-9)
    assert shown >= rate * (1 - 10.0 ** (1 - digits)) - 1e-6


def test_as_many_digits_as_were_measured() -> None:
    assert [words.digits_of(width) for width in (0.05, 0.01, 0.005, 0.001, 0.0005)] == [
        2,
        3,
        3,
        4,
        4,
    ]
    assert words.mpps(4.19921e6) == "4.19" and words.mpps(41_990) == "0.0419"
    assert words.mpps(12.34e6) == "12.3" and words.mpps(0) == "0"
    assert words.ratio(1.66e-6) == "1.7 frames in a million" and words.ratio(0.031) == "3.1 %"
    assert words.ratio(2e-9) == "2 frames in a billion"


# -- golden ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["table.md", "table.csv", "table.json"])
def test_a_run_that_was_kept_has_the_same_tables(name: str) -> None:
    """Made by ``python -m tests.unit.zeroloss.report_runs``; a change has to be intended."""
    run = read_run(GOLDEN)
    report = report_of(run, zstack(), PublishedRelation.OTHER)
    made = {"table.md": markdown, "table.csv": csv_text, "table.json": json_text}[name](report)
    assert made == (GOLDEN / name).read_text(encoding="utf-8")


def test_a_run_of_an_earlier_version_has_a_page_and_pictures(tmp_path: Path) -> None:
    run = read_run(GOLDEN)
    for entry in run.records:
        for name in ("follow_up_log", "latency", "soak"):
            (entry.result or {}).pop(name, None)  # type: ignore[typeddict-item, misc]
        if entry.result:
            entry.result["evidence"].pop("lost_by_direction", None)
    assert "command" not in run.environment and "virtual" not in run.environment
    write(report_of(replace(run, environment={})), tmp_path)
    assert "Host unknown, started at a time that is not recorded" in (tmp_path / "report.html").read_text()


# -- documentation -----------------------------------------------------------------------------------


def test_every_column_and_file_is_documented() -> None:
    page = (ROOT / "docs/zeroloss/report.md").read_text(encoding="utf-8")
    for name in COLUMNS:
        assert f"`{name}`" in page, name
    for name, _, _ in FILES:
        assert f"`{name}`" in page, name


def test_each_mode_of_the_vnf_has_a_table() -> None:
    cells = [Cell("dpdkvhostuser", 2, vnf_mode=mode) for mode in ("mac", "noisy")]
    report = report_of(run_of([record(cell, result(device())) for cell in cells]))
    assert [grid.title.partition("1 queue, ")[2] for grid in grids(report)] == [
        "VNF in mode mac",
        "VNF in mode noisy",
    ]
    assert [row["vnf_mode"] for row in csv.DictReader(io.StringIO(csv_text(report)))] == ["mac", "noisy"]
    assert all(figure.efficiency is None for figure in report.figures)
