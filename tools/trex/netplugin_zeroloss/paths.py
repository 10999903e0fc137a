"""The paths of a run (pure): each of the generator's directions enters at one end and leaves at its partner.

Ends are in pairs: 0 and 1, 2 and 3, and so on. The VNF forwards between the ports of a pair.
"""

from __future__ import annotations

from collections.abc import Sequence

from netplugin_zeroloss.values import Direction


def fit(paths: int, ends: int) -> bool:
    """Whether so many paths are traffic on all pairs: one for each end, or one for each pair.

    Two ends can have any number.
    """
    return ends == 2 or paths in (ends, ends // 2)


def entrances(paths: int, ends: int) -> tuple[int, ...]:
    """Return the end at which each path enters: in order, or the first of each pair if there are so few."""
    if 2 * paths == ends:
        return tuple(range(0, ends, 2))
    return tuple(number % ends for number in range(paths))


def names(paths: int, ports: Sequence[str]) -> tuple[str, ...]:
    """Return a name for each path from the ids of the ports: ``zeroloss-1 to zeroloss-2``.

    Empty if these are not the paths of the ports.
    """
    if not ports or not fit(paths, len(ports)):
        return ()
    return tuple(f"{ports[end]} to {ports[end ^ 1]}" for end in entrances(paths, len(ports)))


def dead(ways: Sequence[Direction]) -> list[int]:
    """Return the directions of which no frame was received, sent or not."""
    return [number for number, way in enumerate(ways) if way.rx_packets <= 0]


def described(numbers: Sequence[int], known: Sequence[str]) -> str:
    """Name directions in an error: ``path 1 (zeroloss-2 to zeroloss-1) and path 2``."""
    return " and ".join(f"path {n} ({known[n]})" if n < len(known) else f"path {n}" for n in numbers)
