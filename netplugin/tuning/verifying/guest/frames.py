"""Measure frames in a loop between testpmd on this host, in the place of OVS, and testpmd in the VM."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from netplugin.api.errors import CapacityExhausted, HostError, NetpluginError
from netplugin.host.processes import printable
from netplugin.libvirt.image_domain import NICS
from netplugin.tuning.facts import Facts, Live
from netplugin.tuning.planning.plan import TuningPlan
from netplugin.tuning.steps import needed
from netplugin.tuning.verifying import loop
from netplugin.tuning.verifying.guest.machine import Machine
from netplugin.tuning.verifying.loop import Side
from netplugin.tuning.verifying.options import busy_cpus
from netplugin.tuning.verifying.result import ThroughputSettings
from netplugin.tuning.verifying.shell import GuestShell, as_host_errors

#: The unit of testpmd in the VM, and the file with its commands.
_UNIT, _START = "netplugin-testpmd", "/run/netplugin-testpmd"
#: Seconds until frames come round, and that are not counted then: a VM without KVM is slow.
_FRAMES_S = 180.0
_FIX = "look at the errors above; DPDK in the VM needs hugepages: do not build the image with --hugepage-mb 0"
_LINES = 12


@contextmanager
def host_side(settings: ThroughputSettings) -> Iterator[Side]:
    """Run testpmd on this host, to whose socket QEMU connects. Raises: HostError."""
    with loop.host_side(settings, _FIX) as side:
        # QEMU may run as another user, who cannot list the folder.
        side.folder.chmod(0o711)
        side.socket.chmod(0o666)
        yield side


def measure(shell: GuestShell, side: Side, settings: ThroughputSettings) -> tuple[str, float]:
    """Run testpmd in the VM for one window; return DPDK's version here, and frames per second each way.

    It is on the first NIC, which the image binds to a driver of DPDK, and sends the frames.

    Raises: NetpluginError.
    """
    words = [loop.PROGRAM, "--lcores", f"0@0,1@{settings.guest_cpu}", "--in-memory", "-a", NICS[0], "--"]
    words += [*loop.FORWARD, f"--txpkts={settings.frame_size}", f"--cmdline-file={_START}"]
    shell.run(["tee", _START], stdin=loop.START)
    before = side.frames()
    shell.run(["systemd-run", "--quiet", "--collect", f"--unit={_UNIT}", *words])
    try:
        with as_host_errors(loop.STEP, _FIX):
            _wait(shell, side, before)
            return side.telemetry.version, loop.in_window(side.program, side.frames, settings.window_s)
    finally:
        try:
            shell.run(["systemctl", "stop", _UNIT])
        except NetpluginError:
            shell.check("testpmd ran in it")


def _wait(shell: GuestShell, side: Side, before: int) -> None:
    """Wait until frames come from the VM. Raises: HostError with what testpmd printed there."""
    deadline = time.monotonic() + _FRAMES_S
    while side.frames() == before:
        side.program.check()
        state = shell.run(["systemctl", "show", "--property=ActiveState", "--value", _UNIT]).strip()
        if state != "active" or time.monotonic() > deadline:
            log = shell.run(["journalctl", "--no-pager", "-o", "cat", "-n", str(_LINES), "-u", _UNIT])
            what = f"no frame comes from testpmd in the VM:\n{printable(log.strip())}"
            raise HostError(what, step=loop.STEP, fix=_FIX)


def free_cpu(machine: Machine, plan: TuningPlan | None, facts: Facts, live: Live) -> int:
    """Return a CPU of the host for the program at the other end of vhost-user: one of OVS, if it is free.

    Raises: CapacityExhausted.
    """
    free = needed(facts.cpus.online) - frozenset(machine.pins.values()) - busy_cpus(live)
    of = plan.partition if plan else None
    found = (free & of.pmd or free - of.housekeeping or free) if of else free
    if not found:
        raise CapacityExhausted(
            "no CPU is left for testpmd on this host",
            step=loop.STEP,
            fix="stop a VM or OVS, or leave --testpmd away",
        )
    return max(found)
