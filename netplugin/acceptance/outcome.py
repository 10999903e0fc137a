"""What a search found: the verdict of each goal, its bounds, and why."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from netplugin.acceptance.values import Goal


class SearchVerdict(StrEnum):
    """How a search ended. Only ``ndr`` and ``vnf_limited`` come with a rate."""

    #: The highest rate at which the goal is reached, bracketed.
    NDR = "ndr"
    #: The loss does not fall with the load: there is no such rate.
    FLOOR = "floor"
    #: The generator could not send what it took; the device can do at least the lower bound.
    GENERATOR_LIMITED = "generator_limited"
    #: Bracketed, but what runs in the VM does no more even without the backend.
    VNF_LIMITED = "vnf_limited"
    #: No verdict: the reason says what was in the way.
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Floor:
    """Loss that stays however low the load is."""

    #: Frames lost for each frame sent, at the lowest loads that were tried.
    loss_ratio: float
    lost_packets: int
    #: Trials at these loads that lost, in this much traffic.
    events: int
    traffic_s: float
    #: The place with the largest count of lost frames, if the generator's evidence has one.
    place: str | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one goal. ``upper_pps`` is the lowest rate that failed, or the line where none did."""

    goal: Goal
    verdict: SearchVerdict
    reason: str
    lower_pps: float
    upper_pps: float
    floor: Floor | None = None

    @property
    def answer_pps(self) -> float | None:
        """The rate that may be quoted, if there is one."""
        quotable = (SearchVerdict.NDR, SearchVerdict.VNF_LIMITED)
        return self.lower_pps if self.verdict in quotable else None
