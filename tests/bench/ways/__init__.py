"""The ways to make a port that are compared, one file each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Plugged:
    """One port that was made: how long it took, and parts of that if the way tells them (milliseconds)."""

    ms: float
    parts: Mapping[str, float] = field(default_factory=dict)


class Way(ABC):
    """Makes ports and removes them, one at a time. ``name`` is that in the tables."""

    name: str
    #: IP addresses in the filter of a port; None: it writes no filter.
    addresses: int | None = None

    @abstractmethod
    def plug(self, number: int) -> Plugged:
        """Make the port and return when it is there. No two that are there have one number."""

    @abstractmethod
    def unplug(self, number: int) -> float | None:
        """Remove the port; returns the milliseconds it took, None if the way leaves it there."""
