"""The guest as seen from the outside: its QEMU, what it is given, and the channels it talks on.

The machine's root is the guest's root too, read-only under a tmpfs: what runs outside runs inside,
from the same paths. The guest is sent nothing but a job in the share; it says how it gets on by
lines of JSON on a virtio port, whose end of file tells that QEMU is gone. That it goes on at all it
says on another, once a second (`tests.nested.pulse`).
"""

from __future__ import annotations

import fcntl
import json
import os
import selectors
import shlex
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tests.lab import initramfs, kernel
from tests.lab.kernel import CACHE, QUICK_BOOT
from tests.lab.processes import Daemon, LabError, LabTimeout, tail_of
from tests.nested import monitor
from tests.nested.prepare import Parts
from tests.nested.pulse import SILENCE_S, Pulse

CHECKOUT = Path(__file__).resolve().parents[2]
INSIDE = Path("/run/netplugin-lab-nested")
"""Tells that this is the guest; made by its init."""
SHARE = Path("/run/share")
"""Where the guest has the directory that it shares with the outside."""
SHARE_PREFIX = "guest-"
INITRD, JOB, CONSOLE, OUTPUT, DMESG = "initrd", "job.json", "console", "output", "dmesg"
PORT = "netplugin.lab"
CHANNEL = "NETPLUGIN_LAB_CHANNEL"
"""The environment variable with the port's descriptor, for who is to report on it."""
GUEST = "NETPLUGIN_LAB_GUEST"
"""The environment variable that counts the guests that some tests got: 1, unless one was replaced."""
# Above it the firmware puts the virtual functions' registers where nothing answers.
MEMORY_LIMIT_MB = 2560
# The kernel finds the other modules by itself once the root is there.
ROOT_MODULES = ("9p", "9pnet_virtio", "overlay")
BOOT_DEADLINE_S = 180.0
#: As a nice value: about three times the weight of a session that has none.
WEIGHT = -5
_seconds = time.monotonic
_LOOK_S = 1.0
# A panic alone is 30.
TAIL_LINES = 60
# What is under them on the machine is not there in the guest.
COVERED = tuple(map(Path, ("/dev", "/proc", "/run", "/sys")))


class BootError(LabError):
    """The guest did not come as far as running its job."""


@dataclass(frozen=True, slots=True, order=True)
class Needs:
    """What a guest must have; tests with the same needs share one.

    The default is enough for VFs and for what has them by vfio, so that most tests need one boot.
    """

    cpus: int = 1
    """Without KVM two are the slower the busier the machine: they wait for each other."""
    memory_mb: int = 2048
    hugepages: int = 128
    """2 MB pages, out of the memory."""

    def __post_init__(self) -> None:
        if self.cpus < 1 or not 512 <= self.memory_mb <= MEMORY_LIMIT_MB:
            raise LabError(f"a guest has at least 1 CPU and 512 to {MEMORY_LIMIT_MB} MB: {self}")
        if not 0 <= self.hugepages * 2 <= self.memory_mb - 384:
            raise LabError(f"a guest has to keep 384 MB besides its hugepages: {self}")

    def __str__(self) -> str:
        pages = f", {self.hugepages} hugepages" if self.hugepages else ""
        plural = "s" if self.cpus > 1 else ""
        return f"{self.cpus} CPU{plural}, {self.memory_mb} MB{pages}"


@dataclass(frozen=True, slots=True)
class Job:
    """What the guest is to run, and with what."""

    command: Sequence[str]
    directory: str
    environment: Mapping[str, str]
    modules: str
    """The kernel's modules, on the machine."""


@dataclass(frozen=True, slots=True)
class Nic:
    """An igb NIC: its place in the guest and its address."""

    pci: str
    mac: str


PF = Nic("0000:01:00.0", "52:54:00:00:aa:01")
WIRE = Nic("0000:02:00.0", "52:54:00:00:aa:02")
NICS = (PF, WIRE)
# All on one hub: what one of them sends, the other receives. As QEMU's -netdev.
HUB = ("hubport,hubid=0",) * len(NICS)
#: Of one more NIC, virtio's.
OUT_MAC = "52:54:00:00:aa:03"


def inside() -> bool:
    """Whether this process runs in the guest."""
    return INSIDE.exists()


def check_visible(*paths: Path) -> None:
    """What the guest is to find at its path must not be where it has something of its own."""
    for path in paths:
        for covered in COVERED:
            if path.is_relative_to(covered):
                raise LabError(f"{path} cannot be seen in the guest, which has its own {covered}")


class StalledError(LabError):
    """The guest does not go on, through no fault of what runs in it."""


@dataclass(frozen=True, slots=True)
class Ends:
    """The two ends of each channel of a guest: on one side we, on the other its QEMU."""

    channel: socket.socket
    pulse: socket.socket
    monitor: socket.socket


class Machine:
    """A guest that was started."""

    def __init__(self, share: Path, ends: Ends, silence_s: float = SILENCE_S) -> None:
        self._share = share
        self._ends = ends
        self._pulse = Pulse(ends.pulse, silence_s)
        self._received = b""

    def receive(self, deadline_s: float) -> dict[str, Any] | None:
        """The next message; None when it has ended.

        Raises: LabTimeout, and StalledError before it if the guest's heart does not beat.
        """
        end = _seconds() + deadline_s
        with selectors.DefaultSelector() as events:
            events.register(self._ends.channel, selectors.EVENT_READ)
            events.register(self._ends.pulse, selectors.EVENT_READ)
            while b"\n" not in self._received:
                began = _seconds()
                asked = max(0.0, min(_LOOK_S, end - began))
                ready = {key.fileobj for key, _ in events.select(asked)}
                if self._ends.pulse in ready:
                    if not self._pulse.receive():
                        events.unregister(self._ends.pulse)
                else:
                    self._pulse.waited(asked, _seconds() - began)
                if self._ends.channel in ready:
                    if not self._read():
                        return None
                elif self._pulse.stands:
                    raise StalledError(self._examined())
                elif _seconds() >= end:
                    raise LabTimeout(f"the guest said nothing for {deadline_s:.0f} s\n{self.tail()}")
        line, _, self._received = self._received.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def _read(self) -> bool:
        try:
            more = self._ends.channel.recv(1 << 20)
        except ConnectionResetError:
            more = b""
        self._received += more
        self._pulse.alive()
        return bool(more)

    def _examined(self) -> str:
        """What there is to say of a guest that stands; its kernel is ended for it."""
        clock = self._pulse.clock
        seen = monitor.examine(self._ends.monitor)
        return f"no heartbeat of the guest since its clock said {clock} s\n{seen}\n{self.tail()}"

    def tail(self) -> str:
        """The end of what the command and the kernel printed."""
        logs = [self._share / name for name in (OUTPUT, CONSOLE)]
        return "\n".join(tail_of(log, TAIL_LINES) for log in logs if log.exists())


@contextmanager
def started(
    needs: Needs, parts: Parts, job: Job, disk: Path | None = None, netdevs: Sequence[str] = HUB
) -> Iterator[Machine]:
    """A guest that runs a job, for the time of the block at most.

    With a ``disk`` (an image, virtio's first) it may reboot, and runs the same job again. ``netdevs`` are
    what the NICs are joined to; one more is of a NIC of virtio's.
    """
    with shared_directory() as share, _ends() as (ours, theirs):
        (share / JOB).write_text(json.dumps(asdict(job)))
        modules = parts.kernel.load_order(ROOT_MODULES)
        init = init_script(modules, job.command[0])
        (share / INITRD).write_bytes(initramfs.build(parts.kernel, modules, init))
        args = qemu_args(needs, parts, share, theirs, disk, netdevs)
        environment = parts.emulator.environment
        passed = [each.fileno() for each in (theirs.channel, theirs.pulse, theirs.monitor)]
        qemu = Daemon("qemu", args, share / CONSOLE, environment, pass_fds=passed)
        try:
            qemu.start()
            _favour(qemu.pid)
            # QEMU alone has them now: they end with QEMU.
            for each in (theirs.channel, theirs.pulse, theirs.monitor):
                each.close()
            # While it boots again it has no heartbeat.
            yield Machine(share, ours, *([BOOT_DEADLINE_S] if disk else []))
        finally:
            qemu.kill()


def _favour(pid: int) -> None:
    """Give its session more of the CPUs than the others have: a run of all tests ends with these guests.

    Between sessions the kernel shares by this and not by priorities: sched(7), "The autogroup feature".
    """
    with suppress(OSError):  # not every kernel has it
        Path(f"/proc/{pid}/autogroup").write_text(str(WEIGHT))


@contextmanager
def _ends() -> Iterator[tuple[Ends, Ends]]:
    with ExitStack() as closed:
        pairs = [socket.socketpair() for _ in fields(Ends)]
        for each in (end for pair in pairs for end in pair):
            closed.enter_context(each)
        ours, theirs = zip(*pairs, strict=True)
        yield Ends(*ours), Ends(*theirs)


@contextmanager
def shared_directory() -> Iterator[Path]:
    """A directory in the cache. What a killed run left of its own is removed by the next one."""
    with kernel.locked("share"):
        for left in CACHE.glob(f"{SHARE_PREFIX}*"):
            _remove_if_left(left)
        directory = Path(tempfile.mkdtemp(dir=CACHE, prefix=SHARE_PREFIX))
        # Locked as long as this process lives.
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield directory
    finally:
        shutil.rmtree(directory)
        os.close(lock)


def _remove_if_left(directory: Path) -> None:
    try:
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return  # removed by who made it, just now
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Its owner may have removed it in between.
        shutil.rmtree(directory, ignore_errors=True)
    except BlockingIOError:
        pass
    finally:
        os.close(lock)


def qemu_args(
    needs: Needs,
    parts: Parts,
    share: Path,
    ends: Ends,
    disk: Path | None = None,
    netdevs: Sequence[str] = HUB,
) -> list[str]:
    """QEMU's command line. A reboot ends the guest, unless it has a disk that outlives it."""
    return [
        str(parts.emulator.program),
        *(word for directory in parts.emulator.data for word in ("-L", str(directory))),
        *("-nodefaults", "-no-user-config", "-display", "none"),
        *(["-drive", f"file={disk},format=raw,if=virtio"] if disk else ["-no-reboot"]),
        # One thread for all CPUs, as a precaution: a few guests of several CPUs with a thread for each
        # stood, and why is not known. It could not be made to happen: of 74 small guests with 2 or 4
        # CPUs on a busy machine none did (95 %: less than 4.9 %).
        *("-machine", "q35,kernel-irqchip=split", "-accel", "tcg,thread=single"),
        # With five levels of page tables the IOMMU's addresses do not fit.
        *("-cpu", "max,la57=off", "-smp", str(needs.cpus), "-m", str(needs.memory_mb)),
        *("-device", "intel-iommu,intremap=on,caching-mode=on", "-device", "virtio-rng-pci"),
        *("-serial", "stdio"),
        *("-chardev", f"socket,id=pulse,fd={ends.pulse.fileno()}"),
        *("-device", "isa-serial,chardev=pulse"),
        *("-chardev", f"socket,id=monitor,fd={ends.monitor.fileno()}"),
        *("-mon", "chardev=monitor,mode=control"),
        *("-device", "virtio-serial-pci"),
        *("-chardev", f"socket,id=channel,fd={ends.channel.fileno()}"),
        *("-device", f"virtserialport,chardev=channel,name={PORT}"),
        *_shared("root", Path("/"), "readonly=on"),
        *_shared("share", share),
        *(word for number, netdev in enumerate(netdevs) for word in _nic(number, netdev)),
        *("-kernel", str(parts.kernel.image), "-initrd", str(share / INITRD)),
        *("-append", kernel_command_line(needs)),
    ]


def _shared(tag: str, directory: Path, *options: str) -> list[str]:
    reported = [f"path={directory}", f"mount_tag={tag}", "security_model=none", "multidevs=remap"]
    return ["-virtfs", ",".join(["local", *reported, *options])]


def _nic(number: int, netdev: str) -> list[str]:
    joined = ["-netdev", f"{netdev},id=net{number}"]
    if number >= len(NICS):
        return [*joined, "-device", f"virtio-net-pci,netdev=net{number},mac={OUT_MAC},romfile="]
    port = f"pcie-root-port,id=port{number},chassis={number + 1},slot={number + 1}"
    igb = f"igb,netdev=net{number},bus=port{number},mac={NICS[number].mac},romfile="
    return ["-device", port, *joined, "-device", igb]


def kernel_command_line(needs: Needs) -> str:
    # A guest that hangs is sent an NMI, to learn where it hangs.
    words = f"console=ttyS0 {QUICK_BOOT} unknown_nmi_panic intel_iommu=on"
    return f"{words} hugepages={needs.hugepages}"


def init_script(modules: Sequence[str], python: str) -> str:
    """The initramfs's init: the machine's root under a tmpfs, and on to `tests.nested.init`.

    A failure ends process 1, which is a kernel panic, which ends QEMU.
    """
    return f"""#!/bin/busybox sh
set -e
/bin/busybox mkdir -p /sbin /usr/bin /usr/sbin /lower /upper /root
/bin/busybox --install -s
mount -t devtmpfs devtmpfs /dev
for module in {" ".join(modules)}; do insmod /modules/$module.ko; done
mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=524288,cache=loose root /lower
mount -t tmpfs tmpfs /upper
mkdir /upper/files /upper/work
mount -t overlay -o lowerdir=/lower,upperdir=/upper/files,workdir=/upper/work overlay /root
mount -t proc proc /root/proc
umount /dev
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PYTHONPATH={shlex.quote(str(CHECKOUT))}
exec switch_root -c /dev/console /root {shlex.quote(python)} -m tests.nested.init
"""
