"""The VNF ``testpmd``: DPDK's test forwarder, by default in a mode that only rewrites both MAC addresses."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from netplugin.host import cpus
from netplugin.programs.program import Program, Telemetry
from netplugin_zeroloss.loss.contract import DropCounters
from netplugin_zeroloss.machines import choose as machines
from netplugin_zeroloss.machines.contract import LocalMachine, Machine
from netplugin_zeroloss.vnf.contract import (
    Forwarded,
    ForwardMode,
    PortCounts,
    TestpmdDescription,
    Vnf,
    VnfCores,
    VnfError,
    VnfInfo,
    VnfPort,
)
from netplugin_zeroloss.vnf.dpdk import DpdkDevice, KeptAddresses, check_cores, devices_of
from netplugin_zeroloss.vnf.guest import check_nics, guest_cores, read_guest, require_guest
from netplugin_zeroloss.vnf.telemetry import RemoteTelemetry

_PREFIX = "vnf"
#: Log text of testpmd when it polls its queues.
_FORWARDS = "packet forwarding - ports="
#: Buffers in addition to those in rings: lcore caches, and bursts in flight.
_SPARE_BUFFERS = 2048

Model = TypeVar("Model", bound=BaseModel)
Count = Annotated[int, Field(ge=0)]


class PortTelemetry(Protocol):
    """DPDK's telemetry of a program, here or on a machine."""

    version: str

    def each(self, command: str, ports: Iterable[int]) -> list[Any]: ...
    def close(self) -> None: ...


class _Answer(BaseModel):
    """What is used of an answer; other fields are not looked at."""

    model_config = ConfigDict(frozen=True, strict=True)


class _Info(_Answer):
    nb_rx_queues: Count


class _Link(_Answer):
    status: str


class _Stats(_Answer):
    ipackets: Count
    opackets: Count
    imissed: Count
    ierrors: Count
    #: By receive queue, of at most 16 queues.
    q_ipackets: list[Count] = []


class Testpmd(Vnf):
    """One process, on this machine or in a VM. It drops every frame that it received and did not send."""

    __test__ = False  # the name looks like a test to pytest

    def __init__(self, description: TestpmdDescription, ports: tuple[VnfPort, ...], cores: VnfCores) -> None:
        """Raises: VnfError if the NICs in a VM are not those of the ports."""
        check_nics("testpmd", description, ports)
        self._description, self._ports, self._cores = description, ports, cores
        self._local = isinstance(description.machine, LocalMachine)
        self._machine: Machine | None = None
        self._program: Program | None = None
        self._telemetry: PortTelemetry | None = None

    def start(self) -> VnfInfo:
        deadline = time.monotonic() + self._description.start_s
        if self._local:
            return self._start_here(deadline)
        self._machine = machine = machines.make(self._description.machine, deadline)
        facts = read_guest(machine, self._description)
        require_guest(self._description, facts, len(self._ports))
        cores = guest_cores(self._cores, facts)
        devices = [DpdkDevice(nic, virtual=False) for nic in self._description.nics]
        words = arguments(self._description, self._ports, cores, devices, facts.online)
        telemetry = RemoteTelemetry(machine, _socket_in(machine.directory))
        return self._forwarding(machine, words, telemetry, deadline)

    def _start_here(self, deadline: float) -> VnfInfo:
        binary = self._description.binary
        if shutil.which(binary) is None:
            raise VnfError(f"{binary}: there is no such program; Debian has it in dpdk-dev")
        check_cores(self._cores)
        devices = devices_of(self._ports)
        addresses = KeptAddresses(self._ports)
        self._machine = machine = machines.make(LocalMachine(), deadline)
        words = arguments(self._description, self._ports, self._cores, devices, os.sched_getaffinity(0))
        telemetry = Telemetry(Path(_socket_in(machine.directory)))
        return self._forwarding(machine, words, telemetry, deadline, addresses)

    def _forwarding(
        self,
        machine: Machine,
        words: Sequence[str],
        telemetry: PortTelemetry,
        deadline: float,
        addresses: KeptAddresses | None = None,
    ) -> VnfInfo:
        """Start the process and wait until it forwards and its links are up."""
        self._telemetry = telemetry
        # Line-buffered: readiness is detected in the log.
        line = ["env", f"RUNTIME_DIRECTORY={machine.directory}", "stdbuf", "-oL", *words]
        self._program = program = machine.program("testpmd", line)
        program.start()
        program.wait_for(lambda: program.logged(_FORWARDS), deadline, "it forwards")
        mode = self._description.forward_mode
        if not program.logged(f"{mode} {_FORWARDS}"):
            raise VnfError(f"testpmd forwards, and not in the mode {mode}{program.log_tail()}")
        if addresses is not None:
            addresses.put_back()
        for number, port in enumerate(self._ports):
            program.wait_for(partial(self._is_up, number), deadline, f"the link of {port.device} is up")
        queues = self._queues()
        return VnfInfo("testpmd", telemetry.version, queues, {"command": " ".join(words)})

    def check(self) -> None:
        if self._program is None:
            raise VnfError("testpmd has not been started")
        self._program.check()
        for port, link in zip(self._ports, self._ask("/ethdev/link_status", _Link), strict=True):
            if link.status != "UP":
                raise VnfError(f"testpmd: the link of {port.device} is down")

    @property
    def place(self) -> DropCounters:
        return Forwarded(self._counts)

    def close(self) -> None:
        if self._telemetry is not None:
            self._telemetry.close()
            self._telemetry = None
        if self._program is not None:
            self._program.stop()
            self._program = None
        if self._machine is not None:
            self._machine.close()
            self._machine = None

    # -- inside ----------------------------------------------------------------------------------

    def _queues(self) -> tuple[int, ...]:
        """Return the queues per port. Raises: VnfError if a port has fewer than requested."""
        found = [info.nb_rx_queues for info in self._ask("/ethdev/info", _Info)]
        for port, queues in zip(self._ports, found, strict=True):
            if queues != port.queues:
                raise VnfError(f"testpmd: {port.device} has {queues} receive queues, not {port.queues}")
        return tuple(found)

    def _counts(self) -> list[PortCounts]:
        stats = self._ask("/ethdev/stats", _Stats)
        return [
            PortCounts(s.ipackets, s.opackets, s.imissed, s.ierrors, tuple(s.q_ipackets[: port.queues]))
            for s, port in zip(stats, self._ports, strict=True)
        ]

    def _is_up(self, number: int) -> bool:
        (link,) = self._ask("/ethdev/link_status", _Link, [number])
        return link.status == "UP"

    def _ask(self, command: str, model: type[Model], numbers: Sequence[int] | None = None) -> list[Model]:
        """Return the answer about each port. Raises: ProgramError; VnfError if it is not one of DPDK."""
        if self._telemetry is None:
            raise VnfError("testpmd has not been started")
        asked = range(len(self._ports)) if numbers is None else numbers
        answers = self._telemetry.each(command, asked)
        try:
            return [model.model_validate(answer) for answer in answers]
        except ValidationError as error:
            raise VnfError(
                f"testpmd: {str(answers)[:200]} is no answer of DPDK to {command}: is"
                f" {self._description.binary} DPDK's own testpmd?"
            ) from error


def _socket_in(directory: str) -> str:
    """Return the telemetry socket of a DPDK program with this runtime directory."""
    return f"{directory}/dpdk/{_PREFIX}/dpdk_telemetry.v2"


def arguments(
    description: TestpmdDescription,
    ports: Sequence[VnfPort],
    cores: VnfCores,
    devices: Sequence[DpdkDevice],
    allowed: Collection[int],
) -> list[str]:
    """Return the command line (pure). ``allowed``: CPUs on which it may run where ``cores`` names none.

    Raises: VnfError.
    """
    queues = {port.queues for port in ports}
    if len(queues) > 1:
        raise VnfError(f"testpmd has the same number of queues on each port, not {sorted(queues)}")
    (each,) = queues
    ring = max(port.ring for port in ports)
    mtu = max(port.mtu for port in ports)
    jumbo = [f"--max-pkt-len={mtu + 22}", f"--mbuf-size={mtu + 256}"] if mtu > 1500 else []
    return [
        description.binary,
        "--lcores",
        _lcores(cores, allowed),
        "-m",
        str(description.needs_mb(len(ports))),
        *(["--in-memory"] if description.hugepages else ["--no-huge"]),
        "--single-file-segments",
        f"--file-prefix={_PREFIX}",
        *_devices(devices),
        "--",
        f"--forward-mode={description.forward_mode}",
        *_noisy(description),
        *(f"--eth-peer={number},{port.peer_mac}" for number, port in enumerate(ports)),
        f"--nb-cores={len(cores.workers) or 1}",
        f"--rxq={each}",
        f"--txq={each}",
        f"--rxd={ring}",
        f"--txd={ring}",
        f"--total-num-mbufs={len(ports) * each * 2 * ring + _SPARE_BUFFERS}",
        *jumbo,
        "--no-lsc-interrupt",
        # With a period testpmd does not wait for a key; once a minute costs nothing.
        "--stats-period=60",
        "--auto-start",
    ]


def _noisy(description: TestpmdDescription) -> list[str]:
    if description.forward_mode is not ForwardMode.NOISY:
        return []
    work = description.noisy
    return [
        f"--noisy-lkup-memory={work.memory_mb}",
        f"--noisy-lkup-num-reads={work.reads}",
        f"--noisy-lkup-num-writes={work.writes}",
    ]


def _devices(devices: Sequence[DpdkDevice]) -> list[str]:
    """Return ``--vdev`` for virtual devices, and an allow list for PCI devices."""
    allowed = [word for d in devices if not d.virtual for word in ("-a", d.name)]
    return [*(f"--vdev={d.text}" for d in devices if d.virtual), *(allowed or ["--no-pci"])]


def _lcores(cores: VnfCores, allowed: Collection[int]) -> str:
    """Map lcores to CPUs: ``0@2,1@3,2@4``; ``0@(2-5)``: any of these CPUs."""
    free = cpus.format_list(allowed)
    main = f"0@({free})" if cores.main is None else f"0@{cores.main}"
    workers = [f"{n}@{cpu}" for n, cpu in enumerate(cores.workers, start=1)] or [f"1@({free})"]
    return ",".join([main, *workers])
