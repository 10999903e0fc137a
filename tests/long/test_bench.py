"""The benchmark itself, in its smallest form: each workload measures what its tables are made of."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench import __main__ as bench
from tests.bench import names
from tests.bench.goals import goals
from tests.bench.values import read

pytestmark = pytest.mark.long


def test_the_smallest_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert bench.main(["--form", "smoke", "--folder", str(tmp_path)]) == 0
    *_, kept = sorted(tmp_path.glob("*.json"))
    run = read(kept)
    assert {series.workload for series in run.series} == set(names.ALL)
    assert all(series.samples for series in run.series)
    assert run.machine.open_vswitch[0].isdigit() and run.machine.dpdk.startswith("DPDK")
    for suffix in (".md", ".svg"):
        assert kept.with_suffix(suffix).stat().st_size > 0
    assert all(goal.text in kept.with_suffix(".md").read_text() for goal in goals())
    capsys.readouterr()
    assert bench.main(["--show", str(kept), "--folder", str(tmp_path), "--compare"]) == 0
    assert "| figure | old | new |" in capsys.readouterr().out
