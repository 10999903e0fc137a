"""Checks whether two runs are comparable, and lists their differences (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from netplugin.acceptance.matrix.records import Cell, CellRecord, RunRecord

#: Differences here can change the rates without a change of the backend.
_MACHINE: Final = ("host", "machine", "kernel", "cpus")
#: Environment fields that differ between any two runs.
_OF_THE_RUN: Final = (
    *_MACHINE,
    "started",
    "command",
    "sessions",
    "run_id",
    "seed",
    "generator",
)


def _both(before: RunRecord, after: RunRecord) -> Iterator[tuple[Cell, CellRecord, CellRecord]]:
    """Yield the records of cells that both runs have."""
    for cell in before.cells:
        old, new = before.record(cell), after.record(cell)
        if old is not None and new is not None:
            yield cell, old, new


def refusals(before: RunRecord, after: RunRecord) -> Iterator[str]:
    """Yield the reasons that make the runs incomparable: no common cell, or different goals."""
    if not set(before.cells) & set(after.cells):
        yield "the runs have no cell in common"
    goals: dict[tuple[str, str], list[str]] = {}
    for cell, old, new in _both(before, after):
        if old.result is not None and new.result is not None:
            if _goal(old.result) != _goal(new.result):
                words = old.result["goal"]["in_words"], new.result["goal"]["in_words"]
                goals.setdefault(words, []).append(cell.key)
    for (one, other), keys in goals.items():
        yield f"the goals differ ({_cells(keys)}): {one}; then {other}"


def _goal(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of the goal without its name."""
    return {k: v for k, v in result["goal"].items() if k not in ("name", "in_words")}


def doubts(before: RunRecord, after: RunRecord) -> Iterator[str]:
    """Yield differences that can change the rates without a change of the backend."""
    for name in _MACHINE:
        one, other = before.environment.get(name), after.environment.get(name)
        if one != other:
            yield f"{name}: {one}, then {other}"
    seen: dict[str, list[str]] = {}
    for cell, old, new in _both(before, after):
        for text in _doubts_of(old, new):
            seen.setdefault(text, []).append(cell.key)
    for text, keys in seen.items():
        yield f"{text} ({_cells(keys)})"
    for name, run in (("old", before), ("new", after)):
        missing = [cell.key for cell in run.cells if run.record(cell) is None]
        if missing:
            yield f"the {name} run is incomplete: not measured {_cells(missing)}"


def _doubts_of(old: CellRecord, new: CellRecord) -> Iterator[str]:
    facts = _facts(old), _facts(new)
    for what in sorted(facts[0].keys() & facts[1].keys()):
        one, other = facts[0][what], facts[1][what]
        if one != other:
            yield f"{what}: {one}, then {other}"


def _facts(record: CellRecord) -> dict[str, Any]:
    """Return VNF, generator and line rate of a cell."""
    vnf = _vnf(record.setup)
    found = {f"VNF's {name}": vnf[name] for name in ("name", "version", "rx_queues") if name in vnf}
    if record.result is not None:
        found["generator"] = record.result["environment"].get("generator")
        found["line rate"] = record.result["plan"]["line_rate_pps"]
    return found


def _vnf(setup: Mapping[str, Any]) -> Mapping[str, Any]:
    found = setup.get("vnf")
    return found if isinstance(found, Mapping) else {}


def changes(before: RunRecord, after: RunRecord) -> Iterator[str]:
    """Yield the other differences, most likely those under test."""
    for name in sorted({*before.environment, *after.environment} - set(_OF_THE_RUN)):
        one, other = before.environment.get(name), after.environment.get(name)
        if one != other:
            yield f"{name}: {one}, then {other}"


def _cells(keys: Sequence[str]) -> str:
    return keys[0] if len(keys) == 1 else f"{len(keys)} cells"
