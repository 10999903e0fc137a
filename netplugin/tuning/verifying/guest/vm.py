"""Run the VM for the time of a measurement: nothing of it is left, however that ends."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from netplugin.api.errors import BackendUnavailable, Conflict, HostError, OperationTimeout
from netplugin.host.link_values import Bridge
from netplugin.host.links import Links
from netplugin.host.locks import Locks
from netplugin.libvirt.image_domain import HOST
from netplugin.libvirt.transient import TransientDomain, answers_ssh
from netplugin.libvirt.vm_image import BUILD, Image
from netplugin.programs.program import Program, own_directory
from netplugin.tuning.verifying import shell
from netplugin.tuning.verifying.guest.machine import BRIDGE, MTU, NAMES, Machine
from netplugin.tuning.verifying.options import Options
from netplugin.tuning.verifying.shell import STEP, GuestShell, as_host_errors

Say = Callable[[str], None]

#: Seconds that libvirt has to start the VM, with hugepages to clear.
_START_S = 120.0
_FIX = "see libvirt's error; a placed VM needs free hugepages: netplugin host apply, or --unplaced"
_LOCK = "verify-guest"
_KVM = Path("/dev/kvm")
#: Of the bridge between two VMs.
_ALIAS, _ADDRESS = "netplugin-verify", "52:54:00:5a:fd:00"


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
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@contextmanager
def alone(image: Image, uri: str) -> Iterator[None]:
    """Let one run at a time have VMs; remove first what a killed one left.

    Raises: Conflict if another run has them, or the bridge is not ours; HostError if the image was written.
    """
    with closing(Locks()) as locks:
        if holder := locks.take(_LOCK):
            raise Conflict(f"{holder} measures in a VM now", step=STEP, fix="wait until it has ended")
        for name in NAMES:
            _remove(TransientDomain(uri, name), image)
        links = Links()
        if (there := links.get(BRIDGE)) is not None:
            # The alias is set after the device is made: until then its MAC address identifies it.
            if there.alias != _ALIAS and (there.alias or there.address != _ADDRESS):
                raise Conflict(f"{BRIDGE} is a device of something else", step=STEP, fix="rename that device")
            links.delete(BRIDGE)
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
        # The end of the boot would else disturb the first round.
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
        links.create(BRIDGE, Bridge(), alias=_ALIAS, address=_ADDRESS, mtu=MTU)
        links.set(BRIDGE, up=True)
        yield
    finally:
        links.delete(BRIDGE)
