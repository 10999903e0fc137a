"""The axes of a run description: what is varied, and which cells a rule is for."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from netplugin.api.fields import Name
from netplugin.host.cpus import parse_list
from netplugin_zeroloss.journal import NO_BACKEND, Cell
from netplugin_zeroloss.values import MIXES, mean_size
from netplugin_zeroloss.vnf.contract import ForwardMode

Count = Annotated[int, Field(ge=1, le=1_000_000_000)]
Frame = Annotated[int, Field(ge=64, le=16_000)] | str


#: Cells of a run, which take months at some minutes each.
_MOST_CELLS = 5000


class Section(BaseModel):
    """Base of the sections of a run description; unknown fields are rejected."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class NumaPlacement(StrEnum):
    """Where the VM, or a VNF without a VM, is relative to the NICs of the ends."""

    LOCAL = "local"
    #: On the nearest other NUMA node.
    REMOTE = "remote"


class Axes(Section):
    """Axes of the matrix: every combination is a cell."""

    backends: Annotated[tuple[Name, ...], Field(min_length=1)]
    #: Number of PMD threads, each on a core of its own (``4``), or their CPUs, one per core
    #: (``"2-5"``).
    pmd_cores: Annotated[tuple[Annotated[int, Field(ge=1, le=1024)] | str, ...], Field(min_length=1)] = (1,)
    #: Backends without PMD threads: one cell for all values of ``pmd_cores``. Null: those whose data path has
    #: none (``netplugin.data_path``).
    without_pmd: tuple[Name, ...] | None = None
    #: Bytes with FCS, or the name of a mix.
    frames: Annotated[tuple[Frame, ...], Field(min_length=1)] = (64,)
    flows: Annotated[tuple[Count, ...], Field(min_length=1)] = (1024,)
    queues: Annotated[tuple[Annotated[int, Field(ge=1, le=128)], ...], Field(min_length=1)] = (1,)
    #: Forward modes of testpmd as the VNF. Empty: that of its description.
    vnf_modes: tuple[ForwardMode, ...] = ()
    #: Frames that the generator sends back to back in each direction; the rate is the mean.
    bursts: Annotated[tuple[Annotated[int, Field(ge=1, le=65_536)], ...], Field(min_length=1)] = (1,)
    #: NUMA node of the VM or VNF, relative to the NICs. Empty: as its description has it.
    numa: tuple[NumaPlacement, ...] = ()
    #: Backends whose ports get fewer queues where they, or their VFs, have fewer than ``queues``.
    fewer_queues: tuple[Name, ...] = ()

    @field_validator("pmd_cores")
    @classmethod
    def _are_cpus(cls, value: tuple[int | str, ...]) -> tuple[int | str, ...]:
        for cores in value:
            if isinstance(cores, str):
                cpu_list(cores)
        counts = [pmd_count(cores) for cores in value]
        for count in counts:
            if counts.count(count) > 1:
                raise ValueError(f"two entries have {count} cores, and would be the same cell")
        return value

    @field_validator("frames")
    @classmethod
    def _are_frames(cls, value: tuple[int | str, ...]) -> tuple[int | str, ...]:
        for frame in value:
            if isinstance(frame, str) and frame not in MIXES:
                raise ValueError(f"no {frame!r}: give bytes with FCS, or one of {', '.join(MIXES)}")
        return value

    @model_validator(mode="after")
    def _once_each(self) -> Self:
        for name in ("backends", "frames", "flows", "queues", "vnf_modes", "bursts", "numa"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise ValueError(f"{name}: a value may be listed once")
        axes = (self.backends, self.pmd_cores, self.frames, self.flows, self.queues, self.bursts)
        count = math.prod(max(1, len(axis)) for axis in (*axes, self.vnf_modes, self.numa))
        if count > _MOST_CELLS:
            raise ValueError(f"{count} combinations; a run has at most {_MOST_CELLS} cells: split it")
        if NO_BACKEND in self.backends:
            raise ValueError(f"backends: {NO_BACKEND!r} is the name of controls")
        if unknown := [name for name in self.fewer_queues if name not in self.backends]:
            raise ValueError(f"fewer_queues: {unknown[0]!r} is not among the backends")
        return self


class Match(Section):
    """Selects the cells that match all given fields."""

    backend: Name | None = None
    pmd_cores: int | None = None
    frame: Frame | None = None
    flows: int | None = None
    queues: int | None = None
    vnf_mode: ForwardMode | None = None
    burst: int | None = None
    numa: NumaPlacement | None = None

    def fits(self, cell: Cell) -> bool:
        """Whether all given fields are those of the cell."""
        given = ((name, getattr(self, name)) for name in Match.model_fields)
        return all(
            value is None or getattr(cell, name) == (str(value) if name == "frame" else value)
            for name, value in given
        )

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if not self.model_dump(exclude_none=True):
            raise ValueError("it is empty, and so means every cell")
        return self


def pmd_count(cores: int | str) -> int:
    """Return the number of PMD cores of an entry of ``pmd_cores``. Raises: ValueError."""
    return cores if isinstance(cores, int) else len(cpu_list(cores))


def cpu_list(text: str) -> tuple[int, ...]:
    """Parse a CPU list such as ``2-5,8``. Raises: ValueError."""
    try:
        found = parse_list(text)
    except ValueError:
        found = ()
    if not found:
        raise ValueError(f"{text!r} is no list of CPUs such as '2-5,8'")
    return found


def frame_bytes(frame: int | str) -> float:
    """Return the (mean) frame size in bytes, with FCS."""
    return mean_size(frame) if isinstance(frame, str) else frame


def largest_frame(frame: int | str) -> int:
    return max(size for size, _ in MIXES[frame]) if isinstance(frame, str) else frame
