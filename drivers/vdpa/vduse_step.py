"""A program: one step on a VDUSE device or vDPA device, as a process that its caller can give up.

    vduse_step.py create|bind|delete NAME DRIVER
    vduse_step.py destroy NAME
    vduse_step.py try NAME

Each of these may wait in the kernel for as long as somebody holds a device, and SIGKILL does not end it.
The program needs the standard library only, so that it starts quickly. ``try`` changes nothing.

The character device of ``vhost_vdpa`` can be open once. To delete a device that somebody has open waits until
it is closed. So the program opens it first, which nobody can do after it. It closes it as soon as the kernel
has taken away the name of the device, by which nobody can open it any more.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import select
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

#: Exit statuses: refused, for what standard error says; and the device is held by another process.
REFUSED, HELD = 1, 3

_BUS = Path("/sys/bus/vdpa")
_DEVICES = _BUS / "devices"
_CONTROL = "/dev/vduse/control"
#: VDUSE_DESTROY_DEV of linux/vduse.h: _IOW(0x81, 0x03, char[256])
_NAME_BYTES = 256
_DESTROY = 1 << 30 | _NAME_BYTES << 16 | 0x81 << 8 | 3
#: VDUSE_SET_API_VERSION: _IOW(0x81, 0x01, __u64)
_SET_VERSION = 1 << 30 | 8 << 16 | 0x81 << 8 | 1
#: VDUSE_CREATE_DEV: _IOW(0x81, 0x02, struct vduse_dev_config), which has name, vendor, kind, features, number
#: and alignment of queues, what is reserved, and how many bytes follow.
_REQUEST = struct.Struct("=256sIIQII52xI")
_CREATE = 1 << 30 | _REQUEST.size << 16 | 0x81 << 8 | 2
_VIRTIO_NET = 1
#: What follows a request: ``struct virtio_net_config``. Never 0, see ``_would_make``.
_CONFIG_BYTES = 24
#: Features of virtio 1.0: VERSION_1 and ACCESS_PLATFORM, which the kernel needs; MQ and CTRL_VQ.
_ALWAYS, _SEVERAL = 1 << 32 | 1 << 33, 1 << 22 | 1 << 17
#: The most queue pairs that OVS gives a device (``vhost-max-queue-pairs`` in vswitch.xml).
MOST_PAIRS = 128
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
        if verb == "try":
            return _try(name)
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
    with open(_CONTROL, "rb+", buffering=0) as control:
        try:
            fcntl.ioctl(control, _DESTROY, name.encode().ljust(_NAME_BYTES, b"\0"))
        except OSError as refused:
            if refused.errno == errno.EBUSY:
                print(f"a process serves the VDUSE device {name}", file=sys.stderr)
                return HELD
            raise
    return 0


def _try(name: str) -> int:
    """Print with how many queue pairs the kernel makes a network device: ``MOST_PAIRS``, 1 or 0."""
    with open(_CONTROL, "rb+", buffering=0) as control:
        fcntl.ioctl(control, _SET_VERSION, bytes(8))  # 0, as DPDK does
        print(next((pairs for pairs in (MOST_PAIRS, 1) if _would_make(control, name, pairs)), 0))
    return 0


def _would_make(control: IO[bytes], name: str, pairs: int) -> bool:
    """Whether the kernel would make a network device with so many queue pairs; it makes none.

    The request is that of DPDK (vduse_device_create in lib/vhost/vduse.c): for several pairs with a control
    queue. The kernel first refuses a request that is not valid for it (EINVAL), and then reads the device's
    configuration behind the request (vduse_ioctl in drivers/vdpa/vdpa_user/vduse_dev.c). There is no memory:
    it ends with EFAULT before there is a device.
    """
    features, queues = (_ALWAYS | _SEVERAL, 2 * pairs + 1) if pairs > 1 else (_ALWAYS, 2)
    asked = (name.encode(), 0, _VIRTIO_NET, features, queues, mmap.PAGESIZE, _CONFIG_BYTES)
    try:
        fcntl.ioctl(control, _CREATE, at_the_end(_REQUEST.pack(*asked)))
    except OSError as refused:
        if refused.errno not in (errno.EINVAL, errno.EFAULT):
            raise
        return refused.errno == errno.EFAULT
    return _destroy(name) == 0  # no kernel is known that gets here


def at_the_end(request: bytes) -> memoryview:
    """Place a request where the memory ends: nobody can read what follows it, nor can the kernel.

    It is longer than what ``fcntl.ioctl`` copies (1024 bytes), so that the kernel gets this address.
    """
    page = mmap.PAGESIZE
    file = os.memfd_create("request", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, 2 * page)
        memory = mmap.mmap(file, 2 * page)
        memory[page - len(request) : page] = request
        os.ftruncate(file, page)
    finally:
        os.close(file)
    return memoryview(memory)[page - len(request) :]


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
