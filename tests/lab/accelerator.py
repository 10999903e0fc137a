"""Whether guests run on KVM or on TCG here: /dev/kvm may be there and still run no ordinary kernel."""

from __future__ import annotations

import functools
import os
import select
import subprocess
import tempfile
import time
from enum import StrEnum
from pathlib import Path

from tests.lab import initramfs, kernel

EMULATOR = "/usr/bin/qemu-system-x86_64"
COMMAND_LINE = f"console=ttyS0 {kernel.QUICK_BOOT}"
CHOICE = "NETPLUGIN_LAB_ACCEL"
#: That KVM boots no guest takes this long to find out, and more than half of it is CPU time. It is asked
#: once for all processes of a run of tests.
KVM_DEADLINE_S = 5.0
ANSWER_HOLDS_S = 3600.0
_NO_KVM = "kvm-boots-no-guest"


class Accelerator(StrEnum):
    """The domain types of libvirt; QEMU is TCG."""

    KVM = "kvm"
    TCG = "qemu"


@functools.cache
def accelerator() -> Accelerator:
    """KVM if it boots the guests' kernel for real, else TCG. The environment may choose."""
    chosen = os.environ.get(CHOICE)
    if chosen is not None:
        return Accelerator[chosen.upper()]
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return Accelerator.TCG
    with kernel.locked("kvm"):
        return Accelerator.KVM if _boots(kernel.CACHE / _NO_KVM) else Accelerator.TCG


def _boots(failed: Path) -> bool:
    """Whether KVM boots a guest; `failed` is there if lately it did not."""
    try:
        if 0 <= time.time() - failed.stat().st_mtime < ANSWER_HOLDS_S:
            return False
    except FileNotFoundError:
        pass
    # Under /run, which is the sandbox's: a kill must not leave it behind.
    with tempfile.TemporaryDirectory(dir="/run") as directory:
        boots = _kvm_boots(Path(directory))
    if not boots:
        failed.touch()
    return boots


def _kvm_boots(directory: Path) -> bool:
    initrd = directory / "initramfs"
    initrd.write_bytes(initramfs.build(kernel.cached()))
    args = [EMULATOR, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]
    args += ["-machine", "q35", "-accel", "kvm", "-cpu", "host", "-m", "128"]
    args += ["-kernel", str(kernel.cached().image), "-initrd", str(initrd)]
    # init opens the second port: the first has the kernel's messages.
    args += ["-append", COMMAND_LINE, "-serial", "null", "-serial", "stdio"]
    with subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", "--", *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as qemu:
        try:
            return qemu.stdout is not None and _says_ready(qemu.stdout.fileno())
        finally:
            qemu.kill()


def _says_ready(output: int) -> bool:
    printed = b""
    end = time.monotonic() + KVM_DEADLINE_S
    while initramfs.READY.encode() not in printed:
        readable, _, _ = select.select([output], [], [], max(0.0, end - time.monotonic()))
        more = os.read(output, 4096) if readable else b""
        if not more:
            return False
        printed += more
    return True
