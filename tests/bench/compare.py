"""How often ``compare`` cries wolf, and how large a drop it finds: searches of simulated devices.

    python -m tests.bench.compare [--runs N] [--pool N] [--seed N]

It needs no root and sends nothing. Answers are drawn from a pool of real searches of each device,
without putting back; "run" is one pair of runs that are compared.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from netplugin_zeroloss.journal import Cell, RunRecord
from netplugin_zeroloss.report.compare import compare

from tests.unit.zeroloss.report_runs import device, merged, record, result, run_of

DEVICES = ("clean", "noisy", "rare-stalls", "heavy-stalls")
REPEATS = (1, 3, 5, 7, 10, 15)
DROPS = (0.05, 0.1, 0.2)
#: Cells of a run whose false alarms are counted together.
CELLS = 4

Pool = Sequence[dict[str, Any]]


def pool(name: str, slower: float, count: int, seed: int) -> Pool:
    return [result(device(name, slower=slower), seed=f"{seed}/{slower}/{n}") for n in range(count)]


def statuses(
    before: Pool, after: Pool, repeats: int, cells: int, runs: int, seed: int
) -> tuple[float, float]:
    """The parts of so many pairs of runs that end with status 1, and with 2."""
    rng = random.Random(f"{seed}/{repeats}/{cells}")
    found: Counter[int] = Counter()
    for _ in range(runs):
        drawn = [_drawn(rng, before, after, repeats) for _ in range(cells)]
        old, new = zip(*drawn, strict=True)
        found[compare(_run(old), _run(new)).status] += 1
    return found[1] / runs, found[2] / runs


def _drawn(rng: random.Random, before: Pool, after: Pool, repeats: int) -> tuple[Pool, Pool]:
    """Searches for both sides of one cell, none of them twice."""
    if before is after:
        both = rng.sample(list(before), 2 * repeats)
        return both[:repeats], both[repeats:]
    return rng.sample(list(before), repeats), rng.sample(list(after), repeats)


def _run(cells: Sequence[Pool]) -> RunRecord:
    return run_of([record(Cell("a", n), merged(pool)) for n, pool in enumerate(cells, 1)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--pool", type=int, default=150)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    drops = "".join(f" {drop:.0%} lower found |" for drop in DROPS)
    print(f"| device | repeats | false alarm in a run of {CELLS} cells | status 2 |{drops}")
    print("| --- | --- | --- | --- |" + " --- |" * len(DROPS))
    for name in DEVICES:
        # A device that is always the same needs no pool.
        count = 30 if name == "clean" else options.pool
        pools = {drop: pool(name, drop, count, options.seed) for drop in (0.0, *DROPS)}
        for repeats in REPEATS:
            rest = repeats, CELLS, options.runs, options.seed
            cells = [*statuses(pools[0.0], pools[0.0], *rest)]
            rest = repeats, 1, options.runs, options.seed
            cells += [statuses(pools[0.0], pools[drop], *rest)[0] for drop in DROPS]
            print(
                f"| {name} | {repeats} | " + " | ".join(f"{c:.1%}" for c in cells) + " |",
                flush=True,
            )


if __name__ == "__main__":
    main()
