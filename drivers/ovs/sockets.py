"""vhost-user sockets: their paths, which ports claim, and what of them and their directories is there.

Each new port has its own directory below ``[ovs] vhost_socket_dir``, which only root can write to.
The directory belongs to the user that the VM's QEMU runs as (``qemu_user``), or else to the group
of all QEMU processes. OVS connects as root. The path is a claim of the port: the VM has it in its
domain, so it does not change while the port exists, even if the options do.

The caller may choose a path (``PortSpec.vhost_user_socket``) below one of the roots that the operator allows
(``[ovs] vhost_socket_roots``), in a directory of its own or of its VM. Missing directories are created, and
noted in the claim of the port before that. Only noted ones get an owner and a mode, and are removed when they
are empty and no port has its socket in them. At the path only a socket is removed, and no port gets a path at
which there is a file.
"""

from __future__ import annotations

import contextlib
import grp
import os
import stat
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from drivers.ovs.remains import ASIDE, REMOVER
from netplugin.api.errors import Conflict, InvalidRequest
from netplugin.api.models import PortSpec
from netplugin.backend import NOBODY, Claim, Intent
from netplugin.host.names import DERIVED, SOCKETS, VHOST, device_name, vhost_socket
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
#: And the user of those who open the socket.
_USER = "user"
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


def socket_path(settings: OvsSettings, intent: Intent, row: OvsPort | None) -> str:
    """The path where QEMU creates the socket: the claimed one, or the one in its row, or a new one."""
    claimed = next((claim.key for claim in intent.claims if claim.kind == KIND), None)
    row_path = path_of(row) if row else None
    fitting = row_path if row_path and fits(row_path, intent.port_id) else None
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
    """Whether the claim is on a path that the caller chose."""
    return claim.kind == KIND and ROOT in claim.memory


# -- paths that callers choose -----------------------------------------------------------------------


def check(settings: OvsSettings, spec: PortSpec) -> None:
    """Refuse a path outside of the roots. Raises: InvalidRequest."""
    if spec.vhost_user_socket is None:
        return
    path = Path(spec.vhost_user_socket)
    root = _root_of(settings, path)
    below = path.parent.relative_to(root).parts if root else ()
    if root is None:
        roots = ", ".join(map(str, _roots(settings)))
        message = f"{path} is not below a directory of [ovs] vhost_socket_roots ({roots})"
    elif not below:
        message = f"{path} has no directory of its own below {root}, such as {root}/{spec.vm_id}/{path.name}"
    elif ASIDE in below or (root == settings.vhost_socket_dir and below[0].startswith(DERIVED)):
        message = f"names in {root} that begin with {DERIVED} are those that the agent chooses"
    else:
        return
    raise InvalidRequest.of_field("vhost_user_socket", message)


def _roots(settings: OvsSettings) -> tuple[Path, ...]:
    return (settings.vhost_socket_dir, *settings.vhost_socket_roots)


def _root_of(settings: OvsSettings, path: Path) -> Path | None:
    """The root that the path is below; of several, the longest."""
    found = [root for root in _roots(settings) if root in path.parents]
    return max(found, key=lambda root: len(root.parts), default=None)


# -- the claim -----------------------------------------------------------------------------------------


def claim_socket(
    settings: OvsSettings, intent: Intent, row: OvsPort | None, taken: Mapping[Claim, str]
) -> Claim:
    """Claim the path of a port's socket: the one that the caller chose, or that of ``socket_path``.

    A chosen path is looked at here: only the spec has it, so no observation does before the claim.

    Raises: Conflict if it cannot have the path.
    """
    assert intent.spec is not None
    asked = intent.spec.vhost_user_socket
    had = next((claim for claim in intent.claims if claim.kind == KIND), None)
    if had is not None:
        if asked == (had.key if is_chosen(had) else None):
            return had
        raise _conflict(
            f"the port is still being removed with its socket {had.key}", "DELETE it, then PUT it"
        )
    if asked is None:
        return Claim(KIND, socket_path(settings, intent, row))
    return _claim(settings, intent, asked, row, taken)


def _claim(
    settings: OvsSettings, intent: Intent, asked: str, row: OvsPort | None, taken: Mapping[Claim, str]
) -> Claim:
    path, root = Path(asked), _root_of(settings, Path(asked))
    user = intent.spec.qemu_user if intent.spec else None
    assert root is not None  # see ``check``
    above = [each for each in path.parents if root in each.parents]
    made = {str(each) for each in above if not os.path.lexists(each)}
    for claim, owner in taken.items():
        if claim.kind != KIND or owner in (NOBODY, intent.port_id):
            continue
        other = Path(claim.key)
        if path in (other, *other.parents) or other in path.parents:
            raise _conflict(f"port {owner} has its socket at {other}", "choose another path")
        if path.parent in other.parent.parents or other.parent in path.parent.parents:
            # One of them would be for QEMU to write to, and the other one in it.
            raise _conflict(
                f"{other.parent}, for the socket of port {owner}, is above or below {path.parent}",
                "choose a directory next to it",
            )
        if is_chosen(claim):
            if other.parent == path.parent and claim.memory[_USER] != user:
                raise _conflict(
                    f"{other.parent} is for qemu_user {claim.memory[_USER]} of port {owner}, not for {user}",
                    "choose a path in another directory, or the same qemu_user",
                )
            made |= {str(each) for each in above} & {*claim.memory[MADE]}
    if os.path.lexists(path) and (row is None or path_of(row) != asked):
        raise _conflict(f"there is a file at {path}, and it is not of this port", f"remove it: rm {path}")
    return Claim(KIND, asked, {ROOT: str(root), MADE: sorted(made), _USER: user})


def _conflict(why: str, fix: str) -> Conflict:
    return Conflict(f"vhost_user_socket: {why}", step="claim", fix=fix)


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
        row_path = path_of(row) if row else None
        paths = {new_path(settings, port_id)}
        if row_path and fits(row_path, port_id):
            paths.add(row_path)
        for directory in sorted(map(os.path.dirname, paths)):
            if found := observed_directory(directory):
                directories[directory] = found
                own[port_id] = (*own.get(port_id, ()), directory)
    gid = _gid(settings.vhost_socket_group)
    return ObservedSockets(own, directories, gid, stuck=REMOVER.stuck)


def look_at_chosen(
    found: ObservedSockets, claims: Mapping[str, tuple[str, Mapping[str, Any]]], ports: Collection[str] | None
) -> ObservedSockets:
    """Add the chosen sockets of these ports (None: of all) to what was observed.

    ``claims`` has the path of each port with a claim on one, and the memory of the claim.
    """
    chosen: dict[str, ChosenSocket] = {}
    directories = dict(found.directories)
    there = {i: claims[i] for i in (claims if ports is None else ports) if i in claims}
    there = {i: claim for i, claim in there.items() if ROOT in claim[1]}
    if not there:
        return found
    # A directory of ours is noted in the claim of each port below it.
    users = Counter(each for _, memory in claims.values() for each in memory.get(MADE, ()))
    for port_id, (path, memory) in there.items():
        directory = observed_directory(str(Path(path).parent))
        if directory is not None:
            directories[directory.path] = directory
        there_is_one = is_socket(path)
        empty = takewhile(lambda each: users[each] == 1, _empty_without(path, memory[MADE], there_is_one))
        chosen[port_id] = ChosenSocket(path, memory[ROOT], there_is_one, tuple(empty))
    return replace(found, chosen=chosen, directories=directories)


def _empty_without(path: str, made: Collection[str], is_socket: bool) -> Iterator[str]:
    """The directories of ours above a socket that have nothing else in them, the inner ones first."""
    gone = Path(path)
    is_gone = is_socket or not os.path.lexists(path)
    for each in gone.parents:
        if str(each) not in made or not is_gone:
            return
        try:
            with os.scandir(each) as entries:
                is_gone = all(entry.name == gone.name for entry in entries)
        except FileNotFoundError:
            pass
        except OSError:
            return
        else:
            if is_gone:
                yield str(each)
        gone = each


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
