"""JSON result of a search: verdict, rate, bounds, and everything needed to check or replay it.

With repeats it describes the median run; ``repeats`` has the spread of the others.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter

from netplugin.programs import bounded
from netplugin_zeroloss.search import parts
from netplugin_zeroloss.search.follow_up import FollowUp, describe
from netplugin_zeroloss.search.recorded import Recorded, RecordedLog, ResultEntry
from netplugin_zeroloss.search.rfc9971 import GoalResult
from netplugin_zeroloss.search.search import SearchResult, middle
from netplugin_zeroloss.search.trials import Outcome, SearchPlan, Trial
from netplugin_zeroloss.values import Goal, Measurement, UnusableInput

FORMAT = 1
#: What a search has beyond RFC 9971; docs/zeroloss/method.md.
EXTENSIONS = ["early_abort", "invalid_trials", "warm_up", "loss_by_direction", "dead_direction"]
EXTENSIONS += ["loss_located", "floor"]


def result_of(
    plan: SearchPlan,
    repeats: Sequence[SearchResult],
    environment: Mapping[str, Any],
    followed: FollowUp | None = None,
    wall_s: float = 0.0,
) -> ResultEntry:
    """Return the JSON result of one or more repeats of a search, and of what followed them."""
    number = middle(repeats)
    shown, outcome = repeats[number], repeats[number].headline
    trials = [trial for each in repeats for trial in each.trials]
    log = [describe_trial(trial, repeat) for repeat, each in enumerate(repeats) for trial in each.trials]
    answers = [each.headline.answer_pps for each in repeats]
    between = spread([answer for answer in answers if answer is not None])
    evidence = _attribution(plan, outcome, shown.trials)
    found = {
        "format": FORMAT,
        "verdict": outcome.verdict.value,
        "reason": "; ".join([outcome.reason, *_parts(evidence)]),
        "zero_loss_pps": outcome.answer_pps,
        "bounds_pps": [outcome.lower_pps, outcome.upper_pps],
        "trials": len(trials),
        "invalid_trials": sum(1 for trial in trials if not trial.valid),
        "traffic_s": sum(trial.traffic_s for trial in trials),
        "wall_s": wall_s,
        "goal": describe_goal(outcome.goal),
        "goals": [_describe(*one) for one in zip(shown.outcomes, shown.goal_results, strict=True)],
        "rfc9971": {"strict": plan.strict_rfc9971, "extensions": [] if plan.strict_rfc9971 else EXTENSIONS},
        "repeats": {
            "count": len(repeats),
            "shown": number,
            "verdicts": dict(Counter(each.headline.verdict.value for each in repeats)),
            "answers_pps": answers,
            "spread": dataclasses.asdict(between) if between else None,
        },
        "plan": describe_plan(plan),
        "trial_log": log,
        "evidence": evidence,
        **describe(plan, followed),
        "follow_up_log": [describe_trial(t, len(repeats)) for t in (followed.trials if followed else ())],
        "environment": dict(environment),
    }
    return cast(ResultEntry, found)


def describe_goal(goal: Goal) -> dict[str, Any]:
    return dataclasses.asdict(goal) | {"in_words": goal.in_words()}


def _describe(outcome: Outcome, by_rfc9971: GoalResult) -> dict[str, Any]:
    return {
        "goal": describe_goal(outcome.goal),
        "verdict": outcome.verdict.value,
        "reason": outcome.reason,
        "rate_pps": outcome.answer_pps,
        "bounds_pps": [outcome.lower_pps, outcome.upper_pps],
        "rfc9971": dataclasses.asdict(by_rfc9971),
    }


def describe_plan(plan: SearchPlan) -> dict[str, Any]:
    most = plan.generator_max_pps
    return dataclasses.asdict(plan) | {"generator_max_pps": most if math.isfinite(most) else None}


def describe_measurement(measured: Measurement) -> dict[str, Any]:
    plain = replace(measured, evidence=dict(measured.evidence), readings=dict(measured.readings))
    return dataclasses.asdict(plain)


def describe_trial(trial: Trial, repeat: int) -> dict[str, Any]:
    return {
        "repeat": repeat,
        "number": trial.number,
        **dataclasses.asdict(trial.request),
        "verdict": trial.judgement.verdict.value,
        "cause": trial.judgement.cause,
        "reason": trial.judgement.reason,
        "lost_packets": trial.judgement.lost_packets,
        "loss_ratio": trial.judgement.loss_ratio,
        "measured": describe_measurement(trial.measured),
    }


def _attribution(plan: SearchPlan, outcome: Outcome, trials: Sequence[Trial]) -> dict[str, Any]:
    """Return the trials at the bounds, the located loss at the upper one, and the parts that limit."""
    lower = [t for t in trials if t.passed and t.rate == outcome.lower_pps]
    upper = [t for t in trials if t.lossy and t.rate == outcome.upper_pps]
    longest = max((*lower, *upper), key=lambda t: t.traffic_s, default=None)
    at_once = [t for t in upper if _at_once(plan, t)]
    return {
        "lower_trials": [t.number for t in lower],
        "upper_trials": [t.number for t in upper],
        "lost_at_upper": sum(t.judgement.lost_packets for t in upper),
        "places_at_upper": parts.located(t.measured.evidence for t in upper),
        "lost_by_direction": _by_direction(upper),
        "dead_directions": outcome.dead,
        "limiting_directions": () if outcome.dead else parts.limiting(_by_direction(at_once)),
        "full": parts.full(longest.measured.readings) if longest else {},
        "floor": dataclasses.asdict(outcome.floor) if outcome.floor else None,
        "invalid_causes": dict(Counter(t.judgement.cause.value for t in trials if t.judgement.cause)),
    }


def _at_once(plan: SearchPlan, trial: Trial) -> bool:
    """Whether a trial lost for lack of capacity: late loss is random, and so is whom it hits."""
    fills_s = 2 * plan.buffer_packets / (plan.headline.relative_width * trial.rate)
    return not trial.measured.aborted or trial.traffic_s <= max(2 * plan.headline.initial_trial_s, fills_s)


def _parts(evidence: Mapping[str, Any]) -> Iterator[str]:
    """Name the path that limits, and what is full while others of its kind idle."""
    if evidence["limiting_directions"]:
        yield f"direction {' and '.join(map(str, evidence['limiting_directions']))} limits"
    for name, load in evidence["full"].items():
        yield f"{name} is full ({load:.0%}) while others idle"


def _by_direction(trials: Sequence[Trial]) -> list[int]:
    """Return the lost frames of each direction; empty if the generator does not count by direction."""
    counts = [[way.tx_packets - way.rx_packets for way in t.measured.directions] for t in trials]
    return [sum(each) for each in zip(*counts, strict=True)] if len({*map(len, counts)}) == 1 else []


def environment(generator: str, command: Sequence[str], started: str) -> dict[str, Any]:
    """Return machine and software versions for the result."""
    try:
        release = version("netplugin")
    except PackageNotFoundError:  # not installed: run from a checkout
        release = "unknown"
    return {
        "generator": generator,
        "command": list(command),
        "started": started,
        "netplugin": release,
        "python": platform.python_version(),
        "host": platform.node(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        # Linux's x86 flag X86_FEATURE_HYPERVISOR; other machines have none.
        "virtual": " hypervisor" in Path("/proc/cpuinfo").read_text(encoding="utf-8"),
    }


def dumps(result: Mapping[str, Any], indent: int | None = 1) -> str:
    """Serialize to strict JSON without NaN and infinity; on one line if ``indent`` is None."""
    return json.dumps(_plain(result), indent=indent, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    # pydantic's to_json would do it, but refuses half a surrogate pair: a byte of a file name.
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


_RESULT: TypeAdapter[ResultEntry] = TypeAdapter(ResultEntry)
_RECORDED: TypeAdapter[Recorded] = TypeAdapter(Recorded)


def load(text: str, name: str) -> tuple[SearchPlan, list[RecordedLog], RecordedLog, ResultEntry]:
    """Parse a result: plan, trials of each repeat, those that followed, and the JSON object.

    Raises: UnusableInput.
    """
    try:
        whole = bounded.parse(text)
        if isinstance(whole, dict) and whole.get("format", FORMAT) != FORMAT:
            raise UnusableInput(name, f"its format is {whole['format']!s:.40}, this program reads {FORMAT}")
        result, recorded = bounded.validated(whole, _RESULT), bounded.validated(whole, _RECORDED)
    except bounded.Unreadable as error:
        raise UnusableInput(name, f"it is no result of a search: {error}") from error
    repeats: list[RecordedLog] = [[] for _ in range(result["repeats"]["count"])]
    for entry, trial in zip(result["trial_log"], recorded["trial_log"], strict=True):
        if entry["repeat"] >= len(repeats):
            raise UnusableInput(name, f"trial_log: it has no repeat {entry['repeat']}")
        repeats[entry["repeat"]].append(trial)
    return recorded["plan"], repeats, recorded.get("follow_up_log", []), result


@dataclass(frozen=True, slots=True)
class ResultSpread:
    """Spread of the answers of repeated searches, in pps."""

    answers: int
    median_pps: float
    #: Interval between two answers that contains the true median with probability ``confidence``.
    interval_pps: tuple[float, float]
    confidence: float
    #: Relative standard deviation; None for one answer.
    relative_std: float | None


def spread(answers: Sequence[float], requested: float = 0.95) -> ResultSpread | None:
    """Return the narrowest order-statistic interval for the median; None without answers.

    Each answer is above the true median with probability 1/2 for any distribution, so the number above
    is binomial. Five or fewer answers cannot reach 95 %: the interval is then the full range, with its
    actual confidence.
    """
    ordered = sorted(answers)
    count = len(ordered)
    if not count:
        return None
    out, confidence = 0, _covers(count, 0)
    while 2 * (out + 1) < count and _covers(count, out + 1) >= requested:
        out += 1
        confidence = _covers(count, out)
    mean = statistics.fmean(ordered)
    return ResultSpread(
        count,
        statistics.median(ordered),
        (ordered[out], ordered[-1 - out]),
        confidence,
        relative_std(ordered) if mean else None,
    )


def relative_std(answers: Sequence[float]) -> float | None:
    """Return the relative standard deviation; None for one answer."""
    return statistics.stdev(answers) / statistics.fmean(answers) if len(answers) > 1 else None


def _covers(count: int, out: int) -> float:
    """Return the probability that the median lies between the answers ``out`` from both ends."""
    below = math.fsum(math.comb(count, k) * 0.5**count for k in range(out + 1))
    return max(0.0, 1 - 2 * below)
