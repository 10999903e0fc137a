"""Evaluates search algorithms on simulated devices with known answers: cost, error and spread.

Each run of a device has its own random stream. It is seeded by the seed, the device name and the run
number, so it is the same for every algorithm and on every machine. Of a class each run has another device.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace

from netplugin_zeroloss.evaluation.algorithms import ALGORITHMS, AlgorithmResult
from netplugin_zeroloss.evaluation.population import device_of
from netplugin_zeroloss.generators.sim import SimGenerator
from netplugin_zeroloss.search.result import relative_std
from netplugin_zeroloss.search.trials import SearchPlan

#: Called with the number of finished searches and the total.
Progress = Callable[[int, int], None]
#: Searches per task of the process pool.
_CHUNK = 10


@dataclass(frozen=True, slots=True)
class AlgorithmRow:
    """Results of one algorithm on one device family or class. Means are over the runs."""

    device: str
    algorithm: str
    runs: int
    #: Runs by verdict, the correct verdict (of a class: the most frequent), and runs with another.
    verdicts: dict[str, int]
    right_verdict: str
    wrong_verdicts: int
    trials: float
    traffic_s: float
    #: Maximum over the runs.
    traffic_max_s: float
    #: Medians.
    known_pps: float | None
    median_pps: float | None
    #: Median of the relative errors, and what 95 % of them are within.
    error: float | None
    error_95: float | None
    #: Relative standard deviation of the answers, as multiples of the known ones.
    spread: float | None
    #: Probability that a soak test at the answer, as long as a full trial, loses a frame.
    p_soak: float | None


@dataclass(frozen=True, slots=True)
class _Task:
    plan: SearchPlan
    device: str
    algorithm: str
    seed: int
    runs: range


def evaluate(
    plan: SearchPlan,
    devices: Sequence[str],
    algorithms: Sequence[str],
    runs: int,
    seed: int,
    jobs: int,
    progress: Progress = lambda done, of: None,
) -> list[AlgorithmRow]:
    """Return one row per device and algorithm, in the given order."""
    pairs = [(device, algorithm) for device in devices for algorithm in algorithms]
    chunks = [range(first, min(first + _CHUNK, runs)) for first in range(0, runs, _CHUNK)]
    tasks = [_Task(plan, *pair, seed, chunk) for pair in pairs for chunk in chunks]
    found: dict[tuple[str, str], list[AlgorithmResult]] = {}
    done = 0
    for task, findings in _carry_out(tasks, jobs):
        # Chunks end in any order; ``_row`` sorts before it sums floats.
        found.setdefault((task.device, task.algorithm), []).extend(findings)
        done += len(findings)
        progress(done, runs * len(pairs))
    return [_row(*pair, found[pair]) for pair in pairs]


def _carry_out(tasks: Sequence[_Task], jobs: int) -> Iterator[tuple[_Task, list[AlgorithmResult]]]:
    if jobs == 1:
        yield from ((task, _search(task)) for task in tasks)
        return
    with ProcessPoolExecutor(jobs) as pool:
        futures = {pool.submit(_search, task): task for task in tasks}
        for future in as_completed(futures):
            yield futures[future], future.result()


def _search(task: _Task) -> list[AlgorithmResult]:
    """Run the searches of one task, in a worker process."""
    soak_s = task.plan.headline.final_trial_s
    done = []
    for run in task.runs:
        family = device_of(task.device, run)
        # Seeding with a string is stable across machines and processes.
        rng = random.Random(f"{task.seed}/{run}/{task.device}")
        found = ALGORITHMS[task.algorithm](task.plan, SimGenerator(family, rng))
        known, answer = family.limit_pps(soak_s), found.answer_pps
        p_soak = None if answer is None else family.loss_probability(answer, soak_s)
        known = None if known is None else min(known, task.plan.line_rate_pps)
        done.append(replace(found, right_verdict=family.verdict, known_pps=known, p_soak=p_soak))
    return done


def _row(device: str, algorithm: str, runs: Sequence[AlgorithmResult]) -> AlgorithmRow:
    verdicts = Counter(sorted(run.verdict for run in runs))
    traffic = sorted(run.traffic_s for run in runs)
    answers = sorted(run.answer_pps for run in runs if run.answer_pps is not None)
    soaks = sorted(run.p_soak for run in runs if run.p_soak is not None)
    known = [run.known_pps for run in runs if run.known_pps is not None]
    pairs = ((run.answer_pps, run.known_pps) for run in runs)
    ratios = sorted(answer / truth for answer, truth in pairs if answer is not None and truth is not None)
    errors = sorted(abs(ratio - 1) for ratio in ratios)
    return AlgorithmRow(
        device,
        algorithm,
        len(runs),
        dict(verdicts),
        Counter(sorted(run.right_verdict for run in runs)).most_common(1)[0][0],
        sum(run.verdict != run.right_verdict for run in runs),
        statistics.fmean(run.trials for run in runs),
        statistics.fmean(traffic),
        traffic[-1],
        statistics.median(known) if known else None,
        statistics.median(answers) if answers else None,
        statistics.median(ratios) - 1 if ratios else None,
        errors[math.ceil(0.95 * len(errors)) - 1] if errors else None,
        relative_std(ratios or answers),
        statistics.fmean(soaks) if soaks else None,
    )


_HEAD = (
    *("device", "search", "verdicts (right one)", "wrong", "trials", "traffic s"),
    *("error", "95 % within", "spread", "P(soak)"),
)


def as_table(rows: Sequence[AlgorithmRow]) -> str:
    """Format the rows as a Markdown table, one device family after the other."""
    lines = [_HEAD, tuple("---" for _ in _HEAD)]
    lines += [
        (
            row.device,
            row.algorithm,
            ", ".join(f"{count} {name}" for name, count in row.verdicts.items()) + f" ({row.right_verdict})",
            str(row.wrong_verdicts),
            f"{row.trials:.1f}",
            f"{row.traffic_s:.1f}",
            _shown(row.error, "+.1%"),
            _shown(row.error_95, ".1%"),
            _shown(row.spread, ".1%"),
            _shown(row.p_soak, ".2f"),
        )
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ((cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in padded)


def as_json(rows: Sequence[AlgorithmRow]) -> str:
    return json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n"


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
