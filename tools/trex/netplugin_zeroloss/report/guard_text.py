"""Formats what ``guard`` found as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from netplugin_zeroloss.journal import CellRecord
from netplugin_zeroloss.report import words
from netplugin_zeroloss.report.figures import ReportFigure
from netplugin_zeroloss.report.table import short_text
from netplugin_zeroloss.search.guard import LEVEL, MISSED, GuardFound, GuardVerdict
from netplugin_zeroloss.search.result import ResultSpread, dumps, spread

FORMAT: Final = 1
#: Exit status of a run with such a cell; the first that is there counts.
_STATUS: Final = {
    GuardVerdict.WORSE: 1,
    GuardVerdict.FAILED: 2,
    GuardVerdict.UNDECIDED: 3,
    GuardVerdict.NOT_WORSE: 0,
}


@dataclass(frozen=True, slots=True)
class GuardedCell:
    """A cell with the search of A, and what was found."""

    record: CellRecord
    found: GuardFound

    @property
    def ratio(self) -> ResultSpread | None:
        """The loads that lose a short trial, B's to A's, over the rounds."""
        return spread([each.ratio for each in self.found.rounds])

    @property
    def limited(self) -> str:
        """Whether the highest load hides what B can do (``at least`` this ratio), or A; else empty."""
        rounds = self.found.rounds
        if any(each.b.at_top for each in rounds):
            return "at least"
        return "at most" if any(each.a.at_top for each in rounds) else ""


def status(cells: Sequence[GuardedCell]) -> int:
    """Return the exit status."""
    verdicts = {cell.found.verdict for cell in cells}
    return next(status for verdict, status in _STATUS.items() if verdict in verdicts)


def text(cells: Sequence[GuardedCell]) -> str:
    return "".join(f"{line}\n" for line in _lines(cells))


def _lines(cells: Sequence[GuardedCell]) -> Iterator[str]:
    ordered = sorted(cells, key=lambda cell: list(_STATUS).index(cell.found.verdict))
    yield f"{ordered[0].found.verdict}: {words.count(len(cells), 'cell')}"
    for cell in ordered:
        a = ReportFigure(cell.record.cell, cell.record)
        rate = "" if a.number is None else f"  A: {short_text(a)} Mpps"
        yield f"  {cell.found.verdict:10} {a.cell.key}{rate}{_ratio(cell)}"
        yield f"  {'':10} {cell.found.reason}"
    yield (
        f"At most {words.percent(LEVEL)} of such runs call a cell worse that is not, and"
        f" {words.percent(MISSED)} call one not worse that is."
    )


def _ratio(cell: GuardedCell) -> str:
    found = cell.ratio
    if found is None:
        return ""
    low, high = (words.percent(end, 1) for end in found.interval_pps)
    text, why = words.percent(found.median_pps, 1), f"{low} to {high}"
    if cell.limited:
        text, why = f"{cell.limited} {low if cell.limited == 'at least' else high}", "the highest load"
    return f"  B / A at once: {text} ({why}, {words.percent(found.confidence)} confidence)"


def json_text(cells: Sequence[GuardedCell]) -> str:
    whole = {
        "format": FORMAT,
        "status": status(cells),
        "level": LEVEL,
        "missed": MISSED,
        "cells": [_cell(cell) for cell in cells],
    }
    return dumps(whole)


def _cell(cell: GuardedCell) -> dict[str, Any]:
    ratio = cell.ratio
    return {
        "key": cell.record.cell.key,
        "verdict": cell.found.verdict.value,
        "reason": cell.found.reason,
        "zero_loss_pps": cell.record.zero_loss_pps,
        "ratio": ratio
        and {
            **{"median": ratio.median_pps, "interval": ratio.interval_pps},
            **{"confidence": ratio.confidence, "limited": cell.limited or None},
        },
        "claims": [asdict(claim) | {"shown": claim.shown} for claim in cell.found.claims],
        "rounds": [asdict(each) | {"ratio": each.ratio} for each in cell.found.rounds],
        "traffic_s": cell.found.traffic_s,
    }
