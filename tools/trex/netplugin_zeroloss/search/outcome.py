"""Outcome of a search per goal: verdict, bounds and reason."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from netplugin_zeroloss.values import Goal


class SearchVerdict(StrEnum):
    """Verdict of a search. Only ``ndr`` and ``vnf_limited`` have a rate."""

    #: The highest load that meets the goal, bracketed.
    NDR = "ndr"
    #: Load-independent loss: no load meets the goal.
    FLOOR = "floor"
    #: The generator could not send the required load; the device forwards at least the lower bound.
    GENERATOR_LIMITED = "generator_limited"
    #: Bracketed, but the VNF is as slow without the backend.
    VNF_LIMITED = "vnf_limited"
    #: No verdict; see the reason.
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Floor:
    """Load-independent loss."""

    #: Loss ratio at the lowest loads.
    loss_ratio: float
    lost_packets: int
    #: Lossy trials at these loads, and seconds of traffic there.
    events: int
    traffic_s: float
    #: Component with the most lost frames, if loss attribution names one.
    place: str | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of one goal. ``upper_pps`` is the lowest failed load, or the line rate if none failed."""

    goal: Goal
    verdict: SearchVerdict
    reason: str
    lower_pps: float
    upper_pps: float
    floor: Floor | None = None

    @property
    def answer_pps(self) -> float | None:
        """The rate of the verdict in pps, if it has one."""
        quotable = (SearchVerdict.NDR, SearchVerdict.VNF_LIMITED)
        return self.lower_pps if self.verdict in quotable else None
