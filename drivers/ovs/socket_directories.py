"""The changes of the directories of vhost-user sockets, and how they are made.

A directory of a port, in ``[ovs] vhost_socket_dir``, is removed with all that its VM has left. Of a path that
the caller chose, only the socket is removed, and directories of ours that are empty.

Every directory is opened in that of the one before, without following symbolic links. Those above the
socket's must be root's alone, so that nobody can replace them meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

from drivers.ovs.remains import set_aside
from drivers.ovs.sockets import (
    PASSABLE,
    ChosenSocket,
    Directory,
    is_socket,
)
from netplugin.api.errors import HostError
from netplugin.backend import Change
from netplugin.host.safe_files import make_directory

_STEP = "socket-directory"
#: For root alone until it has its owner and mode.
_NEW = 0o700
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class SocketChange(Change, ABC):
    """A change of the files of a port's socket."""

    #: Whether it is made before the rows are written, or after the flows.
    before_rows: ClassVar[bool] = False

    @abstractmethod
    def apply(self) -> None:
        """Make the change. Raises: HostError."""


@dataclass(frozen=True)
class MakeSocketDirectory(SocketChange):
    """Create the directory of a socket with those above it, or set its owner and mode.

    ``made``: the directories that are ours, or will be. Others stay as they are.
    """

    before_rows: ClassVar[bool] = True
    described_as = (
        "make directory {self.directory.path} (user {self.directory.uid}, group {self.directory.gid}, "
        "mode {self.directory.mode:o})"
    )

    directory: Directory
    root: str
    made: tuple[str, ...]

    def apply(self) -> None:
        desired, path, root = self.directory, Path(self.directory.path), Path(self.root)
        with _translated(path):
            make_directory(root, PASSABLE)
            with _opened(root, path, make=True) as opened:
                *above, (_, last) = opened
                for each, descriptor in above:
                    if str(each) in self.made:
                        os.fchmod(descriptor, PASSABLE)
                if desired.path in self.made:
                    os.fchown(last, desired.uid, desired.gid)
                    os.fchmod(last, desired.mode)
                elif not _may_create(os.fstat(last), desired):
                    who = f"user {desired.uid}" if desired.uid else f"group {desired.gid}"
                    raise HostError(
                        f"{path} is not ours, and QEMU ({who}) may not create its socket in it",
                        step=_STEP,
                        fix="remove it, and the agent makes it; or give QEMU write access to it",
                    )


@dataclass(frozen=True)
class RemoveSocketDirectory(SocketChange):
    """Remove the directory of a port, with the socket that QEMU left in it."""

    described_as = "remove directory {self.path}"

    path: str

    def apply(self) -> None:
        set_aside(self.path)


@dataclass(frozen=True)
class RemoveChosenSocket(SocketChange):
    """Remove the socket that QEMU left, and the directories of ours that are empty without it."""

    described_as = "remove socket {self.socket.path}"

    socket: ChosenSocket

    def apply(self) -> None:
        path = Path(self.socket.path)
        with _translated(path), _opened(Path(self.socket.root), path.parent, make=False) as opened:
            directory, descriptor = opened[-1]
            if directory == path.parent and is_socket(path.name, descriptor):
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


# -- on the file system -----------------------------------------------------------------------------


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


def _may_create(found: os.stat_result, desired: Directory) -> bool:
    """Whether QEMU may create a socket in a directory of others."""
    mode, both = found.st_mode, 0o3  # write and search
    if desired.uid:
        of_class = found.st_uid == desired.uid and mode >> 6 & both == both
    else:
        of_class = (found.st_gid == desired.gid and mode >> 3 & both == both) or found.st_uid != 0
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
