"""What a run is to measure, as its YAML file says it, checked before anything is sent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from netplugin.acceptance.evidence import choose as evidences
from netplugin.acceptance.generators import choose as generators
from netplugin.acceptance.matrix.axes import Axes, Match, Section, largest_frame
from netplugin.acceptance.matrix.hypervisor import Agent, Cores, End, Vm, ssh_of
from netplugin.acceptance.matrix.records import Cell
from netplugin.acceptance.matrix.yaml_model import parse
from netplugin.acceptance.vnf import description as vnfs
from netplugin.models import Name

#: A frame has this beside its payload: addresses, type, FCS.
_FRAME_BYTES = 18

Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
Ratio = Annotated[float, Field(gt=0, le=0.5, allow_inf_nan=False)]


class Search(Section):
    """As the options of the command ``search``."""

    #: Seconds of the trial that decides, and of those that find where to look.
    final_duration: Seconds = 60.0
    initial_duration: Seconds = 0.4
    precision: Ratio = 0.005
    max_loss_ratio: Annotated[float, Field(ge=0, le=0.5, allow_inf_nan=False)] = 0.0
    #: Measured beside the headline.
    goals: tuple[Literal["csit-ndr", "csit-pdr"], ...] = ()
    repeats: Annotated[int, Field(ge=1, le=1000)] = 1
    #: Seconds of traffic in which loss is not held against the device; None: a sixth of the final ones.
    warm_up: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)] | None = None
    #: Frames that the rings on the way may hold.
    buffer_packets: Annotated[int, Field(ge=0, le=10**9)] = 2048
    max_trials: Annotated[int, Field(ge=1, le=100_000)] = 150
    #: Of the wire, all directions together: in bit/s, or, if given, in frames a second.
    line_bits_per_second: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10e9
    line_rate_pps: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


class Override(Section):
    """What is different for some cells: other interfaces, another program for taps."""

    cells: Match
    generator: generators.Description | None = None
    vnf: vnfs.Description | None = None


class Loopback(Section):
    """The generator with its ends joined: what it can do by itself."""

    generator: generators.Description


class VnfControl(Section):
    """The VNF with the generator and nothing between: on devices that are there already."""

    generator: generators.Description
    #: With an agent only: without one the VNF is the generator's own matter.
    vnf: vnfs.Description | None = None
    ports: Annotated[tuple[vnfs.Port, ...], Field(min_length=2, max_length=2)] | None = None


class Controls(Section):
    """Rows that say how far the others can be believed. What is left out is not measured."""

    loopback: Loopback | None = None
    vnf: VnfControl | None = None
    #: Seconds of the trial that decides a control.
    final_duration: Seconds = 10.0


class Timeouts(Section):
    """Seconds."""

    #: For one answer of the agent.
    agent: Seconds = 60.0
    #: Until a port is active, and its VM's side connected.
    active: Seconds = 60.0
    #: Until a VM answers by SSH.
    boot: Seconds = 180.0
    #: Until the first frames come through.
    forwarding: Seconds = 20.0


class Description(Section):
    """The whole file."""

    name: Name
    #: Published tables that were taken on hardware such as this: they may stand beside the figures.
    comparable_to: tuple[str, ...] = ()
    #: Of everything random.
    seed: int = 1
    #: None: nothing is set up. The generator has its device itself, as a simulation does.
    agent: Agent | None = None
    ends: Annotated[tuple[End, ...], Field(min_length=2, max_length=2)] | None = None
    vnf: vnfs.Description | None = None
    vnf_cores: Cores = Cores()
    #: None: the VNF takes the ports itself, or is in a VM that runs already.
    vm: Vm | None = None
    #: What is read before and after each trial, beside the VNF's own counters.
    evidence: evidences.Description = evidences.Description()
    generator: generators.Description
    overrides: tuple[Override, ...] = ()
    search: Search = Search()
    matrix: Axes
    exclude: tuple[Match, ...] = ()
    controls: Controls = Controls()
    timeouts: Timeouts = Timeouts()

    @field_validator("ends", mode="before")
    @classmethod
    def _with_names(cls, value: Any) -> Any:
        """Ports and addresses have names of their own unless they are given."""
        if not isinstance(value, list):
            return value
        return [
            {**_end_defaults(number), **end} if isinstance(end, dict) else end
            for number, end in enumerate(value)
        ]

    @model_validator(mode="after")
    def _whole(self) -> Self:
        with_agent = {"ends": self.ends, "vnf": self.vnf}
        for name, value in with_agent.items():
            if (value is None) != (self.agent is None):
                raise ValueError(
                    f"{name}: it is needed with an agent, and of no use without"
                    " (`agent: {}` is the local one)"
                )
        if self.controls.vnf is not None and self.agent is not None and not self.controls.vnf.ports:
            raise ValueError("controls.vnf.ports: say on which devices the VNF is to run")
        for problem in (*self._about_ends(), *self._about_vm()):
            raise ValueError(problem)
        return self

    def _about_vm(self) -> Iterator[str]:
        chosen = [self.vnf, *(override.vnf for override in self.overrides)]
        if self.vm is None:
            return
        if self.agent is None:
            yield "vm: it needs an agent, which gives it its NICs"
        for vnf in chosen:
            if vnf is not None and not (ssh_of(vnf) or isinstance(vnf, vnfs.ExternalDescription)):
                yield "vm: the VNF must run in it: machine: {type: ssh, ...}, or type: external"

    def _about_ends(self) -> Iterator[str]:
        one, other = self.ends or (None, None)
        if one is None or other is None:
            return
        for name in ("port_id", "mac", "peer_mac"):
            if getattr(one, name) == getattr(other, name):
                yield f"ends: both have {name} {getattr(one, name)}"
        largest = max(largest_frame(frame) for frame in self.matrix.frames)
        for end in (one, other):
            for network in (end.network, *end.networks.values()):
                if largest > network.mtu + _FRAME_BYTES:
                    yield f"ends: mtu {network.mtu} is too small for frames of {largest} bytes"

    def generator_of(self, cell: Cell) -> generators.Description:
        """Of the first override that fits, or that of all cells."""
        fitting = (o.generator for o in self._overrides_of(cell) if o.generator is not None)
        return next(fitting, self.generator)

    def vnf_of(self, cell: Cell) -> vnfs.Description | None:
        """The same of the VNF."""
        fitting = (o.vnf for o in self._overrides_of(cell) if o.vnf is not None)
        return next(fitting, self.vnf)

    def _overrides_of(self, cell: Cell) -> Iterator[Override]:
        return (override for override in self.overrides if override.cells.fits(cell))


def read(text: str, name: str) -> Description:
    """The description in a YAML text. Raises: UnusableInput naming file, line and field."""
    return parse(text, name, Description)


def _end_defaults(number: int) -> dict[str, str]:
    return {
        "port_id": f"zeroloss-{number + 1}",
        "mac": f"52:54:00:5a:00:{number + 1:02x}",
        "peer_mac": f"52:54:00:5a:01:{number + 1:02x}",
    }
