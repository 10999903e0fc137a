"""The journal of a run, and how it is read: one JSON object a line, only ever appended to.

The first line is the run, the others what happened, in order:

    {"entry": "run", "format": 1, "name", "started", "description", "environment", "cells": [..]}
    {"entry": "session", "started", "environment"}             it was resumed
    {"entry": "begin", "cell", "part", "at", "plan", "setup"}  the device is set up, the search begins
    {"entry": "trial", "cell", "part", "repeat", "number", "at", "wall_s", "request", "measured"}
    {"entry": "end", "cell", "part", "started", "ended", "result", "error", "setup", "anew"}

``cell`` is a cell's fields, ``result`` what ``search --json`` writes. A part that ended with an error
is gone on with when the run is resumed; with ``anew`` its trials do not count any more. A line that
was torn by a crash can only be the last one: it was never acknowledged, and is dropped.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from netplugin.acceptance import result as results
from netplugin.acceptance.errors import UnusableInput
from netplugin.acceptance.matrix.records import Cell, CellRecord, Part, RunRecord
from netplugin.acceptance.trials import SearchPlan
from netplugin.acceptance.values import Measurement, TrialRequest

FILE = "journal.jsonl"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class PastTrial:
    """One trial as it ended. ``wall_s`` is the real time since the one before, or since the set-up."""

    repeat: int
    request: TrialRequest
    measured: Measurement
    wall_s: float


@dataclass(slots=True)
class Attempt:
    """A part of a cell that was begun and has not ended: what a resumed run goes on with."""

    started: str
    plan: SearchPlan
    trials: list[PastTrial] = field(default_factory=list)


@dataclass(slots=True)
class Past:
    """All that a journal says: the run as reports read it, and what is still open."""

    run: RunRecord
    open: dict[tuple[Cell, Part], Attempt] = field(default_factory=dict)


def read_run(folder: Path) -> RunRecord:
    """A run as its folder has it; it may still be going on. Raises: UnusableInput."""
    past = read_past(folder)
    if past is None:
        raise UnusableInput(str(folder), "no run was begun in it")
    return past.run


def read_past(folder: Path) -> Past | None:
    """Everything in the folder's journal; None if there is none, or no whole line in it.

    Raises: UnusableInput if it is no journal of this format.
    """
    path = folder / FILE
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnusableInput(str(path), f"it cannot be read: {error.strerror}") from error
    past: Past | None = None
    records: list[CellRecord] = []
    sessions: list[dict[str, Any]] = []
    for number, entry in _entries(path, text):
        try:
            if past is None:
                past = _begun(path, entry)
            else:
                _take(past, entry, records, sessions)
        except (KeyError, TypeError, ValueError) as error:
            raise UnusableInput(
                f"{path}, line {number}", f"it is not of a run: {error!r}"
            ) from error
    if past is not None:
        environment = {**past.run.environment, "sessions": sessions}
        past.run = dataclasses.replace(past.run, environment=environment, records=tuple(records))
    return past


def _entries(path: Path, text: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    """Whole lines with their numbers, from 1."""
    whole = text[: text.rfind(b"\n") + 1].splitlines()
    for number, line in enumerate(whole, 1):
        try:
            entry = json.loads(line)
        except ValueError as error:
            if number == len(whole):
                return  # written, but not in full: the machine went down
            raise UnusableInput(f"{path}, line {number}", "it is no JSON") from error
        if not isinstance(entry, dict):
            raise UnusableInput(f"{path}, line {number}", "it is no JSON object")
        yield number, entry


def _begun(path: Path, entry: Mapping[str, Any]) -> Past:
    if entry["entry"] != "run":
        raise ValueError(entry["entry"])
    if entry["format"] != FORMAT:
        raise UnusableInput(
            str(path), f"its format is {entry['format']}, this program reads {FORMAT}"
        )
    cells = tuple(Cell(**cell) for cell in entry["cells"])
    return Past(RunRecord(entry["name"], entry["description"], entry["environment"], cells, ()))


def _take(
    past: Past,
    entry: Mapping[str, Any],
    records: list[CellRecord],
    sessions: list[dict[str, Any]],
) -> None:
    kind = entry["entry"]
    if kind == "session":
        sessions.append({"started": entry["started"], **entry["environment"]})
        return
    where = Cell(**entry["cell"]), Part(entry["part"])
    if kind == "begin":
        # Set up again, it goes on with the plan that it had.
        past.open.setdefault(where, Attempt(entry["at"], results.read_plan(entry["plan"])))
    elif kind == "trial":
        past.open[where].trials.append(
            PastTrial(
                entry["repeat"], results.read_request(entry["request"]),
                results.read_measurement(entry["measured"]), entry["wall_s"],
            )
        )  # fmt: skip
    elif kind == "end":
        if entry["result"] is not None or entry["anew"]:
            past.open.pop(where, None)
        records.append(
            CellRecord(
                *where, entry["started"], entry["ended"], entry["result"], entry["error"],
                entry["setup"],
            )
        )  # fmt: skip
    else:
        raise ValueError(kind)
