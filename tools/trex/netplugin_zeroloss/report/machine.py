"""Machine-readable figures of a run: CSV with one row per cell, and JSON.

New columns and fields are appended; none is renamed. Rates are pps of both directions together. A
missing value is empty (CSV) or null (JSON).
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Callable
from typing import Any, Final

from netplugin_zeroloss.report.figures import Report, ReportFigure

FORMAT: Final = 1

_Value = str | float | int | None

#: Column name and value.
COLUMNS: Final[tuple[tuple[str, Callable[[ReportFigure], _Value]], ...]] = (
    ("backend", lambda f: f.cell.backend),
    ("pmd_cores", lambda f: f.cell.pmd_cores),
    ("frame", lambda f: f.cell.frame),
    ("flows", lambda f: f.cell.flows),
    ("queues", lambda f: f.cell.queues),
    ("verdict", lambda f: f.verdict),
    ("zero_loss_pps", lambda f: f.rate_pps),
    ("at_least_pps", lambda f: f.at_least_pps),
    ("lower_pps", lambda f: f.bounds_pps[0] if f.bounds_pps else None),
    ("upper_pps", lambda f: f.bounds_pps[1] if f.bounds_pps else None),
    ("goal", lambda f: f.goal.words if f.goal else None),
    ("repeats", lambda f: f.repeats),
    ("median_pps", lambda f: f.interval.median_pps if f.interval else None),
    ("interval_low_pps", lambda f: f.interval.low_pps if f.interval else None),
    ("interval_high_pps", lambda f: f.interval.high_pps if f.interval else None),
    ("interval_confidence", lambda f: f.interval.confidence if f.interval else None),
    ("pps_per_pmd_core", lambda f: f.rate_per_core_pps),
    ("scaling_efficiency", lambda f: f.efficiency),
    ("cpu_pmd", lambda f: f.cpu.pmd if f.cpu else None),
    ("cpu_pmd_busy_share", lambda f: f.cpu.pmd_busy if f.cpu else None),
    ("cycles_per_packet", lambda f: f.cpu.cycles_per_packet if f.cpu else None),
    ("cpu_softirq", lambda f: f.cpu.softirq if f.cpu else None),
    ("cpu_softirq_busiest_share", lambda f: f.cpu.softirq_busiest if f.cpu else None),
    ("cpu_system", lambda f: f.cpu.system if f.cpu else None),
    ("floor_loss_ratio", lambda f: f.floor_ratio),
    ("floor_place", lambda f: f.floor_place),
    ("loopback_pps", lambda f: f.loopback.rate_pps if f.loopback else None),
    ("vnf_alone_pps", lambda f: f.vnf.rate_pps if f.vnf else None),
    ("published_pps", lambda f: f.published_pps),
    ("trials", lambda f: f.trials),
    ("invalid_trials", lambda f: f.invalid_trials),
    ("traffic_s", lambda f: f.traffic_s),
    ("started", lambda f: f.started),
    ("reason", lambda f: f.reason),
)


def csv_text(report: Report) -> str:
    """Return CSV with a header. Text that a spreadsheet would evaluate is prefixed with ``'``."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([name for name, _ in COLUMNS])
    writer.writerows([_safe(value(figure)) for _, value in COLUMNS] for figure in report.figures)
    return buffer.getvalue()


def _safe(value: _Value) -> _Value:
    return f"'{value}" if isinstance(value, str) and value[:1] in tuple("=+-@\t\r") else value


def json_text(report: Report) -> str:
    """Return JSON: ``cells`` has the CSV columns, ``others`` the additional goals."""
    cells: list[dict[str, Any]] = [
        {
            "key": figure.cell.key,
            **{name: value(figure) for name, value in COLUMNS},
            "verdicts": dict(figure.verdicts),
            "others": [dataclasses.asdict(goal) for goal in figure.others],
        }
        for figure in report.figures
    ]
    whole = {
        "format": FORMAT,
        "run": report.run,
        "complete": not report.missing,
        "goals": list(report.goals),
        "published": (
            {
                "name": report.published.name,
                "source": report.published.source,
                "beside": report.beside.value,
                "conditions": dict(report.published.conditions),
            }
            if report.published
            else None
        ),
        "cells": cells,
    }
    return json.dumps(whole, indent=1, allow_nan=False) + "\n"
