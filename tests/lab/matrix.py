"""Runs of ``netplugin-zeroloss matrix`` on real parts: how they start, and what must hold of their trials."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from netplugin_zeroloss.journal import CellRecord
from netplugin_zeroloss.judge import judge
from netplugin_zeroloss.search.result import dumps, load, result_of
from netplugin_zeroloss.search.search import replayed, search

ROOT = Path(__file__).resolve().parents[2]
#: Of a search with so few trials on a machine that may be busy.
VERDICTS = {"ndr", "floor", "generator_limited", "failed"}


def zeroloss(*arguments: str | Path, command: str = "matrix") -> list[str]:
    program = ROOT / "tools/trex/zeroloss.py"
    return [sys.executable, "-W", "ignore", str(program), command, *map(str, arguments)]


def write(folder: Path, description: Mapping[str, Any]) -> Path:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(dict(description)))
    return path


def entries(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The whole entries of a kind in a run's journal, which may be being written."""
    path = folder / "journal.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    whole = [json.loads(line) for line in lines if line.endswith("\n")]
    return [entry for entry in whole if entry["entry"] == kind]


def check_trials(record: CellRecord, directions: int = 2) -> None:
    """Each trial's sum closes to the frame, and what it is follows from what was measured."""
    result = record.result
    assert result is not None, record.error
    assert record.verdict in VERDICTS
    assert result["trials"] == len(result["trial_log"]) > 0
    plan, repeats, _, _ = load(dumps(result), "result")
    whole = [trial for trials in repeats for trial in trials]
    for (asked, measured), entry in zip(whole, result["trial_log"], strict=True):
        located = sum(measured.evidence.values())
        assert "unexplained" in measured.evidence
        assert measured.tx_packets == measured.rx_packets + located, entry
        assert len(measured.directions) == directions
        judged = judge(asked, measured, plan.headline.relative_width)
        if entry["cause"] == "control":  # set aside, whatever it showed
            assert entry["reason"] == f"it bounds nothing: {judged.reason}"
        else:
            assert (judged.verdict, judged.reason) == (entry["verdict"], entry["reason"])
    invalid = [entry for entry in result["trial_log"] if entry["verdict"] == "invalid"]
    assert len(invalid) == result["invalid_trials"] and all(entry["cause"] for entry in invalid)
    again = result_of(plan, [replayed(search(plan), trials) for trials in repeats], {})
    assert (again["verdict"], again["zero_loss_pps"]) == (record.verdict, record.zero_loss_pps)
