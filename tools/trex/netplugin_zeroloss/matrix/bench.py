"""The contract of a bench, which sets up the device under test; trials count only while it stands."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from netplugin_zeroloss import paths
from netplugin_zeroloss.generators import choose as generators
from netplugin_zeroloss.generators.contract import Generator, GeneratorInfo
from netplugin_zeroloss.journal import Part
from netplugin_zeroloss.matrix.cells import CellTask
from netplugin_zeroloss.matrix.description import RunDescription
from netplugin_zeroloss.matrix.findings import about_generators, require
from netplugin_zeroloss.search.parts import ways
from netplugin_zeroloss.values import GeneratorError, Measurement, TrialRequest


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
    def check(self, tasks: Sequence[CellTask]) -> Mapping[str, Any]:
        """Check that all tasks could be set up, without changing the host or sending traffic.

        Returns: facts about the machine for the journal.
        Raises: UnusableInput, GeneratorError.
        """

    @abstractmethod
    def stand(self, task: CellTask) -> AbstractContextManager[Stand]:
        """Set up the device for the duration of the block.

        Raises: CellError, GeneratorError, VnfError, NetpluginError.
        """

    def recover(self) -> None:  # noqa: B027 - there may be nothing left
        """Remove what this run left behind when it was killed. Raises: UnusableInput."""

    def restore(self) -> Sequence[str]:
        """Put back what was changed for several cells, when the run ends.

        Returns: what stays changed on the host, one line each, with a fix.
        """
        return ()

    def close(self) -> None:  # noqa: B027 - there may be nothing to close
        """Release all resources."""


class BareBench(Bench):
    """A bench without setup: the generator includes its device, as a simulation does."""

    def __init__(self, description: RunDescription) -> None:
        self._description = description

    def check(self, tasks: Sequence[CellTask]) -> Mapping[str, Any]:
        require(about_generators((generator_of(self._description, task), task.cell) for task in tasks))
        return {}

    @contextmanager
    def stand(self, task: CellTask) -> Iterator[Stand]:
        with generators.make(generator_of(self._description, task)) as generator:
            yield Stand(generator)


def generator_of(description: RunDescription, task: CellTask) -> generators.Description:
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


# -- A generator whose trials count only if the setup is unchanged when they end. -----------------


#: Seconds and rate of the forwarding probe.
_FIRST_S = 0.2
_FIRST_PPS = 1000.0


class CheckedGenerator(Generator):
    """Runs checks after each trial. A failed check raises, ends the cell and discards the trial.

    A path on which no frame was received is tried again with few frames, as overload may starve it. The
    search does so too, for 5 s, and not with ``strict_rfc9971``; its verdict is final, an error is resumed.
    """

    def __init__(
        self,
        inner: Generator,
        checks: Sequence[Callable[[], None]],
        ports: Sequence[str],
        forwarding_s: float,
    ) -> None:
        """``ports``: ids of the ports of the ends; ``forwarding_s``: seconds for a path to forward."""
        self._inner = inner
        self._checks = tuple(checks)
        self._ports, self._forwarding_s = tuple(ports), forwarding_s

    @property
    def info(self) -> GeneratorInfo:
        return self._inner.info

    def run(self, request: TrialRequest) -> Measurement:
        measured = self._inner.run(request)
        for check in self._checks:
            check()
        if paths.dead(ways(measured)):
            wait_until_forwarding(self._inner, request, self._forwarding_s, self._ports)
        return measured

    def recall(self, request: TrialRequest) -> None:
        self._inner.recall(request)

    def close(self) -> None:
        self._inner.close()


def wait_until_forwarding(
    generator: Generator, like: TrialRequest, seconds: float, ports: Sequence[str] = ()
) -> None:
    """Send short probes until all frames are received on every path.

    The probes let the device learn addresses and set up flows. If some frames are still lost at the
    deadline, the search locates the problem. ``ports``: ids of the ports of the ends.
    Raises: GeneratorError naming the paths on which no frame was received.
    """
    deadline = time.monotonic() + seconds
    rate, duration = min(_FIRST_PPS, like.rate_pps), max(_FIRST_S, generator.info.min_trial_s)
    why = "does it forward?"
    probe = TrialRequest(rate, duration, like.frame_size, like.flows, False, why, like.mix)
    while True:
        found = ways(generator.run(probe))
        if all(way.rx_packets >= way.tx_packets > 0 for way in found):
            return
        if time.monotonic() >= deadline:
            break
    if dead := paths.dead(found):
        where = paths.described(dead, paths.names(len(found), ports))
        some = f", and on {len(found) - len(dead)} of {len(found)} paths some did"
        raise GeneratorError(
            f"no frame came through within {seconds:g} s on {where}: of {found[dead[0]].tx_packets} sent none"
            f" came back{some if len(dead) < len(found) else ''};"
            " are the MAC addresses, networks and links those of the description?"
        )
