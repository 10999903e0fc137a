"""The contract of a place: it counts, is read before a trial and after it, and says what that means."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

_N = TypeVar("_N", int, float)


@dataclass(frozen=True, slots=True)
class Reading:
    """Everything a place counted since it began, at one moment."""

    #: Frames lost here, by counter; these only grow.
    lost: Mapping[str, int] = field(default_factory=dict)
    #: What else it counts, in units that the name says: ``cpu_s``, ``cycles``, ``packets``.
    counters: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Found:
    """What happened here between two readings. The names are without the place's own."""

    lost: Mapping[str, int] = field(default_factory=dict)
    #: Figures for people and reports: shares (0 to 1), seconds of CPU, cycles a packet.
    readings: Mapping[str, float] = field(default_factory=dict)


class Place(ABC):
    """One place on the frames' way. Reading it must not disturb a trial: it is never read during one."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Like ``ovs``, ``host``, ``vnf``: what stands before the names of its counts."""

    @abstractmethod
    def read(self) -> Reading:
        """All counters now. Raises: EvidenceError if the place cannot be read."""

    def between(self, before: Reading, after: Reading, elapsed_s: float) -> Found:
        """The differences; a place whose counts want arithmetic overrides this.

        Raises: EvidenceError if a count went down or is gone: something was started anew under the
        trial.
        """
        return Found(
            _differences(self.name, before.lost, after.lost),
            _differences(self.name, before.counters, after.counters),
        )


class EvidenceError(Exception):
    """A place cannot be read, or what it says cannot be."""


def _differences(place: str, before: Mapping[str, _N], after: Mapping[str, _N]) -> dict[str, _N]:
    for name in before.keys() - after.keys():
        raise EvidenceError(f"{place}: {name} is not counted any more: it went during the trial")
    found = {name: value - before.get(name, 0) for name, value in after.items()}
    for name, value in found.items():
        if value < 0:
            raise EvidenceError(f"{place}: {name} went back by {-value:g} during the trial")
    return found
