"""The one SQLite file in which the agent remembers everything: its tables, versions and transactions.

``synchronous=FULL``: what a platform was told survives a power cut.
"""

from __future__ import annotations

import sqlite3
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS ports (
    port_id TEXT PRIMARY KEY,
    backend TEXT NOT NULL,
    vm_id TEXT NOT NULL,
    spec TEXT NOT NULL,
    previous_spec TEXT,
    state TEXT NOT NULL,
    error TEXT,
    timings TEXT NOT NULL DEFAULT '{}',
    standby_of TEXT,
    number INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS ports_vm ON ports (vm_id);
CREATE TABLE IF NOT EXISTS networks (
    network_id TEXT PRIMARY KEY,
    vni INTEGER NOT NULL UNIQUE,
    local_vlan INTEGER NOT NULL UNIQUE,
    spec TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS claims (
    kind TEXT NOT NULL,
    key TEXT NOT NULL,
    port_id TEXT NOT NULL REFERENCES ports (port_id) ON DELETE CASCADE,
    memory TEXT NOT NULL DEFAULT '{}',
    PRIMARY KEY (kind, key)
);
CREATE TABLE IF NOT EXISTS quarantine (
    kind TEXT NOT NULL,
    key TEXT NOT NULL,
    reason TEXT NOT NULL,
    PRIMARY KEY (kind, key)
);
CREATE INDEX IF NOT EXISTS claims_port ON claims (port_id);
CREATE TABLE IF NOT EXISTS forgotten (
    port_id TEXT NOT NULL,
    number INTEGER NOT NULL,
    PRIMARY KEY (port_id, number)
);
CREATE TABLE IF NOT EXISTS set_aside (
    kind TEXT NOT NULL,
    key TEXT NOT NULL,
    content TEXT NOT NULL,
    reason TEXT NOT NULL,
    PRIMARY KEY (kind, key)
);
CREATE TABLE IF NOT EXISTS placements (
    vm_id TEXT PRIMARY KEY,
    placement TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS tasks (
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
_VERSION = 6


class Database:
    """One connection, one writer at a time. Hold ``lock`` over what belongs together."""

    def __init__(self, path: Path) -> None:
        """Open or make the file. Raises: sqlite3.Error, OSError, ValueError for a newer version."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.lock = threading.RLock()
        #: Why the last transaction could not be committed; empty when it was.
        self.failure = ""
        self.sql = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        path.chmod(0o600)
        self.sql.execute("PRAGMA journal_mode=WAL")
        self.sql.execute("PRAGMA synchronous=FULL")
        self.sql.execute("PRAGMA foreign_keys=ON")
        self._check_version(path)
        self._migrate()
        self.sql.executescript(_SCHEMA)
        self.sql.execute(f"PRAGMA user_version={_VERSION}")
        #: Made with the database and never changed: a copy has the same.
        self.identity = self._own_identity()

    def close(self) -> None:
        with self.lock:
            self.sql.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All that is written within, or nothing of it."""
        with self.lock:
            try:
                self.sql.execute("BEGIN IMMEDIATE")
                yield
                self.sql.execute("COMMIT")
            except BaseException as error:
                if isinstance(
                    error, sqlite3.OperationalError
                ):  # of the disk or the file, not of us
                    self.failure = str(error)
                if self.sql.in_transaction:
                    self.sql.execute("ROLLBACK")
                raise
            self.failure = ""

    def _own_identity(self) -> str:
        row = self.sql.execute("SELECT value FROM meta WHERE key = 'store'").fetchone()
        if row is not None:
            return str(row[0])
        made = str(uuid.uuid4())
        with self.transaction():
            self.sql.execute("INSERT INTO meta VALUES ('store', ?)", (made,))
        return made

    def _check_version(self, path: Path) -> None:
        version = int(self.sql.execute("PRAGMA user_version").fetchone()[0])
        if version > _VERSION:
            raise ValueError(
                f"{path} was written by a newer netplugin (version {version}, this one knows {_VERSION})"
            )

    def _migrate(self) -> None:
        """What an older version has made becomes as this one makes it.

        Up to 2, claims had no memory; up to 3, no port stood beside another; up to 4, no VM was placed;
        up to 5, ports had no number, and what was forgotten or could not be read was not kept.
        """
        for table, column, kind in (
            ("claims", "memory", "TEXT NOT NULL DEFAULT '{}'"),
            ("ports", "standby_of", "TEXT"),
            ("ports", "number", "INTEGER NOT NULL DEFAULT 0"),
        ):
            columns = {row[1] for row in self.sql.execute(f"PRAGMA table_info({table})")}
            if columns and column not in columns:
                self.sql.execute(f"ALTER TABLE {table} ADD COLUMN {column} {kind}")
