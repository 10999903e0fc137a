"""Remove what VMs leave in the directories of their sockets, in the background.

A QEMU that is broken into fills its directory as it likes: with files by the hundred thousand, with
directories nested by the thousand. Therefore a directory is moved aside with one rename(2), to a directory
that only root can enter, and cleared there by a thread that lets others go on. A directory in it is moved
next to it before it is cleared: the work needs no recursion and no path, and goes on after a restart.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from queue import Empty, SimpleQueue

from netplugin.api.errors import HostError
from netplugin.host.names import DERIVED
from netplugin.host.safe_files import opened, require_own_directory

LOG = logging.getLogger(__name__)
#: The directory in that of the ports to which theirs are moved.
ASIDE = f"{DERIVED}removed"
_STEP = "socket-directory"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: Entries after which the thread rests for as long as they took.
_AT_ONCE = 256
#: Pauses before what could not be removed is tried again, seconds: the first, and the longest.
_AGAIN_S = (0.5, 60.0)


def set_aside(path: str) -> None:
    """Move what has this path aside, to be removed later. Raises: HostError."""
    base, name = os.path.split(path)
    try:
        with opened(os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as parent:
            if not os.path.lexists(path):
                return
            with contextlib.suppress(FileExistsError):
                os.mkdir(ASIDE, 0o700, dir_fd=parent)
            require_own_directory(Path(base, ASIDE))
            with opened(os.open(ASIDE, _DIRECTORY, dir_fd=parent)) as to:
                os.rename(name, secrets.token_hex(8), src_dir_fd=parent, dst_dir_fd=to)
    except FileNotFoundError:
        return
    except OSError as refused:
        raise HostError(
            f"{path}: {refused.strerror}",
            step=_STEP,
            fix=f"look for a mount and for files that nobody may remove: findmnt -R {path}; lsattr -d {path}",
        ) from refused
    REMOVER.start(Path(base))


class Remover:
    """The thread that clears the directories that are aside. It starts with the first of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bases: SimpleQueue[Path] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stuck: dict[str, str] = {}
        #: Entries until now, and the CPU time of the thread at its last rest.
        self._done, self._spent_s = 0, 0.0

    @property
    def stuck(self) -> Mapping[str, str]:
        """What cannot be removed, and why, by path. It is tried again until it is gone."""
        return dict(self._stuck)

    def start(self, base: Path) -> None:
        """Clear what is aside in this directory of ports, if anything is."""
        if not os.path.lexists(base / ASIDE):
            return
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="socket-remains", daemon=True)
                self._thread.start()
        self._bases.put(base)

    def _run(self) -> None:
        pause_s, longest_s = _AGAIN_S
        while True:
            try:
                bases = {self._bases.get(timeout=pause_s if self._stuck else None)}
                pause_s = _AGAIN_S[0]
            except Empty:
                bases = {Path(path).parent.parent for path in self._stuck}
                pause_s = min(2 * pause_s, longest_s)
            for base in bases:
                self._clear_all(base / ASIDE)

    def _clear_all(self, aside: Path) -> None:
        stuck: dict[str, str] = {}
        try:
            require_own_directory(aside)
            with opened(os.open(aside, _DIRECTORY)) as top:
                while name := self._next(aside, top, stuck):
                    self._remove(aside, top, name, stuck)
        except (OSError, HostError) as refused:
            LOG.error("%s cannot be cleared: %s", aside, refused)
        elsewhere = {path: why for path, why in self._stuck.items() if Path(path).parent != aside}
        self._stuck = {**elsewhere, **stuck}

    def _next(self, aside: Path, top: int, stuck: Collection[str]) -> str | None:
        with os.scandir(top) as entries:
            return next((each.name for each in entries if str(aside / each.name) not in stuck), None)

    def _remove(self, aside: Path, top: int, name: str, stuck: dict[str, str]) -> None:
        path = str(aside / name)
        try:
            self._clear(top, name)
        except OSError as refused:
            stuck[path] = refused.strerror or str(refused)
            if path not in self._stuck:
                LOG.warning("%s cannot be removed: %s", path, refused.strerror)

    def _clear(self, top: int, name: str) -> None:
        """Remove a file; or the files in a directory, and itself, with its directories moved next to it.

        Raises: OSError.
        """
        self._rest()
        try:
            folder = os.open(name, _DIRECTORY, dir_fd=top)
        except NotADirectoryError:
            os.unlink(name, dir_fd=top)
            return
        with opened(folder):
            # A process of the VM may still have it open: nothing more comes into it.
            os.fchown(folder, os.geteuid(), os.getegid())
            os.fchmod(folder, 0o700)
            while self._emptied(folder, top):  # a directory that changes as it is read may leave some out
                pass
        os.rmdir(name, dir_fd=top)

    def _emptied(self, folder: int, top: int) -> int:
        """Go through a directory once. Returns how much was in it. Raises: OSError, at the end."""
        number, failed = 0, None
        with os.scandir(folder) as entries:
            for entry in entries:
                self._rest()
                try:
                    if entry.is_dir(follow_symlinks=False):
                        os.rename(entry.name, secrets.token_hex(8), src_dir_fd=folder, dst_dir_fd=top)
                    else:
                        os.unlink(entry.name, dir_fd=folder)
                    number += 1
                except FileNotFoundError:
                    pass
                except OSError as refused:
                    failed = refused
        if failed is not None:
            raise failed
        return number

    def _rest(self) -> None:
        """After some entries rest for as long as they took of a CPU: others need it too."""
        self._done += 1
        if self._done % _AT_ONCE == 0:
            spent = time.thread_time()
            time.sleep(max(0.0, spent - self._spent_s))
            self._spent_s = spent


REMOVER = Remover()
