"""The VM to measure in: its domain on an overlay of the image, placed by the host's plan, and its run."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from lxml import etree

from netplugin.api.domain_models import DomainPolicy
from netplugin.api.errors import BackendUnavailable, Conflict, HostError, OperationTimeout
from netplugin.api.models import Binding, DomainRequirements
from netplugin.host.link_values import Bridge
from netplugin.host.links import Links
from netplugin.host.locks import Locks
from netplugin.libvirt.domain import complete, parse_domain, written
from netplugin.libvirt.image_domain import HOST, NICS, USER, add, domain, place
from netplugin.libvirt.interfaces import text
from netplugin.libvirt.pins import Placement
from netplugin.libvirt.transient import TransientDomain, answers_ssh
from netplugin.libvirt.vm_image import BUILD, KEY, KNOWN_HOSTS, Image
from netplugin.programs.program import Program, own_directory
from netplugin.programs.ssh import SshTarget
from netplugin.tuning.facts import Facts, Live
from netplugin.tuning.placing.capacity import ground_of, held, pinned_by_others, running
from netplugin.tuning.placing.render import render_placed
from netplugin.tuning.planning.plan import TuningPlan
from netplugin.tuning.steps import needed
from netplugin.tuning.verifying import shell
from netplugin.tuning.verifying.options import Options
from netplugin.tuning.verifying.result import GuestVm
from netplugin.tuning.verifying.shell import STEP, GuestShell, as_host_errors

Say = Callable[[str], None]

#: Seconds that libvirt has to start the VM, with hugepages to clear.
_START_S = 120.0
_FIX = "see libvirt's error; a placed VM needs free hugepages: netplugin host apply, or --unplaced"
_LOCK = "verify-guest"
_KVM = Path("/dev/kvm")
#: Names of the domains. They are the same for every run, so that a run finds what a killed one left.
_NAMES = ("netplugin-verify", "netplugin-verify-2")
#: The bridge between two VMs: name, mark, MAC address, MTU in bytes.
_BRIDGE, _ALIAS, _ADDRESS, MTU = "npverify", "netplugin-verify", "52:54:00:5a:fd:00", 9000
#: Where the NIC on the bridge is in a VM: not among those that are bound to DPDK's drivers.
_NIC = "0000:00:11.0"
#: MAC addresses of the VMs' NICs on the bridge, and of the NIC under test.
MACS, _VHOST_MAC = ("52:54:00:5a:fe:01", "52:54:00:5a:fe:02"), "52:54:00:5a:fc:01"
#: Queues of a NIC with multiple queues: as many as the VM has vCPUs, up to this.
_QUEUES = 8


@dataclass(frozen=True)
class Machine:
    """A VM as it will be started. ``vm`` is kept with the figures; its kernel is not known before it runs."""

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
    for name, address, port in zip(_NAMES, MACS, ssh_ports, strict=False):
        files = image.overlay(name), image.console(name)
        xml = domain(name, image.folder, made.vcpus, made.memory_mb, made.arguments, *files, port, emulate)
        root, nics, placement = parse_domain(xml, STEP), [], None
        if len(ssh_ports) > 1:
            driver, mtu = {"queues": str(min(made.vcpus, _QUEUES))}, {"size": str(MTU)}
            tags = {"source": {"bridge": _BRIDGE}, "driver": driver, "mtu": mtu}
            nics.append(_nic("bridge", address, _NIC, tags))
        if vhost:
            source = {"type": "unix", "path": str(vhost), "mode": "client"}
            nics.append(_nic("vhostuser", _VHOST_MAC, NICS[0], {"source": source}))
        complete(root, nics)
        if plan is not None:
            domains = [each for each in running(live, STEP) if each.name not in _NAMES]
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


def require(options: Options, image: Image) -> Collection[str]:
    """Check this host and the image; return the programs that the VM needs.

    Raises: BackendUnavailable for what is missing.
    """
    testpmd, tcp = ["dpdk-testpmd"] * options.testpmd, ["iperf3"] * options.tcp
    shell.require(["virsh", "qemu-img", "ssh", *testpmd, *tcp])
    if not options.emulate and not _KVM.exists():
        fix = "modprobe kvm_intel or kvm_amd; to try without, --emulate: then figures are no measure"
        raise BackendUnavailable(f"this host has no {_KVM}", step=STEP, fix=fix)
    programs = ["cyclictest", *testpmd, *tcp, *["ethtool"] * options.tcp]
    shell.require(programs, image.manifest)
    return programs


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody listens on now."""
    with socket.create_server((HOST, 0)) as probe:
        return int(probe.getsockname()[1])


@contextmanager
def alone(image: Image, uri: str) -> Iterator[None]:
    """Let one run at a time have VMs; remove first what a killed one left.

    Raises: Conflict if another run has them, or the bridge is not ours; HostError if the image was written.
    """
    with closing(Locks()) as locks:
        if holder := locks.take(_LOCK):
            raise Conflict(f"{holder} measures in a VM now", step=STEP, fix="wait until it has ended")
        for name in _NAMES:
            _remove(TransientDomain(uri, name), image)
        links = Links()
        if (there := links.get(_BRIDGE)) is not None:
            # The alias is set after the device is made: until then its MAC address identifies it.
            if there.alias != _ALIAS and (there.alias or there.address != _ADDRESS):
                raise Conflict(f"{_BRIDGE} is a device of others", step=STEP, fix="rename that device")
            links.delete(_BRIDGE)
        before = image.state()
        yield
        if image.state() != before:
            what = f"{image.disk} was written while the VM ran, and is no image any more"
            raise HostError(what, step=STEP, fix=f"{BUILD} --rebuild, with the options of that image")


@contextmanager
def booted(machine: Machine, uri: str, boot_s: int, say: Say) -> Iterator[GuestShell]:
    """Start the VM and wait until it has booted; destroy it at the end and remove its overlay.

    libvirt destroys it also if this process is killed; the next run then removes the overlay.

    Raises: NetpluginError if it does not start, OperationTimeout if it does not answer, HostError if it ends
    in between.
    """
    domain, image, ssh = TransientDomain(uri, machine.name), machine.image, machine.ssh
    within = GuestShell(ssh, domain, lambda: image.console_tail(machine.name))
    with ExitStack() as stack:
        directory = own_directory()
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        file = directory / "domain.xml"
        file.write_text(machine.xml)
        # virsh starts the domain and then waits: with it, libvirt ends the domain.
        commands = f"create {file} --autodestroy; event --domain {machine.name} --event lifecycle --loop"
        starter = Program("virsh", ["virsh", "-c", uri, commands], directory / "virsh.log")
        stack.callback(starter.stop)
        stack.callback(_remove, domain, image)
        image.make_overlay(machine.name)
        began = time.monotonic()
        with as_host_errors(STEP, _FIX):
            starter.start()
            starter.wait_for(lambda: domain.is_running, began + _START_S, "the VM runs")
        if not answers_ssh(ssh.host, ssh.port, began + boot_s, lambda: domain.is_running):
            within.check("it booted")
            fix = "look at its console above; a slow host needs more time: --boot SECONDS"
            raise OperationTimeout(f"the VM does not answer by SSH{within.console()}", step=STEP, fix=fix)
        # Without this, the end of the boot would disturb the first round.
        within.run(["systemctl", "start", "default.target"], max(1.0, began + boot_s - time.monotonic()))
        say(f"the VM has booted after {time.monotonic() - began:.0f} s")
        yield within


def _remove(domain: TransientDomain, image: Image) -> None:
    """Remove domain and overlay: those of this run, or of one that was killed."""
    try:
        domain.stop()
    finally:
        image.remove_overlay(domain.name)


@contextmanager
def bridge() -> Iterator[None]:
    """Have a bridge between two VMs, without an uplink. Raises: HostError."""
    links = Links()
    try:
        links.create(_BRIDGE, Bridge(), alias=_ALIAS, address=_ADDRESS, mtu=MTU)
        links.set(_BRIDGE, up=True)
        yield
    finally:
        links.delete(_BRIDGE)
