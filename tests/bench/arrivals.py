"""When calls of an open loop are to be made, and what they came to (pure).

Callers do not wait for each other: a slow answer delays no other call. The latency of each is counted
from when it was to be made, so that calls which had to wait for a connection are not left out.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


def poisson(rate: float, seconds: float, seed: int) -> list[float]:
    """Return the times of independent calls, in seconds from the start; ``rate`` is per second.

    Their number is fixed (rate times duration), their gaps are exponential, scaled to end in time.
    """
    rng = random.Random(seed)
    gaps = [rng.expovariate(rate) for _ in range(round(rate * seconds) + 1)]
    scale = seconds / sum(gaps)
    times, now = [], 0.0
    for gap in gaps[:-1]:
        now += gap * scale
        times.append(now)
    return times


@dataclass(frozen=True, slots=True)
class Call:
    """One call: when it was to be made, when it was made and answered (seconds), and how.

    ``outcome`` is ``ok``, or the code of the problem: ``overloaded``. A call with no answer has None in
    ``answered`` and ``no answer`` as outcome. ``removed_ms`` is what the removal of its port took after.
    """

    intended: float
    made: float | None
    answered: float | None
    outcome: str
    removed_ms: float | None = None

    @property
    def latency_ms(self) -> float | None:
        return None if self.answered is None else (self.answered - self.intended) * 1e3


@dataclass(frozen=True, slots=True)
class Outcome:
    """The calls of one rate."""

    latencies_ms: tuple[float, ...]
    #: Calls that were refused or not answered, by their code.
    refused: dict[str, int]
    #: The latest start of a call behind its intended time: above some ms the caller was the limit.
    latest_ms: float
    removals_ms: tuple[float, ...]


def outcome(calls: Sequence[Call]) -> Outcome:
    """Only calls that were carried out have a latency here: a refusal is quick, and no success."""
    refused: dict[str, int] = {}
    for call in calls:
        if call.outcome != "ok":
            refused[call.outcome] = refused.get(call.outcome, 0) + 1
    done = [call.latency_ms for call in calls if call.outcome == "ok" and call.latency_ms is not None]
    late = [(call.made - call.intended) * 1e3 for call in calls if call.made is not None]
    removals = tuple(call.removed_ms for call in calls if call.removed_ms is not None)
    return Outcome(tuple(done), refused, max(late, default=0.0), removals)
