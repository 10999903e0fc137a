"""Carries out ``guard``: the matrix of A once, and then cell by cell visits to A and B in turn.

The folder has the runs of both, ``a`` and ``b``. The journal of each has the trials of its visits, with the
number of the visit as their ``repeat``. A visit that was interrupted is made again when the run is resumed.
"""

from __future__ import annotations

import io
import math
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter

from netplugin.programs import bounded
from netplugin_zeroloss.journal import Cell, CellRecord, JournalError, Part
from netplugin_zeroloss.judge import Verdict
from netplugin_zeroloss.matrix import cells, session
from netplugin_zeroloss.matrix.bench import BareBench, Bench
from netplugin_zeroloss.matrix.carry_out import OF_A_CELL
from netplugin_zeroloss.matrix.cells import CellTask
from netplugin_zeroloss.matrix.description import RunDescription, differences
from netplugin_zeroloss.matrix.session import Begun, RunOptions
from netplugin_zeroloss.report.guard_text import GuardedCell
from netplugin_zeroloss.report.words import mpps
from netplugin_zeroloss.search.guard import (
    AT_ONCE,
    GuardFound,
    GuardPlan,
    GuardVerdict,
    Scores,
    Visit,
    Visited,
    guard,
)
from netplugin_zeroloss.search.recorded import PastTrial, Plan, ResultEntry
from netplugin_zeroloss.search.search import replayed, run_repeat
from netplugin_zeroloss.search.trials import FAILURES, NotForwarding, SearchPlan, SearchVerdict
from netplugin_zeroloss.values import ReplayError, UnusableInput

_PLAN: TypeAdapter[SearchPlan] = TypeAdapter(Plan)
#: More than the visits of a run: each has random numbers of its own in a simulation.
_VISITS: Final = 10_000
#: Called with a line of progress.
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class GuardOptions:
    """Parsed command line. ``traffic_s``: of a cell, with that of its search."""

    a: Path
    b: Path
    folder: Path
    traffic_s: float
    resume: bool = False
    quiet: bool = False
    command: tuple[str, ...] = ()

    def side(self, name: str, resume: bool) -> RunOptions:
        path = self.a if name == "a" else self.b
        return RunOptions(path, self.folder / name, resume, self.quiet, self.command)


def carry_out(asked: GuardOptions, say: Say) -> tuple[GuardedCell, ...]:
    """Measure until each cell is decided. After KeyboardInterrupt it can be resumed.

    Raises: UnusableInput, GeneratorError before any traffic.
    """
    a, b = (session.read_file(path)[0] for path in (asked.a, asked.b))
    _check_alike(a, b)
    with ExitStack() as stack:
        begun_b = _begun(stack, asked.side("b", asked.resume), say)
        session.carry_out(asked.side("a", asked.resume), io.StringIO())
        begun_a = _begun(stack, asked.side("a", resume=True), say)
        compared = cells.cells(a)
        return tuple(
            _Guarded(asked, cell, len(compared), (begun_a, begun_b), say).carry_out() for cell in compared
        )


def _check_alike(a: RunDescription, b: RunDescription) -> None:
    """Raises: UnusableInput if the descriptions have other cells, or search in another way."""
    mine, other = cells.cells(a), cells.cells(b)
    for name, more, less in (("A", mine, other), ("B", other, mine)):
        if only := [cell.key for cell in more if cell not in less]:
            raise UnusableInput("cells", f"only in {name}: {'; '.join(only)}")
    if not mine:
        raise UnusableInput("cells", "exclude leaves none")
    searches = [line for line in differences(a, b) if line.startswith("search.")]
    if searches:
        raise UnusableInput("B", "it searches in another way than A:\n" + "\n".join(searches))


def _begun(stack: ExitStack, options: RunOptions, say: Say) -> Begun:
    run = stack.enter_context(session.begun(options))

    def restore() -> None:
        for text in run.bench.restore():
            say(f"warning: {text}")

    stack.callback(restore)
    return run


class _Guarded:
    """One cell in both runs."""

    def __init__(
        self, asked: GuardOptions, cell: Cell, of: int, sides: tuple[Begun, Begun], say: Say
    ) -> None:
        self._asked, self._of, self._sides, self._say = asked, of, sides, say
        self._task = CellTask(cell, Part.SEARCH)
        opened = [side.past.open.get((cell, Part.SEARCH)) for side in sides]
        #: The trials of the past visits of each side, and the number of its visits.
        self._past = [
            deque(list(each) for _, each in groupby(part.trials if part else (), attrgetter("repeat")))
            for part in opened
        ]
        self._visits = [len(visits) for visits in self._past]

    def carry_out(self) -> GuardedCell:
        self._say(str(self._task))
        record = self._sides[0].past.run.record(self._task.cell)
        assert record is not None
        found = self._found(record)
        self._say(f"  {found.verdict}: {found.reason}")
        return GuardedCell(record, found)

    def _found(self, record: CellRecord) -> GuardFound:
        result = record.result
        if result is None or record.verdict in FAILURES:
            why = record.error if result is None else result["reason"]
            return GuardFound(GuardVerdict.FAILED, f"the search of A: {why}")
        if record.verdict == SearchVerdict.GENERATOR_LIMITED and not result["bounds_pps"][0]:
            return GuardFound(GuardVerdict.FAILED, f"the search of A: {result['reason']}")
        passed = [trial["rate_pps"] for trial in result["trial_log"] if trial["verdict"] is Verdict.PASSED]
        if not passed:
            return GuardFound(GuardVerdict.FAILED, "A loses frames in each trial")
        asked = self._plan(result, max(passed))
        asking = guard(asked)
        try:
            visit = next(asking)
            while True:
                visit = asking.send(self._replayed(visit) or self._live(visit, asked.plan))
        except StopIteration as end:
            found: GuardFound = end.value
            return found

    def _plan(self, result: ResultEntry, begin_pps: float) -> GuardPlan:
        plan, rate = bounded.validated(result["plan"], _PLAN), result["zero_loss_pps"]
        if result["verdict"] == SearchVerdict.GENERATOR_LIMITED:
            # What the generator could show of A is what is compared.
            rate = result["bounds_pps"][0]
            plan = replace(plan, generator_max_pps=rate)
        seed = f"{self._sides[0].description.seed}/{self._task.cell.key}"
        traffic_s = self._asked.traffic_s - result["traffic_s"]
        return GuardPlan(plan, rate, begin_pps, seed, traffic_s, self._of)

    def _replayed(self, visit: Visit) -> Visited | None:
        """Return what a past visit found; None if none is left. Interrupted ones are left out."""
        past = self._past[visit.is_b]
        while past:
            trials = past.popleft()
            traffic_s = sum(each.measured.elapsed_s for each in trials)
            try:
                scores = replayed(visit.trials(), [(each.request, each.measured) for each in trials])
            except ReplayError:
                continue
            except NotForwarding as error:
                return Visited(None, traffic_s, error.outcome.reason)
            return Visited(scores, traffic_s)
        return None

    def _live(self, visit: Visit, plan: SearchPlan) -> Visited:
        """Set up the device, and run the trials."""
        run, task, repeat = self._sides[visit.is_b], self._task, self._visits[visit.is_b]
        self._visits[visit.is_b] += 1
        traffic: list[float] = []

        def note(number: int, trial: PastTrial) -> None:
            traffic.append(trial.measured.elapsed_s)
            run.journal.trial(task.cell, task.part, number, trial)

        scores, why = None, "the generator did not do what was asked"
        try:
            with _bench(run, visit).stand(task) as stand:
                run.journal.begin(task.cell, task.part, plan, stand.setup)
                scores = run_repeat(visit.trials(), stand.generator, repeat, note)
        except JournalError:
            raise
        except NotForwarding as error:
            why = error.outcome.reason
        except OF_A_CELL as error:
            why = str(error) or type(error).__name__
        self._say(f"  round {visit.round}, {'B' if visit.is_b else 'A'}: {_in_words(scores, visit, why)}")
        return Visited(scores, sum(traffic), why)


def _bench(run: Begun, visit: Visit) -> Bench:
    """Return the bench of a side. In a simulation each visit has its own chance, as on a host."""
    if run.description.agent is not None:
        return run.bench
    seed = run.description.seed * _VISITS + visit.number
    return BareBench(run.description.model_copy(update={"seed": seed}))


def _in_words(scores: Scores | None, visit: Visit, why: str) -> str:
    if scores is None:
        return f"no result: {why}"
    if scores.floor:
        return scores.floor
    load = scores.at_once_pps * (AT_ONCE if visit.is_b else 1)
    later = "" if math.isinf(scores.lost_after_s) else f", a longer one after {scores.lost_after_s:.2f} s"
    lost = "no short trial up to" if scores.at_top else "a short trial at"
    return f"loses {lost} {mpps(load, 4)} Mpps{later}"
