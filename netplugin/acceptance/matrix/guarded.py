"""A generator whose trials count only if the setup is unchanged when they end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from netplugin.acceptance.errors import GeneratorError
from netplugin.acceptance.generators.contract import Generator, GeneratorInfo
from netplugin.acceptance.values import Direction, Measurement, TrialRequest

#: Seconds and rate of the forwarding probe.
_FIRST_S = 0.2
_FIRST_PPS = 1000.0


class Guarded(Generator):
    """Runs checks after each trial. A failed check raises, ends the cell and discards the trial."""

    def __init__(self, inner: Generator, checks: Sequence[Callable[[], None]]) -> None:
        self._inner = inner
        self._checks = tuple(checks)

    @property
    def info(self) -> GeneratorInfo:
        return self._inner.info

    def run(self, request: TrialRequest) -> Measurement:
        measured = self._inner.run(request)
        for check in self._checks:
            check()
        return measured

    def recall(self, request: TrialRequest) -> None:
        self._inner.recall(request)

    def close(self) -> None:
        self._inner.close()


def wait_until_forwarding(generator: Generator, like: TrialRequest, seconds: float) -> None:
    """Send short probes until all frames are received in every direction.

    The probes let the device learn addresses and set up flows. If some frames are still lost at the
    deadline, the search locates the problem.
    Raises: GeneratorError if no frame was received in a direction.
    """
    deadline = time.monotonic() + seconds
    duration = max(_FIRST_S, generator.info.min_trial_s)
    rate = min(_FIRST_PPS, like.rate_pps)
    while True:
        measured = generator.run(
            TrialRequest(
                rate, duration, like.frame_size, like.flows, False, "does it forward?", like.mix
            )
        )
        ways = _directions(measured)
        if all(way.rx_packets >= way.tx_packets > 0 for way in ways):
            return
        if time.monotonic() < deadline:
            continue
        dead = [number for number, way in enumerate(ways) if way.rx_packets <= 0]
        if dead:
            raise GeneratorError(
                f"no frame came through within {seconds:g} s in direction {dead[0]}: of"
                f" {ways[dead[0]].tx_packets} sent none came back; are the MAC addresses, networks"
                " and links those of the description?"
            )
        return


def _directions(measured: Measurement) -> tuple[Direction, ...]:
    return measured.directions or (Direction(measured.tx_packets, measured.rx_packets),)
