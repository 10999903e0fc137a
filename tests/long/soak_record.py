"""A soak as it is kept: what was done, the samples, and the judgement of each figure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from tests.long.trend import Trend, trend

#: What a figure may grow over the time that is judged; of others nothing. Resident memory has the gaps
#: between what is in use.
BOUNDS = {
    "RSS, MB": 1.0,
    "in use, MB": 0.25,
    "descriptors": 1.0,
    "threads": 0.5,
    "rows": 20.0,
    "store, KB": 128.0,
}
#: The same of a latency, as a part of its median.
LATENCY_BOUND = 0.15
LATENCY = "plug p50, ms"


class Soak(BaseModel):
    """``samples`` have the same length as ``times_s``, seconds from the start."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    started: str
    seconds: float
    revision: str
    #: Calls that were carried out, by what they did, and kills of vswitchd.
    done: Mapping[str, int]
    #: Calls that were refused while vswitchd was away, by their code.
    refused: Mapping[str, int]
    times_s: tuple[float, ...]
    samples: Mapping[str, tuple[float, ...]]

    def trends(self) -> dict[str, Trend]:
        """Judge each figure. Raises: ValueError if there are too few samples."""
        return {
            name: trend(self.times_s, values, _bound(name, values)) for name, values in self.samples.items()
        }

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.model_dump_json(indent=1) + "\n")


def _bound(name: str, values: tuple[float, ...]) -> float:
    if name == LATENCY:
        return LATENCY_BOUND * statistics.median(values)
    return BOUNDS.get(name, 0.0)
