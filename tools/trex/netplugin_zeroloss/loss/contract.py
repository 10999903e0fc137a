"""The contract of components with drop counters, and a generator that reads them around each trial."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

from netplugin.programs.polling import polled
from netplugin_zeroloss.generators.contract import Generator, GeneratorInfo
from netplugin_zeroloss.values import GeneratorError, Measurement, TrialRequest

_N = TypeVar("_N", int, float)


@dataclass(frozen=True, slots=True)
class CounterReading:
    """Counter values of a component at one moment."""

    #: Lost frames by counter; monotonic.
    lost: Mapping[str, int] = field(default_factory=dict)
    #: Other counters; the name gives the unit: ``cpu_s``, ``cycles``, ``packets``.
    counters: Mapping[str, float] = field(default_factory=dict)
    #: Counters of what comes and goes (queues, processes), and those that may be fill levels.
    loose: Mapping[str, float] = field(default_factory=dict)
    #: What only the component itself compares.
    details: Any = None


@dataclass(frozen=True, slots=True)
class CounterChanges:
    """Changes between two readings. Names are without the name of the component."""

    lost: Mapping[str, int] = field(default_factory=dict)
    #: Figures for reports: shares (0 to 1), CPU seconds, cycles per packet.
    readings: Mapping[str, float] = field(default_factory=dict)


class DropCounters(ABC):
    """A component on the path of the frames. It is read only between trials, so it cannot disturb one."""

    #: Such as ``ovs``, ``host`` or ``vnf``: the prefix of its counter names.
    name: str

    @abstractmethod
    def read(self) -> CounterReading:
        """Read all counters. Raises: AttributionError if the component cannot be read."""

    def between(self, before: CounterReading, after: CounterReading, elapsed_s: float) -> CounterChanges:
        """Return the differences of two readings. Override it where counters need arithmetic.

        A loose counter that decreased or disappeared is ``NAME.unusable``, with the decrease.
        Raises: AttributionError if another one did, so the component restarted during the trial.
        """
        readings: dict[str, float] = dict(_differences(self.name, before.counters, after.counters))
        for name in before.loose.keys() | after.loose.keys():
            grown = after.loose.get(name, 0.0) - before.loose.get(name, 0.0)
            fell = grown < 0 or name not in after.loose
            readings |= {f"{name}.unusable": -grown} if fell else {name: grown}
        return CounterChanges(_differences(self.name, before.lost, after.lost), readings)


class AttributionError(Exception):
    """The counters of a component cannot be read or parsed."""


def _differences(place: str, before: Mapping[str, _N], after: Mapping[str, _N]) -> dict[str, _N]:
    if gone := before.keys() - after.keys():
        raise AttributionError(f"{place}: {min(gone)} is not counted any more: it went during the trial")
    found = {name: value - before.get(name, 0) for name, value in after.items()}
    for name, value in found.items():
        if value < 0:
            raise AttributionError(f"{place}: {name} went back by {-value:g} during the trial")
    return found


# -- A generator with loss attribution: reads all drop counters before and after each trial. ------

UNEXPLAINED: Final = "unexplained"
#: Prefix of frames that the generator lost itself, before sending or after receiving.
_GENERATOR: Final = "generator."
#: OVS threads publish their coverage counters about once a second (lib/coverage.c).
_SETTLE_S = 2.0
_AGAIN_S = 0.1


class AttributedGenerator(Generator):
    """Wraps a generator and the components on its path. Closes the generator.

    The sum is exact: sent = received + drops of the generator's own receiver + all counts in ``evidence``
    that are not the generator's. The remainder is ``unexplained``; negative, if a frame was counted twice,
    or frames of other traffic were counted.
    """

    def __init__(
        self, generator: Generator, places: Sequence[DropCounters], settle_s: float = _SETTLE_S
    ) -> None:
        """``settle_s``: seconds to wait for late counters while they do not explain the loss."""
        names = [place.name for place in places]
        if len(set(names)) < len(names):
            raise ValueError(f"two places have one name: {names}")
        self._generator, self._places, self._settle_s = generator, tuple(places), settle_s

    @property
    def info(self) -> GeneratorInfo:
        return self._generator.info

    def run(self, request: TrialRequest) -> Measurement:
        """Run one trial. Raises: GeneratorError, also if a component cannot be read or restarted."""
        try:
            before = {place.name: place.read() for place in self._places}
            measured = self._generator.run(request)
            # OVS has no notification of counters.
            return polled(
                lambda: self._with(measured, before),
                lambda attributed: attributed.evidence[UNEXPLAINED] == 0,
                self._settle_s,
                _AGAIN_S,
            )
        except AttributionError as error:
            raise GeneratorError(str(error)) from error

    def recall(self, request: TrialRequest) -> None:
        """Pass the trial on; counters are compared within a trial only and need no recall."""
        self._generator.recall(request)

    def close(self) -> None:
        self._generator.close()

    def _with(self, measured: Measurement, before: Mapping[str, CounterReading]) -> Measurement:
        evidence = dict(measured.evidence)
        readings = dict(measured.readings)
        for place in self._places:
            found = place.between(before[place.name], place.read(), measured.elapsed_s)
            evidence |= {f"{place.name}.{n}": count for n, count in found.lost.items() if count}
            readings |= {f"{place.name}.{n}": value for n, value in found.readings.items()}
        return replace(measured, evidence=closed(measured, evidence), readings=readings)


def closed(measured: Measurement, located: Mapping[str, float]) -> dict[str, float]:
    """Return the located loss with the unexplained remainder (pure)."""
    missing = measured.tx_packets - measured.rx_packets - measured.rx_errors
    found = sum(count for name, count in located.items() if not name.startswith(_GENERATOR))
    return {**located, UNEXPLAINED: missing - found}
