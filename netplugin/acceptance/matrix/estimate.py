"""Estimates the remaining time of a run (pure), from finished tasks or from typical search costs."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from netplugin.acceptance.matrix import cells
from netplugin.acceptance.matrix.cells import Task
from netplugin.acceptance.matrix.description import Description
from netplugin.acceptance.matrix.records import Part

#: Cost of a search in full trials. A sharp limit takes little more than one; most devices take
#: more.
_FINAL_TRIALS = 1.5
#: Seconds of 1 s trials per additional goal.
_OTHER_GOAL_S = 25.0
#: Seconds to plug the ports, start the VNF, and tear down.
_SET_UP_S = 10.0


@dataclass(slots=True)
class Estimate:
    """Remaining time in seconds. A task that exceeds its estimate is expected to need one more trial."""

    description: Description
    tasks: tuple[Task, ...]
    #: Seconds of the finished tasks.
    took_s: dict[Task, float] = field(default_factory=dict)
    #: The generator runs in virtual time.
    virtual_time: bool = False

    def expected_s(self, task: Task) -> float:
        """Return the expected seconds of a task: the mean of similar tasks, the same backend first."""
        alike = [t for t in self.took_s if t.part is task.part]
        nearest = [t for t in alike if t.cell.backend == task.cell.backend] or alike
        if nearest:
            return statistics.fmean(self.took_s[t] for t in nearest)
        if self.virtual_time:
            return 0.0
        final = self._final_s(task)
        goals = len(self.description.search.goals) if task.part is Part.SEARCH else 0
        once = _FINAL_TRIALS * final + goals * _OTHER_GOAL_S
        return _SET_UP_S + cells.repeats(self.description, task) * once

    def left_s(self, current: Task | None = None, in_current_s: float = 0.0) -> float:
        """Return the remaining seconds; ``in_current_s``: seconds spent on the current task."""
        waiting = [t for t in self.tasks if t not in self.took_s and t != current]
        left = sum(map(self.expected_s, waiting))
        if current is not None and current not in self.took_s:
            one_more = 0.0 if self.virtual_time else self._final_s(current)
            left += max(self.expected_s(current) - in_current_s, one_more)
        return left

    def done_share(self, current: Task | None = None, in_current_s: float = 0.0) -> float:
        """Return the completed share of the time, 0 to 1."""
        spent = sum(self.took_s.values()) + in_current_s
        whole = spent + self.left_s(current, in_current_s)
        if whole > 0:
            return spent / whole
        return len(self.took_s) / len(self.tasks) if self.tasks else 1.0

    def _final_s(self, task: Task) -> float:
        final = self.description.search.final_duration
        if task.part is Part.SEARCH:
            return final
        return min(final, self.description.controls.final_duration)


def in_words(seconds: float) -> str:
    """Format a duration: ``40 s``, ``12 min``, ``3 h 20 min``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"
