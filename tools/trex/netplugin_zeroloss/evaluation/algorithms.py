"""Search algorithms for ``evaluate``: this library's search, binary search and MLRsearch on one generator."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from netplugin_zeroloss.generators.contract import Generator
from netplugin_zeroloss.search.search import run_search
from netplugin_zeroloss.search.trials import SearchPlan
from netplugin_zeroloss.values import Measurement, TrialRequest, UnusableInput

#: Lowest load that MLRsearch offers, as a fraction of the line rate.
_MLR_LEAST = 1e-3


@dataclass(frozen=True, slots=True)
class AlgorithmResult:
    """Result of one search on one device."""

    verdict: str
    answer_pps: float | None
    trials: int
    traffic_s: float


Algorithm = Callable[[SearchPlan, Generator], AlgorithmResult]


class _Meter:
    """Runs trials for a search; counts the trials and the seconds of traffic."""

    def __init__(self, plan: SearchPlan, generator: Generator) -> None:
        self._plan = plan
        self._generator = generator
        self.trials = 0
        self.traffic_s = 0.0

    def run(self, rate: float, duration_s: float, abort: bool) -> Measurement:
        request = TrialRequest(rate, duration_s, self._plan.frame_size, self._plan.flows, abort_on_loss=abort)
        measured = self._generator.run(request)
        self.trials += 1
        self.traffic_s += measured.elapsed_s
        return measured

    def found(self, answer: float | None) -> AlgorithmResult:
        verdict = "ndr" if answer else "failed"
        return AlgorithmResult(verdict, answer or None, self.trials, self.traffic_s)


def zeroloss(plan: SearchPlan, generator: Generator) -> AlgorithmResult:
    """Run the search of this library."""
    found = run_search(plan, generator).found
    return AlgorithmResult(
        found.headline.verdict.value,
        found.headline.answer_pps,
        len(found.trials),
        sum(trial.traffic_s for trial in found.trials),
    )


def _binary(plan: SearchPlan, generator: Generator, abort: bool) -> AlgorithmResult:
    """Bisect between a load that passed and one that lost, to a width relative to the line rate.

    Follows RFC 2544 as simple tools do: any frame sent and not received counts as loss; no trial is
    invalid.
    """
    meter = _Meter(plan, generator)
    goal = plan.headline
    low, high = 0.0, plan.line_rate_pps
    rate = high
    while True:
        measured = meter.run(rate, goal.final_trial_s, abort)
        if measured.rx_packets < measured.tx_packets:
            high = rate
        else:
            low = rate
        if high - low <= goal.relative_width * plan.line_rate_pps:
            return meter.found(low)
        rate = (low + high) / 2


def binary(plan: SearchPlan, generator: Generator) -> AlgorithmResult:
    """Binary search; every trial runs for its full duration."""
    return _binary(plan, generator, abort=False)


def binary_abort(plan: SearchPlan, generator: Generator) -> AlgorithmResult:
    """Binary search; a trial stops at the first loss."""
    return _binary(plan, generator, abort=True)


def _mlrsearch(plan: SearchPlan, generator: Generator, abort: bool) -> AlgorithmResult:
    """Run MLRsearch (PyPI) with the RFC 2544 goal: one full-length trial without loss."""
    package = _import_mlrsearch()
    meter = _Meter(plan, generator)
    goal = plan.headline
    results = package.MeasurementResult

    class Measurer(package.AbstractMeasurer):  # type: ignore[misc,name-defined]
        def measure(self, intended_duration: float, intended_load: float) -> Any:
            measured = meter.run(intended_load, intended_duration, abort)
            return results(
                intended_duration=intended_duration,
                intended_load=intended_load,
                offered_count=measured.tx_packets,
                loss_count=max(0, measured.tx_packets - measured.rx_packets),
                duration_with_overheads=measured.elapsed_s,
            )

    target = package.SearchGoal(
        loss_ratio=0.0,
        exceed_ratio=0.0,
        relative_width=goal.relative_width,
        initial_trial_duration=min(1.0, goal.final_trial_s),
        final_trial_duration=goal.final_trial_s,
        duration_sum=goal.sum_s,
        fail_fast=False,
    )
    config = package.Config(
        goals=(target,),
        min_load=plan.line_rate_pps * _MLR_LEAST,
        max_load=plan.line_rate_pps,
        search_duration_max=1e6,
        warmup_duration=None,
    )
    answers = package.MultipleLossRatioSearch(config=config).search(Measurer(), debug=lambda message: None)
    found = answers[target]
    lower = getattr(found, "relevant_lower_bound", None)
    return meter.found(float(lower) if lower is not None else None)


def mlrsearch(plan: SearchPlan, generator: Generator) -> AlgorithmResult:
    """MLRsearch, unmodified."""
    return _mlrsearch(plan, generator, abort=False)


def mlrsearch_abort(plan: SearchPlan, generator: Generator) -> AlgorithmResult:
    """MLRsearch with trials that stop at the first loss."""
    return _mlrsearch(plan, generator, abort=True)


def _import_mlrsearch() -> Any:
    """Import MLRsearch, which only ``evaluate`` needs. Raises: UnusableInput."""
    try:
        return importlib.import_module("MLRsearch")
    except ImportError as error:
        raise UnusableInput(
            "--algorithms",
            "the package MLRsearch is missing: pip install './tools/trex[evaluate]', in a checkout",
        ) from error


ALGORITHMS: dict[str, Algorithm] = {
    "zeroloss": zeroloss,
    "binary": binary,
    "binary-abort": binary_abort,
    "mlrsearch": mlrsearch,
    "mlrsearch-abort": mlrsearch_abort,
}


def usable(names: Sequence[str]) -> None:
    """Check that all names are known and their packages installed. Raises: UnusableInput."""
    for name in names:
        if name not in ALGORITHMS:
            raise UnusableInput("--algorithms", f"no {name!r}; there are {', '.join(ALGORITHMS)}")
    if any(name.startswith("mlrsearch") for name in names):
        _import_mlrsearch()
