"""Ports with fewer queues than their cell: one table, with their number beside the rate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from netplugin_zeroloss.report.figures import report_of
from netplugin_zeroloss.report.table import figure_text, grids, values

from tests.unit.zeroloss.report_runs import mission


def _with_queues(queues: int, verdict: str) -> Any:
    run = mission(1)
    records = tuple(
        replace(record, setup={**record.setup, "ports": [{"spec": {"queues": queues}}] * 2})
        if record.verdict == verdict
        else record
        for record in run.records
    )
    cells = tuple(replace(cell, queues=8) for cell in run.cells)
    of = dict(zip(run.cells, cells, strict=True))
    records = tuple(replace(r, cell=of.get(r.cell, r.cell)) for r in records)
    return report_of(replace(run, cells=cells, records=records))


@pytest.mark.parametrize(
    ("verdict", "marked"), [("ndr", "4.39 (2 queues)"), ("vnf_limited", "3.99 (VNF limit, 2 queues)")]
)
def test_the_number_of_queues_is_a_mark_of_the_rate(verdict: str, marked: str) -> None:
    report = _with_queues(2, verdict)
    texts = {figure_text(figure) for figure in report.figures if figure.verdict == verdict}
    assert marked in texts and all("8 queues" in grid.title for grid in grids(report))
    assert {values(figure)["port_queues"] for figure in report.figures if figure.verdict == verdict} == {2}


def test_what_has_its_queues_or_no_rate_has_no_such_mark() -> None:
    assert not any("queue" in figure_text(f) for f in _with_queues(8, "ndr").figures)
    assert not any("queue" in figure_text(f) for f in _with_queues(2, "floor").figures)
