"""Formats a comparison as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Final

from netplugin.statistics import RelativeChange
from netplugin_zeroloss.report import words
from netplugin_zeroloss.report.compare import CellComparison, CellVerdict, Comparison
from netplugin_zeroloss.report.figures import Answers
from netplugin_zeroloss.search.result import dumps

FORMAT: Final = 1
_VERDICTS: Final = ("no regression", "regression", "unusable")
#: Worst first.
_ORDER: Final = (
    CellVerdict.REGRESSION,
    CellVerdict.UNDECIDED,
    CellVerdict.FASTER,
    CellVerdict.SAME,
    CellVerdict.NO_BASELINE,
)


def text(comparison: Comparison) -> str:
    """Format as text: the verdict, the reasons, then cell by cell."""
    return "".join(f"{line}\n" for line in _lines(comparison))


def _lines(comparison: Comparison) -> Iterator[str]:
    yield f"{_VERDICTS[comparison.status]}: {_counts(comparison)}"
    for refusal in comparison.refusals:
        yield f"cannot be compared: {refusal}"
    if comparison.refusals:
        return
    for cell in sorted(comparison.cells, key=lambda c: _ORDER.index(c.finding)):
        rates = f"{_rate(cell.before)} -> {_rate(cell.after)}"
        change = f"  {change_text(cell.change)}" if cell.change else ""
        yield f"  {cell.finding.value:14} {cell.cell.key}  {rates}{change}"
        yield f"  {'':14} {cell.why}"
    yield from _method(comparison)
    for doubt in comparison.doubts:
        yield f"doubtful: {doubt}"
    for change in comparison.changes:
        yield f"changed: {change}"


def _counts(comparison: Comparison) -> str:
    counts = {f: sum(1 for c in comparison.cells if c.finding is f) for f in _ORDER}
    found = ", ".join(f"{count} {finding.value}" for finding, count in counts.items() if count)
    return f"{words.count(len(comparison.cells), 'cell')}: {found}"


def _method(comparison: Comparison) -> Iterator[str]:
    limits = comparison.limits
    tested = sum(1 for cell in comparison.cells if cell.p is not None)
    judged = [c for c in comparison.cells if c.p is None and c.why.startswith("bounds only")]
    if tested:
        yield (
            f"{words.count(tested, 'cell')} tested (rank sum, exact; p adjusted by Holm): at most"
            f" {words.percent(limits.level)} for any false alarm among them, if repeats vary as"
            " runs do."
        )
    if judged:
        yield (
            f"{words.count(len(judged), 'cell')} with too few repeats for a test: bounds were"
            " compared, and nothing is known of false alarms."
        )


def _rate(answers: Answers | None) -> str:
    if answers is None:
        return "not measured"
    if answers.rate is not None:
        return words.rate(answers.rate, answers.width)
    if answers.has_bounds:
        return f">= {words.rate(answers.lower, answers.width)}"
    return answers.verdict


def change_text(change: RelativeChange) -> str:
    """Format a change: ``-4.8 % (-5.5 % to -4.1 %, 95 % confidence)``."""
    low, high = (f"{100 * value:+.1f} %" for value in (change.low, change.high))
    sure = f", {words.percent(change.confidence)} confidence" if change.confidence else ", bounds"
    return f"{100 * change.ratio:+.1f} % ({low} to {high}{sure})"


def json_text(comparison: Comparison) -> str:
    """Format as JSON; a field without a value is null."""
    whole = {
        "format": FORMAT,
        "verdict": _VERDICTS[comparison.status],
        "status": comparison.status,
        "old": comparison.before,
        "new": comparison.after,
        **asdict(comparison.limits),
        "refusals": comparison.refusals,
        "doubts": comparison.doubts,
        "changes": comparison.changes,
        "cells": [_cell(cell) for cell in comparison.cells],
    }
    return dumps(whole)


def _cell(cell: CellComparison) -> dict[str, Any]:
    return {
        "key": cell.cell.key,
        "finding": cell.finding.value,
        "why": cell.why,
        "old": _side(cell.before),
        "new": _side(cell.after),
        "change": asdict(cell.change) if cell.change else None,
        "p_adjusted": cell.p,
        "tested": cell.tested,
    }


def _side(answers: Answers | None) -> dict[str, Any] | None:
    if answers is None:
        return None
    return {
        "verdict": answers.verdict,
        "zero_loss_pps": answers.rate,
        "answers_pps": answers.rates,
        "bounds_pps": [answers.lower, answers.upper],
        "sharp": answers.sharp,
    }
