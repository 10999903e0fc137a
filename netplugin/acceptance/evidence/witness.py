"""A generator whose trials come with evidence: every place is read before each trial and after it.

The sum closes: sent = received + what the generator's own receiver dropped + all counts of
``Measurement.evidence`` that are not the generator's. ``unexplained`` is one of them. It is below zero
where places counted more than is missing: one frame counted twice, or frames of somebody else.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from netplugin.acceptance.errors import GeneratorError
from netplugin.acceptance.evidence.contract import EvidenceError, Place, Reading
from netplugin.acceptance.generators.contract import Generator, GeneratorInfo
from netplugin.acceptance.values import Measurement, TrialRequest

UNEXPLAINED: Final = "unexplained"
#: So begins what the generator lost itself, before it was sent or after it came back.
_GENERATOR: Final = "generator."
#: Threads of OVS add up their drops about once a second (lib/coverage.c).
_SETTLE_S = 2.0
_AGAIN_S = 0.1


class Witnessed(Generator):
    """Another generator, with places on the way of its frames. It closes the generator."""

    def __init__(
        self, generator: Generator, places: Sequence[Place], settle_s: float = _SETTLE_S
    ) -> None:
        """``settle_s``: how long counts may come late while they do not explain what is missing."""
        names = [place.name for place in places]
        if len(set(names)) < len(names):
            raise ValueError(f"two places have one name: {names}")
        self._generator, self._places, self._settle_s = generator, tuple(places), settle_s

    @property
    def info(self) -> GeneratorInfo:
        return self._generator.info

    def run(self, request: TrialRequest) -> Measurement:
        """Raises: GeneratorError, also for a place that cannot be read or was started anew."""
        try:
            before = {place.name: place.read() for place in self._places}
            measured = self._generator.run(request)
            deadline = time.monotonic() + self._settle_s
            while True:
                witnessed = self._with(measured, before)
                if witnessed.evidence[UNEXPLAINED] == 0 or time.monotonic() > deadline:
                    return witnessed
                time.sleep(_AGAIN_S)  # nobody tells of a count
        except EvidenceError as error:
            raise GeneratorError(str(error)) from error

    def close(self) -> None:
        self._generator.close()

    def _with(self, measured: Measurement, before: Mapping[str, Reading]) -> Measurement:
        evidence = dict(measured.evidence)
        readings = dict(measured.readings)
        for place in self._places:
            found = place.between(before[place.name], place.read(), measured.elapsed_s)
            evidence |= {f"{place.name}.{n}": count for n, count in found.lost.items() if count}
            readings |= {f"{place.name}.{n}": value for n, value in found.readings.items()}
        return replace(measured, evidence=closed(measured, evidence), readings=readings)


def closed(measured: Measurement, located: Mapping[str, float]) -> dict[str, float]:
    """What was located, and beside it what nobody explains (pure)."""
    missing = measured.tx_packets - measured.rx_packets - measured.rx_errors
    found = sum(count for name, count in located.items() if not name.startswith(_GENERATOR))
    return {**located, UNEXPLAINED: missing - found}
