"""The contract of a generator: reports its capabilities and runs one trial at a time."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import TracebackType

from netplugin.acceptance.values import Measurement, TrialRequest, line_rate_pps


@dataclass(frozen=True, slots=True)
class GeneratorInfo:
    """Capabilities of a generator."""

    name: str
    max_pps: float = math.inf
    #: Simulated time: a trial takes no real time, and ``elapsed_s`` is virtual.
    virtual_time: bool = False
    can_abort: bool = True
    #: Shorter trials are inaccurate.
    min_trial_s: float = 0.0
    #: Line rate of its ports in bit/s on the wire, all directions together.
    line_bps: float = math.inf

    def limit_pps(self, frame_size: float) -> float:
        """Return the maximum frame rate in pps; ``frame_size`` includes the FCS and is the mean of a mix."""
        if math.isinf(self.line_bps):
            return self.max_pps
        return min(self.max_pps, line_rate_pps(self.line_bps, frame_size))


class Generator(ABC):
    """Sends frames through the device under test and counts received frames.

    ``run`` must stop sending, let the device drain, and then read the counters until two reads are
    equal, so that frames in flight do not count as lost.
    """

    @property
    @abstractmethod
    def info(self) -> GeneratorInfo:
        """Capabilities, known before the first trial."""

    @abstractmethod
    def run(self, request: TrialRequest) -> Measurement:
        """Run one trial. Raises: GeneratorError."""

    def recall(self, request: TrialRequest) -> None:  # noqa: B027 - only a simulation has state
        """Account for a trial that was run before a restart; called in order, without running it again."""

    def close(self) -> None:  # noqa: B027 - there may be nothing to release
        """Stop sending and release all resources. Idempotent."""

    def __enter__(self) -> Generator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
