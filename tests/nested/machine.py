"""The guest as seen from the outside: its QEMU, what it is given, and the channel it talks on.

The machine's root is the guest's root too, read-only under a tmpfs: what runs outside runs inside,
from the same paths. The guest is sent nothing but a job in the share; it says how it gets on by
lines of JSON on a virtio port, whose end of file tells that QEMU is gone.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.lab import initramfs, kernel
from tests.lab.kernel import CACHE, QUICK_BOOT
from tests.lab.processes import Daemon, LabError, LabTimeout, tail_of
from tests.nested.prepare import Parts

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
# Above it the firmware puts the virtual functions' registers where nothing answers.
MEMORY_LIMIT_MB = 2560
# The kernel finds the other modules by itself once the root is there.
ROOT_MODULES = ("9p", "9pnet_virtio", "overlay")
BOOT_DEADLINE_S = 180.0
# A guest that is silent so long is looked at: a test that waits is, and so is one that hangs.
_SILENCE_S = 90.0
_LOOK_S = 10.0
# As kernel/rcu/tree_stall.h has it.
_STALL = b"Possible timer handling issue on cpu="
# A panic alone is 30.
TAIL_LINES = 60
# What is under them on the machine is not there in the guest.
COVERED = tuple(map(Path, ("/dev", "/proc", "/run", "/sys")))


class BootError(LabError):
    """The guest did not come as far as running its job."""


@dataclass(frozen=True, slots=True, order=True)
class Needs:
    """What a guest must have; tests with the same needs share one."""

    cpus: int = 1
    """Without KVM two are the slower the busier the machine: they wait for each other."""
    memory_mb: int = 1536
    hugepages: int = 0
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


# All on one hub: what one of them sends, the other hears.
PF = Nic("0000:01:00.0", "52:54:00:00:aa:01")
WIRE = Nic("0000:02:00.0", "52:54:00:00:aa:02")
NICS = (PF, WIRE)


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


class Machine:
    """A guest that was started."""

    def __init__(self, share: Path, channel: socket.socket) -> None:
        self._share = share
        self._channel = channel
        self._received = b""

    def receive(self, deadline_s: float) -> dict[str, Any] | None:
        """The next thing it says; None when it has ended.

        Raises: LabTimeout, and StalledError before it if the guest's own clock has stopped.
        """
        begun = time.monotonic()
        end = begun + deadline_s
        while b"\n" not in self._received:
            self._channel.settimeout(max(0.01, min(_LOOK_S, end - time.monotonic())))
            try:
                more = self._channel.recv(1 << 20)
            except TimeoutError as late:
                silent_s = time.monotonic() - begun
                what = f"the guest said nothing for {silent_s:.0f} s"
                if silent_s >= _SILENCE_S and self._is_stalled():
                    raise StalledError(f"{what}, and its timers stand\n{self.tail()}") from late
                if time.monotonic() < end:
                    continue
                raise LabTimeout(f"{what}\n{self.tail()}") from late
            except ConnectionResetError:
                more = b""
            if not more:
                return None
            self._received += more
        line, _, self._received = self._received.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def _is_stalled(self) -> bool:
        """Whether its kernel misses the ticks of a CPU, which emulated timers lose once in many runs."""
        console = self._share / CONSOLE
        return console.exists() and _STALL in console.read_bytes()

    def tail(self) -> str:
        """The end of what the command and the kernel printed."""
        logs = [self._share / name for name in (OUTPUT, CONSOLE)]
        return "\n".join(tail_of(log, TAIL_LINES) for log in logs if log.exists())


@contextmanager
def started(needs: Needs, parts: Parts, job: Job) -> Iterator[Machine]:
    """A guest that runs a job, for the time of the block at most."""
    ours, theirs = socket.socketpair()
    with shared_directory() as share, ours, theirs:
        (share / JOB).write_text(json.dumps(asdict(job)))
        modules = parts.kernel.load_order(ROOT_MODULES)
        init = init_script(modules, job.command[0])
        (share / INITRD).write_bytes(initramfs.build(parts.kernel, modules, init))
        args = qemu_args(needs, parts, share, theirs.fileno())
        environment = parts.emulator.environment
        qemu = Daemon("qemu", args, share / CONSOLE, environment, pass_fds=[theirs.fileno()])
        try:
            qemu.start()
            theirs.close()  # QEMU alone has it now: it ends with QEMU
            yield Machine(share, ours)
        finally:
            qemu.kill()


@contextmanager
def shared_directory() -> Iterator[Path]:
    """A directory in the cache. What a killed run left of its own is removed by the next one."""
    with kernel.locked():
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


def qemu_args(needs: Needs, parts: Parts, share: Path, channel: int) -> list[str]:
    """QEMU's command line."""
    return [
        str(parts.emulator.program),
        *(word for directory in parts.emulator.data for word in ("-L", str(directory))),
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *("-machine", "q35,kernel-irqchip=split", "-accel", "tcg,thread=multi"),
        # With five levels of page tables the IOMMU's addresses do not fit.
        *("-cpu", "max,la57=off", "-smp", str(needs.cpus), "-m", str(needs.memory_mb)),
        *("-device", "intel-iommu,intremap=on,caching-mode=on", "-device", "virtio-rng-pci"),
        *("-serial", "stdio"),
        *("-device", "virtio-serial-pci", "-chardev", f"socket,id=channel,fd={channel}"),
        *("-device", f"virtserialport,chardev=channel,name={PORT}"),
        *_shared("root", Path("/"), "readonly=on"),
        *_shared("share", share),
        *(word for number, nic in enumerate(NICS) for word in _nic(number, nic)),
        *("-kernel", str(parts.kernel.image), "-initrd", str(share / INITRD)),
        *("-append", kernel_command_line(needs)),
    ]


def _shared(tag: str, directory: Path, *options: str) -> list[str]:
    fields = [f"path={directory}", f"mount_tag={tag}", "security_model=none", "multidevs=remap"]
    return ["-virtfs", ",".join(["local", *fields, *options])]


def _nic(number: int, nic: Nic) -> list[str]:
    port = f"pcie-root-port,id=port{number},chassis={number + 1},slot={number + 1}"
    igb = f"igb,netdev=hub{number},bus=port{number},mac={nic.mac},romfile="
    hub = f"hubport,hubid=0,id=hub{number}"
    return ["-device", port, "-netdev", hub, "-device", igb]


def kernel_command_line(needs: Needs) -> str:
    # A tick that repeats by itself: of one that is set anew each time, the emulation loses one once in
    # many runs, and that CPU then sleeps for ever.
    ticks = "nohz=off highres=off"
    return f"console=ttyS0 {QUICK_BOOT} {ticks} intel_iommu=on hugepages={needs.hugepages}"


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
