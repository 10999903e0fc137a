"""Whether two handfuls of answers differ: an exact rank test, the size of the difference, many tests at once.

Nothing is assumed of how answers are distributed; they are few, skewed, and on a sharp device all the
same. With so few the exact distribution is cheap to compute, ties included.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: Answers on one side beyond which the distribution of ranks is taken for normal.
_EXACT = 25


def p_lower(before: Sequence[float], after: Sequence[float]) -> float:
    """How likely ``after`` would rank so low, or lower, if both were drawn alike (one-sided).

    Wilcoxon's rank sum (Mann-Whitney), given the ties there are: over all ways to deal the same
    answers to the two sides.
    """
    ranks = _doubled_ranks([*before, *after])
    mine = sum(ranks[len(before) :])
    if max(len(before), len(after)) > _EXACT:
        return _normal(ranks, len(after), mine)
    ways = _rank_sums(ranks, len(after))
    low = sum(count for total, count in ways.items() if total <= mine)
    return low / math.comb(len(ranks), len(after))


def least_p(before: int, after: int) -> float:
    """The smallest value that ``p_lower`` can have with so many answers: all of them apart."""
    return 1 / math.comb(before + after, after)


def _doubled_ranks(values: Sequence[float]) -> list[int]:
    """Twice the rank of each, equal values sharing theirs: so they stay whole numbers."""
    counts = Counter(values)
    ranks, below = {}, 0
    for value in sorted(counts):
        ranks[value] = 2 * below + counts[value] + 1
        below += counts[value]
    return [ranks[value] for value in values]


def _rank_sums(ranks: Sequence[int], chosen: int) -> Mapping[int, int]:
    """How many ways there are to choose so many of these ranks, by their sum."""
    ways: list[Counter[int]] = [Counter({0: 1}), *(Counter() for _ in range(chosen))]
    for rank in ranks:
        for taken in range(chosen, 0, -1):
            for total, count in ways[taken - 1].items():
                ways[taken][total + rank] += count
    return ways[chosen]


def _normal(ranks: Sequence[int], chosen: int, mine: int) -> float:
    """The same from mean and variance; a doubled rank is a step of at least 1, half of it corrects."""
    count, mean = len(ranks), math.fsum(ranks) / len(ranks)
    square = math.fsum((rank - mean) ** 2 for rank in ranks) / (count - 1)
    deviation = math.sqrt(chosen * (count - chosen) * square / count)
    if deviation == 0:
        return 1.0
    return 0.5 * math.erfc((chosen * mean - mine - 0.5) / (deviation * math.sqrt(2)))


@dataclass(frozen=True, slots=True)
class Change:
    """``after`` over ``before``, less 1: -0.05 is 5 % less."""

    ratio: float
    low: float
    high: float
    #: That the true one is between; less than what was wanted if there are too few answers.
    confidence: float


def change(before: Sequence[float], after: Sequence[float], wanted: float = 0.95) -> Change:
    """The median of all pairs' ratios (Hodges and Lehmann) and the interval that belongs to the test.

    The interval is from one pair's ratio to another's, as many from the ends as the distribution of
    ranks without ties allows.
    """
    ratios = sorted(_over(b, a) for b in before for a in after)
    out, confidence = 0, max(0.0, 1 - 2 * least_p(len(before), len(after)))
    for steps, covered in _coverage(len(before), len(after)):
        if covered < wanted or 2 * steps >= len(ratios):
            break
        out, confidence = steps, covered
    middle = (ratios[(len(ratios) - 1) // 2] + ratios[len(ratios) // 2]) / 2
    return Change(middle - 1, ratios[out] - 1, ratios[-1 - out] - 1, confidence)


def _over(before: float, after: float) -> float:
    """0 stands for no rate at all; none after none is no change."""
    if before > 0:
        return after / before
    return 1.0 if after <= 0 else math.inf


def _coverage(before: int, after: int) -> Sequence[tuple[int, float]]:
    """So many pairs left out at each end, and the confidence that is left; from none on."""
    if max(before, after) > _EXACT:
        return _normal_coverage(before, after)
    ways = _rank_sums([2 * n for n in range(1, before + after + 1)], after)
    all_ways, least = math.comb(before + after, after), after * (after + 1)
    found, tail = [], 0
    for steps in range(before * after // 2):
        tail += ways[least + 2 * steps]
        found.append((steps, 1 - 2 * tail / all_ways))
    return found


def _normal_coverage(before: int, after: int) -> Sequence[tuple[int, float]]:
    mean = before * after / 2
    deviation = math.sqrt(before * after * (before + after + 1) / 12)
    return [
        (steps, math.erf((mean - steps - 0.5) / (deviation * math.sqrt(2))))
        for steps in range(before * after // 2)
    ]


def can_reach(sizes: Sequence[tuple[int, int]], level: float) -> list[bool]:
    """Which of these pairs of counts can reach the level when all that can are tested together.

    It depends on the counts alone and not on the answers, so leaving the others out is no choice
    that the answers made.
    """
    least = [least_p(*size) for size in sizes]
    ordered = sorted(least)
    # Those that can reach the same are taken together or not at all.
    limits = [p for p in ordered if p * sum(other <= p for other in ordered) <= level]
    return [p <= max(limits, default=0.0) for p in least]


def holm(values: Sequence[float]) -> list[float]:
    """Adjusted so that one limit for all keeps the probability of any false alarm (Holm, 1979)."""
    order = sorted(range(len(values)), key=lambda n: values[n])
    adjusted, highest = [0.0] * len(values), 0.0
    for position, number in enumerate(order):
        highest = max(highest, min(1.0, (len(values) - position) * values[number]))
        adjusted[number] = highest
    return adjusted
