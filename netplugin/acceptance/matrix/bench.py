"""Where cells are measured: a bench makes the device under test of a task, and takes it away again."""

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
    """A cell cannot be set up, or is not any more what was set up. The others go on."""


@dataclass(frozen=True, slots=True)
class Stand:
    """A device that is ready for traffic, and what it was made of."""

    generator: Generator
    setup: Mapping[str, Any] = field(default_factory=dict)


class Bench(ABC):
    """Used by one thread, one stand at a time."""

    @abstractmethod
    def check(self, tasks: Sequence[Task]) -> Mapping[str, Any]:
        """Look whether all these could be set up, without changing anything or sending a frame.

        Returns what the journal is to keep of the machine. Raises: UnusableInput, GeneratorError.
        """

    @abstractmethod
    def stand(self, task: Task) -> AbstractContextManager[Stand]:
        """Set up, for the time of the block.

        Raises: CellError, GeneratorError, VnfError, NetpluginError.
        """

    def recover(self) -> None:  # noqa: B027 - there may be nothing left
        """Give back what this run left when it was killed. Raises: UnusableInput."""

    def close(self) -> None:  # noqa: B027 - there may be nothing to close
        """No more stands."""


class BareBench(Bench):
    """Nothing is set up: the generator has its device itself, as a simulation or a program may."""

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
    """What sends for this task. A simulation has luck of its own in each, whatever ran before it."""
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
    """Start each different one, and end it. Raises: UnusableInput, GeneratorError."""
    checked: list[generators.Description] = []
    for description in descriptions:
        alike = description
        if isinstance(alike, generators.Sim):
            alike = alike.model_copy(update={"seed": ""})
        if alike not in checked:
            checked.append(alike)
            generators.make(description).close()
