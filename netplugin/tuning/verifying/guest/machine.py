"""The VM to measure in (pure): its domain on an overlay of the image, placed by the host's plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lxml import etree

from netplugin.api.domain_models import DomainPolicy
from netplugin.api.models import Binding, DomainRequirements
from netplugin.libvirt.domain import complete, parse_domain, written
from netplugin.libvirt.image_domain import HOST, NICS, USER, add, domain, place
from netplugin.libvirt.interfaces import text
from netplugin.libvirt.pins import Placement
from netplugin.libvirt.vm_image import KEY, KNOWN_HOSTS, Image
from netplugin.programs.ssh import SshTarget
from netplugin.tuning.facts import Facts, Live
from netplugin.tuning.placing.capacity import ground_of, held, pinned_by_others, running
from netplugin.tuning.placing.render import render_placed
from netplugin.tuning.planning.plan import TuningPlan
from netplugin.tuning.steps import needed
from netplugin.tuning.verifying.result import GuestVm
from netplugin.tuning.verifying.shell import STEP

#: Names of the domains. They are the same for every run, so that a run finds what a killed one left.
NAMES = ("netplugin-verify", "netplugin-verify-2")
#: The bridge between two VMs, and its MTU in bytes.
BRIDGE, MTU = "npverify", 9000
#: Where the NIC on the bridge is in a VM: not among those that are bound to DPDK's drivers.
_NIC = "0000:00:11.0"
#: MAC addresses of the VMs' NICs on the bridge, and of the NIC under test.
MACS = ("52:54:00:5a:fe:01", "52:54:00:5a:fe:02")
_VHOST_MAC = "52:54:00:5a:fc:01"
#: Queues of a NIC with multiple queues: as many as the VM has vCPUs, up to this.
_QUEUES = 8


@dataclass(frozen=True)
class Machine:
    """A VM as it will be started. ``vm`` is kept with the figures: without the kernel, which is asked when it
    runs. ``placement`` is None if it is not placed."""

    name: str
    image: Image
    xml: str
    ssh: SshTarget
    placement: Placement | None
    vm: GuestVm


def machines_on(
    image: Image,
    ssh_ports: Sequence[int],
    emulate: bool,
    plan: TuningPlan | None,
    facts: Facts,
    live: Live,
    vhost: Path | None = None,
) -> tuple[Machine, ...]:
    """Return a VM for each port; several are connected by the bridge. Without a plan they are not placed.

    ``vhost``: socket of vhost-user of a program on this host, to which the first NIC under test leads.

    Raises: Conflict, CapacityExhausted if the plan has no room for it, BackendUnavailable if libvirt does not
    say which CPUs other VMs have.
    """
    made = image.manifest
    keys = str(image.folder / KEY), str(image.folder / KNOWN_HOSTS)
    policy = DomainPolicy(pin=True, realtime=plan is not None and plan.intent.realtime)
    machines: list[Machine] = []
    for name, address, port in zip(NAMES, MACS, ssh_ports, strict=False):
        files = image.overlay(name), image.console(name)
        xml = domain(name, image.folder, made.vcpus, made.memory_mb, made.arguments, *files, port, emulate)
        root, nics, placement = parse_domain(xml, STEP), [], None
        if len(ssh_ports) > 1:
            driver, mtu = {"queues": str(min(made.vcpus, _QUEUES))}, {"size": str(MTU)}
            tags = {"source": {"bridge": BRIDGE}, "driver": driver, "mtu": mtu}
            nics.append(_nic("bridge", address, _NIC, tags))
        if vhost:
            source = {"type": "unix", "path": str(vhost), "mode": "client"}
            nics.append(_nic("vhostuser", _VHOST_MAC, NICS[0], {"source": source}))
        complete(root, nics)
        if plan is not None:
            domains = [each for each in running(live, STEP) if each.name not in NAMES]
            before = [each.placement for each in machines if each.placement]
            others = held(before, pinned_by_others(domains, needed(facts.cpus.online), None))
            placement = render_placed(root, (), policy, ground_of(plan, facts), others)
        ssh = SshTarget(HOST, port, USER, *keys)
        vm = GuestVm(
            **made.model_dump(include={"origin", "arguments", "vcpus", "memory_mb"}),
            image=made.tree,
            kernel="",
            emulated=emulate,
            pins=placement.pins if placement else {},
            realtime=policy.realtime,
        )
        machines.append(Machine(name, image, written(root), ssh, placement, vm))
    return tuple(machines)


def _nic(kind: str, mac: str, at: str, tags: Mapping[str, Mapping[str, str]]) -> Binding:
    """A NIC at a PCI address, with these elements."""
    nic = etree.Element("interface", type=kind)
    for tag, attributes in {"mac": {"address": mac}, "model": {"type": "virtio"}, **tags}.items():
        add(nic, tag, **attributes)
    nic.append(place(at))
    needs = DomainRequirements(shared_memory=kind == "vhostuser")
    return Binding(vif_type=kind, interface_xml=text(nic), domain_requirements=needs)
