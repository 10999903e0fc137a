"""How long a run still takes (pure): from the parts that are done, or else from what a search costs."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from netplugin.acceptance.matrix import cells
from netplugin.acceptance.matrix.cells import Task
from netplugin.acceptance.matrix.description import Description
from netplugin.acceptance.matrix.records import Part

#: A search of a device with a sharp limit takes little more than its final trial; most take more.
_FINAL_TRIALS = 1.5
#: Trials of 1 s for each goal beside the headline.
_OTHER_GOAL_S = 25.0
#: To plug, start the VNF, and give everything back.
_SET_UP_S = 10.0


@dataclass(slots=True)
class Estimate:
    """Seconds. A part that takes longer than expected is always expected to end with one more trial."""

    description: Description
    tasks: tuple[Task, ...]
    #: What parts took, as far as they are done.
    took_s: dict[Task, float] = field(default_factory=dict)
    #: The generator takes no real time.
    virtual_time: bool = False

    def expected_s(self, task: Task) -> float:
        """Of one part: as long as those of its kind took, the same backend's first."""
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
        """Of everything that has not ended; ``in_current_s`` is what the current part has had."""
        waiting = [t for t in self.tasks if t not in self.took_s and t != current]
        left = sum(map(self.expected_s, waiting))
        if current is not None and current not in self.took_s:
            one_more = 0.0 if self.virtual_time else self._final_s(current)
            left += max(self.expected_s(current) - in_current_s, one_more)
        return left

    def done_share(self, current: Task | None = None, in_current_s: float = 0.0) -> float:
        """From 0 to 1, in time."""
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
    """``40 s``, ``12 min``, ``3 h 20 min``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"
