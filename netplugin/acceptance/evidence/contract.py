"""The contract of a component with drop counters: read before and after a trial, then compared."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

_N = TypeVar("_N", int, float)


@dataclass(frozen=True, slots=True)
class Reading:
    """Counter values of a component at one moment."""

    #: Lost frames by counter; monotonic.
    lost: Mapping[str, int] = field(default_factory=dict)
    #: Other counters; the name gives the unit: ``cpu_s``, ``cycles``, ``packets``.
    counters: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Found:
    """Changes between two readings. Names are without the name of the component."""

    lost: Mapping[str, int] = field(default_factory=dict)
    #: Figures for reports: shares (0 to 1), CPU seconds, cycles per packet.
    readings: Mapping[str, float] = field(default_factory=dict)


class Place(ABC):
    """A component on the path of the frames. It is read only between trials, so it cannot disturb one."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name such as ``ovs``, ``host`` or ``vnf``: the prefix of its counter names."""

    @abstractmethod
    def read(self) -> Reading:
        """Read all counters. Raises: EvidenceError if the component cannot be read."""

    def between(self, before: Reading, after: Reading, elapsed_s: float) -> Found:
        """Return the differences of two readings. Override it where counters need arithmetic.

        Raises: EvidenceError if a counter decreased or disappeared, so the component restarted during
        the trial.
        """
        return Found(
            _differences(self.name, before.lost, after.lost),
            _differences(self.name, before.counters, after.counters),
        )


class EvidenceError(Exception):
    """The counters of a component cannot be read or parsed."""


def _differences(place: str, before: Mapping[str, _N], after: Mapping[str, _N]) -> dict[str, _N]:
    for name in before.keys() - after.keys():
        raise EvidenceError(f"{place}: {name} is not counted any more: it went during the trial")
    found = {name: value - before.get(name, 0) for name, value in after.items()}
    for name, value in found.items():
        if value < 0:
            raise EvidenceError(f"{place}: {name} went back by {-value:g} during the trial")
    return found
