"""The VNF ``testpmd``: DPDK's test forwarder, by default in a mode that only rewrites both MAC addresses."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, ValidationError

from netplugin.host import cpus
from netplugin.programs import bounded
from netplugin_zeroloss.loss.contract import DropCounters
from netplugin_zeroloss.machines import LocalMachine
from netplugin_zeroloss.vnf.contract import (
    Forwarded,
    ForwardMode,
    PortCounts,
    ProgramVnf,
    TestpmdDescription,
    VnfCores,
    VnfError,
    VnfInfo,
    VnfPort,
)
from netplugin_zeroloss.vnf.dpdk import addresses_of_taps, check_cores, devices_of
from netplugin_zeroloss.vnf.guest import check_nics, guest_cores, read_guest, require_guest

_PREFIX = "vnf"
#: Asks DPDK's telemetry, where the program runs: its socket exchanges packets (SOCK_SEQPACKET), which SSH
#: does not forward.
_ASK = Path(__file__).with_name("telemetry_child.py")
#: Log text of testpmd when it polls its queues.
_FORWARDS = "packet forwarding - ports="
#: Buffers in addition to those in rings: lcore caches, and bursts in flight.
_SPARE_BUFFERS = 2048

Model = TypeVar("Model", bound=BaseModel)
Count = Annotated[int, Field(ge=0)]


# What is used of each answer; other fields are not looked at.


class _Info(BaseModel, strict=True):
    nb_rx_queues: Count


class _Link(BaseModel, strict=True):
    status: str


class _Stats(BaseModel, strict=True):
    ipackets: Count
    opackets: Count
    imissed: Count
    ierrors: Count
    #: By receive queue, of at most 16 queues.
    q_ipackets: list[Count] = []


class _Printed(BaseModel, strict=True):
    version: str
    answers: list[dict[str, Any]]


class Testpmd(ProgramVnf):
    """One process, on this machine or in a VM. It drops every frame that it received and did not send."""

    __test__ = False  # the name looks like a test to pytest
    name = "testpmd"

    def __init__(self, description: TestpmdDescription, ports: tuple[VnfPort, ...], cores: VnfCores) -> None:
        """Raises: VnfError if the NICs in a VM are not those of the ports."""
        super().__init__(ports, cores)
        check_nics(self.name, description, ports)
        self._description = description
        self._version = "unknown"  # of DPDK, known from the first answer

    def start(self) -> VnfInfo:
        description, deadline = self._description, time.monotonic() + self._description.start_s
        addresses: dict[str, str] = {}
        if isinstance(description.machine, LocalMachine):
            if shutil.which(description.binary) is None:
                raise VnfError(f"{description.binary}: there is no such program; Debian has it in dpdk-dev")
            cores, allowed = self._cores, tuple(os.sched_getaffinity(0))
            check_cores(cores)
            devices = devices_of(self._ports)
            addresses = addresses_of_taps(self._ports)
            machine = self._on(description.machine, deadline)
        else:
            machine = self._on(description.machine, deadline)
            facts = read_guest(machine, description)
            require_guest(description, facts, len(self._ports))
            cores, allowed = guest_cores(self._cores, facts), facts.online
            devices = [word for nic in description.nics for word in ("-a", nic)]
        words = arguments(description, self._ports, cores, devices, allowed)
        machine.write(f"{machine.directory}/{_ASK.name}", _ASK.read_text(encoding="utf-8"))
        # Line-buffered: readiness is detected in the log.
        runs = ["env", f"RUNTIME_DIRECTORY={machine.directory}", "stdbuf", "-oL", *words]
        program = self._run(machine, runs)
        program.wait_for(lambda: program.logged(_FORWARDS), deadline, "it forwards")
        mode = description.forward_mode
        if not program.logged(f"{mode} {_FORWARDS}"):
            raise VnfError(f"testpmd forwards, and not in the mode {mode}{program.log_tail()}")
        for tap, address in addresses.items():
            machine.run(["ip", "link", "set", "dev", tap, "address", address])
        self._wait_for_links(deadline)
        queues = tuple(info.nb_rx_queues for info in self._ask("/ethdev/info", _Info))
        for port, found in zip(self._ports, queues, strict=True):
            if found != port.queues:
                raise VnfError(f"testpmd: {port.device} has {found} receive queues, not {port.queues}")
        return VnfInfo(self.name, self._version, queues, {"command": " ".join(words)})

    @property
    def place(self) -> DropCounters:
        return Forwarded(self._counts)

    def _counts(self) -> list[PortCounts]:
        stats = self._ask("/ethdev/stats", _Stats)
        return [
            PortCounts(s.ipackets, s.opackets, s.imissed, s.ierrors, tuple(s.q_ipackets[: port.queues]))
            for s, port in zip(stats, self._ports, strict=True)
        ]

    def _links(self) -> Sequence[bool]:
        return [link.status == "UP" for link in self._ask("/ethdev/link_status", _Link)]

    def _ask(self, command: str, model: type[Model]) -> list[Model]:
        """Return the answer about each port. Raises: ProgramError; VnfError if it is not one of DPDK."""
        machine = self._machine
        if machine is None:
            raise VnfError("testpmd has not been started")
        socket = f"{machine.directory}/dpdk/{_PREFIX}/dpdk_telemetry.v2"
        program = [machine.python, "-IS", f"{machine.directory}/{_ASK.name}", socket]
        printed = machine.run([*program, *(f"{command},{n}" for n in range(len(self._ports)))])
        try:
            found = _Printed.model_validate(bounded.parse(printed.strip().rpartition("\n")[2]))
            answers = [model.model_validate(answer[command]) for answer in found.answers]
        except (ValueError, ValidationError, KeyError) as error:
            raise VnfError(
                f"testpmd: {printed[:200]!r} is no answer of DPDK to {command}: is"
                f" {self._description.binary} DPDK's own testpmd?"
            ) from error
        if len(answers) != len(self._ports):
            raise VnfError(f"testpmd: {len(answers)} answers to {command} of {len(self._ports)} ports")
        self._version = found.version
        return answers


def arguments(
    description: TestpmdDescription,
    ports: Sequence[VnfPort],
    cores: VnfCores,
    devices: Sequence[str],
    allowed: Collection[int],
) -> list[str]:
    """Return the command line (pure). ``allowed``: CPUs on which it may run where ``cores`` names none.

    Raises: VnfError.
    """
    each, *others = sorted({port.queues for port in ports})
    if others:
        raise VnfError(f"testpmd has the same number of queues on each port, not {[each, *others]}")
    ring, mtu = max(port.ring for port in ports), max(port.mtu for port in ports)
    jumbo = [f"--max-pkt-len={mtu + 22}", f"--mbuf-size={mtu + 256}"] if mtu > 1500 else []
    work = {}
    if description.forward_mode is ForwardMode.NOISY:
        noisy = description.noisy
        work = {"memory": noisy.memory_mb, "num-reads": noisy.reads, "num-writes": noisy.writes}
    return [
        *(description.binary, "--lcores", _lcores(cores, allowed)),
        *("-m", str(description.needs_mb(len(ports)))),
        "--in-memory" if description.hugepages else "--no-huge",
        "--single-file-segments",
        f"--file-prefix={_PREFIX}",
        *devices,
        *(() if "-a" in devices else ["--no-pci"]),
        "--",
        f"--forward-mode={description.forward_mode}",
        *(f"--noisy-lkup-{word}={number}" for word, number in work.items()),
        *(f"--eth-peer={number},{port.peer_mac}" for number, port in enumerate(ports)),
        f"--nb-cores={len(cores.workers) or 1}",
        *(f"--rxq={each}", f"--txq={each}", f"--rxd={ring}", f"--txd={ring}"),
        f"--total-num-mbufs={len(ports) * each * 2 * ring + _SPARE_BUFFERS}",
        *jumbo,
        "--no-lsc-interrupt",
        # With a period testpmd does not wait for a key; once a minute costs nothing.
        "--stats-period=60",
        "--auto-start",
    ]


def _lcores(cores: VnfCores, allowed: Collection[int]) -> str:
    """Map lcores to CPUs: ``0@2,1@3,2@4``; ``0@(2-5)``: any of these CPUs."""
    free = cpus.format_list(allowed)
    main = f"0@({free})" if cores.main is None else f"0@{cores.main}"
    workers = [f"{n}@{cpu}" for n, cpu in enumerate(cores.workers, start=1)] or [f"1@({free})"]
    return ",".join([main, *workers])
