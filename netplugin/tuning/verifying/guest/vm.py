"""Run the VM for the time of a measurement: nothing of it is left, however that ends."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from netplugin.api.errors import BackendUnavailable, Conflict, HostError, NetpluginError, OperationTimeout
from netplugin.host.locks import Locks
from netplugin.host.processes import needs_program
from netplugin.libvirt.image_domain import HOST
from netplugin.libvirt.transient import TransientDomain, answers_ssh
from netplugin.libvirt.vm_image import BUILD, Image
from netplugin.programs.program import Program, ProgramError, own_directory
from netplugin.tuning.verifying.guest import link
from netplugin.tuning.verifying.guest.machine import NAMES, STEP, Machine
from netplugin.tuning.verifying.guest.shell import GuestShell

Say = Callable[[str], None]

#: Seconds that libvirt has to start the VM, with hugepages to clear.
_START_S = 120.0
_LOCK = "verify-guest"
_KVM = Path("/dev/kvm")


def require(emulate: bool) -> None:
    """Raises: BackendUnavailable for a program that is missing here, or KVM."""
    programs = {"virsh": "libvirt-clients", "qemu-img": "qemu-utils", "ssh": "openssh-client"}
    for program, package in programs.items():
        needs_program(program, package, STEP)
    if not emulate and not _KVM.exists():
        raise BackendUnavailable(
            f"this host has no {_KVM}",
            step=STEP,
            fix="modprobe kvm_intel or kvm_amd; to try without, --emulate: then figures are no measure",
        )


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@contextmanager
def alone(image: Image, uri: str) -> Iterator[None]:
    """Let one run at a time have VMs; remove first what a killed one left.

    Raises: Conflict if another run has them, HostError if the image was written.
    """
    with closing(Locks()) as locks:
        if holder := locks.take(_LOCK):
            raise Conflict(f"{holder} measures in a VM now", step=STEP, fix="wait until it has ended")
        for name in NAMES:
            _remove(TransientDomain(uri, name), image)
        link.remove()
        before = image.state()
        yield
        if image.state() != before:
            raise HostError(
                f"{image.disk} was written while the VM ran, and is no image any more",
                step=STEP,
                fix=f"{BUILD} --rebuild, with the options of that image",
            )


@contextmanager
def booted(machine: Machine, uri: str, boot_s: int, say: Say) -> Iterator[GuestShell]:
    """Start the VM and wait until it has booted; destroy it at the end and remove its overlay.

    libvirt destroys it also if this process is killed; the next run then removes the overlay.

    Raises: NetpluginError if it does not start, OperationTimeout if it does not answer, HostError if it ends
    in between.
    """
    domain, image = TransientDomain(uri, machine.name), machine.image
    directory = own_directory()
    starter = _starter(uri, machine, directory)
    try:
        image.make_overlay(machine.name)
        began = time.monotonic()
        _start(starter, domain)
        shell = GuestShell(machine.ssh, domain, lambda: image.console_tail(machine.name))
        _wait(shell, domain, machine, began + boot_s)
        say(f"the VM has booted after {time.monotonic() - began:.0f} s")
        yield shell
    finally:
        try:
            _remove(domain, image)
        finally:
            starter.stop()
            shutil.rmtree(directory, ignore_errors=True)


def _starter(uri: str, machine: Machine, directory: Path) -> Program:
    """Return the virsh that starts the domain and then waits: with it, libvirt ends the domain."""
    file = directory / "domain.xml"
    file.write_text(machine.xml)
    commands = f"create {file} --autodestroy; event --domain {machine.name} --event lifecycle --loop"
    return Program("virsh", ["virsh", "-c", uri, commands], directory / "virsh.log")


def _start(starter: Program, domain: TransientDomain) -> None:
    try:
        starter.start()
        starter.wait_for(lambda: domain.is_running, time.monotonic() + _START_S, "the VM runs")
    except ProgramError as error:
        raise HostError(
            f"the VM cannot be started: {error}",
            step=STEP,
            fix="see libvirt's error; a placed VM needs free hugepages: netplugin host apply, or --unplaced",
        ) from error


def _wait(shell: GuestShell, domain: TransientDomain, machine: Machine, deadline: float) -> None:
    """Wait for SSH, and then for the end of the boot, which else would disturb the first round."""
    target = machine.ssh
    if not answers_ssh(target.host, target.port, deadline, lambda: domain.is_running):
        shell.check("it booted")
        raise OperationTimeout(
            f"the VM does not answer by SSH{shell.console()}",
            step=STEP,
            fix="look at its console above; a slow host needs more time: --boot SECONDS",
        )
    shell.run(["systemctl", "start", "default.target"], max(1.0, deadline - time.monotonic()))


def _remove(domain: TransientDomain, image: Image) -> None:
    """Remove domain and overlay: those of this run, or of one that was killed."""
    try:
        domain.stop()
    except NetpluginError as error:
        raise type(error)(
            error.detail,
            step=STEP,
            fix=error.fix or "see that `virsh list` answers: systemctl start libvirtd",
        ) from error
    finally:
        image.remove_overlay(domain.name)
