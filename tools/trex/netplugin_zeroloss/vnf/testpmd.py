"""The VNF ``testpmd``: DPDK's test forwarder, by default in a mode that only rewrites both MAC addresses."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from functools import partial

from netplugin.host import cpus
from netplugin.host.program import Program, Telemetry, own_directory
from netplugin_zeroloss.vnf.contract import (
    ForwardMode,
    OwnProgram,
    PortCounts,
    TestpmdDescription,
    VnfCores,
    VnfError,
    VnfInfo,
    VnfPort,
)
from netplugin_zeroloss.vnf.dpdk import DpdkDevice, KeptAddresses, check_cores, devices_of

_PREFIX = "vnf"
#: Log text of testpmd when it polls its queues.
_FORWARDS = "packet forwarding - ports="
#: Buffers in addition to those in rings: lcore caches, and bursts in flight.
_SPARE_BUFFERS = 2048


class Testpmd(OwnProgram):
    """One local process. It drops every frame that it received and did not send."""

    __test__ = False  # the name looks like a test to pytest

    def __init__(self, description: TestpmdDescription, ports: tuple[VnfPort, ...], cores: VnfCores) -> None:
        self._description, self._ports, self._cores = description, ports, cores

    def start(self) -> VnfInfo:
        deadline = time.monotonic() + self._description.start_s
        binary = self._description.binary
        if shutil.which(binary) is None:
            raise VnfError(f"{binary}: there is no such program; Debian has it in dpdk-dev")
        check_cores(self._cores)
        devices = devices_of(self._ports)
        addresses = KeptAddresses(self._ports)
        self._directory = directory = own_directory()
        words = arguments(self._description, self._ports, self._cores, devices)
        # Line-buffered: readiness is detected in the log.
        program = Program("testpmd", ["stdbuf", "-oL", *words], directory / "log")
        self._program = program
        telemetry = Telemetry(directory / "dpdk" / _PREFIX / "dpdk_telemetry.v2")
        self._telemetry = telemetry
        program.start({"RUNTIME_DIRECTORY": str(directory)})
        program.wait_for(lambda: telemetry.there, deadline, "it takes its ports")
        program.wait_for(lambda: _FORWARDS in program.log.read_text(), deadline, "it forwards")
        addresses.put_back()
        for number, port in enumerate(self._ports):
            program.wait_for(
                partial(_is_up, telemetry, number),
                deadline,
                f"the link of {port.device} is up",
            )
        return VnfInfo("testpmd", telemetry.version, self._queues(), {"command": " ".join(words)})

    def check(self) -> None:
        if self._program is None or self._telemetry is None:
            raise VnfError("testpmd has not been started")
        self._program.check()
        for number, port in enumerate(self._ports):
            if not _is_up(self._telemetry, number):
                raise VnfError(f"testpmd: the link of {port.device} is down")

    def _queues(self) -> tuple[int, ...]:
        """Return the queues per port. Raises: VnfError if a port has fewer than requested."""
        assert self._telemetry is not None
        found = []
        for number, port in enumerate(self._ports):
            queues = int(self._telemetry.ask("/ethdev/info", number)["nb_rx_queues"])
            if queues != port.queues:
                raise VnfError(f"testpmd: {port.device} has {queues} receive queues, not {port.queues}")
            found.append(queues)
        return tuple(found)

    def _counts(self) -> list[PortCounts]:
        if self._telemetry is None:
            raise VnfError("testpmd has not been started")
        stats = [self._telemetry.ask("/ethdev/stats", n) for n in range(len(self._ports))]
        return [PortCounts(s["ipackets"], s["opackets"], s["imissed"], s["ierrors"]) for s in stats]


def arguments(
    description: TestpmdDescription,
    ports: Sequence[VnfPort],
    cores: VnfCores,
    devices: Sequence[DpdkDevice],
) -> list[str]:
    """Return the command line (pure, except for the allowed CPUs if none are given)."""
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
        _lcores(cores),
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


def _is_up(telemetry: Telemetry, number: int) -> bool:
    return bool(telemetry.ask("/ethdev/link_status", number)["status"] == "UP")


def _devices(devices: Sequence[DpdkDevice]) -> list[str]:
    """Return ``--vdev`` for virtual devices, and an allow list for PCI devices."""
    allowed = [word for d in devices if not d.virtual for word in ("-a", d.name)]
    return [*(f"--vdev={d.text}" for d in devices if d.virtual), *(allowed or ["--no-pci"])]


def _lcores(cores: VnfCores) -> str:
    """Map lcores to CPUs: ``0@2,1@3,2@4``; ``0@(2-5)``: any of these CPUs."""
    free = cpus.format_list(os.sched_getaffinity(0))
    main = f"0@({free})" if cores.main is None else f"0@{cores.main}"
    workers = [f"{n}@{cpu}" for n, cpu in enumerate(cores.workers, start=1)] or [f"1@({free})"]
    return ",".join([main, *workers])
