"""Process 1 of the guest: mounts what there is to mount and runs the job of the share."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import BinaryIO

from tests.lab import sandbox
from tests.lab.processes import LabError, run
from tests.nested import machine, pulse
from tests.nested.machine import Job

# No udev runs in the guest: a device's driver is loaded by who wants it.
MODULES = ("igb", "tun", "vhost_net")
# What udev would make.
DEV_LINKS = {"fd": "", "stdin": "/0", "stdout": "/1", "stderr": "/2"}


def main() -> None:
    sandbox.make_private(own_kernel=True)
    pulse.start_beating()
    for name, number in DEV_LINKS.items():
        (Path("/dev") / name).symlink_to(f"/proc/self/fd{number}")
    run(["mount", "-t", "cgroup2", "cgroup2", "/sys/fs/cgroup"])
    machine.INSIDE.touch()
    job = _job()
    _use_modules(Path(job.modules))
    with _channel() as channel:
        _say(channel, event="up")
        status = _run(job, channel)
        (machine.SHARE / machine.DMESG).write_text(run(["dmesg"]))
        _say(channel, event="ended", status=status)
        # The guest is ended from the outside: what is still in the channel would be lost.
        while True:
            signal.pause()


def _job() -> Job:
    machine.SHARE.mkdir()
    options = "trans=virtio,version=9p2000.L,msize=524288"
    run(["mount", "--no-mtab", "-t", "9p", "-o", options, "share", machine.SHARE])
    return Job(**json.loads((machine.SHARE / machine.JOB).read_text()))


def _use_modules(modules: Path) -> None:
    here = Path("/lib/modules") / os.uname().release
    here.parent.mkdir(exist_ok=True)
    here.symlink_to(modules)
    run(["modprobe", "--all", *MODULES], timeout=60)


def _channel() -> BinaryIO:
    for port in Path("/sys/class/virtio-ports").iterdir():
        if (port / "name").read_text().strip() == machine.PORT:
            return open(Path("/dev") / port.name, "wb")
    raise LabError(f"there is no virtio port {machine.PORT}")


def _say(channel: BinaryIO, **message: object) -> None:
    channel.write(json.dumps(message).encode() + b"\n")
    channel.flush()


def _run(job: Job, channel: BinaryIO) -> int:
    with (machine.SHARE / machine.OUTPUT).open("wb") as output:
        child = subprocess.Popen(
            job.command,
            cwd=job.directory,
            env={**job.environment, machine.CHANNEL: str(channel.fileno())},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[channel.fileno()],
            start_new_session=True,
        )
    # Orphans come to process 1.
    while True:
        pid, status = os.wait()
        if pid == child.pid:
            return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    main()
