"""The VM to measure in (pure): its domain on an overlay of the image, placed by the host's plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lxml import etree

from netplugin.api.domain_models import DomainPolicy
from netplugin.api.errors import InvalidRequest
from netplugin.api.models import Binding, DomainRequirements
from netplugin.host.cpus import format_list, parse_list
from netplugin.libvirt.domain import complete, parse_domain, written
from netplugin.libvirt.image_domain import HOST, NICS, USER, add, domain, place
from netplugin.libvirt.interfaces import Element, text
from netplugin.libvirt.pins import Placement
from netplugin.libvirt.vm_image import KEY, KNOWN_HOSTS, Image
from netplugin.programs.ssh import SshTarget
from netplugin.tuning.command_line import Machine as KernelMachine
from netplugin.tuning.command_line import parse_command_line
from netplugin.tuning.facts import Facts, Live
from netplugin.tuning.placing.capacity import ground_of, held, pinned_by_others, running
from netplugin.tuning.placing.render import render_placed
from netplugin.tuning.planning.plan import TuningPlan
from netplugin.tuning.steps import needed
from netplugin.tuning.verifying.result import GuestVm

STEP = "verify-guest"
#: Names of the domains. They are the same for every run, so that a run finds what a killed one left.
NAMES = ("netplugin-verify", "netplugin-verify-2")
#: The bridge between two VMs, and its MTU in bytes.
BRIDGE, MTU = "npverify", 9000
#: Where the NIC on the bridge is in a VM: not among those that are bound to DPDK's drivers.
_NIC = "0000:00:11.0"
_VHOST_MAC = "52:54:00:5a:fc:01"
#: Queues of a NIC with multiple queues: as many as the VM has vCPUs, up to this.
_QUEUES = 8


@dataclass(frozen=True)
class Machine:
    """A VM as it will be started. ``placement`` is None if it is not placed."""

    name: str
    image: Image
    xml: str
    ssh: SshTarget
    placement: Placement | None
    realtime: bool
    emulated: bool

    @property
    def pins(self) -> Mapping[int, int]:
        """CPU of each vCPU; empty if it is not placed."""
        return self.placement.pins if self.placement else {}

    def described(self, kernel: str) -> GuestVm:
        """Return what is kept with the figures. ``kernel``: release of the kernel that runs in the VM."""
        made = self.image.manifest
        return GuestVm(
            image=made.tree,
            origin=made.origin,
            kernel=kernel,
            arguments=made.arguments,
            vcpus=made.vcpus,
            memory_mb=made.memory_mb,
            emulated=self.emulated,
            pins=dict(self.pins),
            realtime=self.realtime,
        )


def mac(number: int) -> str:
    """Return the MAC address of a VM's NIC on the bridge."""
    return f"52:54:00:5a:fe:{number + 1:02x}"


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
    realtime = plan is not None and plan.intent.realtime
    machines: list[Machine] = []
    for number, (name, port) in enumerate(zip(NAMES, ssh_ports, strict=False)):
        files = image.overlay(name), image.console(name)
        xml = domain(name, image.folder, made.vcpus, made.memory_mb, made.arguments, *files, port, emulate)
        root = parse_domain(xml, STEP)
        nics = [_on_bridge(number, made.vcpus)] if len(ssh_ports) > 1 else []
        nics += [_on_vhost(vhost)] if vhost else []
        complete(root, nics)
        placement = None
        if plan is not None:
            before = [each.placement for each in machines if each.placement]
            placement = _place(root, plan, facts, live, before)
        ssh = SshTarget(HOST, port, USER, *keys)
        machines.append(Machine(name, image, written(root), ssh, placement, realtime, emulate))
    return tuple(machines)


def _on_bridge(number: int, vcpus: int) -> Binding:
    """The NIC on the bridge."""
    nic = etree.Element("interface", type="bridge")
    add(nic, "mac", address=mac(number))
    add(nic, "source", bridge=BRIDGE)
    add(nic, "model", type="virtio")
    if vcpus > 1:
        add(nic, "driver", queues=str(min(vcpus, _QUEUES)))
    add(nic, "mtu", size=str(MTU))
    nic.append(place(_NIC))
    return Binding(vif_type="bridge", interface_xml=text(nic))


def _on_vhost(socket: Path) -> Binding:
    """The first NIC under test, whose other side is a program that listens on the socket."""
    nic = etree.Element("interface", type="vhostuser")
    add(nic, "mac", address=_VHOST_MAC)
    add(nic, "source", type="unix", path=str(socket), mode="client")
    add(nic, "model", type="virtio")
    nic.append(place(NICS[0]))
    needs = DomainRequirements(shared_memory=True)
    return Binding(vif_type="vhostuser", interface_xml=text(nic), domain_requirements=needs)


def _place(
    root: Element, plan: TuningPlan, facts: Facts, live: Live, before: Sequence[Placement]
) -> Placement:
    domains = [each for each in running(live, STEP) if each.name not in NAMES]
    others = held(before, pinned_by_others(domains, needed(facts.cpus.online), None))
    policy = DomainPolicy(pin=True, realtime=plan.intent.realtime)
    return render_placed(root, (), policy, ground_of(plan, facts), others)


def measured_vcpus(image: Image, asked: str | None) -> str:
    """Return the vCPUs to measure: those requested, else those that the guest's kernel isolates, else all.

    Raises: InvalidRequest naming ``cpus``.
    """
    vcpus = image.manifest.vcpus
    every = frozenset(range(vcpus))
    if asked is None:
        line = parse_command_line(image.manifest.arguments)
        isolated = line.isolation(KernelMachine(vcpus, every, (), ())).get("domain")
        return format_list(isolated or every)
    with suppress(ValueError):
        named = frozenset(parse_list(asked))
        if named and named <= every:
            return format_list(named)
    raise InvalidRequest(
        f"cpus: {asked} is no list of the VM's vCPUs, which are {format_list(every)}",
        step=STEP,
        fix="write it like 1-3, or leave it away for the isolated ones",
    )
