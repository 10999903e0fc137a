"""What the checks of a domain look at."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

from netplugin.libvirt_xml import Element
from netplugin.models import Binding, Finding, VfInfo
from netplugin.placing.ground import Ground
from netplugin.placing.needs import Cell, cells_of, memory_kb, vcpus
from netplugin.placing.placement import Placement
from netplugin.placing.refusals import pinned
from netplugin.tuning.facts import Cpus

STEP: Final = "check-domain"


@dataclass(frozen=True)
class Nic:
    """A port of the VM: what the domain should have of it."""

    port_id: str
    binding: Binding


@dataclass(frozen=True)
class Case:
    """``ground`` is None where the host has no plan; ``mine`` is the place that the VM was given last;
    ``others`` are the CPUs of other VMs; ``other_vfs`` the VFs of the agent's pool that no port of this
    VM has."""

    domain: Element
    nics: tuple[Nic, ...]
    ground: Ground | None
    mine: Placement | None = None
    others: Cpus = frozenset()
    other_vfs: tuple[VfInfo, ...] = ()

    @cached_property
    def vcpus(self) -> int:
        return vcpus(self.domain, STEP)

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """The guest's NUMA cells; one of all where it has none."""
        return tuple(cells_of(self.domain, STEP)) or (
            Cell(0, tuple(range(self.vcpus)), memory_kb(self.domain, STEP)),
        )

    @cached_property
    def pins(self) -> dict[int, Cpus]:
        """The CPUs of each vCPU that is pinned."""
        said = dict(pinned(self.domain, STEP))
        every = said.get("<vcpu cpuset>")
        found = {n: said.get(f"<vcpupin> {n}", every) for n in range(self.vcpus)}
        return {n: cpus for n, cpus in found.items() if cpus}

    @cached_property
    def emulator(self) -> Cpus | None:
        """The CPUs of QEMU's own threads, None where they may run on all."""
        said = dict(pinned(self.domain, STEP))
        return said.get("<emulatorpin>", said.get("<vcpu cpuset>"))

    @property
    def used(self) -> Cpus:
        return frozenset(cpu for cpus in self.pins.values() for cpu in cpus)


def graded(
    id: str, wrong: str | None, found: str, expected: str, fix: str, status: str = "warn"
) -> Finding:
    """``wrong`` is what is found instead of ``found`` if it is not as it should be."""
    if wrong is None:
        return Finding(id=id, status="ok", found=found, expected=expected)
    return Finding.model_validate(
        {"id": id, "status": status, "found": wrong, "expected": expected, "fix": fix}
    )
