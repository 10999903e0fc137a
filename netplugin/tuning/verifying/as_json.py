"""Render a run and a comparison as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from netplugin.tuning.verifying.comparison import LEVEL, Comparison
from netplugin.tuning.verifying.histogram import PERCENTILES, Histogram
from netplugin.tuning.verifying.result import Run
from netplugin.tuning.verifying.text import verdict


def run_json(run: Run, path: Path) -> str:
    """Render the figures of a run; ``file`` names the file with all samples."""
    shown: dict[str, Any] = {
        "label": run.label,
        "started": run.started.isoformat(),
        "file": str(path),
    }
    if run.latency:
        shown["latency_us"] = {
            "settings": run.latency.settings.model_dump(),
            "overall": _figures(run.latency.overall),
            "cpus": {str(cpu): _figures(each) for cpu, each in run.latency.by_cpu().items()},
        }
    if run.throughput:
        samples = run.throughput.samples
        shown["throughput_pps"] = {
            "settings": run.throughput.settings.model_dump(),
            "median": median(samples), "min": min(samples), "max": max(samples),
            "samples": list(samples),
        }  # fmt: skip
    shown["conditions"] = dict(run.conditions)
    return json.dumps(shown, indent=2) + "\n"


def _figures(histogram: Histogram) -> Mapping[str, float | None]:
    return {
        "min": histogram.min_us,
        "average": round(histogram.average_us, 2),
        **{name: histogram.percentile(share) for name, share in PERCENTILES.items()},
        "max": histogram.max_us,
        "samples": histogram.samples,
        "overflows": histogram.overflows,
    }


def comparison_json(comparison: Comparison) -> str:
    """Render a comparison; a missing number is null, ``ratio`` is after divided by before."""
    runs = {"before": comparison.before, "after": comparison.after}
    figures = [
        {
            "name": row.figure.name, "unit": row.figure.unit,
            "before": row.before, "after": row.after,
            "samples_before": list(row.samples[0]), "samples_after": list(row.samples[1]),
            "ratio": _ratio(row.change.ratio if row.change else None),
            "ratio_low": _ratio(row.change.low if row.change else None),
            "ratio_high": _ratio(row.change.high if row.change else None),
            "p_adjusted": row.p, "finding": row.finding.value, "why": row.why or None,
        }
        for row in comparison.rows
    ]  # fmt: skip
    shown = {
        **{n: {"label": r.label, "started": r.started.isoformat()} for n, r in runs.items()},
        "verdict": verdict(comparison),
        "level": LEVEL,
        "figures": figures,
        "differences": [
            {"name": d.name, "before": d.before, "after": d.after} for d in comparison.differences
        ],
    }
    return json.dumps(shown, indent=2, allow_nan=False) + "\n"


def _ratio(less_one: float | None) -> float | None:
    return None if less_one is None or not math.isfinite(less_one) else less_one + 1
