"""Progress display for a terminal: a bar, the current task, its last trial, and the remaining time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from netplugin.acceptance.matrix.cells import Task
from netplugin.acceptance.matrix.estimate import Estimate
from netplugin.acceptance.matrix.journal import PastTrial
from netplugin.acceptance.matrix.progress import Lines, trial_line
from netplugin.acceptance.trials import SearchPlan

#: Refreshed between trials, so that the remaining time counts down.
_REFRESHES_PER_S = 2


@contextmanager
def bar(estimate: Estimate, output: TextIO) -> Iterator[Lines]:
    """Show the bar within the block; restores the terminal on exit."""
    console = Console(file=output)
    shown = _Bar(estimate, console, output)
    with Live(shown, console=console, refresh_per_second=_REFRESHES_PER_S):
        yield shown


class _Bar(Lines):
    """The live display; lines about whole cells scroll above it."""

    def __init__(self, estimate: Estimate, console: Console, output: TextIO) -> None:
        super().__init__(estimate, output)
        self._console = console
        self._last = ""

    def begins(self, task: Task) -> None:
        super().begins(task)
        self._last = "is being set up"

    def trial(self, task: Task, plan: SearchPlan, number: int, trial: PastTrial) -> None:
        self._last = trial_line(plan, number, trial)

    def say(self, text: str) -> None:
        self._console.print(Text(text))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        share, left = self.status()
        line = Table.grid(padding=(0, 1))
        line.add_row(ProgressBar(1.0, share, width=40), Text(f"{share:4.0%}, {left}"))
        yield line
        yield Text(self._last, overflow="ellipsis", no_wrap=True)
