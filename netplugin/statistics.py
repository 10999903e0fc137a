"""Exact rank test for two small samples, size of the difference, multiple testing, sequential sign test.

No distribution is assumed: samples are small and skewed, and all equal on a device with a sharp limit.
For such sizes the exact distribution is cheap to compute, including ties.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

#: Sample size above which the rank sum is approximated by a normal distribution.
_EXACT = 25


def p_lower(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the one-sided p-value that ``after`` is not lower than ``before``.

    Wilcoxon rank sum (Mann-Whitney) test, conditional on the ties: over all assignments of the answers
    to the two samples.
    """
    ranks = _doubled_ranks([*before, *after])
    mine = sum(ranks[len(before) :])
    if max(len(before), len(after)) > _EXACT:
        return _normal(ranks, len(after), mine)
    ways = _rank_sums(ranks, len(after))
    low = sum(count for total, count in ways.items() if total <= mine)
    return low / math.comb(len(ranks), len(after))


def least_p(before: int, after: int) -> float:
    """Return the smallest possible ``p_lower`` for these sample sizes, that of disjoint samples."""
    return 1 / math.comb(before + after, after)


def _doubled_ranks(values: Sequence[float]) -> list[int]:
    """Return doubled mid-ranks, so that ties keep integers."""
    counts = Counter(values)
    ranks, below = {}, 0
    for value in sorted(counts):
        ranks[value] = 2 * below + counts[value] + 1
        below += counts[value]
    return [ranks[value] for value in values]


def _rank_sums(ranks: Sequence[int], chosen: int) -> Mapping[int, int]:
    """Return the number of ways to choose ``chosen`` ranks, by their sum."""
    ways: list[Counter[int]] = [Counter({0: 1}), *(Counter() for _ in range(chosen))]
    for rank in ranks:
        for taken in range(chosen, 0, -1):
            for total, count in ways[taken - 1].items():
                ways[taken][total + rank] += count
    return ways[chosen]


def _normal(ranks: Sequence[int], chosen: int, mine: int) -> float:
    """Return the normal approximation, with continuity correction of half a doubled-rank step."""
    count, mean = len(ranks), math.fsum(ranks) / len(ranks)
    square = math.fsum((rank - mean) ** 2 for rank in ranks) / (count - 1)
    deviation = math.sqrt(chosen * (count - chosen) * square / count)
    if deviation == 0:
        return 1.0
    return 0.5 * math.erfc((chosen * mean - mine - 0.5) / (deviation * math.sqrt(2)))


@dataclass(frozen=True, slots=True)
class RelativeChange:
    """Relative change from ``before`` to ``after``: -0.05 is 5 % less."""

    ratio: float
    low: float
    high: float
    #: Confidence of the interval; lower than requested if there are too few answers.
    confidence: float


def change(before: Sequence[float], after: Sequence[float], requested: float = 0.95) -> RelativeChange:
    """Return the Hodges-Lehmann estimate of the ratio, with the interval of the rank test.

    The interval ends are ordered pairwise ratios; how many are cut at each end follows from the rank
    distribution without ties.
    """
    ratios = sorted(_over(b, a) for b in before for a in after)
    out, confidence = 0, max(0.0, 1 - 2 * least_p(len(before), len(after)))
    for steps, covered in _coverage(len(before), len(after)):
        if covered < requested or 2 * steps >= len(ratios):
            break
        out, confidence = steps, covered
    middle = (ratios[(len(ratios) - 1) // 2] + ratios[len(ratios) // 2]) / 2
    return RelativeChange(middle - 1, ratios[out] - 1, ratios[-1 - out] - 1, confidence)


def _over(before: float, after: float) -> float:
    """Return ``after / before``; 0 means no rate, and no rate on both sides is no change."""
    if before > 0:
        return after / before
    return 1.0 if after <= 0 else math.inf


def _coverage(before: int, after: int) -> Sequence[tuple[int, float]]:
    """Return (pairs cut at each end, remaining confidence), starting with 0 pairs."""
    found, tail, cuts = [], 0, range(before * after // 2)
    if max(before, after) > _EXACT:
        mean = before * after / 2
        deviation = math.sqrt(before * after * (before + after + 1) / 12)
        return [(steps, math.erf((mean - steps - 0.5) / (deviation * math.sqrt(2)))) for steps in cuts]
    ways = _rank_sums([2 * n for n in range(1, before + after + 1)], after)
    all_ways, least = math.comb(before + after, after), after * (after + 1)
    for steps in cuts:
        tail += ways[least + 2 * steps]
        found.append((steps, 1 - 2 * tail / all_ways))
    return found


Samples: TypeAlias = Sequence[float]


def adjusted(
    pairs: Sequence[tuple[Samples, Samples] | None], level: float, sides: int = 1
) -> list[float | None]:
    """Return the p-value of each pair, adjusted so that the level holds for all together (``holm``).

    None for no pair, and for one whose sizes cannot reach the level. With one side, the second sample is
    tested to be the lower one; with two, to be another one.
    """
    there = {n: pair for n, pair in enumerate(pairs) if pair is not None}
    able = can_reach([(len(before), len(after)) for before, after in there.values()], level / sides)
    chosen, values = [n for n, reaches in zip(there, able, strict=True) if reaches], []
    for before, after in map(there.__getitem__, chosen):
        p = p_lower(before, after)
        values.append(p if sides == 1 else min(1.0, 2 * min(p, p_lower(after, before))))
    found = dict(zip(chosen, holm(values), strict=True))
    return [found.get(n) for n in range(len(pairs))]


def can_reach(sizes: Sequence[tuple[int, int]], level: float) -> list[bool]:
    """Return which sample sizes can reach the level when all that can are tested together.

    The selection depends on the sizes only, not on the answers, so it does not bias the test.
    """
    least = [least_p(*size) for size in sizes]
    ordered = sorted(least)
    # Equal values are selected together or not at all.
    limits = [p for p in ordered if p * sum(other <= p for other in ordered) <= level]
    return [p <= max(limits, default=0.0) for p in least]


def holm(values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for multiple testing (Holm, 1979)."""
    order = sorted(range(len(values)), key=lambda n: values[n])
    found, highest = [0.0] * len(values), 0.0
    for position, number in enumerate(order):
        highest = max(highest, min(1.0, (len(values) - position) * values[number]))
        found[number] = highest
    return found


#: Weight of the alternatives of ``sign_odds``: the density of p is proportional to p to this power.
_TOWARDS_CLEAR = 4


def sign_odds(successes: int, trials: int) -> float:
    """Return the odds against chance (an e-value): that a success is more likely than not.

    They are a likelihood ratio against p = 1/2, mixed over all p from 1/2 to 1. While p is at most 1/2 they
    are a nonnegative supermartingale that starts at 1. So the probability that they ever reach 1 / level is
    at most level, however often one looks and whenever one stops (Ville's inequality, Robbins' mixture test).
    """
    count, more = trials + _TOWARDS_CLEAR + 1, successes + _TOWARDS_CLEAR
    # The integral of p**more (1 - p)**failures from 1/2 on: a beta function, and a tail of a binomial.
    below = sum(math.comb(count, k) for k in range(more + 1)) / 2**count
    beta = 1 / (count * math.comb(count - 1, more))
    prior = (1 - 1 / 2 ** (_TOWARDS_CLEAR + 1)) / (_TOWARDS_CLEAR + 1)
    return math.ldexp(beta * below / prior, trials)
