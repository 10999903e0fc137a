"""The contract of a generator: it says what it can, runs one trial at a time, and is closed."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import TracebackType

from netplugin.acceptance.values import Measurement, TrialRequest, line_rate_pps


@dataclass(frozen=True, slots=True)
class GeneratorInfo:
    """What a generator says of itself."""

    name: str
    max_pps: float = math.inf
    #: A trial takes no real time; ``elapsed_s`` is what counts.
    virtual_time: bool = False
    can_abort: bool = True
    #: Shorter trials are not exact.
    min_trial_s: float = 0.0
    #: What its ports carry, all directions together, in bits a second of the wire.
    line_bps: float = math.inf

    def limit_pps(self, frame_size: float) -> float:
        """Frames a second that it can send; ``frame_size`` has the FCS, and is the mean of a mix."""
        if math.isinf(self.line_bps):
            return self.max_pps
        return min(self.max_pps, line_rate_pps(self.line_bps, frame_size))


class Generator(ABC):
    """Sends frames through the device under test and counts what comes back.

    The order of reading is part of the contract: stop, let the device drain, read the counters until
    two reads are equal. Frames in flight must not look like lost ones.
    """

    @property
    @abstractmethod
    def info(self) -> GeneratorInfo:
        """What it is; known before the first trial."""

    @abstractmethod
    def run(self, request: TrialRequest) -> Measurement:
        """One trial. Raises: GeneratorError."""

    def recall(self, request: TrialRequest) -> None:  # noqa: B027 - only a simulation has a memory
        """Told of a trial that was run before a restart, in its order, and is not run again."""

    def close(self) -> None:  # noqa: B027 - there may be nothing to give back
        """Stop sending and give everything back; may be called twice."""

    def __enter__(self) -> Generator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
