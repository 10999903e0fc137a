"""Loss of a VNF from its port counters: frames received on one port and not sent on its partner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from netplugin.acceptance.evidence.contract import EvidenceError, Found, Place, Reading
from netplugin.acceptance.vnf.contract import VnfError


@dataclass(frozen=True, slots=True)
class PortCounts:
    """Frames since the start of the VNF. ``missed`` and ``errors`` reached the port but were not received."""

    received: int
    sent: int
    missed: int = 0
    errors: int = 0


class Forwarded(Place):
    """The component ``vnf`` of a program that only forwards between paired ports."""

    def __init__(self, counts: Callable[[], Sequence[PortCounts]]) -> None:
        """``counts`` returns the counters per port; it raises VnfError if the VNF does not answer."""
        self._counts = counts

    @property
    def name(self) -> str:
        return "vnf"

    def read(self) -> Reading:
        try:
            ports = self._counts()
        except VnfError as error:
            raise EvidenceError(f"vnf: {error}") from error
        lost: dict[str, int] = {}
        counters: dict[str, float] = {}
        for number, port in enumerate(ports):
            lost[f"port{number}.rx_missed"] = port.missed
            lost[f"port{number}.rx_errors"] = port.errors
            counters[f"port{number}.rx_packets"] = port.received
            counters[f"port{number}.tx_packets"] = port.sent
        return Reading(lost, counters)

    def between(self, before: Reading, after: Reading, elapsed_s: float) -> Found:
        found = super().between(before, after, elapsed_s)
        lost = dict(found.lost)
        for number in range(len(after.counters) // 2):
            partner = number ^ 1
            came = found.readings[f"port{number}.rx_packets"]
            went = found.readings[f"port{partner}.tx_packets"]
            if went > came:
                raise EvidenceError(
                    f"vnf: port {partner} sent {went - came:g} frames that port {number} did not"
                    " receive in the trial: there were frames on their way when it began"
                )
            lost[f"port{partner}.not_sent"] = round(came - went)
        return Found(lost, found.readings)
