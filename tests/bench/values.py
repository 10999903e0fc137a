"""What a run of the benchmark has measured, as it is kept: series of samples, and where they are from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

#: Raised with each change of the models below that an earlier file does not satisfy.
SCHEMA: Final = 1


class Unreadable(ValueError):
    """A file is no run of this schema; the message says what it is."""


class Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Series(Value):
    """Samples of one figure, in the order in which they were taken.

    The first six fields say what was measured, and are the identity of the figure in another run.
    Series of one workload whose ``turns`` are the same were measured in turn, sample by sample.
    """

    workload: str
    #: The part that was measured: ``plug``, ``own share``, ``RSS`` and so on.
    figure: str
    #: Who did it: ``agent``, ``os-vif`` and so on.
    way: str
    #: Ports that were there already.
    ports: int | None = None
    #: IP addresses in the filter of the port; None if there is no filter.
    addresses: int | None = None
    #: Intended plugs per second.
    rate: float | None = None
    unit: str
    samples: tuple[float, ...]

    @property
    def key(self) -> tuple[str, str, str, int | None, int | None, float | None]:
        return self.workload, self.figure, self.way, self.ports, self.addresses, self.rate

    @property
    def label(self) -> str:
        """``one-port: plug, agent, 16 addresses, 100 ports``."""
        words = [self.figure, self.way]
        words += (
            []
            if self.addresses is None
            else [f"{self.addresses} address{'es' if self.addresses != 1 else ''}"]
        )
        words += [] if self.ports is None else [f"{self.ports} ports"]
        words += [] if self.rate is None else [f"{self.rate:g}/s"]
        return f"{self.workload}: {', '.join(words)}"


class Machine(Value):
    """Where it was measured. Two runs on machines that differ are not comparable."""

    cpu: str
    cpus: int
    memory_gb: int
    kernel: str
    open_vswitch: str
    dpdk: str
    python: str
    ovsdbapp: str
    os_vif: str
    libvirt: str
    #: Load average over the last minute when the run began; a quiet machine is below 0.3.
    load: float


class Run(Value):
    """One run of the benchmark."""

    schema_version: Literal[1] = SCHEMA
    started: str
    #: Seconds that the run took.
    took_s: float
    #: ``full`` or ``quick``; their series have different lengths.
    form: str
    revision: str
    machine: Machine
    series: tuple[Series, ...]
    #: What was left out, and why.
    notes: tuple[str, ...] = ()

    def find(
        self,
        workload: str,
        figure: str,
        way: str = "agent",
        ports: int | None = None,
        addresses: int | None = None,
        rate: float | None = None,
    ) -> Series | None:
        """Return the series with this identity."""
        key = workload, figure, way, ports, addresses, rate
        return next((each for each in self.series if each.key == key), None)

    def of(self, workload: str, figure: str | None = None, way: str | None = None) -> Iterator[Series]:
        """Yield the series of a workload, in the order in which they were measured."""
        for each in self.series:
            if each.workload == workload and figure in (None, each.figure) and way in (None, each.way):
                yield each


def read(path: Path) -> Run:
    """Raises: Unreadable."""
    try:
        return Run.model_validate_json(path.read_bytes())
    except OSError as wrong:
        raise Unreadable(f"{path}: {wrong.strerror}") from wrong
    except ValidationError as wrong:
        raise Unreadable(f"{path} is no run of schema {SCHEMA}: {wrong.error_count()} errors") from wrong


def write(run: Run, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(run.model_dump_json(indent=1) + "\n")
