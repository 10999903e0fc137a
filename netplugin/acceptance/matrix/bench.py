"""The contract of a bench: sets up the device under test for a task and tears it down."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from netplugin.acceptance.generators import choose as generators
from netplugin.acceptance.generators.contract import Generator
from netplugin.acceptance.matrix.cells import Task
from netplugin.acceptance.matrix.description import Description
from netplugin.acceptance.matrix.records import Part


class CellError(Exception):
    """The setup of a cell failed or has changed. The run continues with the other cells."""


@dataclass(frozen=True, slots=True)
class Stand:
    """A device ready for traffic, and a record of its setup."""

    generator: Generator
    setup: Mapping[str, Any] = field(default_factory=dict)


class Bench(ABC):
    """Sets up one device at a time; not thread-safe."""

    @abstractmethod
    def check(self, tasks: Sequence[Task]) -> Mapping[str, Any]:
        """Check that all tasks could be set up, without changing the host or sending traffic.

        Returns: facts about the machine for the journal.
        Raises: UnusableInput, GeneratorError.
        """

    @abstractmethod
    def stand(self, task: Task) -> AbstractContextManager[Stand]:
        """Set up the device for the duration of the block.

        Raises: CellError, GeneratorError, VnfError, NetpluginError.
        """

    def recover(self) -> None:  # noqa: B027 - there may be nothing left
        """Remove what this run left behind when it was killed. Raises: UnusableInput."""

    def close(self) -> None:  # noqa: B027 - there may be nothing to close
        """Release all resources."""


class BareBench(Bench):
    """A bench without setup: the generator includes its device, as a simulation does."""

    def __init__(self, description: Description) -> None:
        self._description = description

    def check(self, tasks: Sequence[Task]) -> Mapping[str, Any]:
        check_generators(generator_of(self._description, task) for task in tasks)
        return {}

    @contextmanager
    def stand(self, task: Task) -> Iterator[Stand]:
        with generators.make(generator_of(self._description, task)) as generator:
            yield Stand(generator)


def generator_of(description: Description, task: Task) -> generators.Description:
    """Return the generator of a task. Each task of a simulation has its own seed, independent of order."""
    controls = description.controls
    chosen = description.generator_of(task.cell)
    if task.part is Part.LOOPBACK and controls.loopback is not None:
        chosen = controls.loopback.generator
    elif task.part is Part.VNF and controls.vnf is not None:
        chosen = controls.vnf.generator
    if isinstance(chosen, generators.Sim):
        seed = f"{description.seed}/{chosen.seed}/{task.cell.key}/{task.part}"
        return chosen.model_copy(update={"seed": seed})
    return chosen


def check_generators(descriptions: Iterator[generators.Description]) -> None:
    """Start and stop each distinct generator. Raises: UnusableInput, GeneratorError."""
    checked: list[generators.Description] = []
    for description in descriptions:
        alike = description
        if isinstance(alike, generators.Sim):
            alike = alike.model_copy(update={"seed": ""})
        if alike not in checked:
            checked.append(alike)
            generators.make(description).close()
