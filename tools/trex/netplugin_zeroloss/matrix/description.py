"""The run description: the models of its YAML file, validated before any traffic."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from netplugin.api.domain_models import DomainPolicy
from netplugin.api.fields import Mac, Name
from netplugin.api.models import Network
from netplugin.host.cpus import parse_list
from netplugin.libvirt.image_domain import HOST, NICS, SSH_PORT, USER
from netplugin.libvirt.vm_image import KEY, KNOWN_HOSTS
from netplugin_zeroloss import paths
from netplugin_zeroloss.asked import BITS_PER_SECOND, SearchOptions
from netplugin_zeroloss.generators import choose as generators
from netplugin_zeroloss.journal import NO_BACKEND, Cell
from netplugin_zeroloss.loss import choose as evidences
from netplugin_zeroloss.machines import SshMachine
from netplugin_zeroloss.matrix.yaml_model import parse
from netplugin_zeroloss.values import MIXES, UnusableInput
from netplugin_zeroloss.vnf import contract as vnfs
from netplugin_zeroloss.vnf.contract import VnfCores

# -- The axes: what is varied, and which cells a rule is for. -------------------------------------


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


def cpu_list(text: str) -> tuple[int, ...]:
    """Parse a CPU list such as ``2-5,8``. Raises: ValueError."""
    try:
        found = parse_list(text)
    except ValueError:
        found = ()
    if not found:
        raise ValueError(f"{text!r} is no list of CPUs such as '2-5,8'")
    return found


def pmd_count(cores: int | str) -> int:
    """Return the number of PMD cores of an entry of ``pmd_cores``. Raises: ValueError."""
    return cores if isinstance(cores, int) else len(cpu_list(cores))


def _with_counts(entries: tuple[int | str, ...]) -> tuple[int | str, ...]:
    counts = Counter(map(pmd_count, entries))
    for count, times in counts.items():
        if times > 1:
            raise ValueError(f"two entries have {count} cores, and would be the same cell")
    return entries


def _known(frame: int | str) -> int | str:
    if isinstance(frame, str) and frame not in MIXES:
        raise ValueError(f"no {frame!r}: give bytes with FCS, or one of {', '.join(MIXES)}")
    return frame


def largest_frame(frame: int | str) -> int:
    return max(size for size, _ in MIXES[frame]) if isinstance(frame, str) else frame


_T = TypeVar("_T")
_Count = Annotated[int, Field(ge=1, le=1_000_000_000)]
_Frame = Annotated[Annotated[int, Field(ge=64, le=16_000)] | str, AfterValidator(_known)]
_Some = Annotated[tuple[_T, ...], Field(min_length=1)]


class Axes(Section):
    """Axes of the matrix: every combination is a cell."""

    backends: _Some[Name]
    #: Number of PMD threads, each on a core of its own (``4``), or their CPUs, one per core (``"2-5"``).
    pmd_cores: Annotated[_Some[Annotated[int, Field(ge=1, le=1024)] | str], AfterValidator(_with_counts)] = (
        1,
    )
    #: Backends without PMD threads: one cell for all values of ``pmd_cores``. Null: those whose data path has
    #: none (``netplugin.data_path``).
    without_pmd: tuple[Name, ...] | None = None
    #: Bytes with FCS, or the name of a mix.
    frames: _Some[_Frame] = (64,)
    flows: _Some[_Count] = (1024,)
    queues: _Some[Annotated[int, Field(ge=1, le=128)]] = (1,)
    #: Forward modes of testpmd as the VNF. Empty: that of its description.
    vnf_modes: tuple[vnfs.ForwardMode, ...] = ()
    #: Frames that the generator sends back to back in each direction; the rate is the mean.
    bursts: _Some[Annotated[int, Field(ge=1, le=65_536)]] = (1,)
    #: NUMA node of the VM or VNF, relative to the NICs. Empty: as its description has it.
    numa: tuple[NumaPlacement, ...] = ()
    #: Backends whose ports get fewer queues where they, or their VFs, have fewer than ``queues``.
    fewer_queues: tuple[Name, ...] = ()

    @model_validator(mode="after")
    def _once_each(self) -> Self:
        names = ("backends", "frames", "flows", "queues", "vnf_modes", "bursts", "numa")
        count = len(self.pmd_cores)
        for name in names:
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise ValueError(f"{name}: a value may be listed once")
            count *= max(1, len(values))
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
    frame: Annotated[int, Field(ge=64, le=16_000)] | str | None = None
    flows: int | None = None
    queues: int | None = None
    vnf_mode: vnfs.ForwardMode | None = None
    burst: int | None = None
    numa: NumaPlacement | None = None

    def fits(self, cell: Cell) -> bool:
        """Whether all given fields are those of the cell."""
        given = ((name, value) for name in Match.model_fields if (value := getattr(self, name)) is not None)
        return all(getattr(cell, n) == (str(value) if n == "frame" else value) for n, value in given)

    @model_validator(mode="after")
    def _not_empty(self) -> Self:
        if not self.model_dump(exclude_none=True):
            raise ValueError("it is empty, and so means every cell")
        return self


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
    """A VM for the VNF, started for each cell from an image, or from a domain with only the NIC for SSH; the
    agent adds the ports."""

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


def _in_the_image(vm: Any, section: Any, ends: int) -> Any:
    """Return a section whose VNF, as far as it has none, has the address of a VM on an image and its NICs."""
    vnf = section.get("vnf") if isinstance(section, dict) else None
    if not (isinstance(vm, dict) and vm.get("image") and isinstance(vnf, dict)):
        return section
    if vnf.get("type") not in ("testpmd", "vpp") or "machine" in vnf:
        return section
    image, port = str(vm["image"]), vm.get("ssh_port") or SSH_PORT
    keys = {"key": f"{image}/{KEY}", "known_hosts": f"{image}/{KNOWN_HOSTS}"}
    machine = {"type": "ssh", "host": HOST, "port": port, "user": USER, **keys}
    return {**section, "vnf": {"nics": list(NICS[:ends]), **vnf, "machine": machine}}


def vm_of(vnf: vnfs.Description) -> SshMachine | None:
    """Return the access to the VM of this VNF, if it runs in one."""
    machine = vnf.machine if isinstance(vnf, vnfs.PlacedDescription) else None
    return machine if isinstance(machine, SshMachine) else None


#: Entries of ``exclude`` and ``overrides``; each is matched with each cell.
MOST_RULES = 100
#: Bytes of a frame beyond its MTU payload: addresses, type, FCS.
_FRAME_BYTES = 18

#: A VM on an image has so many NICs.
_InPairs = Field(min_length=2, max_length=len(NICS))

Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]


class Search(SearchOptions):
    """Search parameters, as the options of the command ``search``."""

    #: Line rate on the wire in bit/s, all directions together, if ``line_rate_pps`` is null.
    line_bits_per_second: Annotated[float, Field(gt=0, le=1e15, allow_inf_nan=False)] = BITS_PER_SECOND


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

    @model_validator(mode="before")
    @classmethod
    def _with_defaults(cls, value: Any) -> Any:
        """Fill in port ids and MAC addresses of the ends, and how VNFs in a VM on an image are reached."""
        if not isinstance(value, dict):
            return value
        given, ends = dict(value), value.get("ends")
        if isinstance(ends, list):
            named = (_end_defaults(number) for number in itertools.count(1))
            given["ends"] = [
                {**of, **end} if isinstance(end, dict) else end for of, end in zip(named, ends, strict=False)
            ]
        overrides = given.get("overrides")
        with_vnf = [given, *(overrides if isinstance(overrides, list) else ())]
        count = len(ends) if isinstance(ends, list) else 2
        reached = [_in_the_image(given.get("vm"), each, count) for each in with_vnf]
        return reached[0] | ({"overrides": reached[1:]} if isinstance(overrides, list) else {})

    @model_validator(mode="after")
    def _whole(self) -> Self:
        for problem in self._problems():
            raise ValueError(problem)
        return self

    def _problems(self) -> Iterator[str]:
        for name, value in (("ends", self.ends), ("vnf", self.vnf)):
            if (value is None) != (self.agent is None):
                without = "of no use without (`agent: {}` is the local one)"
                yield f"{name}: it is needed with an agent, and {without}"
        control = self.controls.vnf
        if control is not None and self.agent is not None and not control.ports:
            yield "controls.vnf.ports: say on which devices the VNF is to run"
        yield from self._about_ends(self.ends or ())
        of_rules = (override.vnf for override in self.overrides)
        yield from self._about_vnfs([vnf for vnf in (self.vnf, *of_rules) if vnf is not None])

    def _about_ends(self, ends: Sequence[End]) -> Iterator[str]:
        if len(ends) % 2:
            yield f"ends: they come in pairs, and there are {len(ends)}"
        for name in ("port_id", "mac", "peer_mac"):
            values = [getattr(end, name) for end in ends]
            if twice := [value for value in values if values.count(value) > 1]:
                yield f"ends: two have {name} {twice[0]}"
        for chosen in (self.generator, *(o.generator for o in self.overrides)):
            count = len(chosen.paths) if isinstance(chosen, generators.Tcpreplay | generators.TrexStl) else 0
            if ends and count and not paths.fit(count, len(ends)):
                yield f"generator.paths: {count} for {len(ends)} ends: give one for each, or each pair"
        largest = max(largest_frame(frame) for frame in self.matrix.frames)
        for mtu in (n.mtu for end in ends for n in (end.network, *end.networks.values())):
            if largest > mtu + _FRAME_BYTES:
                yield f"ends: mtu {mtu} is too small for frames of {largest} bytes"

    def _about_vnfs(self, chosen: Sequence[vnfs.Description]) -> Iterator[str]:
        ends, axes, control = self.ends or (), self.matrix, self.controls.vnf
        own_vm = [vm_of(vnf) or isinstance(vnf, vnfs.ExternalDescription) for vnf in chosen]
        testpmd = [vnf for vnf in chosen if isinstance(vnf, vnfs.TestpmdDescription)]
        for vnf in chosen:
            if isinstance(vnf, vnfs.PlacedDescription) and vnf.nics and len(vnf.nics) != len(ends):
                yield f"vnf.nics: {len(vnf.nics)} NICs for {len(ends)} ends"
            if isinstance(vnf, vnfs.VppDescription) and vnf.poll_sleep_us and self.vnf_cores.workers:
                yield "vnf.poll_sleep_us: VPP's workers never sleep: leave out vnf_cores.workers"
        if self.vm is not None:
            if self.agent is None:
                yield "vm: it needs an agent, which gives it its NICs"
            if not all(own_vm):
                yield "vm: the VNF must run in it: machine: {type: ssh, ...}, or type: external"
            if control is not None and (control.vnf is None or vm_of(control.vnf)):
                whose = "which has the ports: the cells have one in a VM"
                yield f"controls.vnf.vnf: name a VNF on this host, {whose}"
        if axes.vnf_modes and self.agent is not None and len(testpmd) < len(chosen):
            yield "matrix.vnf_modes: these are modes of testpmd, so each VNF must be {type: testpmd}"
        modes = axes.vnf_modes or [vnf.forward_mode for vnf in testpmd]
        spoofing = [mode for mode in modes if mode.spoofs and self.agent is not None]
        if spoofing and any(end.port_security for end in ends):
            why = "sends from addresses that are not the port's, which port security drops"
            yield f"ends: the mode {spoofing[0]} {why}: set port_security: false at all ends"
        if axes.numa:
            if self.agent is None:
                yield "matrix.numa: it needs an agent, on a host with a VNF to place"
            if self.vm is None and any(own_vm):
                yield "matrix.numa: the run must place the VNF: in a VM that it starts (vm), or on this host"
            if self.vm is not None and self.vm.placement.numa_node is not None:
                yield "matrix.numa: vm.policy.numa_node names one node for all cells"

    def generator_of(self, cell: Cell) -> generators.Description:
        """Return the generator of a cell: that of the first matching override, or the default."""
        rules = (rule for rule in self.overrides if rule.cells.fits(cell))
        return next((rule.generator for rule in rules if rule.generator is not None), self.generator)

    def vnf_of(self, cell: Cell) -> vnfs.Description | None:
        """Return the VNF of a cell: that of the first matching override, or the default."""
        rules = (rule for rule in self.overrides if rule.cells.fits(cell))
        found = next((rule.vnf for rule in rules if rule.vnf is not None), self.vnf)
        return None if found is None else in_mode(found, cell)


def in_mode(vnf: vnfs.Description, cell: Cell) -> vnfs.Description:
    """Return the VNF in the forward mode of the cell, if that has one."""
    if not cell.vnf_mode or not isinstance(vnf, vnfs.TestpmdDescription):
        return vnf
    return vnf.model_copy(update={"forward_mode": vnfs.ForwardMode(cell.vnf_mode)})


def read(text: str, name: str) -> RunDescription:
    """Parse a run description. Raises: UnusableInput naming file, line and field."""
    return parse(text, name, RunDescription)


def _end_defaults(number: int) -> dict[str, str]:
    macs = {"mac": f"52:54:00:5a:00:{number:02x}", "peer_mac": f"52:54:00:5a:01:{number:02x}"}
    return {"port_id": f"zeroloss-{number}", **macs}


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
