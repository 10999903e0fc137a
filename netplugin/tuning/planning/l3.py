"""Cores that share an L3 cache kept together (pure): a CCX of AMD's CPUs, a cluster of ARM's.

Threads of one VM, or PMD threads that hand packets to it, exchange data through the L3 cache. Between
cores of different L3 caches data goes over the fabric (SUSE Best Practices, "Optimizing Linux for AMD
EPYC": an L3 for each CCX).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from netplugin.tuning.facts import Cache, Cpus

T = TypeVar("T")


def l3_caches(caches: Iterable[Cache]) -> tuple[Cpus, ...]:
    """The CPUs of each L3 cache; none where the machine tells of none."""
    return tuple(cache.cpus for cache in caches if cache.level == 3)


def grouped(cores: Sequence[T], cpus: Sequence[Cpus], l3: Sequence[Cpus]) -> list[list[T]]:
    """The cores by the cache that they share, in their order; ``cpus`` are those of each core."""
    groups: dict[int, list[T]] = {}
    for core, mine in zip(cores, cpus, strict=True):
        home = next((number for number, cache in enumerate(l3) if mine & cache), -1)
        groups.setdefault(home, []).append(core)
    return list(groups.values())


def together(groups: Iterable[Sequence[T]], count: int) -> list[T]:
    """So many, of as few caches as will do, and of those that this leaves least of; all, if too few.

    The order of ``groups`` decides between equals, so that the lowest are taken first.
    """
    left = [list(group) for group in groups if group]
    taken: list[T] = []
    while left and len(taken) < count:
        wanted = count - len(taken)
        fitting = [group for group in left if len(group) >= wanted]
        best = min(fitting, key=len) if fitting else max(left, key=len)
        taken += best[:wanted]
        left.remove(best)
    return taken
