"""The journal: what was written is read again, a torn line is dropped, one program writes at a time."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import reduce
from pathlib import Path
from random import Random
from typing import Any

import pytest
from netplugin_zeroloss.journal import (
    FILE,
    Cell,
    CellRecord,
    Journal,
    Part,
    RunRecord,
    read_past,
    read_run,
)
from netplugin_zeroloss.report.compare import compare
from netplugin_zeroloss.report.comparison_text import json_text as comparison_json
from netplugin_zeroloss.report.comparison_text import text
from netplugin_zeroloss.report.figures import report_of
from netplugin_zeroloss.report.table import csv_text, json_text, markdown
from netplugin_zeroloss.search.recorded import PastTrial
from netplugin_zeroloss.search.result import dumps
from netplugin_zeroloss.values import Direction, Measurement, TrialRequest, UnusableInput

from tests.unit.zeroloss.helpers import plan
from tests.unit.zeroloss.report_runs import device, result

_CELL = Cell("dpdkvhostuser", 2, "imix", 10, 4)
_RUN = RunRecord("run", "name: run\n", {"host": "h"}, (_CELL, Cell("linuxbridge")), ())
_ASKED = TrialRequest(1e6 / 3, 0.4, 340, 10, True, "probe", "imix")
_MEASURED = Measurement(
    133333,
    133000,
    0.1 + 0.2,
    directions=(Direction(133333, 133000),),
    evidence={"ovs.drops": 333},
    readings={"host.cpu_s": 0.25},
)
_TRIAL = PastTrial(1, _ASKED, _MEASURED, 1.5)
_ENDED = CellRecord(_CELL, Part.SEARCH, "a", "b", json.loads(dumps(result(device(), latency_s=1, soak_s=1))))


def _write(folder: Path) -> None:
    with closing(Journal(folder)) as journal:
        journal.run(_RUN)
        journal.begin(_CELL, Part.SEARCH, plan(), {"vnf": "testpmd"})
        journal.trial(_CELL, Part.SEARCH, 1, _TRIAL)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    _write(tmp_path)
    past = read_past(tmp_path)
    assert past is not None
    attempt = past.open[_CELL, Part.SEARCH]
    assert (attempt.plan, attempt.trials) == (plan(), [_TRIAL])
    with closing(Journal(tmp_path)) as journal:
        journal.session({"host": "other"})
        journal.end(_ENDED)
    run = read_run(tmp_path)
    assert run.environment["host"] == "h"
    assert [session["host"] for session in run.environment["sessions"]] == ["other"]
    assert replace(run, environment=_RUN.environment) == replace(_RUN, records=(_ENDED,))
    assert run.record(_CELL) == _ENDED and run.record(_RUN.cells[1]) is None
    again = read_past(tmp_path)
    assert again is not None and not again.open


def test_what_json_has_no_number_for_comes_back_as_what_it_is(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as journal:
        journal.run(_RUN)
        journal.begin(_CELL, Part.SEARCH, plan(), {})
        odd = replace(_MEASURED, elapsed_s=math.nan)
        journal.trial(_CELL, Part.SEARCH, 1, replace(_TRIAL, measured=odd))
    past = read_past(tmp_path)
    assert past is not None
    (trial,) = past.open[_CELL, Part.SEARCH].trials
    assert math.isnan(trial.measured.elapsed_s) and trial.measured.rx_packets == odd.rx_packets


@pytest.mark.parametrize("restart", [False, True])
def test_after_an_error_the_trials_count_unless_a_restart_is_requested(tmp_path: Path, restart: bool) -> None:
    _write(tmp_path)
    failed = CellRecord(_CELL, Part.SEARCH, "a", "b", error="the agent went")
    with closing(Journal(tmp_path)) as journal:
        journal.end(failed, restart=restart)
        journal.begin(_CELL, Part.SEARCH, plan(precision=0.1), {})
    past = read_past(tmp_path)
    assert past is not None and past.run.records == (failed,)
    attempt = past.open[_CELL, Part.SEARCH]
    assert len(attempt.trials) == (0 if restart else 1)
    assert attempt.plan == (plan(precision=0.1) if restart else plan())


def test_wherever_the_last_line_is_torn_the_rest_is_whole(tmp_path: Path) -> None:
    """Cut after every third byte of it: read as if it had not been written, and written again."""
    _write(tmp_path)
    text = (tmp_path / FILE).read_bytes()
    begin = text[:-1].rfind(b"\n") + 1
    for end in range(begin, len(text), 3):
        folder = tmp_path / str(end)
        folder.mkdir()
        (folder / FILE).write_bytes(text[:end])
        past = read_past(folder)
        assert past is not None and past.open[_CELL, Part.SEARCH].trials == []
        with closing(Journal(folder)) as journal:
            journal.trial(_CELL, Part.SEARCH, 1, _TRIAL)
        assert [json.loads(line)["entry"] for line in (folder / FILE).open()] == ["run", "begin", "trial"]


def test_a_last_line_of_zeros_is_a_torn_one(tmp_path: Path) -> None:
    """A file system may come up with the length of a line and not with its bytes."""
    _write(tmp_path)
    with (tmp_path / FILE).open("ab") as file:
        file.write(b"\0" * 40 + b"\n")
    with closing(Journal(tmp_path)) as journal:
        journal.end(_ENDED)
    assert read_run(tmp_path).records == (_ENDED,)


def test_a_first_line_that_is_torn_is_no_run(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"entry": "run", "for')
    assert read_past(tmp_path) is None
    with pytest.raises(UnusableInput, match="no run was begun"):
        read_run(tmp_path)
    with closing(Journal(tmp_path)) as journal:
        journal.run(_RUN)
    assert read_run(tmp_path).cells == _RUN.cells


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("x", "line 2: it is no JSON"),
        ("[]", "line 2: it is not of a run: it is no JSON object"),
        ('{"entry": "trial"}', "line 2: it is not of a run"),
        ('{"entry": "lunch", "cell": {"backend": "a"}, "part": "search"}', "line 2: it is not of a run"),
    ],
)
def test_a_line_in_the_middle_that_is_wrong_is_reported(tmp_path: Path, line: str, words: str) -> None:
    _write(tmp_path)
    lines = (tmp_path / FILE).read_text().splitlines()
    (tmp_path / FILE).write_text("\n".join([lines[0], line, *lines[1:], ""]))
    with pytest.raises(UnusableInput, match=words):
        read_run(tmp_path)


def test_a_journal_of_another_format_or_of_something_else(tmp_path: Path) -> None:
    _write(tmp_path)
    text = (tmp_path / FILE).read_text()
    (tmp_path / FILE).write_text(text.replace('"format": 1', '"format": 2', 1))
    with pytest.raises(UnusableInput, match="its format is 2"):
        read_run(tmp_path)
    (tmp_path / FILE).write_text('{"entry": "session"}\n{}\n')
    with pytest.raises(UnusableInput, match="line 1"):
        read_run(tmp_path)
    with pytest.raises(UnusableInput, match="no run was begun"):
        read_run(tmp_path / "none")


def test_two_programs_do_not_write_at_once(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as journal:
        with pytest.raises(UnusableInput, match="another zeroloss"):
            Journal(tmp_path)
        journal.run(_RUN)
    Journal(tmp_path).close()


def test_a_journal_of_an_earlier_version_has_fewer_fields(tmp_path: Path) -> None:
    """What it lacks is as it was then."""
    _write(tmp_path)
    path = tmp_path / FILE
    added = ("vnf_mode", "burst", "numa", "latency", "readings", "latency_s", "soak_s", "measures_latency")
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    for entry in entries:
        for part in (entry.get("cell"), entry.get("request"), entry.get("plan"), *entry.get("cells", ())):
            for name in added if part else ():
                part.pop(name, None)
    assert "burst" not in json.dumps(entries)
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    past = read_past(tmp_path)
    assert past is not None and past.run.cells == _RUN.cells
    attempt = past.open[_CELL, Part.SEARCH]
    assert (attempt.plan, attempt.trials) == (plan(), [_TRIAL])


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UnusableInput, match="file"):
        Journal(tmp_path / "file")


#: Values of every type, and numbers without bounds.
_ODD = (None, "x", -1, 0, 1 << 63, 10**400, 1e99, math.nan, [], [1], {}, {"a": []}, True)


def _places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the paths of all values; of a list those of its first entry."""
    if path:
        yield path
    items = (
        value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    )
    for name, each in items:
        yield from _places(each, (*path, name))


def test_a_value_of_another_type_or_size_is_named_or_reported(tmp_path: Path) -> None:
    """Each value of a journal, one after the other, is replaced by an odd one, or left out."""
    _write(tmp_path)
    with closing(Journal(tmp_path)) as journal:
        journal.session({"host": "other"})
        journal.end(_ENDED)
    path = tmp_path / FILE
    lines = path.read_text().splitlines()
    before, refused, random = read_run(tmp_path), 0, Random(1)
    for number, line in enumerate(lines, 1):
        for place in random.sample(places := list(_places(json.loads(line))), min(12, len(places))):
            entry = json.loads(line)
            *above, last = place
            holder = reduce(lambda value, name: value[name], above, entry)
            odd = random.choice((*_ODD, "left out"))
            if odd == "left out":
                del holder[last]
            else:
                holder[last] = odd
            path.write_text("\n".join([*lines[: number - 1], json.dumps(entry), *lines[number:], ""]))
            try:
                _report(before, read_run(tmp_path))
            except UnusableInput as error:
                where = rf"{path}(, line {number}: it is not of a run: \S+|: its format is|, line \d)"
                assert re.match(where, str(error)) and "\n" not in str(error), (place, odd)
                refused += 1
    assert refused > 20


def _report(before: RunRecord, run: RunRecord) -> None:
    report = report_of(run)
    assert markdown(report) and csv_text(report) and json_text(report)
    for found in (compare(before, run), compare(run, before)):
        assert text(found) and comparison_json(found)
