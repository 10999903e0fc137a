"""Converts counters of the stateless TRex client (``get_stats``, global statistics) to a measurement.

Observed with TRex 3.08:

- ``duration`` fixes the number of frames, not the duration: 5 s at 8 Mpps took 14.7 s.
- ``ierrors`` of the receiving port are frames that the generator itself lost.
- A full transmit queue drops (``low_end``) or retries. Only the global statistics show it:
  ``m_total_queue_drop``, ``m_total_queue_full``. They are never cleared: take the difference.
- ``tx_pps`` and similar values are slow averages. Rates are computed from counters and elapsed time.
- Loss is computed from port counters. Per-stream counters are read on another core and are late.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from netplugin.acceptance.errors import GeneratorError
from netplugin.acceptance.values import Direction, Measurement


@dataclass(frozen=True, slots=True)
class StlReading:
    """Counters of all ports, and global counters, at one moment."""

    opackets: Mapping[int, int]
    ipackets: Mapping[int, int]
    ierrors: Mapping[int, int]
    oerrors: Mapping[int, int]
    queue_drops: int
    queue_full: int

    @staticmethod
    def parse(stats: Mapping[Any, Any], raw_global: Mapping[str, Any]) -> StlReading:
        """Parse the results of ``get_stats()`` and of the RPC ``get_global_stats``.

        Port numbers are integers in Python and strings after JSON.
        Raises: GeneratorError.
        """
        ports = {int(name): port for name, port in stats.items() if str(name).isdecimal()}
        if not ports:
            raise GeneratorError("TRex's statistics have no port")
        try:
            counts = {
                name: {number: int(port[name]) for number, port in ports.items()}
                for name in ("opackets", "ipackets", "ierrors", "oerrors")
            }
            return StlReading(
                **counts,
                queue_drops=int(raw_global["m_total_queue_drop"]),
                queue_full=int(raw_global["m_total_queue_full"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise GeneratorError(f"TRex's statistics cannot be read: {error!r}") from error


def measurement(
    before: StlReading | None,
    after: StlReading,
    paths: Sequence[tuple[int, int]],
    elapsed_s: float,
    uncertainty_s: float = 0.0,
    settled: bool = True,
) -> Measurement:
    """Return the measurement between two readings (``before`` None: all counters started at 0).

    ``paths`` are pairs of ports: the first sends, the second receives.
    """
    directions = tuple(
        Direction(
            _more(before, after, "opackets", sender), _more(before, after, "ipackets", receiver)
        )
        for sender, receiver in paths
    )
    used = {port for path in paths for port in path}
    rx_errors = sum(_more(before, after, "ierrors", port) for port in used)
    tx_errors = sum(_more(before, after, "oerrors", port) for port in used)
    queue_drops = after.queue_drops - (before.queue_drops if before else 0)
    return Measurement(
        tx_packets=sum(d.tx_packets for d in directions),
        rx_packets=sum(d.rx_packets for d in directions),
        elapsed_s=elapsed_s,
        rx_errors=rx_errors,
        queue_drops=queue_drops + tx_errors,
        queue_full=after.queue_full - (before.queue_full if before else 0),
        elapsed_uncertainty_s=uncertainty_s,
        settled=settled,
        directions=directions,
        evidence={"generator.rx": rx_errors, "generator.queue": queue_drops},
    )


def _more(before: StlReading | None, after: StlReading, name: str, port: int) -> int:
    counts: Mapping[int, int] = getattr(after, name)
    if port not in counts:
        raise GeneratorError(f"TRex has no port {port}")
    return counts[port] - (getattr(before, name).get(port, 0) if before else 0)
