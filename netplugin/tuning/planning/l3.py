"""Group cores by shared L3 cache (pure): a CCX on AMD, a cluster on ARM.

The threads of a VM, and the PMD threads that serve it, exchange data through the L3 cache. Between cores
with different L3 caches, data crosses the fabric (SUSE Best Practices, "Optimizing Linux for AMD EPYC":
an L3 for each CCX).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from netplugin.tuning.facts import Cache, Cpus

T = TypeVar("T")


def l3_caches(caches: Iterable[Cache]) -> tuple[Cpus, ...]:
    """CPUs of each L3 cache; empty if the machine reports none."""
    return tuple(cache.cpus for cache in caches if cache.level == 3)


def grouped(cores: Sequence[T], cpus: Sequence[Cpus], l3: Sequence[Cpus]) -> list[list[T]]:
    """Group cores by L3 cache, keeping their order; ``cpus`` are the CPUs of each core."""
    groups: dict[int, list[T]] = {}
    for core, mine in zip(cores, cpus, strict=True):
        home = next((number for number, cache in enumerate(l3) if mine & cache), -1)
        groups.setdefault(home, []).append(core)
    return list(groups.values())


def together(groups: Iterable[Sequence[T]], count: int) -> list[T]:
    """Take ``count`` cores from as few groups as possible, best fit first; all cores if there are too few.

    Ties are resolved by the order of ``groups``.
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
