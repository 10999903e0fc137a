"""Open files by name where others could have put a link, a FIFO or a file of theirs.

Our own files (state, journals, keys, sockets): owner, type and mode are checked on the descriptor, after
the open. A tree of others (a copy of a host's files, a root file system): its links lead to a place in it,
as after chroot(2), and never out of it. No open waits for the other end of a FIFO.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

#: Bits that the mode of a file may not have: others could write to it; also read it; or only its group could.
WRITABLE, PRIVATE, OF_GROUP = 0o022, 0o077, 0o027
_ALWAYS = os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFBLK: "a block device",
    stat.S_IFCHR: "a character device",
}
# open_how and RESOLVE_* of include/uapi/linux/openat2.h (openat2(2), Linux 5.6). The number of the system
# call is the same on all architectures that Debian has.
_OPENAT2: Final = 437
_NO_MAGICLINKS, _IN_ROOT = 0x02, 0x10
#: Of a path with a way up, the kernel gives up (EAGAIN) whenever anybody on the host renames or mounts
#: something meanwhile, and leaves it to the caller to try again.
_TRIES = 1000
_LIBC = ctypes.CDLL(None, use_errno=True)


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


class UnsafeFile(OSError):
    """What is at a path is not ours to use, or others could change it."""

    def __init__(self, path: Path | str, reason: str, fix: str) -> None:
        super().__init__(errno.EPERM, reason, str(path))
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.filename} {self.strerror}. Fix: {self.fix}"


# -- our own files -----------------------------------------------------------------------------------


def keep_to_owner() -> None:
    """Let nobody else write to the files that this process makes, whatever umask it was started with."""
    os.umask(os.umask(WRITABLE) | WRITABLE)


def open_own(
    path: Path, flags: int = os.O_RDONLY, *, mode: int = 0o600, deny: int = WRITABLE, links: bool = False
) -> int:
    """Open a regular file of root or of our own user, with no bit of ``deny`` in its mode.

    ``links``: a link of that name is followed: the operator chose it. A file to write to has one name.

    Raises: UnsafeFile, OSError.
    """
    try:
        descriptor = os.open(path, flags | _ALWAYS | (0 if links else os.O_NOFOLLOW), mode)
    except OSError as refused:
        if refused.errno == errno.ELOOP:
            raise UnsafeFile(path, "is a symbolic link", f"remove it: rm {path}") from None
        if refused.errno in (errno.ENXIO, errno.EISDIR):
            raise _irregular(path, path.stat().st_mode) from None
        raise
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise _irregular(path, found.st_mode)
        _require_own(path, found)
        if found.st_mode & deny:
            has, more = stat.S_IMODE(found.st_mode), found.st_mode & deny
            what = f"can be {'written' if more & WRITABLE else 'read'} by others (mode {has:o})"
            raise UnsafeFile(path, what, f"chmod {has & ~deny:o} {path}")
        if found.st_nlink > 1 and flags & os.O_ACCMODE != os.O_RDONLY:
            raise UnsafeFile(path, f"has {found.st_nlink} names (hard links)", "move it away, or copy it")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def path_of_own(path: str, *, deny: int = WRITABLE) -> Iterator[str]:
    """A path that leads to this very file, for a library that opens it; see ``open_own``, with ``links``.

    Raises: UnsafeFile, OSError.
    """
    with opened(open_own(Path(path), deny=deny, links=True)) as descriptor:
        yield f"/proc/self/fd/{descriptor}"


def read_own(path: Path, *, deny: int = WRITABLE) -> bytes:
    """Read a file that the operator named, see ``open_own``, with ``links``. Raises: UnsafeFile, OSError."""
    with open(open_own(path, deny=deny, links=True), "rb") as file:
        return file.read()


def own_directory(path: Path, mode: int) -> None:
    """Create a directory with those above it, or check that only root or our own user may write to it.

    In a directory with the sticky bit others may write: they cannot replace what is ours.

    Raises: UnsafeFile, OSError.
    """
    make_directory(path, mode)
    require_own_directory(path)


def make_directory(path: Path, mode: int) -> None:
    """Create a directory with this mode, whatever the umask, and those above it; one that is there stays.

    Raises: OSError.
    """
    if not path.parent.exists():
        make_directory(path.parent, 0o755)
    try:
        path.mkdir(0o700)
    except FileExistsError:
        return
    with opened(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | _ALWAYS)) as made:
        os.fchmod(made, mode)


def require_own_directory(path: Path) -> None:
    """Raises: UnsafeFile if others may replace what is in the directory; OSError if there is none."""
    with opened(os.open(path, os.O_RDONLY | os.O_DIRECTORY | _ALWAYS)) as descriptor:
        found = os.fstat(descriptor)
    _require_own(path, found)
    if found.st_mode & WRITABLE and not found.st_mode & stat.S_ISVTX:
        what = f"can be written by others (mode {stat.S_IMODE(found.st_mode):o})"
        raise UnsafeFile(path, what, f"look what is in it, and chmod go-w {path}")


def _require_own(path: Path, found: os.stat_result) -> None:
    if found.st_uid not in (0, os.geteuid()):
        owner = f"belongs to user {found.st_uid}, and not to root or the user that runs this"
        raise UnsafeFile(path, owner, f"look who made it; move it away, or chown root {path}")


def _irregular(path: Path | str, mode: int) -> UnsafeFile:
    kind = _KINDS.get(stat.S_IFMT(mode), "something else")
    return UnsafeFile(path, f"is {kind} and no regular file", "move it away")


@contextlib.contextmanager
def opened(descriptor: int) -> Iterator[int]:
    """Close a descriptor at the end."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def sync(path: Path) -> None:
    """fsync a file, or a directory so that a new or replaced file in it survives a crash (fsync(2)).

    Raises: OSError.
    """
    with opened(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as descriptor:
        os.fsync(descriptor)


@contextlib.contextmanager
def replacing(path: Path, mode: int, owner: tuple[int, int] | None = None) -> Iterator[IO[bytes]]:
    """Write a file of an unpredictable name, which takes the place of ``path`` at the end, on the disk.

    Raises: OSError; then ``path`` is as it was.
    """
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as draft:
        try:
            yield draft
            draft.flush()
            if owner is not None:
                os.fchown(draft.fileno(), *owner)
            os.fchmod(draft.fileno(), mode)
            os.fsync(draft.fileno())
            os.replace(draft.name, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(draft.name)
            raise
    sync(path.parent)


# -- a tree of others --------------------------------------------------------------------------------


def open_within(root: Path, name: str, flags: int) -> int:
    """Open what has this path in a tree: links lead to a place within it. Raises: OSError."""
    # openat2(2) refuses flags that mean nothing with O_PATH.
    flags |= os.O_CLOEXEC if flags & os.O_PATH else _ALWAYS
    if root == Path("/"):  # this host itself: there is no way out, and older kernels can do it
        return os.open(root / name, flags)
    how = _OpenHow(flags, 0, _IN_ROOT | _NO_MAGICLINKS)
    with opened(os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as top:
        path = os.fsencode(name.lstrip("/") or ".")
        for _ in range(_TRIES):
            found = int(_LIBC.syscall(_OPENAT2, top, path, ctypes.byref(how), ctypes.sizeof(how)))
            failed = ctypes.get_errno() if found < 0 else 0
            if failed != errno.EAGAIN:
                break
    if failed:
        raise OSError(failed, os.strerror(failed), str(root / name.lstrip("/")))
    return found


def open_file_within(root: Path, name: str) -> IO[bytes]:
    """Open a regular file of a tree for reading. Raises: UnsafeFile, OSError."""
    descriptor = open_within(root, name, os.O_RDONLY)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise _irregular(root / name.lstrip("/"), mode)
    return open(descriptor, "rb")


def folder_within(root: Path, name: str) -> int:
    """Open a directory of a tree, made with those above it if there is none. No part of it may be a link.

    Raises: OSError; NotADirectoryError at a link or a file, or for a way up.
    """
    if ".." in Path(name).parts:
        raise NotADirectoryError(errno.ENOTDIR, "leads out of it", name)
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for part in Path(name.strip("/")).parts:
        with opened(folder) as above:
            try:
                os.mkdir(part, 0o700, dir_fd=above)
                made = True
            except FileExistsError:
                made = False
            folder = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | _ALWAYS, dir_fd=above)
            if made:
                os.fchmod(folder, 0o755)
    return folder
