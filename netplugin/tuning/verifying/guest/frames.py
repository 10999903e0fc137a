"""Measure frames in a loop between testpmd on this host, in the place of OVS, and testpmd in the VM."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from netplugin.api.errors import CapacityExhausted, HostError, NetpluginError
from netplugin.host.processes import printable
from netplugin.libvirt.image_domain import NICS
from netplugin.tuning.facts import Facts, Live
from netplugin.tuning.planning.plan import TuningPlan
from netplugin.tuning.steps import needed
from netplugin.tuning.verifying import loop
from netplugin.tuning.verifying.guest.machine import Machine
from netplugin.tuning.verifying.guest.shell import GuestShell
from netplugin.tuning.verifying.loop import HostSide
from netplugin.tuning.verifying.options import busy_cpus
from netplugin.tuning.verifying.result import ThroughputSettings

#: The unit of testpmd in the VM, and the file with its commands.
_UNIT, _START = "netplugin-testpmd", "/run/netplugin-testpmd"
#: Seconds until frames come round, and that are not counted then: a VM without KVM is slow.
_FRAMES_S = 180.0
_FIX = "look at the errors above; DPDK in the VM needs hugepages: do not build the image with --hugepage-mb 0"
_LINES = 12


@contextmanager
def host_side(settings: ThroughputSettings) -> Iterator[tuple[HostSide, Path]]:
    """Run testpmd on this host; yield also the socket to which QEMU connects. Raises: HostError."""
    with loop.host_side(settings, _FIX) as side:
        socket = side.folder / loop.SOCKET
        # QEMU may run as another user, who cannot list the folder.
        side.folder.chmod(0o711)
        socket.chmod(0o666)
        yield side, socket


def measure(shell: GuestShell, side: HostSide, settings: ThroughputSettings) -> tuple[str, float]:
    """Run testpmd in the VM for one window; return DPDK's version here, and frames per second each way.

    Raises: NetpluginError.
    """
    shell.run(["tee", _START], stdin=f"start tx_first {loop.BURSTS}\n")
    before = _frames(side)
    shell.run(["systemd-run", "--quiet", "--collect", f"--unit={_UNIT}", *arguments(settings)])
    try:
        _wait(shell, side, before)
        with loop.as_host_errors(_FIX):
            counted, seconds = loop.in_window(side.program, lambda: _frames(side), settings.window_s)
    finally:
        _stop(shell)
    return side.telemetry.version, counted / seconds


def free_cpu(machine: Machine, plan: TuningPlan | None, facts: Facts, live: Live) -> int:
    """Return a CPU of the host for the program at the other end of vhost-user: one of OVS, if it is free.

    Raises: CapacityExhausted.
    """
    online = needed(facts.cpus.online)
    free = online - frozenset(machine.pins.values()) - busy_cpus(live)
    first = plan.partition.pmd if plan else frozenset()
    housekeeping = plan.partition.housekeeping if plan else frozenset()
    for found in (free & first, free - housekeeping, free):
        if found:
            return max(found)
    raise CapacityExhausted(
        "no CPU is left for testpmd on this host",
        step=loop.STEP,
        fix="stop a VM or OVS, or leave --testpmd away",
    )


def arguments(settings: ThroughputSettings) -> list[str]:
    """testpmd in the VM on the first NIC, which the image binds to a driver of DPDK; it sends the frames."""
    return [
        *(loop.PROGRAM, "--lcores", f"0@0,1@{settings.guest_cpu}", "--in-memory", "-a", NICS[0], "--"),
        *loop.FORWARD,
        f"--txpkts={settings.frame_size}",
        f"--cmdline-file={_START}",
    ]


def _wait(shell: GuestShell, side: HostSide, before: int) -> None:
    """Wait until frames come from the VM. Raises: HostError with what testpmd printed there."""
    with loop.as_host_errors(_FIX):
        deadline = time.monotonic() + _FRAMES_S
        while _frames(side) == before:
            side.program.check()
            ended = shell.run(["systemctl", "show", "--property=ActiveState", "--value", _UNIT]).strip()
            if ended != "active" or time.monotonic() > deadline:
                log = shell.run(["journalctl", "--no-pager", "-o", "cat", "-n", str(_LINES), "-u", _UNIT])
                raise HostError(
                    f"no frame comes from testpmd in the VM:\n{printable(log.strip())}",
                    step=loop.STEP,
                    fix=_FIX,
                )


def _stop(shell: GuestShell) -> None:
    try:
        shell.run(["systemctl", "stop", _UNIT])
    except NetpluginError:
        shell.check("testpmd ran in it")


def _frames(side: HostSide) -> int:
    return loop.frames(side.telemetry)
