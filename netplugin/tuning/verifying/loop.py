"""Measure the packet rate of two testpmd in a loop: the host's side of vhost-user, and the guest's side.

The frames of one burst circulate, as in the hands-on guide of vhost-user, without NIC or OVS. If both are on
this host, the result depends only on CPUs, caches, memory and interrupts; or the guest's side is in a VM.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from netplugin.api.errors import HostError, NetpluginError
from netplugin.host.cpus import format_list
from netplugin.host.processes import printable
from netplugin.libvirt.image_domain import NICS
from netplugin.programs.program import Program, Telemetry, own_directory
from netplugin.tuning.verifying.options import MEMORY_MB
from netplugin.tuning.verifying.result import ThroughputSettings
from netplugin.tuning.verifying.shell import GuestShell, as_host_errors

STEP = "testpmd"
_FIX = "leave the loop out, --only latency, or name CPUs, --loop-cpus A,B"
_VM_FIX = "look at the errors above; DPDK in the VM needs hugepages: do not build it with --hugepage-mb 0"
SOCKET = "loop.sock"
_START_S = 60.0
#: Warm-up of caches and page faults, seconds: the first second is slower.
_WARM_S = 1.0
#: How long after the window the first frame is awaited, seconds.
_SILENT_S = 60.0
#: Output goes to a file, and testpmd flushes it only with a statistics report. The first report is due one
#: period after the TSC was zero, so it is missing while the uptime is shorter (``main`` in
#: app/test-pmd/testpmd.c of DPDK 22.11).
_LINE_BUFFERED = ("stdbuf", "-oL")
#: Initial bursts of 32 frames, as in the guide: more than both rings hold, so that neither runs empty. The
#: excess is dropped.
_COMMANDS = "start tx_first 32\n"
_RING = 256
#: The unit of testpmd in the VM, and the file with its commands.
_UNIT, _START = "netplugin-testpmd", "/run/netplugin-testpmd"
#: Seconds until frames come from a VM, and that are not counted then: without KVM it is slow.
_FRAMES_S = 180.0
_FORWARD = (
    # Each side modifies the frame, as a VNF does.
    *("--forward-mode=macswap", "--nb-cores=1", "--rxq=1", "--txq=1", f"--rxd={_RING}", f"--txd={_RING}"),
    # Without the second, the host side waits 9 s for its peer.
    *("--total-num-mbufs=4096", "--no-lsc-interrupt", "--disable-link-check"),
    # With a period, testpmd does not wait for a key press. The maximum, because reports disturb.
    "--stats-period=65535",
)


@dataclass(frozen=True)
class Side:
    """A testpmd that forwards; ``folder`` has the socket of vhost-user."""

    program: Program
    telemetry: Telemetry
    folder: Path

    def frames(self) -> int:
        """Frames received since the start. Raises: ProgramError."""
        return int(self.telemetry.ask("/ethdev/stats", 0)["ipackets"])


@contextmanager
def host_side(settings: ThroughputSettings, of_vm: bool = False) -> Iterator[Side]:
    """Run testpmd, which forwards what its peer sends. Raises: HostError with testpmd's text."""
    with ExitStack() as stack:
        stack.enter_context(as_host_errors(STEP, _VM_FIX if of_vm else _FIX))
        folder = own_directory()
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        host = side(stack, folder, "host", host_arguments(settings, folder, os.sched_getaffinity(0)))
        if of_vm:  # QEMU may run as another user, who cannot list the folder
            folder.chmod(0o711)
            (folder / SOCKET).chmod(0o666)
        yield host


def measure(settings: ThroughputSettings) -> tuple[str, float]:
    """Run both testpmd for one window; return DPDK's version and frames per second each way.

    Raises: HostError with testpmd's error text.
    """
    with host_side(settings) as host, ExitStack() as stack:
        arguments = guest_arguments(settings, host.folder, os.sched_getaffinity(0))
        guest = side(stack, host.folder, "guest", arguments)
        deadline = time.monotonic() + _START_S
        guest.program.wait_for(lambda: host.frames() and guest.frames(), deadline, "frames come round")
        seen = in_window(guest.program, lambda: host.frames() + guest.frames(), settings.window_s)
        host.program.check()
        return host.telemetry.version, seen / 2


def measure_in(shell: GuestShell, host: Side, settings: ThroughputSettings) -> tuple[str, float]:
    """The same with testpmd in the VM, on the first NIC, which the image binds to a driver of DPDK.

    Raises: NetpluginError, ProgramError.
    """
    words = ["dpdk-testpmd", "--lcores", f"0@0,1@{settings.guest_cpu}", "--in-memory", "-a", NICS[0], "--"]
    words += [*_FORWARD, f"--txpkts={settings.frame_size}", f"--cmdline-file={_START}"]
    shell.run(["tee", _START], stdin=_COMMANDS)
    before = host.frames()
    shell.run(["systemd-run", "--quiet", "--collect", f"--unit={_UNIT}", *words])
    try:
        deadline = time.monotonic() + _FRAMES_S
        while host.frames() == before:
            host.program.check()
            state = shell.run(["systemctl", "show", "--property=ActiveState", "--value", _UNIT]).strip()
            if state != "active" or time.monotonic() > deadline:
                log = shell.run(["journalctl", "--no-pager", "-o", "cat", "-n", "12", "-u", _UNIT])
                what = f"no frame comes from testpmd in the VM:\n{printable(log.strip())}"
                raise HostError(what, step=STEP, fix=_VM_FIX)
        return host.telemetry.version, in_window(host.program, host.frames, settings.window_s)
    finally:
        try:
            shell.run(["systemctl", "stop", _UNIT])
        except NetpluginError:
            shell.check("testpmd ran in it")


def host_arguments(settings: ThroughputSettings, folder: Path, own: set[int]) -> list[str]:
    """Arguments of the host side. Threads that do not poll run on other CPUs in ``own``, if any remain."""
    vdev = f"net_vhost0,iface={folder}/{SOCKET},queues=1"
    return [*_eal(settings, "host", settings.host_cpu, vdev, own), *_FORWARD, "--auto-start"]


def guest_arguments(settings: ThroughputSettings, folder: Path, own: set[int]) -> list[str]:
    """Arguments of the guest side, which sends the frames by commands from a file."""
    vdev = f"net_virtio_user0,path={folder}/{SOCKET},queues=1,queue_size={_RING}"
    eal = _eal(settings, "guest", settings.guest_cpu, vdev, own)
    return [*eal, *_FORWARD, f"--txpkts={settings.frame_size}", f"--cmdline-file={folder}/start"]


def _eal(settings: ThroughputSettings, name: str, cpu: int, vdev: str, own: set[int]) -> list[str]:
    free, node = format_list(own - {settings.host_cpu, settings.guest_cpu} or own), settings.hugepage_node
    memory = ["--no-huge", "-m", str(MEMORY_MB)]
    if node is not None:
        # From one node; DPDK would otherwise use each node with an lcore.
        memory = ["--in-memory", f"--socket-mem={','.join(['0'] * node + [str(MEMORY_MB)])}"]
    more = ["--single-file-segments", "--no-pci", f"--file-prefix={name}", f"--vdev={vdev}", "--"]
    return ["dpdk-testpmd", "--lcores", f"0@({free}),1@{cpu}", *memory, *more]


def side(stack: ExitStack, folder: Path, name: str, arguments: list[str]) -> Side:
    """Start one testpmd and wait until it forwards."""
    (folder / "start").write_text(_COMMANDS)
    program = Program(f"testpmd ({name})", [*_LINE_BUFFERED, *arguments], folder / f"{name}.log")
    stack.callback(program.stop)
    deadline = time.monotonic() + _START_S
    program.start({"RUNTIME_DIRECTORY": str(folder)})
    telemetry = Telemetry(folder / "dpdk" / name / "dpdk_telemetry.v2")
    stack.callback(telemetry.close)
    program.wait_for(lambda: program.logged("packet forwarding - ports="), deadline, "it forwards")
    program.wait_for(lambda: telemetry.there, deadline, "it answers")
    return Side(program, telemetry, folder)


def in_window(program: Program, seen: Callable[[], int], window_s: float) -> float:
    """Warm up, then return how many frames a second were seen in the window.

    A machine may stop a polling thread for longer than the window. So the window ends with a frame, and the
    time without frames counts.

    Raises: ProgramError if the program ends, or no frame comes.
    """
    _pass_time(program, _WARM_S)
    before, began = seen(), time.monotonic()
    _pass_time(program, window_s)
    counted = program.wait_for(lambda: seen() - before, time.monotonic() + _SILENT_S, "frames come round")
    return counted / (time.monotonic() - began)


def _pass_time(program: Program, seconds: float) -> None:
    """Wait, but fail if the program ends."""
    until = time.monotonic() + seconds
    program.wait_for(lambda: time.monotonic() >= until, until + _START_S, "time passes")
