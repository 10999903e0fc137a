"""vhost-user sockets: their directories, which QEMU creates them in, and cleanup of leftovers.

Each new port has its own directory below ``[ovs] vhost_socket_dir``, which only root can write to.
The directory belongs to the user that the VM's QEMU runs as (``qemu_user``), or else to the group
of all QEMU processes. OVS connects as root. The path is a claim of the port: the VM has it in its
domain, so it does not change while the port exists, even if the options do.
"""

from __future__ import annotations

import contextlib
import grp
import os
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from drivers.ovs.remains import REMOVER
from netplugin.api.models import Finding
from netplugin.backend import Claim, Intent
from netplugin.host.names import (
    MAX_SOCKET_PATH,
    SOCKETS,
    VHOST,
    device_name,
    fits_socket,
    vhost_socket,
)
from netplugin.host.ovs import OvsSettings
from netplugin.host.ovs_rows import OvsPort
from netplugin.host.safe_files import make_directory
from netplugin.host.usability import Usability

#: The kind of claim that holds the path of a port's socket.
KIND = "vhost-socket"
#: In the memory of a claim on a path that the caller chose: the root that it is below.
ROOT = "root"
#: And the directories that are ours, which the agent has made or will make.
MADE = "made"
#: Options of Interface that hold the path.
PATH_OPTIONS = ("vhost-server-path", "vdpa-socket-path")

_STEP = "socket-directory"
#: Others may traverse it (to their own directory) and not list it.
PASSABLE = 0o711
_OF_GROUP = 0o2770
_OF_USER = 0o700


@dataclass(frozen=True)
class Directory:
    """A directory of sockets with its owner and mode."""

    path: str
    uid: int
    gid: int
    mode: int


# -- paths -------------------------------------------------------------------------------------------


def claim_socket(settings: OvsSettings, intent: Intent, row: OvsPort | None) -> Claim:
    """Claim the path of a port's socket."""
    return Claim(KIND, socket_path(settings, intent, row))


def socket_path(settings: OvsSettings, intent: Intent, row: OvsPort | None) -> str:
    """The path where QEMU creates the socket: the claimed one, or the one in its row, or a new one."""
    claimed = next((claim.key for claim in intent.claims if claim.kind == KIND), None)
    reported = path_of(row) if row else None
    fitting = reported if reported and fits(reported, intent.port_id) else None
    return claimed or fitting or new_path(settings, intent.port_id)


def path_of(row: OvsPort) -> str | None:
    """The path that OVS connects to for a port."""
    options = row.interface.options if row.interface else {}
    return next((options[name] for name in PATH_OPTIONS if options.get(name)), None)


def new_path(settings: OvsSettings, port_id: str) -> str:
    """The path in the port's own directory."""
    return vhost_socket(settings.vhost_socket_dir, port_id)


def fits(path: str, port_id: str) -> bool:
    """Whether we assigned this path to the port, below any base directory."""
    directory, name = os.path.split(path)
    return name == device_name(VHOST, port_id) and is_own(directory, port_id)


def is_own(directory: str, port_id: str) -> bool:
    """Whether the directory is the port's own, by its name: a directory carries no mark."""
    return os.path.basename(directory) == device_name(SOCKETS, port_id)


def directory_for(path: str, qemu_user: int | None, gid: int) -> Directory:
    """A directory for the sockets of this user, or else of the group of all QEMU processes."""
    if qemu_user is None:
        return Directory(path, 0, gid, _OF_GROUP)
    return Directory(path, qemu_user, 0, _OF_USER)


def is_chosen(claim: Claim) -> bool:
    """Whether the claim is on a path that the caller chose, see ``chosen_sockets``."""
    return claim.kind == KIND and ROOT in claim.memory


# -- observed state ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChosenSocket:
    """A path that the caller chose, below ``root``, and whether there is a socket.

    ``empty``: the directories of ours that have nothing else and that no other port needs, the inner
    ones first.
    """

    path: str
    root: str
    is_socket: bool
    empty: tuple[str, ...]


@dataclass(frozen=True)
class ObservedSockets:
    """The observed sockets and directories of the ports in scope."""

    #: Existing directories of individual ports, by port.
    own: Mapping[str, tuple[str, ...]]
    #: All existing directories, by path.
    directories: Mapping[str, Directory]
    #: The group of all QEMU processes; None if the group does not exist.
    gid: int | None
    #: The paths that callers chose, by port.
    chosen: Mapping[str, ChosenSocket] = field(default_factory=dict)
    #: What VMs left that cannot be removed, and why, by path.
    stuck: Mapping[str, str] = field(default_factory=dict)


NOTHING = ObservedSockets({}, {}, None)


def look(settings: OvsSettings, ports: Collection[str], rows: Mapping[str, OvsPort]) -> ObservedSockets:
    """Look for the directories of these ports below the base directory, and where their rows say."""
    own: dict[str, tuple[str, ...]] = {}
    directories: dict[str, Directory] = {}
    for port_id in ports:
        row = rows.get(port_id)
        reported = path_of(row) if row else None
        paths = {new_path(settings, port_id)}
        if reported and fits(reported, port_id):
            paths.add(reported)
        for directory in sorted(map(os.path.dirname, paths)):
            if found := observed_directory(directory):
                directories[directory] = found
                own[port_id] = (*own.get(port_id, ()), directory)
    gid = _gid(settings.vhost_socket_group)
    return ObservedSockets(own, directories, gid, stuck=REMOVER.stuck)


def observed_directory(path: str) -> Directory | None:
    """The directory at this path; None if there is none, or a symbolic link."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    if not stat.S_ISDIR(found.st_mode):
        return None
    return Directory(path, found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode))


def is_socket(path: str, within: int | None = None) -> bool:
    with contextlib.suppress(OSError):
        return stat.S_ISSOCK(os.stat(path, dir_fd=within, follow_symlinks=False).st_mode)
    return False


def _gid(group: str) -> int | None:
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        return None


# -- changes -----------------------------------------------------------------------------------------


def make_directories(settings: OvsSettings) -> None:
    """Create the base directory and the roots of chosen paths at the agent's start.

    /run is empty after a boot. ``usable``, and a port, report failures. What was moved aside and not removed
    before is removed now.
    """
    for directory in (settings.vhost_socket_dir, *settings.vhost_socket_roots):
        with contextlib.suppress(OSError):
            make_directory(directory, PASSABLE)
    REMOVER.start(settings.vhost_socket_dir)


def usable(directory: Path, group: str) -> Usability:
    """Check the directory: OVS accepts a port with any path and reports the failure only in its log."""
    fix = f"install -d -m {PASSABLE:o} {directory}"
    try:
        found = directory.stat()
    except OSError as missing:
        return Usability(False, f"{directory}: {missing.strerror}", fix, _STEP)
    if _gid(group) is None:
        return Usability(
            False,
            f"there is no group {group!r}",
            "set [ovs] vhost_socket_group to QEMU's group",
            _STEP,
        )
    if not stat.S_ISDIR(found.st_mode):
        return Usability(False, f"{directory} is not a directory", fix, _STEP)
    if found.st_uid not in (0, os.geteuid()):
        owner = f"{directory} is user {found.st_uid}'s, who could replace the directories of ports"
        return Usability(False, owner, f"chown root {directory}", _STEP)
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o022 or not mode & 0o001:
        return Usability(
            False,
            f"{directory} is not for root to write to and for QEMU to pass (mode {mode:o})",
            fix,
            _STEP,
        )
    return Usability(True)


# -- findings ----------------------------------------------------------------------------------------


def findings(settings: OvsSettings, rows: Mapping[str, OvsPort], seen: ObservedSockets) -> list[Finding]:
    """Findings on the sockets of all ports of a backend (pure)."""
    said = {port_id: path_of(row) for port_id, row in rows.items()}
    paths = {port_id: Path(path) for port_id, path in said.items() if path}
    base = settings.vhost_socket_dir
    old = sorted(i for i, path in paths.items() if path.parent.parent != base and fits(str(path), i))
    found = _too_long(base)
    if old:
        some = ", ".join(old[:5]) + (" and others" if len(old) > 5 else "")
        found.append(
            Finding(
                id="vhost-socket-dir",
                status="warn",
                found=f"{len(old)} ports have their sockets elsewhere, as they were made: {some}",
                expected=f"every port has a directory of its own below [ovs] vhost_socket_dir, {base}",
                fix="none is needed: the VMs have the sockets by their paths. A port gets a new path "
                "when it is deleted and requested again, with its VM stopped",
            )
        )
    alike = {
        (row.interface and row.interface.external_ids.get("vm-uuid")) or port_id
        for port_id, row in rows.items()
        if (path := paths.get(port_id)) and _is_of_group(seen, path.parent)
    }
    if len(alike) > 1:
        found.append(
            Finding(
                id="qemu-user",
                status="warn",
                found=f"the sockets of {len(alike)} VMs are for group {settings.vhost_socket_group}: a "
                "QEMU that is broken into can replace its neighbours' sockets, unless sVirt holds it",
                expected="each VM's QEMU runs as a user of its own (qemu_user)",
                fix="run each QEMU as a user of its own and name that in its ports; or see that "
                "libvirt confines it (SELinux, AppArmor)",
            )
        )
    if seen.stuck:
        left, why = next(iter(seen.stuck.items()))
        found.append(
            Finding(
                id="vhost-socket-remains",
                status="warn",
                found=f"{len(seen.stuck)} directories of what VMs left cannot be removed: {left}: {why}",
                expected="what is left in the directory of a port that is gone is removed within a while",
                fix=f"look for a mount, and for files that nobody may remove: findmnt -R {left}; "
                f"lsattr -R {left}; then rm -r {left}",
            )
        )
    return found


def _too_long(base: Path) -> list[Finding]:
    """A base path that is too long for new ports. Those below another one stay."""
    socket = vhost_socket(base, "any")  # all port ids give names of the same length
    if fits_socket(socket):
        return []
    has = len(os.fsencode(base))
    most = MAX_SOCKET_PATH - (len(os.fsencode(socket)) - has)
    return [
        Finding(
            id="vhost-socket-path",
            status="fail",
            found=f"[ovs] vhost_socket_dir {base} has {has} bytes: no new port can come",
            expected=f"{most} bytes at most, so that the path of a port's socket has no more than the "
            f"{MAX_SOCKET_PATH} of a UNIX socket",
            fix="shorten it and restart the agent; ports that are there keep their paths",
        )
    ]


def _is_of_group(seen: ObservedSockets, directory: Path) -> bool:
    found = seen.directories.get(str(directory))
    return found is not None and bool(found.mode & 0o020)
