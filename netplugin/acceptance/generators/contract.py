"""The contract of a generator: it says what it can, runs one trial at a time, and is closed."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import TracebackType

from netplugin.acceptance.values import Measurement, TrialRequest


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
