"""The steps of a build that mount something, in a process whose mounts end with it.

A program of its own, without imports of netplugin: ``unshare`` starts it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_INSTALL = ("install", "-q", "-y", "--no-install-recommends", "-o", "Dpkg::Options::=--force-confold")
_ENVIRONMENT = {
    "DEBIAN_FRONTEND": "noninteractive",
    "LC_ALL": "C",
    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
}


def main(arguments: Sequence[str]) -> int:
    """Carry out one step, given as ``-- STEP ARGUMENTS``.

    Returns: the exit status of the first command that failed, or 0.
    """
    _, step, *rest = arguments
    try:
        _STEPS[step](*rest)
    except subprocess.CalledProcessError as failed:
        return failed.returncode if failed.returncode > 0 else 1
    return 0


def copy(image: str, offset: str, size: str, mount_point: str, target: str) -> None:
    """Copy the root file system of a base, mounted for reading only.

    ``offset`` and ``size``: of its partition in ``image``, in bytes.
    """
    _run("mount", "-o", f"ro,norecovery,loop,offset={offset},sizelimit={size}", image, mount_point)
    _run("cp", "--archive", "--one-file-system", f"{mount_point}/.", target)


def install(root: str, *packages: str) -> None:
    """Install packages in a root file system, with this host's name servers.

    The folders that it mounts on and writes in are no links: the caller has looked.

    ``packages``: names, and paths of .deb files as seen in ``root``.
    """
    for kind, name in (("proc", "proc"), ("sysfs", "sys"), ("tmpfs", "tmp"), ("tmpfs", "run")):
        _run("mount", "-t", kind, kind, f"{root}/{name}")
    _run("mount", "--rbind", "/dev", f"{root}/dev")
    resolver, policy = Path(root, "etc/resolv.conf"), Path(root, "usr/sbin/policy-rc.d")
    resolver.unlink(missing_ok=True)
    if os.path.exists("/etc/resolv.conf"):
        shutil.copyfile("/etc/resolv.conf", resolver)
    # invoke-rc.d(8): 101 means that an action is not allowed, so no daemon is started.
    policy.unlink(missing_ok=True)  # it may be a link
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    for command in (("apt-get", "update", "-q"), ("apt-get", *_INSTALL, *packages)):
        _run("chroot", root, *command, env=os.environ | _ENVIRONMENT)
    _run("chroot", root, "update-initramfs", "-u", "-k", "all", env=os.environ | _ENVIRONMENT)
    policy.unlink()


def _run(*command: str, env: dict[str, str] | None = None) -> None:
    subprocess.run(command, check=True, env=env)


_STEPS: Mapping[str, Callable[..., None]] = {"copy": copy, "install": install}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
