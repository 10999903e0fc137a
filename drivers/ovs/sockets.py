"""The vhost-user sockets: the directory that QEMU makes them in, and what it leaves behind."""

from __future__ import annotations

import contextlib
import grp
import shutil
import stat
from pathlib import Path

from netplugin.backend import Usability
from netplugin.errors import HostError

_STEP = "socket-directory"


def make_directory(directory: Path, group: str) -> None:
    """At the agent's start only: /run is empty after a boot. What fails here, ``usable`` tells."""
    with contextlib.suppress(OSError, LookupError):
        directory.mkdir(parents=True, exist_ok=True)
        shutil.chown(directory, group=group)
        directory.chmod(0o2770)


def usable(directory: Path, group: str) -> Usability:
    """OVS takes a port with any path and fails later, in its log: look at the directory before."""
    fix = f"install -d -m 2770 -g {group} {directory}"
    try:
        found = directory.stat()
    except OSError as missing:
        return Usability(False, f"{directory}: {missing.strerror}", fix, _STEP)
    try:
        wanted = grp.getgrnam(group).gr_gid
    except KeyError:
        return Usability(
            False,
            f"there is no group {group!r}",
            "set [ovs] vhost_socket_group to QEMU's group",
            _STEP,
        )
    if not stat.S_ISDIR(found.st_mode):
        return Usability(False, f"{directory} is not a directory", fix, _STEP)
    if found.st_gid != wanted or stat.S_IMODE(found.st_mode) & 0o777 != 0o770:
        return Usability(
            False, f"{directory} is not for group {group} alone "
            f"(mode {stat.S_IMODE(found.st_mode):o}, group {found.st_gid})", fix, _STEP,
        )  # fmt: skip
    return Usability(True)


def remove(path: str) -> None:
    """Raises: HostError."""
    try:
        Path(path).unlink(missing_ok=True)
    except OSError as refused:
        raise HostError(f"{path}: {refused.strerror}", step=_STEP) from refused
