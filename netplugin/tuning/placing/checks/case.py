"""Input of the domain checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from netplugin.api.models import Binding, VfInfo
from netplugin.libvirt.interfaces import Element
from netplugin.libvirt.needs import GuestCell, cells_of, memory_kb, vcpus
from netplugin.libvirt.pins import Placement, pinned
from netplugin.tuning.facts import Cpus
from netplugin.tuning.placing.capacity import HostCapacity
from netplugin.tuning.placing.host_memory import UNKNOWN, HostMemory

STEP: Final = "check-domain"


@dataclass(frozen=True)
class DomainNic:
    """A port of the VM and the binding that the domain should contain."""

    port_id: str
    binding: Binding


@dataclass(frozen=True)
class Case:
    """A domain and what to check it against. ``ground`` is None if the host has no plan; ``mine`` is the last
    placement of this VM; ``others`` are the CPUs of other VMs; ``other_vfs`` are VFs of the agent's pool
    that belong to no port of this VM; ``other_config`` is that of OVS, None if it did not answer."""

    domain: Element
    nics: tuple[DomainNic, ...]
    ground: HostCapacity | None
    mine: Placement | None = None
    others: Cpus = frozenset()
    other_vfs: tuple[VfInfo, ...] = ()
    host: HostMemory = UNKNOWN
    other_config: Mapping[str, str] | None = None

    @cached_property
    def vcpus(self) -> int:
        return vcpus(self.domain, STEP)

    @cached_property
    def cells(self) -> tuple[GuestCell, ...]:
        """The guest's NUMA cells, or one cell with all vCPUs if the domain defines none."""
        return tuple(cells_of(self.domain, STEP)) or (
            GuestCell(0, tuple(range(self.vcpus)), memory_kb(self.domain, STEP)),
        )

    @cached_property
    def _pinned(self) -> dict[tuple[str, int | None], Cpus]:
        return {(pin.tag, pin.number): pin.cpus for pin in pinned(self.domain, STEP)}

    @cached_property
    def pins(self) -> dict[int, Cpus]:
        """Pinned vCPUs and the CPUs of each."""
        pins, every = self._pinned, self._pinned.get(("vcpu", None))
        found = {n: pins.get(("vcpupin", n), every) for n in range(self.vcpus)}
        return {n: cpus for n, cpus in found.items() if cpus}

    @cached_property
    def emulator(self) -> Cpus | None:
        """The CPUs of QEMU's emulator threads, or None if they are not pinned."""
        return self._pinned.get(("emulatorpin", None), self._pinned.get(("vcpu", None)))

    @property
    def iothreads(self) -> Cpus:
        """The CPUs that the IO threads are pinned to."""
        return frozenset().union(*(cpus for (tag, _), cpus in self._pinned.items() if tag == "iothreadpin"))

    @property
    def used(self) -> Cpus:
        return frozenset(cpu for cpus in self.pins.values() for cpu in cpus)
