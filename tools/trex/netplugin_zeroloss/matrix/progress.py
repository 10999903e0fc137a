"""Progress of a run: a bar on a terminal, otherwise plain lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from netplugin.host.processes import printable
from netplugin_zeroloss.asked import trial_line
from netplugin_zeroloss.journal import CellRecord
from netplugin_zeroloss.matrix.cells import CellTask, TimeEstimate
from netplugin_zeroloss.report import words
from netplugin_zeroloss.search.recorded import PastTrial
from netplugin_zeroloss.search.trials import SearchPlan

#: Refreshed between trials, so that the remaining time counts down.
_REFRESHES_PER_S = 2


@contextmanager
def view(estimate: TimeEstimate, quiet: bool, output: TextIO | None = None) -> Iterator[Lines]:
    """Yield the view for standard error or another output, for the block; restores a terminal on exit."""
    output = output or sys.stderr
    if quiet or not output.isatty():
        yield Lines(estimate, output, quiet)
        return
    console = Console(file=output)
    with Live(bar := _Bar(estimate, output, console), console=console, refresh_per_second=_REFRESHES_PER_S):
        yield bar


class Lines:
    """Prints a line per event, with the remaining time; if it is quiet, warnings only."""

    def __init__(self, estimate: TimeEstimate, output: TextIO, quiet: bool = False) -> None:
        self._estimate, self._output, self._quiet = estimate, output, quiet
        self._task: CellTask | None = None
        self._since = 0.0

    def begins(self, task: CellTask) -> None:
        """Note that a task is set up now."""
        self._task, self._since = task, time.monotonic()
        number = self._estimate.tasks.index(task) + 1
        self._say(f"[{number}/{len(self._estimate.tasks)}] {task}")

    def trial(self, plan: SearchPlan, number: int, trial: PastTrial) -> None:
        """Show a trial that has ended."""
        self._say(f"  {trial_line(plan, number, trial)}")

    def ends(self, record: CellRecord, seconds: float) -> None:
        """Show the result or error of the task, and note its seconds in this session."""
        if self._task is not None:
            self._estimate.took_s[self._task] = seconds
            self._task = None
        shown = f"failed: {record.error}"
        if record.result is not None:
            result, rate = record.result, record.zero_loss_pps
            why = result["reason"] if rate is None else words.rate(rate, result["goal"]["relative_width"])
            shown = f"{record.verdict}: {why}"
        left = self._estimate.left_s()
        self._say(f"  {shown}" + (f"; about {words.seconds(round(left))} left" if left else ""))

    def warns(self, text: str) -> None:
        """Show a problem that does not affect results."""
        if self._quiet:
            print(f"warning: {printable(text)}", file=self._output, flush=True)
        self._say(f"  warning: {text}")

    def _say(self, text: str) -> None:
        if not self._quiet:
            print(printable(text), file=self._output, flush=True)


class _Bar(Lines):
    """The live display: a bar, and the last trial; lines about whole cells scroll above it."""

    def __init__(self, estimate: TimeEstimate, output: TextIO, console: Console) -> None:
        super().__init__(estimate, output)
        self._console = console
        self._last = ""

    def begins(self, task: CellTask) -> None:
        super().begins(task)
        self._last = "is being set up"

    def trial(self, plan: SearchPlan, number: int, trial: PastTrial) -> None:
        self._last = trial_line(plan, number, trial)

    def _say(self, text: str) -> None:
        self._console.print(Text(printable(text)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        spent = time.monotonic() - self._since if self._task is not None else 0.0
        share, left = (of(self._task, spent) for of in (self._estimate.done_share, self._estimate.left_s))
        line, about = Table.grid(padding=(0, 1)), f"{share:4.0%}, about {words.seconds(round(left))} left"
        line.add_row(ProgressBar(1.0, share, width=40), Text(about))
        yield line
        yield Text(self._last, overflow="ellipsis", no_wrap=True)
