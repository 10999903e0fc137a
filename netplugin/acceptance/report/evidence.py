"""Whether the frames of a trial add up: sent = received + lost at known places + unexplained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from netplugin.acceptance.evidence.witness import UNEXPLAINED
from netplugin.acceptance.matrix.records import Cell, RunRecord

#: So begins what the generator lost itself: it is in other counts of the trial already.
_GENERATOR: Final = "generator."


def located(trial: Mapping[str, Any]) -> dict[str, float]:
    """Frames of an entry of the trial log that a place has counted as lost, by place."""
    evidence = trial["measured"]["evidence"]
    return {place: count for place, count in evidence.items() if count and place != UNEXPLAINED}


def not_located(trial: Mapping[str, Any]) -> float:
    """Frames that did not come back and that no place counted; below 0: counted more than once."""
    measured = trial["measured"]
    if UNEXPLAINED in measured["evidence"]:
        return float(measured["evidence"][UNEXPLAINED])
    missing = measured["tx_packets"] - measured["rx_packets"] - measured["rx_errors"]
    found = [n for place, n in located(trial).items() if not place.startswith(_GENERATOR)]
    return float(missing - sum(found))


def unexplained(run: RunRecord, cell: Cell) -> tuple[float, float]:
    """Over all valid trials of a cell: frames that no place counted, and those counted too much."""
    record = run.record(cell)
    if record is None or record.result is None:
        return 0.0, 0.0
    log = record.result["trial_log"]
    left = [not_located(trial) for trial in log if trial["verdict"] != "invalid"]
    return sum(n for n in left if n > 0), -sum(n for n in left if n < 0)
