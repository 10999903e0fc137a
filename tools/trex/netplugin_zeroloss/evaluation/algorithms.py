"""Search algorithms for ``evaluate``: this library's, binary search, MLRsearch and TRex's ``ndr``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from netplugin_zeroloss.generators.contract import Generator
from netplugin_zeroloss.judge import judge
from netplugin_zeroloss.search.search import carry_out, search
from netplugin_zeroloss.search.trials import SearchPlan
from netplugin_zeroloss.values import Measurement, TrialRequest, UnusableInput

#: Lowest load that MLRsearch offers, as a fraction of the line rate.
_MLR_LEAST: Final = 1e-3
#: Seconds that a frame is on its way: TRex reads its counters while it sends.
_ON_ITS_WAY_S: Final = 20e-6
#: TRex: share of a run that may be missing for a full queue, first and last distance, and iterations.
_TREX_QUEUE_FULL, _TREX_ERROR, _TREX_ITERATIONS = 0.02, 0.01, 10


@dataclass(frozen=True, slots=True)
class AlgorithmResult:
    """Result of one search on one device."""

    verdict: str
    answer_pps: float | None
    trials: int
    traffic_s: float
    #: What is known of the device: the right verdict and rate, and how often a soak at the answer loses.
    right_verdict: str = ""
    known_pps: float | None = None
    p_soak: float | None = None


Algorithm = Callable[[SearchPlan, Generator], AlgorithmResult]


class _Meter:
    """Runs trials for a search; counts the trials and the seconds of traffic."""

    def __init__(self, plan: SearchPlan, generator: Generator) -> None:
        self._plan = plan
        self._generator = generator
        self.trials = 0
        self.traffic_s = 0.0
        #: Lowest load at which no trial was valid.
        self.ceiling = float("inf")

    def run(self, rate: float, duration_s: float, abort: bool) -> Measurement:
        request = TrialRequest(rate, duration_s, self._plan.frame_size, self._plan.flows, abort_on_loss=abort)
        measured = self._generator.run(request)
        self.trials += 1
        self.traffic_s += measured.elapsed_s
        return measured

    def judged(self, rate: float, duration_s: float) -> Measurement:
        """Run a trial with early abort until it is valid by this library; else nothing counts as received."""
        width = self._plan.headline.relative_width
        for _ in range(self._plan.attempts):
            measured = self.run(rate, duration_s, True)
            if judge(TrialRequest(rate, duration_s), measured, width).valid:
                return measured
        self.ceiling = min(self.ceiling, rate)
        return replace(measured, rx_packets=0)

    def found(self, answer: float | None) -> AlgorithmResult:
        width = 1 + self._plan.headline.relative_width
        limited = (answer or self._plan.line_rate_pps) * width * 1.001 >= self.ceiling
        verdict = "generator_limited" if limited else "ndr" if answer else "failed"
        return AlgorithmResult(verdict, None if limited else answer or None, self.trials, self.traffic_s)


def _zeroloss(plan: SearchPlan, generator: Generator, strict: bool) -> AlgorithmResult:
    """Run the search of this library, or that of RFC 9971 without its extensions."""
    found = carry_out(search(replace(plan, strict_rfc9971=strict)), generator)
    traffic = sum(trial.traffic_s for trial in found.trials)
    headline = found.headline
    return AlgorithmResult(headline.verdict.value, headline.answer_pps, len(found.trials), traffic)


def _binary(plan: SearchPlan, generator: Generator, abort: bool) -> AlgorithmResult:
    """Bisect between a load that passed and one that lost, to a width relative to the line rate.

    Follows RFC 2544 as simple tools do: any frame sent and not received counts as loss; no trial is
    invalid. With ``abort`` a trial stops at the first loss.
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


def _trex(
    plan: SearchPlan, generator: Generator, seconds: float | None, drop_ratio: float
) -> AlgorithmResult:
    """Search as TRex's ``ndr`` does (``stl/ndr_bench.py`` of TRex 3.08), for ``seconds`` at each rate.

    It sends for twice that time and reads the counters in the middle: frames on their way count as
    dropped, and so does the start of the traffic. Frames that were not sent are a full queue.
    """
    meter = _Meter(plan, generator)
    duration = seconds or plan.headline.final_trial_s
    top = plan.line_rate_pps

    def passes(rate: float) -> tuple[bool, float]:
        measured = meter.run(rate, duration, False)
        sent = measured.tx_packets * min(1.0, duration / measured.elapsed_s)
        lost = measured.tx_packets - measured.rx_packets + rate * _ON_ITS_WAY_S
        full = measured.queue_drops + max(0.0, rate * duration - sent)
        return lost <= drop_ratio * sent and full <= _TREX_QUEUE_FULL * sent, sent / duration

    good, top = passes(top)
    if good:
        return meter.found(top)
    best, low, high = 0.0, 0.0, 1.0
    for _ in range(_TREX_ITERATIONS):
        part = (low + high) / 2
        near = abs(part - best) <= _TREX_ERROR
        if passes(part * top)[0]:
            best = low = part
        else:
            high = part
        if near:
            break
    return meter.found(best * top)


def _mlrsearch(plan: SearchPlan, generator: Generator, how: str) -> AlgorithmResult:
    """Run MLRsearch (PyPI) with the RFC 2544 goal: one full-length trial without loss.

    ``how``: unmodified, with trials that stop at the first loss, or also judged as this library does.
    """
    package = importlib.import_module("MLRsearch")
    meter = _Meter(plan, generator)
    goal = plan.headline

    class Measurer(package.AbstractMeasurer):  # type: ignore[misc,name-defined]
        def measure(self, intended_duration: float, intended_load: float) -> Any:
            if how == "judged":
                measured = meter.judged(intended_load, intended_duration)
            else:
                measured = meter.run(intended_load, intended_duration, how == "abort")
            return package.MeasurementResult(
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
    lower = getattr(answers[target], "relevant_lower_bound", None)
    return meter.found(float(lower) if lower is not None else None)


ALGORITHMS: dict[str, Algorithm] = {
    "zeroloss": partial(_zeroloss, strict=False),
    "strict-rfc9971": partial(_zeroloss, strict=True),
    "binary": partial(_binary, abort=False),
    "binary-abort": partial(_binary, abort=True),
    "trex-ndr": partial(_trex, seconds=20.0, drop_ratio=0.001),
    "trex-ndr-zero": partial(_trex, seconds=None, drop_ratio=0.0),
    "mlrsearch": partial(_mlrsearch, how="plain"),
    "mlrsearch-abort": partial(_mlrsearch, how="abort"),
    "mlrsearch-judged": partial(_mlrsearch, how="judged"),
}


def usable(names: Sequence[str]) -> None:
    """Check that all names are known and their packages installed. Raises: UnusableInput."""
    for name in names:
        if name not in ALGORITHMS:
            raise UnusableInput("--algorithms", f"no {name!r}; there are {', '.join(ALGORITHMS)}")
    if any(name.startswith("mlrsearch") for name in names):
        try:
            importlib.import_module("MLRsearch")
        except ImportError as error:
            how = "pip install './tools/trex[evaluate]', in a checkout"
            raise UnusableInput("--algorithms", f"the package MLRsearch is missing: {how}") from error
