"""Evaluates search algorithms on simulated devices with known answers: cost, error and spread.

Each run of a device has its own random stream. It is seeded by the seed, the device name and the run
number, so it is the same for every algorithm and on every machine.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

from netplugin_zeroloss.evaluation.algorithms import ALGORITHMS, AlgorithmResult
from netplugin_zeroloss.generators.sim import FAMILIES, sim_generator
from netplugin_zeroloss.search.result import relative_std
from netplugin_zeroloss.search.trials import SearchPlan

#: Called with the number of finished searches and the total.
Progress = Callable[[int, int], None]
#: Searches per task of the process pool.
_CHUNK = 10


@dataclass(frozen=True, slots=True)
class AlgorithmRow:
    """Results of one algorithm on one device family. Means are over the runs."""

    device: str
    algorithm: str
    runs: int
    #: Runs by verdict, and the correct verdict.
    verdicts: dict[str, int]
    right_verdict: str
    trials: float
    traffic_s: float
    #: Maximum over the runs.
    traffic_max_s: float
    known_pps: float | None
    median_pps: float | None
    #: Relative error of the median answer.
    error: float | None
    #: Relative standard deviation of the answers.
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
    tasks = [
        _Task(plan, device, algorithm, seed, range(first, min(first + _CHUNK, runs)))
        for device in devices
        for algorithm in algorithms
        for first in range(0, runs, _CHUNK)
    ]
    found: dict[tuple[str, str], list[AlgorithmResult]] = {}
    done = 0
    for task, findings in _carry_out(tasks, jobs):
        # Chunks end in any order; ``_row`` sorts before it sums floats.
        found.setdefault((task.device, task.algorithm), []).extend(findings)
        done += len(findings)
        progress(done, runs * len(devices) * len(algorithms))
    return [
        _row(plan, device, algorithm, found[device, algorithm])
        for device in devices
        for algorithm in algorithms
    ]


def _carry_out(tasks: Sequence[_Task], jobs: int) -> Iterator[tuple[_Task, list[AlgorithmResult]]]:
    if jobs == 1:
        for task in tasks:
            yield task, _search(task)
        return
    with ProcessPoolExecutor(jobs) as pool:
        futures = {pool.submit(_search, task): task for task in tasks}
        for future in as_completed(futures):
            yield futures[future], future.result()


def _search(task: _Task) -> list[AlgorithmResult]:
    """Run the searches of one task, in a worker process."""
    algorithm = ALGORITHMS[task.algorithm]
    return [algorithm(task.plan, sim_generator(task.device, f"{task.seed}/{run}")) for run in task.runs]


def _row(plan: SearchPlan, device: str, algorithm: str, found: Sequence[AlgorithmResult]) -> AlgorithmRow:
    family = FAMILIES[device]
    soak_s = plan.headline.final_trial_s
    known = family.limit_pps(soak_s)
    known = min(known, plan.line_rate_pps) if known is not None else None
    answers = sorted(f.answer_pps for f in found if f.answer_pps is not None)
    median = statistics.median(answers) if answers else None
    traffic = sorted(f.traffic_s for f in found)
    return AlgorithmRow(
        device,
        algorithm,
        len(found),
        dict(sorted(Counter(f.verdict for f in found).items())),
        family.verdict,
        statistics.fmean(f.trials for f in found),
        statistics.fmean(traffic),
        traffic[-1],
        known,
        median,
        median / known - 1 if median is not None and known is not None else None,
        relative_std(answers),
        statistics.fmean(family.loss_probability(a, soak_s) for a in answers) if answers else None,
    )


# -- how it is shown -----------------------------------------------------------------------------


def as_table(rows: Sequence[AlgorithmRow]) -> str:
    """Format the rows as a Markdown table, one device family after the other."""
    head = ("device", "search", "verdicts (right one)", "trials", "traffic s", "error", "spread", "P(soak)")
    lines = [head, tuple("---" for _ in head)]
    lines += [
        (
            row.device,
            row.algorithm,
            ", ".join(f"{count} {name}" for name, count in row.verdicts.items()) + f" ({row.right_verdict})",
            f"{row.trials:.1f}",
            f"{row.traffic_s:.1f}",
            _percent(row.error, sign=True),
            _percent(row.spread),
            "" if row.p_soak is None else f"{row.p_soak:.2f}",
        )
        for row in rows
    ]
    widths = [max(len(line[n]) for line in lines) for n in range(len(head))]
    return "".join(
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |\n"
        for line in lines
    )


def as_json(rows: Sequence[AlgorithmRow]) -> str:
    return json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n"


def as_csv(rows: Sequence[AlgorithmRow]) -> str:
    text = io.StringIO()
    writer = csv.writer(text)
    names = [field.name for field in dataclasses.fields(AlgorithmRow)]
    writer.writerow(names)
    for row in rows:
        values = {name: getattr(row, name) for name in names}
        values["verdicts"] = " ".join(f"{k}:{v}" for k, v in row.verdicts.items())
        writer.writerow(values.values())
    return text.getvalue()


def _percent(value: float | None, *, sign: bool = False) -> str:
    if value is None:
        return ""
    return f"{value:+.1%}" if sign else f"{value:.1%}"
