"""The run description: the models of its YAML file, validated before any traffic."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from netplugin.api.domain_models import DomainPolicy
from netplugin.api.fields import Mac, Name
from netplugin.api.models import Network
from netplugin.host.cpus import parse_list
from netplugin.libvirt.image_domain import HOST, NICS, SSH_PORT, USER
from netplugin.libvirt.vm_image import KEY, KNOWN_HOSTS
from netplugin_zeroloss import paths
from netplugin_zeroloss.generators import choose as generators
from netplugin_zeroloss.journal import Cell
from netplugin_zeroloss.loss import choose as evidences
from netplugin_zeroloss.machines.contract import SshMachine
from netplugin_zeroloss.matrix.axes import Axes, Match, Section, cpu_list, largest_frame
from netplugin_zeroloss.matrix.yaml_model import parse
from netplugin_zeroloss.values import UnusableInput
from netplugin_zeroloss.vnf import contract as vnfs
from netplugin_zeroloss.vnf.contract import VnfCores

# -- Sections of a run description about the hypervisor: agent, ends, CPUs of the VNF, VM. --------


class Cores(Section):
    """CPUs of this machine for the VNF; ``main`` handles no packets. Empty: no pinning."""

    main: Annotated[int, Field(ge=0)] | None = None
    #: CPU list such as ``2-5,8``.
    workers: str = ""

    @field_validator("workers")
    @classmethod
    def _are_cpus(cls, value: str) -> str:
        if value:
            cpu_list(value)
        return value

    def vnf_cores(self) -> VnfCores:
        return VnfCores(self.main, parse_list(self.workers))


class Agent(Section):
    """The agent that sets up each cell. Absent fields default to NETPLUGIN_URL and related variables."""

    url: str | None = None
    token_file: Path | None = None
    #: PEM files: CA certificates, client certificate and its key.
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None


class End(Section):
    """One end of a pair: a port of the VNF, and the network on which its frames arrive and leave."""

    network: Network
    #: Network per backend, where it differs.
    networks: dict[Name, Network] = Field(default_factory=dict)
    port_id: Name
    #: MAC address of the VNF's port.
    mac: Mac
    #: Destination of the VNF's frames; by default the generator's source address.
    peer_mac: Mac
    #: Port security of the port; false: the VNF may send from any address.
    port_security: bool = True

    def network_of(self, backend: str) -> Network:
        return self.networks.get(backend, self.network)


class Vm(Section):
    """A VM for the VNF, started for each cell from an image, or from a domain without NICs; the agent adds
    the ports."""

    #: Image of ``vm build``. Each VM writes to an overlay of it.
    image: Path | None = None
    #: Libvirt domain XML. Name and UUID are replaced.
    domain: Path | None = None
    uri: str = "qemu:///system"
    #: Null: by the CPU plan of the host for an image, and as a domain has it.
    policy: DomainPolicy | None = None
    #: Port of 127.0.0.1 that leads to the SSH server of a VM on an image; null: ``SSH_PORT``.
    ssh_port: Annotated[int, Field(ge=1024, le=65535)] | None = None
    #: Run a VM on an image without KVM, which is very slow.
    emulate: bool = False

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.image is None) == (self.domain is None):
            raise ValueError("name either an image or a domain")
        for name in ("ssh_port", "emulate"):
            if self.image is None and getattr(self, name):
                raise ValueError(f"{name}: it is for an image; a domain has its own")
        return self

    @property
    def placement(self) -> DomainPolicy:
        return self.policy or DomainPolicy(pin=self.image is not None)


def _in_the_image(vm: Any, vnf: Any, ends: int) -> Any:
    """Return a VNF with the address of a VM on an image and of the NICs there, as far as it has none."""
    if not (isinstance(vm, dict) and vm.get("image") and isinstance(vnf, dict)):
        return vnf
    if vnf.get("type") not in ("testpmd", "vpp") or "machine" in vnf:
        return vnf
    image = str(vm["image"])
    machine = {
        "type": "ssh",
        "host": HOST,
        "port": vm.get("ssh_port") or SSH_PORT,
        "user": USER,
        "key": f"{image}/{KEY}",
        "known_hosts": f"{image}/{KNOWN_HOSTS}",
    }
    return {"nics": list(NICS[:ends]), **vnf, "machine": machine}


def vm_of(vnf: vnfs.Description) -> SshMachine | None:
    """Return the access to the VM of this VNF, if it runs in one."""
    machine = vnf.machine if isinstance(vnf, vnfs.PlacedDescription) else None
    return machine if isinstance(machine, SshMachine) else None


# -- The run description: the models of its YAML file, validated before any traffic. --------------


#: Entries of ``exclude`` and ``overrides``; each is matched with each cell.
MOST_RULES = 100
#: Bytes of a frame beyond its MTU payload: addresses, type, FCS.
_FRAME_BYTES = 18

#: A VM on an image has so many NICs.
_InPairs = Field(min_length=2, max_length=len(NICS))

Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
Ratio = Annotated[float, Field(gt=0, le=0.5, allow_inf_nan=False)]


class Search(Section):
    """Search parameters, as the options of the command ``search``."""

    #: Seconds of the deciding trial, and of the first, short trials.
    final_duration: Seconds = 60.0
    initial_duration: Seconds = 0.4
    precision: Ratio = 0.005
    max_loss_ratio: Annotated[float, Field(ge=0, le=0.5, allow_inf_nan=False)] = 0.0
    #: Additional goals.
    goals: tuple[Literal["csit-ndr", "csit-pdr"], ...] = ()
    repeats: Annotated[int, Field(ge=1, le=1000)] = 1
    #: Warm-up: loss within these seconds of traffic does not count; None: a sixth of
    #: final_duration.
    warm_up: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)] | None = None
    #: Frames that rings and queues on the path can hold.
    buffer_packets: Annotated[int, Field(ge=0, le=10**9)] = 2048
    max_trials: Annotated[int, Field(ge=1, le=100_000)] = 150
    #: Seconds of each measurement of latency at 10, 50 and 90 % of the found rate; 0: none.
    latency_duration: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)] = 0.0
    #: Seconds for which the found rate is held afterwards; 0: not at all.
    soak_duration: Annotated[float, Field(ge=0, le=604_800, allow_inf_nan=False)] = 0.0
    #: Line rate, all directions together: in bit/s, or, if set, in frames per second.
    line_bits_per_second: Annotated[float, Field(gt=0, le=1e15, allow_inf_nan=False)] = 10e9
    line_rate_pps: Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)] | None = None


class Override(Section):
    """Overrides for the selected cells: another generator or VNF."""

    cells: Match
    generator: generators.Description | None = None
    vnf: vnfs.Description | None = None


class Loopback(Section):
    """Control: the generator looped back to itself."""

    generator: generators.Description


class VnfControl(Section):
    """Control: the VNF directly connected to the generator, on existing devices."""

    generator: generators.Description
    #: Only with an agent; without one the generator includes the VNF.
    vnf: vnfs.Description | None = None
    ports: Annotated[tuple[vnfs.VnfPort, ...], _InPairs] | None = None


class Controls(Section):
    """Controls that measure the limits of generator and VNF. An absent control is not measured."""

    loopback: Loopback | None = None
    vnf: VnfControl | None = None
    #: Seconds of the deciding trial of a control.
    final_duration: Seconds = 10.0


class Timeouts(Section):
    """Timeouts in seconds."""

    #: One request to the agent.
    agent: Seconds = 60.0
    #: Until a port is active and its VM side connected; and until nobody holds that of a deleted port.
    active: Seconds = 60.0
    #: One reading of the counters of OVS.
    counters: Seconds = 10.0
    #: Until the VM accepts SSH connections.
    boot: Seconds = 180.0
    #: Until the first frames are forwarded.
    forwarding: Seconds = 20.0
    #: Until a VM has shut down by itself; then it is destroyed.
    shutdown: Seconds = 30.0


class RunDescription(Section):
    """A run description."""

    name: Name
    #: Published tables measured on comparable hardware: shown with the results.
    comparable_to: tuple[str, ...] = ()
    #: Seed of all simulated randomness.
    seed: int = 1
    #: None: no setup; the generator includes its device, as a simulation does.
    agent: Agent | None = None
    #: In pairs: the VNF forwards between the first and the second, the third and the fourth, and so on.
    ends: Annotated[tuple[End, ...], _InPairs] | None = None
    vnf: vnfs.Description | None = None
    vnf_cores: Cores = Cores()
    #: Bind NICs between cells to the drivers that the backends need there, and back at the end.
    rebind: bool = False
    #: None: the VNF uses the ports directly, or runs in an existing VM.
    vm: Vm | None = None
    #: Components whose counters are read before and after each trial, in addition to the VNF.
    evidence: evidences.LossDescription = evidences.LossDescription()
    generator: generators.Description
    overrides: Annotated[tuple[Override, ...], Field(max_length=MOST_RULES)] = ()
    search: Search = Search()
    matrix: Axes
    exclude: Annotated[tuple[Match, ...], Field(max_length=MOST_RULES)] = ()
    controls: Controls = Controls()
    timeouts: Timeouts = Timeouts()

    @field_validator("ends", mode="before")
    @classmethod
    def _with_names(cls, value: Any) -> Any:
        """Fill in default port ids and MAC addresses."""
        if not isinstance(value, list):
            return value
        return [
            {**_end_defaults(number), **end} if isinstance(end, dict) else end
            for number, end in enumerate(value)
        ]

    @model_validator(mode="before")
    @classmethod
    def _with_machines(cls, value: Any) -> Any:
        """Fill in how VNFs in a VM on an image are reached."""
        if not isinstance(value, dict):
            return value
        vm = value.get("vm")
        given = dict(value)
        ends = len(given["ends"]) if isinstance(given.get("ends"), list) else 2
        if "vnf" in given:
            given["vnf"] = _in_the_image(vm, given["vnf"], ends)
        if isinstance(overrides := given.get("overrides"), list):
            given["overrides"] = [
                {**each, "vnf": _in_the_image(vm, each["vnf"], ends)}
                if isinstance(each, dict) and "vnf" in each
                else each
                for each in overrides
            ]
        return given

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
        of_vnf = (self._about_sleep(), self._about_modes(), self._about_numa())
        problems = (self._about_ends(), self._about_vm(), *of_vnf)
        for problem in chain.from_iterable(problems):
            raise ValueError(problem)
        return self

    def _about_vm(self) -> Iterator[str]:
        chosen = [self.vnf, *(override.vnf for override in self.overrides)]
        if self.vm is None:
            return
        if self.agent is None:
            yield "vm: it needs an agent, which gives it its NICs"
        for vnf in chosen:
            if vnf is not None and not (vm_of(vnf) or isinstance(vnf, vnfs.ExternalDescription)):
                yield "vm: the VNF must run in it: machine: {type: ssh, ...}, or type: external"
        control = self.controls.vnf
        if control is not None and (control.vnf is None or vm_of(control.vnf)):
            yield "controls.vnf.vnf: name a VNF on this host, which has the ports: the cells have one in a VM"

    def _about_sleep(self) -> Iterator[str]:
        chosen = [self.vnf, *(override.vnf for override in self.overrides)]
        if self.vnf_cores.workers and any(
            isinstance(vnf, vnfs.VppDescription) and vnf.poll_sleep_us for vnf in chosen
        ):
            yield "vnf.poll_sleep_us: VPP's workers never sleep: leave out vnf_cores.workers"

    def _about_modes(self) -> Iterator[str]:
        if self.agent is None:
            return
        chosen = [vnf for vnf in (self.vnf, *(o.vnf for o in self.overrides)) if vnf is not None]
        if self.matrix.vnf_modes and any(not isinstance(v, vnfs.TestpmdDescription) for v in chosen):
            yield "matrix.vnf_modes: these are modes of testpmd, so each VNF must be {type: testpmd}"
        own = (v.forward_mode for v in chosen if isinstance(v, vnfs.TestpmdDescription))
        spoofing = [mode for mode in self.matrix.vnf_modes or own if mode.spoofs]
        if spoofing and any(end.port_security for end in self.ends or ()):
            yield (
                f"ends: the mode {spoofing[0]} sends from addresses that are not the port's, which port"
                " security drops: set port_security: false at all ends"
            )

    def _about_numa(self) -> Iterator[str]:
        if not self.matrix.numa:
            return
        if self.agent is None:
            yield "matrix.numa: it needs an agent, on a host with a VNF to place"
        chosen = [vnf for vnf in (self.vnf, *(o.vnf for o in self.overrides)) if vnf is not None]
        if self.vm is None and any(vm_of(v) or isinstance(v, vnfs.ExternalDescription) for v in chosen):
            yield "matrix.numa: the run must place the VNF: in a VM that it starts (vm), or on this host"
        if self.vm is not None and self.vm.placement.numa_node is not None:
            yield "matrix.numa: vm.policy.numa_node names one node for all cells"

    def _about_ends(self) -> Iterator[str]:
        ends = self.ends or ()
        if len(ends) % 2:
            yield f"ends: they come in pairs, and there are {len(ends)}"
        for name in ("port_id", "mac", "peer_mac"):
            values = [getattr(end, name) for end in ends]
            if twice := [value for value in values if values.count(value) > 1]:
                yield f"ends: two have {name} {twice[0]}"
        for chosen in (self.generator, *(o.generator for o in self.overrides if o.generator is not None)):
            count = len(chosen.paths) if isinstance(chosen, generators.Tcpreplay | generators.TrexStl) else 0
            if ends and count and not paths.fit(count, len(ends)):
                yield f"generator.paths: {count} for {len(ends)} ends: give one for each, or each pair"
        for vnf in (self.vnf, *(o.vnf for o in self.overrides)):
            if isinstance(vnf, vnfs.PlacedDescription) and vnf.nics and len(vnf.nics) != len(ends):
                yield f"vnf.nics: {len(vnf.nics)} NICs for {len(ends)} ends"
        largest = max(largest_frame(frame) for frame in self.matrix.frames)
        for end in ends:
            for network in (end.network, *end.networks.values()):
                if largest > network.mtu + _FRAME_BYTES:
                    yield f"ends: mtu {network.mtu} is too small for frames of {largest} bytes"

    def generator_of(self, cell: Cell) -> generators.Description:
        """Return the generator of a cell: that of the first matching override, or the default."""
        fitting = (o.generator for o in self._overrides_of(cell) if o.generator is not None)
        return next(fitting, self.generator)

    def vnf_of(self, cell: Cell) -> vnfs.Description | None:
        """Return the VNF of a cell: that of the first matching override, or the default."""
        fitting = (o.vnf for o in self._overrides_of(cell) if o.vnf is not None)
        found = next(fitting, self.vnf)
        return None if found is None else in_mode(found, cell)

    def _overrides_of(self, cell: Cell) -> Iterator[Override]:
        return (override for override in self.overrides if override.cells.fits(cell))


def in_mode(vnf: vnfs.Description, cell: Cell) -> vnfs.Description:
    """Return the VNF in the forward mode of the cell, if that has one."""
    if not cell.vnf_mode or not isinstance(vnf, vnfs.TestpmdDescription):
        return vnf
    return vnf.model_copy(update={"forward_mode": vnfs.ForwardMode(cell.vnf_mode)})


def read(text: str, name: str) -> RunDescription:
    """Parse a run description. Raises: UnusableInput naming file, line and field."""
    return parse(text, name, RunDescription)


def _end_defaults(number: int) -> dict[str, str]:
    return {
        "port_id": f"zeroloss-{number + 1}",
        "mac": f"52:54:00:5a:00:{number + 1:02x}",
        "peer_mac": f"52:54:00:5a:01:{number + 1:02x}",
    }


# -- Checks that a resumed run still has the same description. ------------------------------------


def differences(before: RunDescription, now: RunDescription) -> list[str]:
    """Return one line per changed field: ``search.precision: 0.005 before, 0.01 now``."""
    return list(_differences("", before.model_dump(mode="json"), now.model_dump(mode="json")))


def check_same(before: RunDescription, now: RunDescription, folder: str) -> None:
    """Raises: UnusableInput if the description of a resumed run has changed."""
    found = differences(before, now)
    if found:
        raise UnusableInput(folder, "its run has another description:\n" + "\n".join(found))


def _differences(where: str, before: Any, now: Any) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for name in sorted({*before, *now}):
            yield from _differences(f"{where}.{name}" if where else name, before.get(name), now.get(name))
    elif before != now:
        yield f"{where}: {before} before, {now} now"
