"""A program: one step on a VDUSE device or vDPA device, as a process that its caller can give up.

    vduse_step.py create|bind|delete NAME DRIVER
    vduse_step.py destroy NAME

Each of these may wait in the kernel for as long as somebody holds a device, and SIGKILL does not end it.
The program needs the standard library only, so that it starts quickly.

The character device of ``vhost_vdpa`` can be open once. To delete a device that somebody has open waits until
it is closed. So the program opens it first, which nobody can do after it. It closes it as soon as the kernel
has taken away the name of the device, by which nobody can open it any more.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

#: Exit statuses: refused, for what standard error says; and the device is held by another process.
REFUSED, HELD = 1, 3

_BUS = Path("/sys/bus/vdpa")
_DEVICES = _BUS / "devices"
#: VDUSE_DESTROY_DEV of linux/vduse.h: _IOW(0x81, 0x03, char[256])
_NAME_BYTES = 256
_DESTROY = 1 << 30 | _NAME_BYTES << 16 | 0x81 << 8 | 3
_LOOK_S = 0.02
#: What the kernel answers to who opens the device of a VDUSE device that nobody serves: by then nobody else
#: can open it either (vduse_dev_msg_sync in drivers/vdpa/vdpa_user/vduse_dev.c).
_NOT_SERVED = (errno.ETIMEDOUT, errno.EIO)


def main(arguments: Sequence[str]) -> int:
    verb, name, *rest = arguments
    try:
        if verb == "create":
            return _run("vdpa", "dev", "add", "name", name, "mgmtdev", "vduse")
        if verb == "bind":
            return _bind(name, *rest)
        if verb == "unbind":
            _write(_DEVICES / name / "driver/unbind", name)
            return 0
        if verb == "delete":
            return _without_holder(name, "vdpa", "dev", "del", name)
        if verb == "destroy":
            return _destroy(name)
    except OSError as refused:
        print(f"{verb} {name}: {refused}", file=sys.stderr)
        return REFUSED
    print(f"unknown step {verb}", file=sys.stderr)
    return REFUSED


def _bind(name: str, driver: str) -> int:
    """Bind a driver by ``driver_override``, whichever the kernel bound when the device came."""
    device = _DEVICES / name
    _write(device / "driver_override", driver)
    bound = _driver(name)
    if bound not in (None, driver):
        unbind = (sys.executable, "-I", "-S", __file__, "unbind", name)
        if status := _without_holder(name, *unbind):
            return status
    if _driver(name) is None:
        _write(_BUS / "drivers_probe", name)
    if _driver(name) == driver:
        return 0
    print(f"the kernel binds {_driver(name) or 'no driver'} to {name}, not {driver}", file=sys.stderr)
    return REFUSED


def _destroy(name: str) -> int:
    if not os.path.lexists(f"/dev/vduse/{name}"):
        return 0
    with open("/dev/vduse/control", "rb+", buffering=0) as control:
        try:
            fcntl.ioctl(control, _DESTROY, name.encode().ljust(_NAME_BYTES, b"\0"))
        except OSError as refused:
            if refused.errno == errno.EBUSY:
                print(f"a process serves the VDUSE device {name}", file=sys.stderr)
                return HELD
            raise
    return 0


def _without_holder(name: str, *step: str) -> int:
    """Run a step that takes a device away from its driver, unless somebody has the device open."""
    character = _character(name)
    if character is None:
        return _run(*step)
    try:
        # Not inherited: if this process is killed, the step still comes to its end.
        opened = os.open(Path("/dev") / character, os.O_RDWR | os.O_CLOEXEC)
    except OSError as refused:
        if refused.errno == errno.EBUSY:
            print(f"a process has /dev/{character} open", file=sys.stderr)
            return HELD
        if refused.errno in _NOT_SERVED:
            return _run(*step)
        raise
    running = subprocess.Popen(step, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    ended = os.pidfd_open(running.pid)
    while not select.select([ended], [], [], _LOOK_S)[0]:
        if not (_DEVICES / name / character).exists():
            break
    os.close(opened)
    return REFUSED if running.wait() else 0


def _run(*step: str) -> int:
    done = subprocess.run(step, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False)
    return REFUSED if done.returncode else 0


def _character(name: str) -> str | None:
    try:
        entries = os.listdir(_DEVICES / name)
    except FileNotFoundError:
        return None
    return next((entry for entry in entries if entry.startswith("vhost-vdpa-")), None)


def _driver(name: str) -> str | None:
    try:
        return os.path.basename(os.readlink(_DEVICES / name / "driver"))
    except FileNotFoundError:
        return None


def _write(path: Path, value: str) -> None:
    """Write to a file of sysfs, which is not created."""
    opened = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(opened, value.encode())
    finally:
        os.close(opened)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
