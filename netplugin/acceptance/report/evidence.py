"""Loss accounting of a trial: sent = received + lost at known components + unexplained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from netplugin.acceptance.evidence.witness import UNEXPLAINED
from netplugin.acceptance.matrix.records import Cell, RunRecord

#: Prefix of losses of the generator itself, which other counters of the trial include.
_GENERATOR: Final = "generator."


def located(trial: Mapping[str, Any]) -> dict[str, float]:
    """Return the lost frames of a trial log entry, by component."""
    evidence = trial["measured"]["evidence"]
    return {place: count for place, count in evidence.items() if count and place != UNEXPLAINED}


def not_located(trial: Mapping[str, Any]) -> float:
    """Return lost frames that no component counted; negative if frames were counted twice."""
    measured = trial["measured"]
    if UNEXPLAINED in measured["evidence"]:
        return float(measured["evidence"][UNEXPLAINED])
    missing = measured["tx_packets"] - measured["rx_packets"] - measured["rx_errors"]
    found = [n for place, n in located(trial).items() if not place.startswith(_GENERATOR)]
    return float(missing - sum(found))


def unexplained(run: RunRecord, cell: Cell) -> tuple[float, float]:
    """Return unexplained and excess frames over all valid trials of a cell."""
    record = run.record(cell)
    if record is None or record.result is None:
        return 0.0, 0.0
    log = record.result["trial_log"]
    left = [not_located(trial) for trial in log if trial["verdict"] != "invalid"]
    return sum(n for n in left if n > 0), -sum(n for n in left if n < 0)
