"""Measurements at the rate that a search found: latency at parts of it, and a soak that holds it.

They follow the search, are no trials of it and do not change its answer. Like the search they are a
computation without I/O that yields trial requests, so their trials can be recorded and replayed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from netplugin_zeroloss.search.trials import Asking, SearchPlan, Trial
from netplugin_zeroloss.values import LatencySummary, TrialRequest

#: Loads at which the latency is measured, as parts of the found rate.
LATENCY_LOADS: Final = (0.1, 0.5, 0.9)
#: Readings of the counters during a soak, evenly spaced.
SOAK_READINGS: Final = 60


@dataclass(frozen=True, slots=True)
class FollowUp:
    """Trials at the found rate; invalid attempts come before the trial that counts."""

    #: None: there is no rate.
    rate_pps: float | None
    #: By part of the rate.
    latencies: Mapping[float, Trial]
    soak: Trial | None
    trials: tuple[Trial, ...]


def follow_up(plan: SearchPlan, rate_pps: float | None) -> Asking[FollowUp]:
    """Measure what the plan has (``latency_s``, ``soak_s``) at the found rate; None: there is no rate."""

    def asked(rate: float, seconds: float, why: str) -> TrialRequest:
        return plan.request(round(rate, 2), max(seconds, plan.min_trial_s), why, abort=False)

    trials: list[Trial] = []
    latencies: dict[float, Trial] = {}
    soak = None
    if rate_pps is not None:
        for part in LATENCY_LOADS if plan.latency_s and plan.measures_latency else ():
            request = asked(part * rate_pps, plan.latency_s, f"latency at {part:.0%}")
            latencies[part] = yield from _ask(plan, replace(request, latency=True), trials)
        if plan.soak_s:
            request = asked(rate_pps, plan.soak_s, "soak")
            soak = yield from _ask(plan, replace(request, readings=SOAK_READINGS), trials)
    return FollowUp(rate_pps, latencies, soak, tuple(trials))


def _ask(plan: SearchPlan, request: TrialRequest, trials: list[Trial]) -> Asking[Trial]:
    """Request a trial until it is valid, at most ``attempts`` times; returns the last."""
    for _ in range(plan.attempts):
        measured = yield request
        judgement = plan.judge(request, measured)
        before = sum(trial.traffic_s for trial in trials)
        trials.append(Trial(len(trials) + 1, request, measured, judgement, before))
        if trials[-1].valid:
            break
    return trials[-1]


def describe(plan: SearchPlan, found: FollowUp | None) -> dict[str, Any]:
    """Return ``latency`` and ``soak``; null for what the plan has not."""
    return {"latency": _latency(plan, found), "soak": _soak(plan, found)}


def _latency(plan: SearchPlan, found: FollowUp | None) -> dict[str, Any] | None:
    if not plan.latency_s:
        return None
    loads = found.latencies if found else {}
    no_rate = "" if found and found.rate_pps is not None else "there is no rate"
    return {
        "reason": no_rate if plan.measures_latency else "the generator measures no latency",
        "loads": [
            {
                "part": part,
                "rate_pps": trial.rate,
                "duration_s": trial.measured.elapsed_s,
                "verdict": trial.judgement.verdict.value,
                "reason": trial.judgement.reason,
                **_slowest(trial.measured.latencies),
                "directions": [asdict(direction) for direction in trial.measured.latencies],
            }
            for part, trial in loads.items()
        ],
    }


def _slowest(directions: tuple[LatencySummary, ...]) -> dict[str, Any]:
    """Return the largest percentiles of all directions, and the samples of all. Null: not measured."""
    found = [(one.p50_us, one.p90_us, one.p99_us, one.max_us) for one in directions]
    names = ("p50_us", "p90_us", "p99_us", "max_us")
    largest = map(max, zip(*found, strict=True)) if found else [None] * len(names)
    return {"samples": sum(one.samples for one in directions), **dict(zip(names, largest, strict=True))}


def _soak(plan: SearchPlan, found: FollowUp | None) -> dict[str, Any] | None:
    if not plan.soak_s:
        return None
    trial = found.soak if found else None
    if trial is None:
        return {"asked_s": plan.soak_s, "verdict": None, "reason": "there is no rate", "readings": []}
    return {
        "asked_s": plan.soak_s,
        "verdict": trial.judgement.verdict.value,
        "reason": trial.judgement.reason,
        "rate_pps": trial.rate,
        "elapsed_s": trial.measured.elapsed_s,
        "tx_packets": trial.measured.tx_packets,
        "lost_packets": trial.judgement.lost_packets,
        "loss_ratio": trial.judgement.loss_ratio,
        "readings": list(_over_time(trial)),
    }


def _over_time(trial: Trial) -> Iterator[dict[str, Any]]:
    """Yield the missing frames at each reading; the last is the end, after the drain."""
    measured = trial.measured
    for one in measured.progress:
        if one.elapsed_s < measured.elapsed_s:
            yield {"elapsed_s": one.elapsed_s, "missing_packets": one.tx_packets - one.rx_packets}
    yield {"elapsed_s": measured.elapsed_s, "missing_packets": trial.judgement.lost_packets}
