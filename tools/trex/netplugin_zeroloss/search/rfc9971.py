"""Results of a search by RFC 9971 (Multiple Loss Ratio Search): loads classified by their trials (pure).

Sections are those of RFC 9971. A trial that the tool stopped at its first loss, an extension, is a
High-Loss Trial of the requested duration. It counts only where its final loss ratio does not matter: for
goals without loss, whose trials are at least as long.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from netplugin_zeroloss.values import ROUNDING, Goal

if TYPE_CHECKING:
    from netplugin_zeroloss.search.trials import Trial


@dataclass(frozen=True, slots=True)
class GoalResult:
    """Section 4.8.4: the relevant bounds of a goal. None: there is no such load."""

    #: Both bounds exist, at most the goal's width apart.
    regular: bool
    relevant_lower_bound_pps: float | None
    relevant_upper_bound_pps: float | None
    conditional_throughput_pps: float | None


def is_close(lower: float, upper: float, width: float) -> bool:
    """Whether two bounds are within a Goal Width (4.6.5)."""
    # Rates are rounded to 0.01 pps, so each may be off by half of that.
    return upper <= lower * (1 + width) * (1 + ROUNDING) + 0.02


def is_lower_bound(trials: Iterable[Trial], goal: Goal) -> bool | None:
    """Classify a load by its trials (4.7.2, appendix A): True lower, False upper bound, None undecided."""
    seconds = {(full, high): 0.0 for full in (True, False) for high in (True, False)}
    for trial in trials:
        if _counts(trial, goal):
            # Full-Length or Short, High-Loss or Low-Loss (4.7.1).
            seconds[is_full(trial, goal), trial.judgement.loss_ratio > goal.max_loss_ratio] += (
                trial.request.duration_s
            )
    part = goal.exceed_ratio
    excess = max(0.0, seconds[False, True] - seconds[False, False] * part / (1 - part))
    high, low = seconds[True, True] + excess, seconds[True, False]
    whole = max(high + low, goal.sum_s)
    allowed = whole * part + ROUNDING
    if whole - low <= allowed:
        return True
    return False if high > allowed else None


def relevant_bounds(trials: Iterable[Trial], goal: Goal) -> tuple[float | None, float | None]:
    """Return the relevant lower and upper bound (4.8.1, 4.8.2); a pass above an upper bound is luck (5.3.3).

    Without an upper bound the lower one is effective (4.8.4.2).
    """
    kinds = {rate: is_lower_bound(at, goal) for rate, at in _by_rate(trials).items()}
    upper = min((rate for rate, kind in kinds.items() if kind is False), default=None)
    lower = (rate for rate, kind in kinds.items() if kind and (upper is None or rate < upper))
    return max(lower, default=None), upper


def goal_result(trials: Iterable[Trial], goal: Goal) -> GoalResult:
    """Return the goal result at the end of a search (4.8.4)."""
    trials = list(trials)
    lower, upper = relevant_bounds(trials, goal)
    regular = lower is not None and upper is not None and is_close(lower, upper, goal.relative_width)
    throughput = None if lower is None else conditional_throughput(_by_rate(trials)[lower], goal)
    return GoalResult(regular, lower, upper, throughput)


def conditional_throughput(trials: Iterable[Trial], goal: Goal) -> float:
    """Return the forwarding rate that the trials at a lower bound promise (4.8.3, appendix B)."""
    full = [trial for trial in trials if _counts(trial, goal) and is_full(trial, goal)]
    full.sort(key=lambda trial: trial.judgement.loss_ratio)
    left = max(goal.sum_s, sum(t.request.duration_s for t in full)) * (1 - goal.exceed_ratio) - ROUNDING
    loss = full[0].judgement.loss_ratio
    for trial in full:
        if left <= 0:
            break
        loss = trial.judgement.loss_ratio
        left -= trial.request.duration_s
    return full[0].rate * (1 - (1.0 if left > 0 else loss))


def _by_rate(trials: Iterable[Trial]) -> dict[float, list[Trial]]:
    found: dict[float, list[Trial]] = {}
    for trial in trials:
        found.setdefault(trial.rate, []).append(trial)
    return found


def is_full(trial: Trial, goal: Goal) -> bool:
    """Whether it is a Full-Length Trial (4.7.1.4)."""
    return trial.request.duration_s >= goal.final_trial_s * (1 - ROUNDING)


def _counts(trial: Trial, goal: Goal) -> bool:
    if not trial.measured.aborted:
        return True
    longest = goal.final_trial_s * (1 + ROUNDING)
    return goal.max_loss_ratio == 0 and (goal.is_strict or trial.request.duration_s <= longest)
