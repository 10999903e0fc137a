"""Value types of a search: goal, trial request, measurement, and errors without a verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Final

from pydantic import Field

#: Tolerance for floating-point error in comparisons of rates and times.
ROUNDING: Final = 1e-9


class UnusableInput(Exception):
    """An option or a file is unusable; no traffic was sent."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")
        self.what = what
        self.why = why


class GeneratorError(Exception):
    """The generator died, missed its deadline, or sent an invalid answer."""


class ReplayError(Exception):
    """The recorded trials do not belong to the replayed search."""


#: Overhead of a frame on the wire: preamble, start delimiter and inter-frame gap (IEEE 802.3).
_WIRE_OVERHEAD_BYTES: Final = 20


def line_rate_pps(bits_per_second: float, frame_size: float) -> float:
    """Return the line rate in pps; ``frame_size`` includes the FCS: 14.88 Mpps for 64 at 10 Gbit/s."""
    return bits_per_second / (8 * (frame_size + _WIRE_OVERHEAD_BYTES))


#: Mixes of frame sizes: bytes with FCS, and frames per round. ``imix`` is IMIX_v4_1 of FD.io CSIT.
MIXES: Final[Mapping[str, tuple[tuple[int, int], ...]]] = {"imix": ((64, 28), (570, 16), (1518, 4))}


def mean_size(mix: str) -> float:
    """Return the mean frame size of a mix in bytes, with FCS."""
    parts = MIXES[mix]
    return sum(size * count for size, count in parts) / sum(count for _, count in parts)


@dataclass(frozen=True, slots=True)
class TrialRequest:
    """Request for one trial. ``rate_pps`` is the load of all directions together."""

    rate_pps: float
    duration_s: float
    frame_size: int = 64
    flows: int = 1024
    #: Stop at the first certain loss.
    abort_on_loss: bool = True
    #: Purpose of the trial for the log; the generator ignores it.
    purpose: str = ""
    #: Name of a mix in ``MIXES``; ``frame_size`` is its rounded mean. Empty: one size.
    mix: str = ""
    #: Measure the latency of frames, if the generator can.
    latency: bool = False
    #: Number of counter readings during the trial to return, evenly spaced, if the generator has them.
    readings: int = 0
    #: Frames that each direction sends back to back; ``rate_pps`` is the mean over the bursts and the gaps.
    burst: int = 1

    @property
    def packets(self) -> float:
        """Number of frames of the complete trial."""
        return self.rate_pps * self.duration_s


_NotNegative = Annotated[float, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class Direction:
    """Frames sent in one direction and received at the other end."""

    tx_packets: int
    rx_packets: int

    @staticmethod
    def total(directions: Sequence[Direction]) -> Direction:
        """Return the frames of all directions together."""
        return Direction(sum(d.tx_packets for d in directions), sum(d.rx_packets for d in directions))


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """Latency of the sampled frames of one direction, from sending to receiving port, in microseconds."""

    samples: Annotated[int, Field(ge=0)]
    p50_us: _NotNegative
    p90_us: _NotNegative
    p99_us: _NotNegative
    max_us: _NotNegative


@dataclass(frozen=True, slots=True)
class Progress:
    """Counters of all directions ``elapsed_s`` seconds after the first frame; some frames are in flight."""

    elapsed_s: _NotNegative
    tx_packets: int
    rx_packets: int


@dataclass(frozen=True, slots=True)
class Measurement:
    """Counters of a trial, read after the generator stopped, the device drained and two reads were equal."""

    tx_packets: int
    rx_packets: int
    #: Seconds from the first to the last frame, without start and drain.
    elapsed_s: float
    aborted: bool = False
    #: Frames the generator reports as not sent.
    tx_shortfall: int = 0
    #: Frames dropped by the generator's own receiver.
    rx_errors: int = 0
    #: Frames the generator dropped in its own transmit queue.
    queue_drops: int = 0
    #: Number of times the generator was delayed (transmit queue full, or no CPU), so that frames
    #: went out late and in bursts.
    queue_full: int = 0
    #: Frames possibly in flight when the counters were read; 0 after a drain.
    in_flight_packets: int = 0
    #: Uncertainty of ``elapsed_s`` in seconds, for generators with a coarse clock.
    elapsed_uncertainty_s: float = 0.0
    #: Whether the last two reads of the counters were equal.
    settled: bool = True
    directions: tuple[Direction, ...] = ()
    #: Located loss: lost frames by component. The rest of the loss is unexplained.
    evidence: Mapping[str, int | float] = field(default_factory=dict)
    #: Other readings by component: CPU seconds, shares, cycles.
    readings: Mapping[str, int | float] = field(default_factory=dict)
    #: Per direction, and over time: if they were requested and the generator has them.
    latencies: tuple[LatencySummary, ...] = ()
    progress: tuple[Progress, ...] = ()

    @property
    def achieved_pps(self) -> float:
        return self.tx_packets / self.elapsed_s if self.elapsed_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Goal:
    """A Search Goal of RFC 9971 (section 4.6.7): what makes a load a lower bound.

    A load is a lower bound if trials of ``final_trial_s`` were run for ``sum_s`` in total, and at most
    the share ``exceed_ratio`` of that time was in trials with a loss ratio above ``max_loss_ratio``.
    """

    name: str
    #: Goal Loss Ratio (4.6.3) and Goal Exceed Ratio (4.6.4).
    max_loss_ratio: float = 0.0
    exceed_ratio: float = 0.0
    #: Goal Initial and Final Trial Duration (4.6.6, 4.6.1), Goal Duration Sum (4.6.2).
    initial_trial_s: float = 0.4
    final_trial_s: float = 60.0
    sum_s: float = 60.0
    #: Goal Width (4.6.5), relative: upper <= lower * (1 + relative_width).
    relative_width: float = 0.005

    def __post_init__(self) -> None:
        """Validate the parameters. Raises: UnusableInput."""
        for what, value, most, may_be_0 in (
            ("loss ratio", self.max_loss_ratio, 0.5, True),
            ("exceed ratio", self.exceed_ratio, 0.999, True),
            ("final trial duration", self.final_trial_s, 86_400, False),
            ("initial trial duration", self.initial_trial_s, self.final_trial_s, False),
            ("relative width (precision)", self.relative_width, 0.5, False),
        ):
            if not (math.isfinite(value) and 0 <= value <= most and (value or may_be_0)):
                bounds = f"{'at least' if may_be_0 else 'above'} 0 and at most {most:g}"
                raise UnusableInput(f"goal {self.name}", f"{what} must be {bounds}, not {value:g}")
        if not self.final_trial_s <= self.sum_s <= 1000 * self.final_trial_s:
            raise UnusableInput(f"goal {self.name}", "the sum of durations must be 1 to 1000 final trials")

    @property
    def is_strict(self) -> bool:
        """Whether a single lost frame decides, so that a trial may stop there."""
        return self.max_loss_ratio == 0 and self.exceed_ratio == 0

    @property
    def trials_needed(self) -> int:
        return math.ceil(self.sum_s / self.final_trial_s - 1e-9)

    def in_words(self) -> str:
        """Describe the goal in one line, to be shown with every rate."""
        loss = f"loss ratio <= {self.max_loss_ratio:g}" if self.max_loss_ratio else "no frame lost"
        some = f" in {1 - self.exceed_ratio:.0%} of the time" if self.exceed_ratio else ""
        trials = f"{self.trials_needed} x {self.final_trial_s:g} s"
        return f"{loss}{some}, {trials}, bounds within {self.relative_width:.3%}"


def headline(
    final_s: float = 60.0, initial_s: float = 0.4, precision: float = 0.005, max_loss_ratio: float = 0.0
) -> Goal:
    """Return the headline goal: no lost frame in one full-length trial (RFC 2544, section 26.1), or a ratio.

    The first trials are short, but no longer than the last. Raises: UnusableInput.
    """
    name = "zero-loss" if max_loss_ratio == 0 else "loss-ratio"
    return Goal(name, max_loss_ratio, 0.0, min(initial_s, final_s), final_s, final_s, precision)


#: Goals of standards and of FD.io CSIT by name; called with the relative width. RFC 9971 has the first two
#: in its sections 4.10.2 and 4.10.3. CSIT's NDR allows loss in half of its trials: it is not zero loss.
OTHER_GOALS: Final[Mapping[str, Callable[[float], Goal]]] = {
    name: partial(Goal, name, *attributes)
    for name, *attributes in (
        ("rfc2544", 0.0, 0.0, 0.4, 60.0, 60.0),
        ("tst009", 0.0, 0.5, 0.4, 60.0, 120.0),
        ("csit-ndr", 0.0, 0.5, 1.0, 1.0, 21.0),
        ("csit-pdr", 0.005, 0.5, 1.0, 1.0, 21.0),
    )
}
