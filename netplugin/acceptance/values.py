"""The values a search is made of: what a trial was asked, what it measured, and what is the goal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from netplugin.acceptance.errors import UnusableInput

#: What a frame takes on the wire beyond itself: preamble, start delimiter, gap (IEEE 802.3).
_WIRE_OVERHEAD_BYTES: Final = 20


def line_rate_pps(bits_per_second: float, frame_size: float) -> float:
    """Frames a second that fill the wire; ``frame_size`` has the FCS: 14.88 Mpps of 64 at 10 Gbit/s."""
    return bits_per_second / (8 * (frame_size + _WIRE_OVERHEAD_BYTES))


#: Mixes of frame sizes: bytes with FCS, and how many of them in a round. ``imix`` is what FD.io CSIT
#: calls IMIX_v4_1.
MIXES: Final[Mapping[str, tuple[tuple[int, int], ...]]] = {"imix": ((64, 28), (570, 16), (1518, 4))}


def mean_size(mix: str) -> float:
    """Bytes with FCS of the mean frame of a mix in ``MIXES``."""
    parts = MIXES[mix]
    return sum(size * count for size, count in parts) / sum(count for _, count in parts)


@dataclass(frozen=True, slots=True)
class TrialRequest:
    """What the generator is to do. ``rate_pps`` counts the frames of both directions together."""

    rate_pps: float
    duration_s: float
    frame_size: int = 64
    flows: int = 1024
    #: Stop as soon as the device has lost something for certain.
    abort_on_loss: bool = True
    #: Why the search asks: for people who read its log, not for the generator.
    purpose: str = ""
    #: The name of a mix of sizes in ``MIXES``; ``frame_size`` is its mean, rounded. Empty: one size.
    mix: str = ""

    @property
    def packets(self) -> float:
        """How many frames make the trial complete."""
        return self.rate_pps * self.duration_s


@dataclass(frozen=True, slots=True)
class Direction:
    """Frames sent into the device on one side, and those that came out on the other."""

    tx_packets: int
    rx_packets: int


@dataclass(frozen=True, slots=True)
class Measurement:
    """What was counted, after the generator stopped, the device drained and two reads were equal."""

    tx_packets: int
    rx_packets: int
    #: From the first frame to the last, not with what the generator needs to start and to drain.
    elapsed_s: float
    aborted: bool = False
    #: Frames the generator knows that it should have sent and did not.
    tx_shortfall: int = 0
    #: Frames that reached the generator and that its own receiver dropped.
    rx_errors: int = 0
    #: Frames the generator dropped in its own transmit queue.
    queue_drops: int = 0
    #: Times the generator was held up, so that frames went out late and in bursts: the transmit queue
    #: was full, or its program had no CPU.
    queue_full: int = 0
    #: Frames that may have been under way when the counters were read: 0 after a drain.
    in_flight_packets: int = 0
    #: By how much ``elapsed_s`` may be wrong, where the generator's clock is coarse.
    elapsed_uncertainty_s: float = 0.0
    #: Whether two reads of the counters were equal in the end.
    settled: bool = True
    directions: tuple[Direction, ...] = ()
    #: Frames lost, by place, as far as anybody knows: what these leave of the loss is unexplained.
    evidence: Mapping[str, float] = field(default_factory=dict)
    #: What else was read on the way during the trial, by place: seconds of CPU, shares, cycles.
    readings: Mapping[str, float] = field(default_factory=dict)

    @property
    def achieved_pps(self) -> float:
        return self.tx_packets / self.elapsed_s if self.elapsed_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Goal:
    """What a load must do to count as a lower bound (the terms are those of MLRsearch).

    A load is a lower bound when trials of ``final_trial_s`` were run for ``sum_s`` in all, and at most
    the share ``exceed_ratio`` of that time went to trials that lost more than ``max_loss_ratio``.
    """

    name: str
    max_loss_ratio: float = 0.0
    exceed_ratio: float = 0.0
    initial_trial_s: float = 0.4
    final_trial_s: float = 60.0
    sum_s: float = 60.0
    #: The answer's bounds are this close: upper <= lower * (1 + relative_width).
    relative_width: float = 0.005

    def __post_init__(self) -> None:
        """Raises: UnusableInput."""
        _within(self.name, "loss ratio", self.max_loss_ratio, 0, 0.5, or_equal=True)
        _within(self.name, "exceed ratio", self.exceed_ratio, 0, 0.999, or_equal=True)
        _within(self.name, "final trial duration", self.final_trial_s, 0, 86_400)
        _within(self.name, "initial trial duration", self.initial_trial_s, 0, self.final_trial_s)
        _within(self.name, "relative width (precision)", self.relative_width, 0, 0.5)
        if not self.final_trial_s <= self.sum_s <= 1000 * self.final_trial_s:
            raise UnusableInput(
                f"goal {self.name}", "the sum of durations must be 1 to 1000 final trials"
            )

    @property
    def is_strict(self) -> bool:
        """One lost frame decides, so a trial may stop there."""
        return self.max_loss_ratio == 0 and self.exceed_ratio == 0

    @property
    def trials_needed(self) -> int:
        return math.ceil(self.sum_s / self.final_trial_s - 1e-9)

    def in_words(self) -> str:
        """One line to stand beside a number, so that nobody takes it for another one."""
        loss = f"loss ratio <= {self.max_loss_ratio:g}" if self.max_loss_ratio else "no frame lost"
        some = f" in {1 - self.exceed_ratio:.0%} of the time" if self.exceed_ratio else ""
        return (
            f"{loss}{some}, {self.trials_needed} x {self.final_trial_s:g} s,"
            f" bounds within {self.relative_width:.3%}"
        )


def _within(
    goal: str, what: str, value: float, low: float, high: float, *, or_equal: bool = False
) -> None:
    above = value >= low if or_equal else value > low
    if not (math.isfinite(value) and above and value <= high):
        sign = "at least" if or_equal else "above"
        raise UnusableInput(
            f"goal {goal}", f"{what} must be {sign} {low:g} and at most {high:g}, not {value:g}"
        )


def strict_goal(
    final_trial_s: float = 60.0, precision: float = 0.005, initial_trial_s: float = 0.4
) -> Goal:
    """The headline: not one frame lost in one trial of full length (RFC 2544, section 26.1)."""
    return Goal(
        "zero-loss", 0.0, 0.0, min(initial_trial_s, final_trial_s), final_trial_s, final_trial_s,
        precision,
    )  # fmt: skip


def csit_ndr(precision: float = 0.005) -> Goal:
    """What FD.io CSIT publishes as NDR: half of its 1 s trials may lose. It is not zero loss."""
    return Goal("csit-ndr", 0.0, 0.5, 1.0, 1.0, 21.0, precision)


def csit_pdr(precision: float = 0.005) -> Goal:
    """CSIT's PDR: as its NDR, with 0.5 % of the frames lost."""
    return Goal("csit-pdr", 0.005, 0.5, 1.0, 1.0, 21.0, precision)
