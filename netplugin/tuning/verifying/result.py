"""Results of a measurement: histograms, conditions of the host, and how runs are stored."""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, StringConstraints, ValidationError

from netplugin.api.errors import HostError, InvalidRequest, NotFound, reason
from netplugin.api.fields import NAME_PATTERN, Value
from netplugin.host.safe_files import own_directory, read_own, replacing
from netplugin.programs.bounded import first_mistake

#: Percentiles by name, as fractions.
PERCENTILES: Final[Mapping[str, float]] = {"P99": 0.99, "P99.9": 0.999, "P99.99": 0.9999, "P99.999": 0.99999}
#: Part of a file name.
Label = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]


class Histogram(Value):
    """``counts`` maps latency, in whole microseconds, to samples; ``overflows`` are beyond the width."""

    counts: Mapping[int, int]
    overflows: int = Field(0, ge=0)
    min_us: int
    average_us: float
    max_us: int

    @property
    def samples(self) -> int:
        return sum(self.counts.values()) + self.overflows

    def percentile(self, share: float) -> int | None:
        """The latency, in microseconds, that ``share`` of the samples do not exceed.

        None if there are too few samples for one to be above it. If it lies beyond the histogram's width, the
        result is the maximum, which is an upper bound.
        """
        below = math.ceil(round(self.samples * share, 6))  # 0.999 of 1000 is 999, which floats miss
        if below >= self.samples:
            return None
        seen = 0
        for latency, count in sorted(self.counts.items()):
            seen += count
            if seen >= below:
                return latency
        return self.max_us


def merged(parts: Iterable[Histogram]) -> Histogram:
    """Merge histograms. Raises: ValueError without samples."""
    known = [part for part in parts if part.samples]
    if not (samples := sum(part.samples for part in known)):
        raise ValueError("there are no samples")
    counts: Counter[int] = Counter()
    for part in known:
        counts.update(part.counts)
    return Histogram(
        counts=dict(sorted(counts.items())),
        overflows=sum(part.overflows for part in known),
        min_us=min(part.min_us for part in known),
        average_us=sum(part.average_us * part.samples for part in known) / samples,
        max_us=max(part.max_us for part in known),
    )


class LatencySettings(Value):
    """``cpus`` is a list like ``2-5``; ``width_us`` is the histogram's width."""

    cpus: str
    round_s: int
    interval_us: int
    priority: int
    width_us: int


class LatencyRound(Value):
    """One run of cyclictest: the histogram of each CPU."""

    cpus: Mapping[int, Histogram]

    @property
    def overall(self) -> Histogram:
        return merged(self.cpus.values())


class Latency(Value):
    """``program`` is cyclictest's version."""

    program: str
    settings: LatencySettings
    rounds: Annotated[tuple[LatencyRound, ...], Field(min_length=1)]

    @property
    def overall(self) -> Histogram:
        return merged(each.overall for each in self.rounds)

    def by_cpu(self) -> Mapping[int, Histogram]:
        cpus = sorted({cpu for each in self.rounds for cpu in each.cpus})
        return {cpu: merged(r.cpus[cpu] for r in self.rounds if cpu in r.cpus) for cpu in cpus}


class ThroughputSettings(Value):
    """CPUs of both sides; ``hugepage_node`` is the node of the hugepages, None for ordinary pages."""

    host_cpu: int
    guest_cpu: int
    hugepage_node: int | None
    window_s: int
    frame_size: int


class Throughput(Value):
    """``samples`` are frames per second each way, one per run of the two testpmd."""

    program: str
    settings: ThroughputSettings
    samples: Annotated[tuple[float, ...], Field(min_length=1)]


class TcpSettings(Value):
    """``window_s``: seconds that are counted in a round."""

    streams: int
    window_s: int


class TcpSample(Value):
    """Received bits per second, and the mean number of CPUs that were busy on the host meanwhile."""

    bits_per_s: Annotated[float, Field(gt=0)]
    busy_cpus: Annotated[float, Field(ge=0)]


_TcpSamples = Annotated[tuple[TcpSample, ...], Field(min_length=1)]
#: MTU in bytes and whether the VMs' NICs segment (LSO: TSO and GSO in Linux), in the order measured.
TCP_VARIANTS: Final = ((1500, True), (1500, False), (9000, True), (9000, False))


def tcp_words(mtu: int, lso: bool) -> str:
    """Name a variant."""
    return f"MTU {mtu}, {'LSO' if lso else 'no LSO'}"


class TcpVariant(Value):
    """TCP between two VMs."""

    mtu: int
    lso: bool
    samples: _TcpSamples


class Tcp(Value):
    """``between``: from VM to VM. ``host``: on the host's loopback device. A sample for each round."""

    program: str
    settings: TcpSettings
    between: tuple[TcpVariant, ...]
    host: _TcpSamples


class GuestVm(Value):
    """A VM that was measured in. ``image``: digest of its root file system. ``emulated``: without KVM, so its
    figures are no measure of a host. ``pins``: CPU of each vCPU, empty if it was not placed."""

    image: str
    origin: str
    kernel: str
    arguments: str
    vcpus: int
    memory_mb: int
    emulated: bool
    pins: Mapping[int, int]
    realtime: bool

    @property
    def placed(self) -> str:
        on = (f"{vcpu} on CPU {cpu}" for vcpu, cpu in sorted(self.pins.items()))
        return ", ".join(on) or "not placed"


class GuestMeasurement(Value):
    """What was measured in a VM: CPUs of ``latency``, and of the guest's side of a loop, are vCPUs."""

    vm: GuestVm
    latency: Latency | None = None
    tcp: Tcp | None = None
    throughput: Throughput | None = None


class MeasuredRun(Value):
    """One measurement. ``conditions`` are host settings by name, as text."""

    format: Literal[1] = 1
    label: Label
    started: datetime
    conditions: Mapping[str, str]
    latency: Latency | None = None
    throughput: Throughput | None = None
    guest: GuestMeasurement | None = None

    @property
    def is_emulated(self) -> bool:
        return self.guest is not None and self.guest.vm.emulated


# -- The directory with one file for each run; files are written atomically and found by label or name.


FOLDER = Path("/var/lib/netplugin/verify")
STEP = "results"


def prepare(folder: Path) -> None:
    """Check before measuring that results can be written. Raises: HostError."""
    try:
        own_directory(folder, 0o755)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as wrong:
        what = f"{folder} cannot be written: {wrong.strerror}"
        fix = "run it as root, or name another folder: --results DIR"
        raise HostError(what, step=STEP, fix=fix) from wrong


def write(folder: Path, run: MeasuredRun) -> Path:
    """Write a run to a new file. Raises: HostError."""
    path = folder / f"{run.started:%Y%m%dT%H%M%S}-{run.label}.json"
    write_text(path, run.model_dump_json(indent=1) + "\n")
    return path


def write_text(path: Path, text: str) -> None:
    """Write a file atomically, and to the disk. Raises: HostError."""
    try:
        with replacing(path, 0o644) as file:
            file.write(text.encode())
    except OSError as wrong:
        raise HostError(f"{path} cannot be written: {wrong.strerror}", step=STEP) from wrong


def find(folder: Path, name: str) -> Path:
    """Find a run by file path, or the newest with a label. Raises: NotFound."""
    if "/" in name or name.endswith(".json"):
        for path in (Path(name), folder / name):
            if path.is_file():
                return path
        raise NotFound(f"there is no file {name}", step=STEP, fix="name a label, or a file")
    newest = {path.stem.partition("-")[2]: path for path in sorted(folder.glob("[0-9]*-*.json"))}
    if name not in newest:
        what = f"no run in {folder} has the label {name}; there are: {', '.join(sorted(newest)) or 'none'}"
        raise NotFound(what, step=STEP, fix="measure one with --label, or name the folder: --results DIR")
    return newest[name]


def read(path: Path) -> MeasuredRun:
    """Read a run. Raises: InvalidRequest."""
    try:
        return MeasuredRun.model_validate_json(read_own(path))
    except ValidationError as wrong:
        why = first_mistake(wrong)
    except (OSError, UnicodeDecodeError) as wrong:
        why = reason(wrong)
    raise InvalidRequest(f"{path} cannot be read as a run: {why}", step=STEP)
