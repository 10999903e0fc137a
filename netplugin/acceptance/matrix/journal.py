"""The journal of a run and its reader: one JSON object per line, append-only.

The first line describes the run, the others are events in order:

    {"entry": "run", "format": 1, "name", "started", "description", "environment", "cells": [..]}
    {"entry": "session", "started", "environment"}             the run was resumed
    {"entry": "begin", "cell", "part", "at", "plan", "setup"}  the device is set up, the search begins
    {"entry": "trial", "cell", "part", "repeat", "number", "at", "wall_s", "request", "measured"}
    {"entry": "end", "cell", "part", "started", "ended", "result", "error", "setup", "anew"}

``cell`` has the fields of a cell, ``result`` the output of ``search --json``. A part that ended with an
error continues when the run is resumed; with ``anew`` it starts over and its trials are discarded. Only
the last line can be incomplete after a crash; it was not acknowledged and is dropped.
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
    """One finished trial. ``wall_s``: real seconds since the previous trial or the setup."""

    repeat: int
    request: TrialRequest
    measured: Measurement
    wall_s: float


@dataclass(slots=True)
class Attempt:
    """A started and unfinished part of a cell, which a resumed run continues."""

    started: str
    plan: SearchPlan
    trials: list[PastTrial] = field(default_factory=list)


@dataclass(slots=True)
class Past:
    """The content of a journal: the run as reports read it, and the unfinished parts."""

    run: RunRecord
    open: dict[tuple[Cell, Part], Attempt] = field(default_factory=dict)


def read_run(folder: Path) -> RunRecord:
    """Read a run from its folder; it may still be running. Raises: UnusableInput."""
    past = read_past(folder)
    if past is None:
        raise UnusableInput(str(folder), "no run was begun in it")
    return past.run


def read_past(folder: Path) -> Past | None:
    """Read the journal of a folder; None if there is none, or no complete line in it.

    Raises: UnusableInput if it is not a journal of this format.
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
    """Yield complete lines with their numbers, from 1."""
    whole = text[: text.rfind(b"\n") + 1].splitlines()
    for number, line in enumerate(whole, 1):
        try:
            entry = json.loads(line)
        except ValueError as error:
            if number == len(whole):
                return  # incomplete write: the machine crashed
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
        # A repeated setup keeps the plan of the first.
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
