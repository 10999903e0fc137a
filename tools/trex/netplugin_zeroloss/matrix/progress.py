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
from netplugin_zeroloss.journal import CellRecord, PastTrial
from netplugin_zeroloss.judge import judge
from netplugin_zeroloss.matrix.carry_out import View
from netplugin_zeroloss.matrix.cells import CellTask, TimeEstimate, in_words
from netplugin_zeroloss.report.words import mpps
from netplugin_zeroloss.search.trials import SearchPlan


class Lines(View):
    """Prints a line per event, with the remaining time."""

    def __init__(self, estimate: TimeEstimate, output: TextIO) -> None:
        self._estimate = estimate
        self._output = output
        self._task: CellTask | None = None
        self._since = 0.0

    def begins(self, task: CellTask) -> None:
        self._task, self._since = task, time.monotonic()
        number = self._estimate.tasks.index(task) + 1
        self.say(f"[{number}/{len(self._estimate.tasks)}] {task}")

    def trial(self, task: CellTask, plan: SearchPlan, number: int, trial: PastTrial) -> None:
        self.say(f"  {trial_line(plan, number, trial)}")

    def ends(self, record: CellRecord, seconds: float) -> None:
        if self._task is not None:
            self._estimate.took_s[self._task] = seconds
            self._task = None
        left = self._estimate.left_s()
        self.say(f"  {_result_line(record)}" + (f"; about {in_words(left)} left" if left else ""))

    def warns(self, text: str) -> None:
        self.say(f"  warning: {text}")

    def say(self, text: str) -> None:
        print(printable(text), file=self._output, flush=True)

    def status(self) -> tuple[float, str]:
        """Return the completed share (0 to 1) and the remaining time as text."""
        spent = time.monotonic() - self._since if self._task is not None else 0.0
        share = self._estimate.done_share(self._task, spent)
        return share, f"about {in_words(self._estimate.left_s(self._task, spent))} left"


class Silent(Lines):
    """Prints warnings only."""

    def say(self, text: str) -> None:
        """Print nothing."""

    def warns(self, text: str) -> None:
        print(f"warning: {printable(text)}", file=self._output, flush=True)


@contextmanager
def view(estimate: TimeEstimate, quiet: bool, output: TextIO = sys.stderr) -> Iterator[View]:
    """Yield the view for this output, for the duration of the block."""
    if quiet:
        yield Silent(estimate, output)
    elif not output.isatty():
        yield Lines(estimate, output)
    else:
        with bar(estimate, output) as shown:
            yield shown


def trial_line(plan: SearchPlan, number: int, trial: PastTrial) -> str:
    """Format one trial, judged by the headline goal."""
    goal = plan.headline
    request, measured = trial.request, trial.measured
    judged = judge(request, measured, goal.relative_width, goal.max_loss_ratio)
    return (
        f"trial {trial.repeat + 1}.{number}  {mpps(request.rate_pps, 5)} Mpps"
        f"  {measured.elapsed_s:.2f} of {request.duration_s:g} s  {judged.verdict}"
        f"  {request.purpose}: {judged.reason}"
    )


def _result_line(record: CellRecord) -> str:
    if record.result is None:
        return f"failed: {record.error}"
    rate = record.zero_loss_pps
    shown = f"{mpps(rate, 4)} Mpps" if rate is not None else str(record.result["reason"])
    return f"{record.verdict}: {shown}"


# -- Progress display for a terminal: a bar, the current task, its last trial, and the remaining time.


#: Refreshed between trials, so that the remaining time counts down.
_REFRESHES_PER_S = 2


@contextmanager
def bar(estimate: TimeEstimate, output: TextIO) -> Iterator[Lines]:
    """Show the bar within the block; restores the terminal on exit."""
    console = Console(file=output)
    shown = _Bar(estimate, console, output)
    with Live(shown, console=console, refresh_per_second=_REFRESHES_PER_S):
        yield shown


class _Bar(Lines):
    """The live display; lines about whole cells scroll above it."""

    def __init__(self, estimate: TimeEstimate, console: Console, output: TextIO) -> None:
        super().__init__(estimate, output)
        self._console = console
        self._last = ""

    def begins(self, task: CellTask) -> None:
        super().begins(task)
        self._last = "is being set up"

    def trial(self, task: CellTask, plan: SearchPlan, number: int, trial: PastTrial) -> None:
        self._last = trial_line(plan, number, trial)

    def say(self, text: str) -> None:
        self._console.print(Text(printable(text)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        share, left = self.status()
        line = Table.grid(padding=(0, 1))
        line.add_row(ProgressBar(1.0, share, width=40), Text(f"{share:4.0%}, {left}"))
        yield line
        yield Text(self._last, overflow="ellipsis", no_wrap=True)
