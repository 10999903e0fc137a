"""Distribute loads over CPUs to minimize the largest sum, with as few moves as needed (pure).

The optimum is NP-hard (scheduling on identical machines). The heuristic takes the best of three starts, each
improved by single moves and swaps: the current placement; the current placement with every load on a
permitted CPU; and a new placement, largest load first, which is within a third of the optimum (Graham 1969).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

#: A port and one of its receive queues.
Key: TypeAlias = tuple[str, int]
Placement: TypeAlias = Mapping[Key, int]


@dataclass(frozen=True)
class LoadProblem:
    """Loads in percent of a CPU. ``homes`` has the permitted CPUs of each load (never empty)."""

    cpus: tuple[int, ...]
    loads: Mapping[Key, int]
    homes: Mapping[Key, frozenset[int]]

    def sums(self, placement: Placement) -> dict[int, int]:
        """The load of each CPU."""
        found = dict.fromkeys(self.cpus, 0)
        for key, cpu in placement.items():
            found[cpu] += self.loads[key]
        return found

    def largest(self, placement: Placement) -> int:
        return max(self.sums(placement).values(), default=0)

    def away(self, placement: Placement) -> int:
        """The number of loads on a CPU that is not permitted."""
        return sum(cpu not in self.homes[key] for key, cpu in placement.items())

    def within(self, cpus: frozenset[int], placement: Placement) -> tuple[LoadProblem, Placement]:
        """The part of the loads that are on these CPUs; those that are misplaced there do not move."""
        there = {key: cpu for key, cpu in placement.items() if cpu in cpus}
        homes = {key: self.homes[key] & cpus or frozenset((cpu,)) for key, cpu in there.items()}
        return LoadProblem(tuple(cpus), {key: self.loads[key] for key in there}, homes), there

    @property
    def by_size(self) -> list[Key]:
        return sorted(self.loads, key=lambda key: (-self.loads[key], key))


def balanced(problem: LoadProblem, now: Placement) -> dict[Key, int]:
    """A placement whose largest sum and number of misplaced loads are no larger than now.

    It is a fixed point: balancing the result changes nothing.
    """
    placement = dict(now)
    while True:
        better = _step(problem, placement)
        if _worth(problem, better) >= _worth(problem, placement):
            return placement
        placement = better


def _worth(problem: LoadProblem, placement: Placement) -> tuple[int, int]:
    return problem.away(placement), problem.largest(placement)


def _step(problem: LoadProblem, now: dict[Key, int]) -> dict[Key, int]:
    most = problem.largest(now)
    starts = (now, _brought_home(problem, now), _from_nothing(problem))
    found = [_improved(problem, start) for start in starts]
    # A load may be misplaced for a reason: moving it must not raise the largest sum.
    allowed = [placement for placement in found if problem.largest(placement) <= most]
    return min(allowed, key=lambda p: (*_worth(problem, p), _moved(now, p)), default=now)


def _moved(now: Placement, then: Placement) -> int:
    return sum(then[key] != cpu for key, cpu in now.items())


def _from_nothing(problem: LoadProblem) -> dict[Key, int]:
    return _filled(problem, {}, problem.by_size)


def _brought_home(problem: LoadProblem, now: Placement) -> dict[Key, int]:
    home = {key: cpu for key, cpu in now.items() if cpu in problem.homes[key]}
    return _filled(problem, home, [key for key in problem.by_size if key not in home])


def _filled(problem: LoadProblem, begun: Placement, rest: list[Key]) -> dict[Key, int]:
    """Put each of the rest on the permitted CPU with the lowest sum."""
    placement, sums = dict(begun), problem.sums(begun)
    for key in rest:
        cpu = min(problem.homes[key], key=lambda cpu: (sums[cpu], cpu))
        placement[key] = cpu
        sums[cpu] += problem.loads[key]
    return placement


def _improved(problem: LoadProblem, start: Placement) -> dict[Key, int]:
    """Apply the best move or swap off the fullest CPU, until none helps."""
    placement, sums = dict(start), problem.sums(start)
    if not sums:
        return placement
    while True:
        full = max(sums, key=lambda cpu: (sums[cpu], -cpu))
        changes = _moves(problem, placement, sums, full) or _swaps(problem, placement, sums, full)
        if not changes:
            return placement
        _, change = min(changes, key=lambda found: _order(problem, *found))
        for key, cpu in change.items():
            sums[placement[key]] -= problem.loads[key]
            sums[cpu] += problem.loads[key]
            placement[key] = cpu


def _order(problem: LoadProblem, fuller: int, change: Placement) -> tuple[object, ...]:
    """Sort key: the largest effect first, then the least load moved."""
    return fuller, sum(problem.loads[key] for key in change), sorted(change.items())


_Change: TypeAlias = tuple[int, dict[Key, int]]


def _moves(problem: LoadProblem, placement: Placement, sums: Mapping[int, int], full: int) -> list[_Change]:
    """Moves of one load to another CPU, each with the larger of the two resulting sums."""
    found = []
    for key in _on(placement, full):
        load = problem.loads[key]
        for cpu in problem.homes[key] - {full}:
            fuller = max(sums[full] - load, sums[cpu] + load)
            if fuller < sums[full]:
                found.append((fuller, {key: cpu}))
    return found


def _swaps(problem: LoadProblem, placement: Placement, sums: Mapping[int, int], full: int) -> list[_Change]:
    """Swaps of a load for a smaller one, each with the larger of the two resulting sums."""
    found = []
    for key in _on(placement, full):
        for other, cpu in placement.items():
            gain = problem.loads[key] - problem.loads[other]
            homes = cpu in problem.homes[key] and full in problem.homes[other]
            if cpu != full and homes and 0 < gain:
                fuller = max(sums[full] - gain, sums[cpu] + gain)
                if fuller < sums[full]:
                    found.append((fuller, {key: cpu, other: full}))
    return found


def _on(placement: Placement, cpu: int) -> Iterator[Key]:
    return (key for key, there in placement.items() if there == cpu)
