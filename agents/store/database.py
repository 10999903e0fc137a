"""The agent's SQLite database: schema, versions, transactions, and the clock of stored data."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

from netplugin import store_file
from netplugin.api.errors import HostError
from netplugin.host.safe_files import own_directory

# -- A clock for stored data, independent of the system time and continuous across restarts. ------
# It uses CLOCK_BOOTTIME (clock_gettime(2): monotonic, includes suspend), which restarts at each boot.
# Its value is stored with the boot ID and continues from there after a reboot.


BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def _boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class StoredClock:
    """Starts with the time of day, and does not follow when that is set."""

    def __init__(
        self,
        stored: str | None,
        boot: str | None = None,
        boottime: Callable[[], float] = _boottime,
        today: Callable[[], float] = time.time,
    ) -> None:
        """``stored`` is an earlier result of ``state``."""
        self._boottime = boottime
        self._boot = boot if boot is not None else BOOT_ID.read_text().strip()
        if stored is None:
            value = today()
        else:
            was = json.loads(stored)
            value = float(was["value"])
            if was["boot"] == self._boot:
                value += boottime() - float(was["boottime"])
        self._offset = value - boottime()

    def now(self) -> float:
        return self._offset + self._boottime()

    def state(self) -> str:
        """The state to store periodically; after a reboot, the time since the last call is lost."""
        at = self._boottime()
        return json.dumps({"boot": self._boot, "boottime": at, "value": self._offset + at})


# -- The agent's SQLite database: schema, versions and transactions. ------------------------------
# With ``synchronous=FULL``, an acknowledged request survives a power failure. A disk may take
# seconds for a commit. Therefore the event loop never waits for it: it reads from memory, and
# everything else runs ``in_thread``.


LOG = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

#: ``PRAGMA application_id`` of a store (https://sqlite.org/pragma.html), with ``user_version`` as the
#: version of its schema.
_APPLICATION_ID = int.from_bytes(b"nplg", "big")

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE ports (
    port_id TEXT PRIMARY KEY,
    backend TEXT NOT NULL,
    vm_id TEXT NOT NULL,
    spec TEXT NOT NULL,
    previous_spec TEXT,
    state TEXT NOT NULL,
    error TEXT,
    timings TEXT NOT NULL DEFAULT '{}',
    standby_of TEXT,
    number INTEGER NOT NULL DEFAULT 0,
    migration TEXT
);
CREATE INDEX ports_vm ON ports (vm_id);
CREATE TABLE networks (
    network_id TEXT PRIMARY KEY,
    vni INTEGER NOT NULL UNIQUE,
    local_vlan INTEGER NOT NULL UNIQUE,
    spec TEXT NOT NULL
);
CREATE TABLE physical_networks (
    name TEXT PRIMARY KEY,
    spec TEXT NOT NULL
);
CREATE TABLE claims (
    kind TEXT NOT NULL,
    key TEXT NOT NULL,
    port_id TEXT NOT NULL REFERENCES ports (port_id) ON DELETE CASCADE,
    memory TEXT NOT NULL DEFAULT '{}',
    PRIMARY KEY (kind, key)
);
CREATE TABLE quarantine (
    kind TEXT NOT NULL,
    key TEXT NOT NULL,
    reason TEXT NOT NULL,
    PRIMARY KEY (kind, key)
);
CREATE INDEX claims_port ON claims (port_id);
CREATE TABLE forgotten (
    port_id TEXT NOT NULL,
    number INTEGER NOT NULL,
    PRIMARY KEY (port_id, number)
);
CREATE TABLE set_aside (
    kind TEXT NOT NULL,
    key TEXT NOT NULL,
    content TEXT NOT NULL,
    reason TEXT NOT NULL,
    PRIMARY KEY (kind, key)
);
CREATE TABLE placements (
    vm_id TEXT PRIMARY KEY,
    placement TEXT NOT NULL
);
CREATE TABLE events (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    at TEXT NOT NULL,
    kind TEXT NOT NULL,
    state TEXT NOT NULL,
    backend TEXT,
    port_id TEXT,
    subject TEXT,
    detail TEXT NOT NULL
);
CREATE TABLE event_states (
    kind TEXT NOT NULL,
    backend TEXT NOT NULL,
    name TEXT NOT NULL,
    state TEXT NOT NULL,
    PRIMARY KEY (kind, backend, name)
);
CREATE TABLE fleet (
    kind TEXT NOT NULL,
    id TEXT NOT NULL,
    generation INTEGER NOT NULL,
    value TEXT NOT NULL,
    tag TEXT NOT NULL,
    PRIMARY KEY (kind, id)
);
CREATE TABLE tasks (
    taskuuid TEXT PRIMARY KEY,
    fingerprint TEXT NOT NULL,
    method TEXT NOT NULL,
    target TEXT NOT NULL,
    body BLOB NOT NULL,
    callback_url TEXT NOT NULL,
    state TEXT NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0,
    created_at REAL NOT NULL,
    result TEXT
);
"""
#: What changes a schema of version 1 to 2, of 2 to 3, and so on; ``_SCHEMA`` is the newest. A released entry
#: is never changed.
_MIGRATIONS: tuple[str, ...] = (
    "CREATE TABLE fleet (kind TEXT NOT NULL, id TEXT NOT NULL, generation INTEGER NOT NULL, "
    "value TEXT NOT NULL, tag TEXT NOT NULL, PRIMARY KEY (kind, id));",
)
_VERSION = 1 + len(_MIGRATIONS)


class Database:
    """One connection with one writer at a time. Hold ``lock`` across operations that belong together."""

    def __init__(self, path: Path) -> None:
        """Open or create the file, and back it up.

        A damaged file is moved aside and replaced by an empty database; the ports on the host stay,
        as after a lost store. On a full disk the file is opened if its version is current, but
        nothing can be written (see ``failure``).

        Raises: sqlite3.Error, OSError, ValueError for a version that this one does not know.
        """
        own_directory(path.parent, 0o700)
        store_file.prepare(path)
        self.path = path
        self.lock = threading.RLock()
        # A single thread, so that the calls of the event loop run in order.
        self._thread = ThreadPoolExecutor(1, "store")
        #: Why the last transaction failed to commit; empty if it succeeded.
        self.failure = ""
        #: Whether the file could not be opened again when it had to be closed for that.
        self._closed = False
        self.sql = self._open_whole(path)
        try:
            self._bring_to_this_version(path)
        except BaseException:
            self.sql.close()
            raise
        #: Created with the database and never changed; a copy has the same identity.
        self.identity = self._own_identity()
        self.try_to_write()

    def _open_whole(self, path: Path) -> sqlite3.Connection:
        try:
            sql = _connect(path)
            wrong = store_file.problems(sql)
            if not wrong:
                return sql
            sql.close()
        except UnicodeDecodeError as error:
            wrong = [store_file.undecoded(error)]
        except sqlite3.DatabaseError as error:
            if not store_file.is_damaged(error):
                raise
            wrong = [str(error)]
        aside = store_file.move_aside(path)
        LOG.error("%s is damaged and is now %s: %s", path, aside, "; ".join(wrong))
        store_file.prepare(path)
        return _connect(path)

    def later(self, work: Callable[[], object]) -> None:
        """Run ``work`` in the database thread, after earlier work; not at all once it is closed."""
        with contextlib.suppress(RuntimeError):
            self._thread.submit(work)

    async def in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``work`` in the database thread and return its result or raise its exception.

        For the event loop. Work that has started is completed even if the caller is cancelled.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, partial(work, *args, **kwargs))

    def close(self) -> None:
        """Wait for pending work of the thread and close the connection."""
        self._thread.shutdown()
        with self.lock:
            self.sql.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit everything that is written within, or nothing. Raises: HostError if the disk is full."""
        with self.lock:
            try:
                self.sql.execute("BEGIN IMMEDIATE")
                yield
                self.sql.execute("COMMIT")
            except BaseException as failed:
                if not self._closed and self.sql.in_transaction:
                    self.sql.execute("ROLLBACK")
                of_file = sqlite3.Error if self._closed else sqlite3.OperationalError
                if isinstance(failed, of_file):  # of the disk or file, not of us
                    self.failure = str(failed)
                    raise HostError(
                        f"the store cannot be written: {failed}",
                        step="store",
                        fix="look at the disk of [DEFAULT] state_path: is it full, or read-only?",
                    ) from failed
                raise
            self.failure = ""

    def try_to_write(self) -> None:
        """Write a row to update ``failure``. A file that SQLite opened for reading is opened again."""
        for _ in range(2):
            try:
                with self.transaction():
                    self.sql.execute("INSERT OR REPLACE INTO meta VALUES ('probe', '')")
            except HostError as failed:
                if not self._opened_again(failed.__cause__):
                    return
            except sqlite3.Error:
                return
            else:
                return

    def _opened_again(self, failed: BaseException | None) -> bool:
        """SQLite opens a file that it may not write to for reading, and stays with that."""
        if not self._closed and getattr(failed, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_READONLY:
            return False
        with self.lock:
            try:
                self._open_again()
            except (OSError, sqlite3.Error) as refused:
                LOG.warning("the store cannot be opened for writing: %s", refused)
                return False
        return True

    def _open_again(self) -> None:
        """Keep the connection if there is no other. Raises: OSError, sqlite3.Error."""
        if not self._closed:
            fresh = _connect(self.path)
            self.sql.close()
            self.sql = fresh
            if _is_writable(fresh):
                return
            # All connections of a process share how the -shm file was opened, until the last is closed.
            fresh.close()
            self._closed = True
        self.sql = _connect(self.path)
        self._closed = False

    def _own_identity(self) -> str:
        row = self.sql.execute("SELECT value FROM meta WHERE key = 'store'").fetchone()
        if row is not None:
            return str(row[0])
        made = str(uuid.uuid4())
        with self.transaction():
            self.sql.execute("INSERT INTO meta VALUES ('store', ?)", (made,))
        return made

    def _bring_to_this_version(self, path: Path) -> None:
        """Create the tables, or back the file up and migrate it in one transaction."""
        steps = self._steps_to_this_version(path)
        if self.sql.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is not None:
            try:
                store_file.keep_backup(self.sql, path.parent)
            except (OSError, sqlite3.Error) as refused:
                LOG.warning("no copy of the store was made: %s", refused)
        if steps is not None:
            ids = f"PRAGMA application_id={_APPLICATION_ID}; PRAGMA user_version={_VERSION};"
            self.sql.executescript(f"BEGIN; {steps} {ids} COMMIT;")

    def _steps_to_this_version(self, path: Path) -> str | None:
        """The SQL that brings the file to this version; None if it has it. Raises: ValueError."""
        application = int(self.sql.execute("PRAGMA application_id").fetchone()[0])
        version = int(self.sql.execute("PRAGMA user_version").fetchone()[0])
        if (application, version) == (_APPLICATION_ID, _VERSION):
            return None
        if (application, version) == (0, 0):
            return _SCHEMA
        if application == _APPLICATION_ID and 1 <= version < _VERSION:
            return "\n".join(_MIGRATIONS[version - 1 :])
        if application == _APPLICATION_ID:
            raise ValueError(
                f"{path} was written by a newer netplugin (version {version}, this one knows {_VERSION}): "
                f"install that one, or restore a backup of before: netplugin store restore"
            )
        raise ValueError(f"{path} is the database of another program: set another [DEFAULT] state_path")


def _is_writable(sql: sqlite3.Connection) -> bool:
    """Whether a transaction can begin. Raises: sqlite3.Error if another writes for too long, say."""
    try:
        sql.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError as failed:
        if failed.sqlite_errorcode & 0xFF == sqlite3.SQLITE_READONLY:
            return False
        raise
    sql.execute("ROLLBACK")
    return True


def _connect(path: Path) -> sqlite3.Connection:
    """Open the database in WAL mode.

    Without space for the shared-memory file, it is opened with an exclusive lock instead
    (https://sqlite.org/wal.html#use_of_wal_without_shared_memory).
    """
    try:
        return _set_up(path)
    except sqlite3.OperationalError as refused:
        LOG.warning("the store is opened for this process alone: %s", refused)
    return _set_up(path, "EXCLUSIVE")


def _set_up(path: Path, locking: str = "NORMAL") -> sqlite3.Connection:
    sql = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        sql.execute(f"PRAGMA locking_mode={locking}")
        # Invalid UTF-8 must not make other rows unreadable; the parser detects it.
        sql.text_factory = lambda data: data.decode(errors="backslashreplace")
        sql.execute("PRAGMA journal_mode=WAL")
        sql.execute("PRAGMA synchronous=FULL")
        sql.execute("PRAGMA foreign_keys=ON")
        # KiB; the default of 2,000 would hold all ports a second time, which are read once, at the start.
        sql.execute("PRAGMA cache_size=-256")
        sql.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
    except BaseException:
        sql.close()
        raise
    return sql
