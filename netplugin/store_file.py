"""The agent's database file: integrity check, backup and restore (https://sqlite.org/backup.html)."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

from netplugin.host.safe_files import open_own, opened, replacing, require_own_directory, sync

#: Names in ``state_path``: the database, the lock of the running agent, the backups.
DATABASE, LOCK, BACKUPS = "agent.db", "agent.lock", "backups"
#: Prefix of the name of a database that was found damaged and moved aside.
DAMAGED = "agent.db.damaged-"
_KEEP = 5  # backups
_BACKUP = re.compile(r"agent-([0-9]{6,})\.db")
# Files that SQLite keeps next to a database in WAL mode (https://sqlite.org/walformat.html), and before that.
_COMPANIONS = ("-wal", "-shm")
_ROLLBACK = "-journal"


class InUse(Exception):
    """An agent is running on this ``state_path``."""


@contextlib.contextmanager
def locked(state_path: Path) -> Iterator[None]:
    """Hold the lock of ``state_path``. The kernel releases it when the process ends.

    Raises: InUse, OSError; UnsafeFile if others may write to ``state_path`` or own what is there.
    """
    require_own_directory(state_path)
    with opened(open_own(state_path / LOCK, os.O_RDWR | os.O_CREAT, deny=0)) as lock:
        os.fchmod(lock, 0o600)  # whoever can open it can hold the lock
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InUse(f"another agent runs with state_path {state_path}") from None
        yield


def prepare(path: Path) -> None:
    """Create a database file for root or our own user alone, or check that it and those next to it are so.

    Not while this process has it open: POSIX locks end when any descriptor of the file is closed.

    Raises: OSError; UnsafeFile.
    """
    with opened(open_own(path, os.O_RDWR | os.O_CREAT)) as made:
        os.fchmod(made, 0o600)  # SQLite creates those next to it with the same mode
    _require_own(path)


def _require_own(path: Path) -> None:
    for end in ("", *_COMPANIONS, _ROLLBACK):
        with contextlib.suppress(FileNotFoundError):
            os.close(open_own(path.with_name(path.name + end)))


def is_damaged(error: sqlite3.Error) -> bool:
    """Whether an error means that the file is corrupt or not a database (as opposed to, say, a full disk)."""
    primary = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def undecoded(error: UnicodeDecodeError) -> str:
    """What SQLite says of damage in text of the schema, which it quotes as it is."""
    return error.object.decode(errors="replace")


def problems(connection: sqlite3.Connection) -> list[str]:
    """The errors found by ``PRAGMA quick_check``; empty if the database is intact."""
    try:
        found = [str(row[0]) for row in connection.execute("PRAGMA quick_check(10)")]
    except UnicodeDecodeError as error:
        return [undecoded(error)]
    except sqlite3.Error as error:
        if not is_damaged(error):
            raise
        return [str(error)]
    return [] if found == ["ok"] else found


def check(path: Path) -> list[str]:
    """The errors of a file that should be an agent's database. Raises: OSError, sqlite3.Error."""
    if not path.exists():
        return ["there is no such file"]
    with contextlib.closing(_read(path)) as connection:
        found = problems(connection)
        if found:
            return found
        tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master")}
    return [] if {"meta", "ports"} <= tables else ["it is no database of an agent"]


def copy(source: sqlite3.Connection, target: Path) -> None:
    """Copy a database atomically, also while an agent writes to it. Raises: OSError, sqlite3.Error."""
    with replacing(target, 0o600) as draft, contextlib.closing(sqlite3.connect(draft.name)) as made:
        source.backup(made)
        made.execute("PRAGMA journal_mode=DELETE")


def backup(state_path: Path, target: Path) -> None:
    """Copy the database of ``state_path``. Raises: OSError, sqlite3.Error."""
    database = state_path / DATABASE
    if not database.is_file():
        raise FileNotFoundError(f"{database}: there is no store of an agent")
    with contextlib.closing(_read(database)) as source:
        copy(source, target)


def keep_backup(source: sqlite3.Connection, state_path: Path) -> Path | None:
    """Add a backup unless the newest one is of the same commit, and delete the oldest ones.

    Returns: the path of the new backup, None if there was nothing to do.

    Raises: OSError, sqlite3.Error.
    """
    directory = state_path / BACKUPS
    directory.mkdir(mode=0o700, exist_ok=True)
    known = backups(state_path)
    if known and _commit(source) is not None:
        with contextlib.closing(_read(known[-1])) as last:
            if _commit(last) == _commit(source):
                return None
    number = _number(known[-1]) + 1 if known else 1
    target = directory / f"agent-{number:06d}.db"
    copy(source, target)
    for old in (*backups(state_path)[:-_KEEP], *directory.glob(".agent-*.db.*")):
        old.unlink(missing_ok=True)
    return target


def backups(state_path: Path) -> list[Path]:
    """The backups made by the agent, oldest first. Other files, such as renamed backups, are left out."""
    return sorted(filter(_number, (state_path / BACKUPS).glob("agent-*.db")), key=_number)


def _number(path: Path) -> int:
    """The number in the name of a backup, which counts from 1; 0 if the agent gave no such name."""
    found = _BACKUP.fullmatch(path.name)
    return int(found[1]) if found else 0


def restore(state_path: Path, source: Path) -> Path | None:
    """Replace the database by a backup. Returns the path that the old database was moved to.

    Raises: InUse, OSError, sqlite3.Error, ValueError if the backup is damaged.
    """
    require_own_directory(source.parent)
    wrong = check(source)
    if wrong:
        raise ValueError(f"{source}: {'; '.join(wrong)}")
    with locked(state_path):
        # Copy before moving anything, so that a full disk leaves the database in place.
        fresh = state_path / f"{DATABASE}.restored"
        with contextlib.closing(_read(source)) as connection:
            copy(connection, fresh)
        before = move_aside(state_path / DATABASE, "agent.db.before-restore-")
        fresh.replace(state_path / DATABASE)
        sync(state_path)
    return before


def move_aside(path: Path, begin: str = DAMAGED) -> Path | None:
    """Rename a database and its WAL files. Returns the new path, None if there was no database."""
    if not path.exists():
        return None
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    target = path.with_name(f"{begin}{stamp}")
    number = 1
    while target.exists():
        number += 1
        target = path.with_name(f"{begin}{stamp}.{number}")
    # Move the WAL first: without its database it is useless, but next to another one it corrupts
    # it.
    for end in _COMPANIONS:
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + end).rename(target.with_name(target.name + end))
    path.rename(target)
    sync(path.parent)
    return target


def damaged(state_path: Path) -> list[Path]:
    """The databases that were moved aside because they were damaged."""
    return sorted(p for p in state_path.glob(f"{DAMAGED}*") if not p.name.endswith(_COMPANIONS))


def _read(path: Path) -> sqlite3.Connection:
    _require_own(path)
    return sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)


def _commit(connection: sqlite3.Connection) -> tuple[tuple[str, str], ...] | None:
    """The ID of the store and the number of its commit; None if the database has no commit counter."""
    find = "SELECT key, value FROM meta WHERE key IN ('store', 'commit') ORDER BY key"
    try:
        found = tuple(connection.execute(find).fetchall())
    except sqlite3.Error:
        return None
    return found if len(found) == 2 else None
