"""How often ``guard`` calls a device worse: on simulated devices whose ratio is known.

    python -m tests.bench.guard [--runs N] [--seed N]

It needs no root and sends nothing. Each run is one cell: a search of A, and visits to A and B in turn.
"""

from __future__ import annotations

import argparse
import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from statistics import fmean

from netplugin_zeroloss.generators.contract import Generator
from netplugin_zeroloss.generators.devices import DEVICES
from netplugin_zeroloss.generators.sim import SimFamily, SimGenerator
from netplugin_zeroloss.search.guard import GuardFound, GuardPlan, GuardVerdict, Scores, Visited, guard
from netplugin_zeroloss.search.search import carry_out, run_search
from netplugin_zeroloss.search.trials import Asking, SearchPlan
from netplugin_zeroloss.values import headline

from tests.unit.zeroloss.report_runs import LINE_PPS, device

#: Limits of B, over that of A.
RATIOS = {
    **dict.fromkeys(("noisy", "clean"), (1.02, 1.0, 0.98, 0.965, 0.95, 0.9)),
    **dict.fromkeys(("rare-stalls", "heavy-stalls", "drift", "flaky-generator"), (1.0, 0.98, 0.95)),
}
#: Minutes of traffic, with those of the search.
MINUTES = 20.0

#: Returns A or B as a visit finds it.
Device = Callable[[bool, int], SimFamily]


def of_ratio(name: str, ratio: float, is_b: bool, visit: int) -> SimFamily:
    return device(name, slower=1 - ratio if is_b else 0.0)


def stepping(name: str, ratio: float, is_b: bool, visit: int) -> SimFamily:
    """The machine has a new state every nine visits, in which both do up to 30 % less."""
    part = 1 - 0.3 * random.Random(visit // 9).random()
    return device(name, slower=1 - part * (ratio if is_b else 1.0))


def stalling(is_b: bool, visit: int) -> SimFamily:
    """B has the stalls of ``noisy``; the capacity is the same."""
    clean = device("clean")
    stalls = DEVICES["noisy"].stalls
    return replace(clean, devices=(replace(clean.devices[0], stalls=stalls),)) if is_b else clean


def once(device_of: Device, seed: str) -> tuple[GuardFound, float]:
    """One run, and its seconds of traffic."""
    plan = SearchPlan((headline(),), LINE_PPS)
    searched = run_search(plan, SimGenerator(device_of(False, 0), random.Random(f"{seed}/search"))).found
    spent = sum(trial.traffic_s for trial in searched.trials)
    begin = max(trial.rate for trial in searched.trials if trial.passed)
    asking = guard(GuardPlan(plan, searched.headline.answer_pps, begin, seed, 60 * MINUTES - spent))
    try:
        visit = next(asking)
        while True:
            generator = SimGenerator(
                device_of(visit.is_b, visit.number), random.Random(f"{seed}/{visit.number}")
            )
            visit = asking.send(visited(visit.trials(), generator))
    except StopIteration as end:
        found: GuardFound = end.value
        return found, found.traffic_s + spent


def visited(trials: Asking[Scores | None], generator: Generator) -> Visited:
    times: list[float] = []
    scores = carry_out(trials, generator, lambda _, trial: times.append(trial.elapsed_s))
    return Visited(scores, sum(times))


def row(device_of: Device, runs: int, seed: int, pool: ProcessPoolExecutor) -> Sequence[str]:
    found = list(pool.map(partial(once, device_of), (f"{seed}/{n}" for n in range(runs)), chunksize=10))
    counts = Counter(each.verdict for each, _ in found)
    assert not counts[GuardVerdict.FAILED]
    verdicts = (GuardVerdict.WORSE, GuardVerdict.NOT_WORSE, GuardVerdict.UNDECIDED)
    minutes = fmean(seconds for _, seconds in found) / 60
    rounds = fmean(len(each.rounds) for each, _ in found)
    return [*(f"{counts[v] / runs:.1%}" for v in verdicts), f"{minutes:.0f}", f"{rounds:.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rows: list[tuple[str, str, Device]] = [
        (name, f"{ratio:g}", partial(of_ratio, name, ratio))
        for name, many in RATIOS.items()
        for ratio in many
    ]
    rows += [("noisy, with steps", f"{ratio:g}", partial(stepping, "noisy", ratio)) for ratio in (1.0, 0.95)]
    rows += [("clean, B with stalls", "-", stalling)]
    print("| device | B / A | worse | not worse | undecided | minutes of traffic | rounds |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for name, ratio, device_of in rows:
            cells = row(device_of, options.runs, options.seed, pool)
            print(f"| {name} | {ratio} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
