"""The contract of a VNF: its description and its counters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field, StringConstraints
from pydantic.dataclasses import dataclass as checked_dataclass

from netplugin.api.fields import Mac, PciAddress, Value, worded
from netplugin.host.nic_models import KEPT_BY_DPDK
from netplugin.programs.program import Program, ProgramError
from netplugin_zeroloss import machines
from netplugin_zeroloss.loss.contract import AttributionError, CounterChanges, CounterReading, DropCounters
from netplugin_zeroloss.machines import LocalMachine, Machine, SshMachine

# -- The contract of a VNF: attaches to the VM side of ports, forwards between them, and counts frames.


_DEVICE = worded(r"^[^,\s]+$", "must be a device without commas and blanks")


class Attachment(StrEnum):
    """Kind of the VM side of a port, from the agent's binding."""

    #: vhost-user socket on which the VNF listens, as QEMU does for ``dpdkvhostuserclient``.
    VHOST_USER = "vhostuser"
    #: Character device of vhost_vdpa, opened by path. One process at a time has it open.
    VHOST_VDPA = "vhostvdpa"
    #: Persistent tap device, opened by name.
    TAP = "tap"
    #: A VF bound to vfio-pci.
    VFIO = "vfio"
    #: Kernel device through AF_PACKET, for a control without a backend.
    NETDEV = "netdev"
    #: vhost-user socket on which the VNF is the backend (device) side, as OVS is for a VM; OVS uses
    #: DPDK's ``net_virtio_user``.
    VHOST_BACKEND = "vhostbackend"


@checked_dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class VnfPort:
    """A port of the VNF. A run description names those of a control without the backend."""

    attachment: Attachment
    #: Path of a socket or vhost_vdpa device, name of a tap or kernel device, or PCI address.
    device: Annotated[str, StringConstraints(pattern=_DEVICE, max_length=107, strict=True)]
    #: MAC address of the port, and of the far end, the destination of its frames.
    mac: Mac
    peer_mac: Mac
    queues: Annotated[int, Field(ge=1, le=128)] = 1
    #: Ring size in descriptors.
    ring: Annotated[int, Field(ge=64, le=4096)] = 1024
    mtu: Annotated[int, Field(ge=576, le=9216)] = 1500


@dataclass(frozen=True, slots=True)
class VnfCores:
    """CPUs of the VNF on its machine; ``main`` handles no packets. Empty: no pinning."""

    main: int | None = None
    workers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class VnfInfo:
    """Name, version and actual configuration of a VNF, for the report."""

    name: str
    version: str
    #: Actual receive queues per port.
    rx_queues: tuple[int, ...]
    #: Configuration: file name to text.
    configuration: Mapping[str, str]


class VnfError(ProgramError):
    """The VNF cannot be started, has ended, or does not run as requested."""


class Vnf(AbstractContextManager["Vnf"]):
    """Forwards frames between paired ports (0-1, 2-3, ...)."""

    @abstractmethod
    def start(self) -> VnfInfo:
        """Start the VNF and wait until it forwards.

        Raises: VnfError if something is missing or silently differs from the request: fewer receive
        queues, an absent CPU.
        """

    @abstractmethod
    def check(self) -> None:
        """Check that the VNF still runs as started. Raises: VnfError."""

    @property
    @abstractmethod
    def place(self) -> DropCounters:
        """The counters of the VNF."""

    def close(self) -> None:
        """Stop and release all resources. Idempotent."""

    def __exit__(self, *error: object) -> None:
        self.close()


class ProgramVnf(Vnf):
    """A VNF that is one program on a machine."""

    name: ClassVar[str]

    def __init__(self, ports: tuple[VnfPort, ...], cores: VnfCores) -> None:
        self._ports, self._cores = ports, cores
        self._parts = ExitStack()
        self._machine: Machine | None = None
        self._program: Program | None = None

    def check(self) -> None:
        if self._program is None:
            raise VnfError(f"{self.name} has not been started")
        self._program.check()
        for port, up in zip(self._ports, self._links(), strict=True):
            if not up:
                raise VnfError(f"{self.name}: the link of {port.device} is down")

    @abstractmethod
    def _links(self) -> Sequence[bool]:
        """Whether the link of each port is up. Raises: ProgramError."""

    def _wait_for_links(self, deadline: float) -> None:
        assert self._program is not None
        for number, port in enumerate(self._ports):
            is_up = partial(lambda n: self._links()[n], number)
            self._program.wait_for(is_up, deadline, f"the link of {port.device} is up")

    def close(self) -> None:
        self._parts.close()
        self._program = None

    def _on(self, description: LocalMachine | SshMachine, deadline: float) -> Machine:
        """Return the machine, which is left with the VNF. Raises: MachineError."""
        self._machine = machine = machines.connect(description, deadline)
        self._parts.callback(machine.close)
        return machine

    def _run(self, machine: Machine, arguments: Sequence[str]) -> Program:
        """Start the program, which ends with the VNF. Raises: ProgramError."""
        self._program = program = machine.program(self.name, arguments)
        self._parts.callback(program.stop)
        program.start()
        return program


# -- Loss of a VNF from its port counters: frames received on one port and not sent on its partner.


@dataclass(frozen=True, slots=True)
class PortCounts:
    """Frames since the start of the VNF. ``missed`` and ``errors`` reached the port but were not received."""

    received: int
    sent: int
    missed: int = 0
    errors: int = 0
    #: Received by queue, if that is counted.
    queues: tuple[int, ...] = ()


class Forwarded(DropCounters):
    """The component ``vnf`` of a program that only forwards between paired ports."""

    name = "vnf"

    def __init__(self, counts: Callable[[], Sequence[PortCounts]]) -> None:
        """``counts`` returns the counters per port; it raises VnfError if the VNF does not answer."""
        self._counts = counts

    def read(self) -> CounterReading:
        try:
            ports = self._counts()
        except ProgramError as error:
            raise AttributionError(f"vnf: {error}") from error
        lost: dict[str, int] = {}
        counters: dict[str, float] = {}
        for name, port in ((f"port{number}", port) for number, port in enumerate(ports)):
            lost |= {f"{name}.rx_missed": port.missed, f"{name}.rx_errors": port.errors}
            counters |= {f"{name}.rx_packets": port.received, f"{name}.tx_packets": port.sent}
            counters |= {f"{name}.rxq{queue}.packets": count for queue, count in enumerate(port.queues)}
        return CounterReading(lost, counters)

    def between(self, before: CounterReading, after: CounterReading, elapsed_s: float) -> CounterChanges:
        found = super().between(before, after, elapsed_s)
        lost, readings = dict(found.lost), found.readings
        for number in range(sum(name.endswith(".tx_packets") for name in after.counters)):
            partner = number ^ 1
            came, went = readings[f"port{number}.rx_packets"], readings[f"port{partner}.tx_packets"]
            if went > came:
                raise AttributionError(
                    f"vnf: port {partner} sent {went - came:g} frames that port {number} did not"
                    " receive in the trial: there were frames on their way when it began"
                )
            lost[f"port{partner}.not_sent"] = round(came - went)
        return CounterChanges(lost, readings)


# -- VNF descriptions in a run description: program, machine and parameters. -----------------------


#: Program name, looked up in PATH, or path; must not look like an option.
_PROGRAM = worded(r"^[^-\s][^\n]*$", "must be the name or path of a program")
ProgramName = Annotated[str, StringConstraints(pattern=_PROGRAM, max_length=4096, strict=True)]


class ForwardMode(StrEnum):
    """What testpmd does with a frame, as its option ``--forward-mode``."""

    #: Writes the MAC addresses of the sending port and of its far end.
    MAC = "mac"
    #: Swaps the MAC addresses of the frame.
    MACSWAP = "macswap"
    #: Changes nothing.
    IO = "io"
    #: As ``io``, after random reads and writes of memory for each frame.
    NOISY = "noisy"

    @property
    def spoofs(self) -> bool:
        """Whether frames leave a port with a source address that is not the port's."""
        return self in (ForwardMode.MACSWAP, ForwardMode.IO, ForwardMode.NOISY)


class NoisyDescription(Value):
    """Work of the mode ``noisy`` for each frame: random accesses to a memory of its own per port."""

    memory_mb: Annotated[int, Field(ge=1, le=65_536)] = 512
    reads: Annotated[int, Field(ge=0, le=10_000)] = 8
    writes: Annotated[int, Field(ge=0, le=10_000)] = 8


class PlacedDescription(Value):
    """A VNF on this machine, where it attaches to the VM side of the ports, or in a VM with them as NICs."""

    type: str
    binary: ProgramName
    machine: machines.Description = LocalMachine()
    #: PCI addresses of the ports inside the VM, in port order; empty on this machine.
    nics: tuple[PciAddress, ...] = ()
    #: false: normal pages; slower, and without VFs and NICs of a VM.
    hugepages: bool = True
    #: Seconds until it must forward.
    start_s: Annotated[float, Field(gt=0, le=3600)] = 60.0

    #: What has it in a VM: whose packages, and their names; the option of ``vm build``.
    packages: ClassVar[tuple[str, str]]
    vm_build: ClassVar[str]
    #: Whether it needs python3 there; drivers of the kernel that DPDK's driver of a NIC uses; MB besides
    #: hugepages.
    needs_python: ClassVar[bool] = False
    shared_drivers: ClassVar[frozenset[str]] = frozenset()
    heap_mb: ClassVar[int] = 0

    def needs_mb(self, ports: int) -> int:
        """Return the MB of hugepages that a VNF of so many ports takes; 0: not known."""
        return 0


class TestpmdDescription(PlacedDescription):
    """DPDK's testpmd."""

    __test__ = False  # the name looks like a test to pytest

    type: Literal["testpmd"]
    binary: ProgramName = "dpdk-testpmd"
    memory_mb: Annotated[int, Field(ge=64, le=1 << 20)] = 256
    forward_mode: ForwardMode = ForwardMode.MAC
    noisy: NoisyDescription = NoisyDescription()

    packages = ("Debian's packages", "dpdk-dev")
    vm_build = "without --no-testpmd"
    needs_python = True
    shared_drivers = KEPT_BY_DPDK

    def needs_mb(self, ports: int) -> int:
        """As of every VNF; in the mode ``noisy`` each port has its own memory besides."""
        noisy = self.forward_mode is ForwardMode.NOISY
        return self.memory_mb + (ports * self.noisy.memory_mb if noisy else 0)


class TapsDescription(Value):
    """A Python forwarder for taps, for tests and demonstrations: about ten kpps."""

    type: Literal["taps"]


class VppDescription(PlacedDescription):
    """FD.io VPP as a router with static neighbours."""

    type: Literal["vpp"]
    binary: ProgramName = "vpp"
    #: Receive queues per port; null: those of the port.
    rx_queues: Annotated[int, Field(ge=1, le=256)] | None = None
    #: Microseconds that VPP's main thread sleeps after each poll, so that others get its CPU; null: none.
    #: Workers poll all the time, so a VPP that sleeps has none.
    poll_sleep_us: Annotated[int, Field(ge=1, le=10_000)] | None = None
    #: Plug-in directory; null: VPP's default.
    plugin_path: str | None = None

    packages = ("FD.io's packages", "vpp vpp-plugin-dpdk")
    vm_build = "--vpp FOLDER"
    # Without its default main-heap-size VPP ends with a segmentation fault.
    heap_mb = 1024


class ExternalDescription(Value):
    """A VNF run by the operator: nothing is started, and it has no counters."""

    type: Literal["external"]
    #: Name and version for the report.
    name: str = "external"
    version: str = "unknown"


Description = Annotated[
    TestpmdDescription | TapsDescription | VppDescription | ExternalDescription, Field(discriminator="type")
]
