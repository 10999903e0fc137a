"""Hosts as plans have them, and VMs of all sizes, as chance makes them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from netplugin.api.domain_models import DomainPolicy
from netplugin.api.models import Binding, DomainRequirements, PortSpec
from netplugin.libvirt.domain import parse_domain
from netplugin.libvirt.interfaces import Element, tap_interface, vhostuser_interface
from netplugin.tuning.placing.capacity import HostCapacity, ground_of
from netplugin.tuning.planning.plan import make_plan
from netplugin.tuning.read import read_facts
from tests.unit.tuning.machines import MemoryRoot
from tests.unit.tuning.strategies import intents, machines, mend
from tests.unit.tuning.trees import tree

_MB = st.sampled_from([64, 512, 1024, 2048, 6144])


@dataclass(frozen=True)
class Vm:
    """A domain as a platform has it: ``cells`` are the vCPUs of each guest NUMA cell, none for no cells, and
    ``memory_mb`` is the memory of each of them, or of the VM."""

    number: int
    vcpus: int = 2
    memory_mb: int = 1024
    cells: tuple[int, ...] = ()
    iothreads: int = 0
    kind: str = "kvm"
    realtime: bool = False
    topology: str = ""
    vhost: bool = True
    numa_node: int | None = None
    extra: str = ""

    @property
    def name(self) -> str:
        return f"vm-{self.number}"

    @property
    def policy(self) -> DomainPolicy:
        return DomainPolicy(pin=True, realtime=self.realtime, numa_node=self.numa_node)

    @property
    def xml(self) -> str:
        cpu = self.topology + (f"<numa>{''.join(self._cells())}</numa>" if self.cells else "")
        memory = self.memory_mb * max(1, len(self.cells))
        threads = f"<iothreads>{self.iothreads}</iothreads>" if self.iothreads else ""
        return (
            f"<domain type='{self.kind}'><name>{self.name}</name>"
            f"<memory unit='MiB'>{memory}</memory><vcpu>{self.vcpus}</vcpu>{threads}"
            f"<os><type arch='x86_64' machine='q35'>hvm</type></os>"
            f"{f'<cpu>{cpu}</cpu>' if cpu else ''}{self.extra}<devices/></domain>"
        )

    def _cells(self) -> list[str]:
        first, made = 0, []
        for number, count in enumerate(self.cells):
            cpus = f"{first}-{first + count - 1}"
            made.append(f"<cell id='{number}' cpus='{cpus}' memory='{self.memory_mb}' unit='MiB'/>")
            first += count
        return made

    @property
    def domain(self) -> Element:
        return parse_domain(self.xml, "render-domain")

    @property
    def bindings(self) -> list[Binding]:
        spec = PortSpec.model_validate(
            {
                "vm_id": self.name,
                "mac": f"52:54:00:00:00:{self.number:02x}",
                "backend": "x",
                "network": {"type": "flat", "physical_network": "net1"},
                "queues": min(4, self.vcpus),
            }
        )
        if not self.vhost:
            return [Binding(vif_type="tap", interface_xml=tap_interface(spec, f"npt{self.number}"))]
        needs = DomainRequirements(shared_memory=True, hugepages=True)
        xml = vhostuser_interface(spec, f"/run/vhost/{self.number}")
        return [Binding(vif_type="vhostuser", interface_xml=xml, domain_requirements=needs)]


@st.composite
def grounds(draw: st.DrawFn) -> HostCapacity:
    """Plans of machines; how many pages there are is another matter, and chance's."""
    facts = read_facts(MemoryRoot(tree(draw(machines()))))
    intent = draw(intents()).model_copy(update={"vm_cores": None, "vm_memory_mb": 0})
    ground = ground_of(make_plan(facts, mend(facts, intent)[0]), facts)
    assume(ground.with_cores)
    return with_memory(ground, draw(st.sampled_from([512, 6144, 1 << 20, 1 << 20])))


def with_memory(ground: HostCapacity, megabytes: int) -> HostCapacity:
    """The same host with so much for VMs on each node, in pages of both sizes."""
    memory = {2048: megabytes << 10, 1048576: megabytes << 10}
    return replace(ground, nodes=tuple(replace(n, memory_kb=memory) for n in ground.nodes))


@st.composite
def vms(draw: st.DrawFn, number: int = 1, **fixed: Any) -> Vm:
    cells = draw(st.sampled_from([(), (), (), (1,), (2, 2), (1, 3), (4, 4)]))
    asked: dict[str, Any] = {
        "vcpus": sum(cells) or draw(st.sampled_from([1, 2, 2, 3, 4, 4, 5, 8, 9])),
        "memory_mb": draw(_MB),
        "cells": cells,
        "iothreads": draw(st.sampled_from([0, 0, 2])),
        "kind": draw(st.sampled_from(["kvm", "qemu"])),
        "realtime": draw(st.booleans()),
        "vhost": draw(st.booleans()),
    }
    asked |= fixed
    sockets = draw(st.sampled_from([None, None, 1, asked["vcpus"]]))
    if sockets:
        cores = asked["vcpus"] // sockets
        asked["topology"] = f"<topology sockets='{sockets}' cores='{cores}' threads='1'/>"
    return Vm(number, **asked)


def several(ground: HostCapacity) -> st.SearchStrategy[list[Vm]]:
    """Some VMs for a host; in real time only where the host is planned for it."""
    fixed = {} if ground.realtime else {"realtime": False}
    return st.integers(1, 6).flatmap(
        lambda count: st.tuples(*(vms(number, **fixed) for number in range(1, count + 1))).map(list)
    )
