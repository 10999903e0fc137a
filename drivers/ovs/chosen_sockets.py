"""vhost-user sockets at paths that the caller chooses (``PortSpec.vhost_user_socket``).

A path is below one of the roots that the operator allows (``[ovs] vhost_socket_roots``), in a directory
of its own or of its VM. Missing directories are created, and noted in the claim of the port before that.
Only noted ones get an owner and a mode, and are removed when they are empty and no port has its socket in
them. At the path only a socket is removed, and no port gets a path at which there is a file.

Every directory is opened in that of the one before, without following symbolic links. Those above the
socket's must be root's alone, so that nobody can replace them meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, ClassVar

from drivers.ovs import sockets
from drivers.ovs.commands import SocketChange
from drivers.ovs.ports import VhostPort
from drivers.ovs.remains import ASIDE
from drivers.ovs.sockets import KIND, ROOT, ChosenSocket, Directory, ObservedSockets, is_chosen
from netplugin.api.errors import Conflict, FieldError, HostError, InvalidRequest
from netplugin.api.models import PortSpec
from netplugin.backend import NOBODY, Change, Claim, Intent
from netplugin.host.names import DERIVED
from netplugin.host.ovs import OvsSettings
from netplugin.host.ovs_rows import OvsPort

_STEP = "socket-directory"
#: In the memory of a claim: the directories that are ours, and the user of those who open the socket.
_MADE, _USER = "made", "user"
#: For root alone until it has its owner and mode.
_NEW = 0o700
_PASSABLE = 0o711
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

# -- before anything is stored -------------------------------------------------------------------------


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
    errors = [FieldError(field="vhost_user_socket", message=message)]
    raise InvalidRequest(f"vhost_user_socket: {message}", step="validate", errors=errors)


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
    """Claim the path of a port's socket: the chosen one, or as ``sockets.claim_socket``.

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
        return sockets.claim_socket(settings, intent, row)
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
            made |= {str(each) for each in above} & {*claim.memory[_MADE]}
    if os.path.lexists(path) and (row is None or sockets.path_of(row) != asked):
        raise _conflict(f"there is a file at {path}, and it is not of this port", f"remove it: rm {path}")
    return Claim(KIND, asked, {ROOT: str(root), _MADE: sorted(made), _USER: user})


def _conflict(why: str, fix: str) -> Conflict:
    return Conflict(f"vhost_user_socket: {why}", step="claim", fix=fix)


# -- observed state ------------------------------------------------------------------------------------


def look(
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
    users = Counter(each for _, memory in claims.values() for each in memory.get(_MADE, ()))
    for port_id, (path, memory) in there.items():
        directory = sockets.observed_directory(str(Path(path).parent))
        if directory is not None:
            directories[directory.path] = directory
        is_socket = _is_socket(path)
        empty = takewhile(lambda each: users[each] == 1, _empty_without(path, memory[_MADE], is_socket))
        chosen[port_id] = ChosenSocket(path, memory[ROOT], is_socket, tuple(empty))
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


def _is_socket(path: str, within: int | None = None) -> bool:
    with contextlib.suppress(OSError):
        return stat.S_ISSOCK(os.stat(path, dir_fd=within, follow_symlinks=False).st_mode)
    return False


# -- plan (pure) ---------------------------------------------------------------------------------------


def arrivals(port: VhostPort, seen: ObservedSockets) -> list[Change]:
    """The changes before the row of a port with a chosen path is added."""
    claim, path = port.chosen, Path(port.socket)
    if claim is None or seen.gid is None:
        return []
    wish = sockets.directory_for(str(path.parent), port.spec.qemu_user, seen.gid)
    found = seen.directories.get(wish.path)
    if found == wish or (found is not None and wish.path not in claim.memory[_MADE]):
        return []
    return [MakeChosenDirectory((port.port_id,), wish, claim.memory[ROOT], tuple(claim.memory[_MADE]))]


def departures(port_id: str, seen: ObservedSockets) -> list[Change]:
    """The changes after the row of a port is removed."""
    chosen = seen.chosen.get(port_id)
    if chosen is None or not (chosen.is_socket or chosen.empty):
        return []
    return [RemoveChosenSocket((port_id,), chosen)]


@dataclass(frozen=True)
class MakeChosenDirectory(SocketChange):
    """Create the directory of a socket with those above it, or set its owner and mode.

    ``made``: the directories that are ours, or will be. Others stay as they are.
    """

    before_rows: ClassVar[bool] = True
    directory: Directory
    root: str
    made: tuple[str, ...]

    def describe(self) -> str:
        wish = self.directory
        return f"make directory {wish.path} (user {wish.uid}, group {wish.gid}, mode {wish.mode:o})"

    def apply(self) -> None:
        wish, path = self.directory, Path(self.directory.path)
        with _translated(path), _opened(Path(self.root), path, make=True) as opened:
            *above, (_, last) = opened
            for each, descriptor in above:
                if str(each) in self.made:
                    os.fchmod(descriptor, _PASSABLE)
            if wish.path in self.made:
                os.fchown(last, wish.uid, wish.gid)
                os.fchmod(last, wish.mode)
            elif not _may_create(os.fstat(last), wish):
                who = f"user {wish.uid}" if wish.uid else f"group {wish.gid}"
                raise HostError(
                    f"{path} is not ours, and QEMU ({who}) may not create its socket in it",
                    step=_STEP,
                    fix="remove it, and the agent makes it; or give QEMU write access to it",
                )


@dataclass(frozen=True)
class RemoveChosenSocket(SocketChange):
    """Remove the socket that QEMU left, and the directories of ours that are empty without it."""

    socket: ChosenSocket

    def describe(self) -> str:
        return f"remove socket {self.socket.path}"

    def apply(self) -> None:
        path = Path(self.socket.path)
        with _translated(path), _opened(Path(self.socket.root), path.parent, make=False) as opened:
            directory, descriptor = opened[-1]
            if directory == path.parent and _is_socket(path.name, descriptor):
                os.unlink(path.name, dir_fd=descriptor)
            for (_, parent), (each, _) in reversed([*pairwise(opened)]):
                if str(each) not in self.socket.empty:
                    return
                try:
                    os.rmdir(each.name, dir_fd=parent)
                except OSError as refused:
                    if refused.errno not in (errno.ENOTEMPTY, errno.ENOENT):
                        raise
                    return


@contextlib.contextmanager
def _opened(root: Path, directory: Path, *, make: bool) -> Iterator[list[tuple[Path, int]]]:
    """Open the root and the directories below it as far as there are any, at most to this one.

    Raises: OSError (ENOTDIR at a symbolic link); HostError if another user could replace one of them.
    """
    with contextlib.ExitStack() as stack:
        opened: list[tuple[Path, int]] = []

        def enter(path: Path, flags: int, within: int | None) -> None:
            descriptor = os.open(path if within is None else path.name, _OPEN | flags, dir_fd=within)
            stack.callback(os.close, descriptor)
            opened.append((path, descriptor))

        enter(root, 0, None)
        for name in directory.relative_to(root).parts:
            above, descriptor = opened[-1]
            _require_guarded(above, os.fstat(descriptor))
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, _NEW, dir_fd=descriptor)
            try:
                enter(above / name, os.O_NOFOLLOW, descriptor)
            except FileNotFoundError:
                break
        yield opened


def _require_guarded(path: Path, found: os.stat_result) -> None:
    """Raises: HostError if others than root could replace what is in the directory."""
    if found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
        raise HostError(
            f"{path} is not for root alone to write to "
            f"(user {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}), and sockets are below it",
            step=_STEP,
            fix=f"chown root {path} && chmod go-w {path}; or choose another path",
        )


def _may_create(found: os.stat_result, wish: Directory) -> bool:
    """Whether QEMU may create a socket in a directory of others."""
    mode, both = found.st_mode, 0o3  # write and search
    if wish.uid:
        of_class = found.st_uid == wish.uid and mode >> 6 & both == both
    else:
        of_class = (found.st_gid == wish.gid and mode >> 3 & both == both) or found.st_uid != 0
    return of_class or mode & both == both


@contextlib.contextmanager
def _translated(path: Path) -> Iterator[None]:
    """Translate errors of the system. Raises: HostError."""
    try:
        yield
    except OSError as refused:
        if refused.errno in (errno.ENOTDIR, errno.ELOOP):
            raise HostError(
                f"{path}: {refused.filename} is a symbolic link or no directory",
                step=_STEP,
                fix="choose a path without symbolic links below the root",
            ) from refused
        raise HostError(f"{path}: {refused.strerror}", step=_STEP) from refused
