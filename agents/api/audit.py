"""The audit log: caller, address, call and result; one JSON object per line.

It has an entry for every call that changes something and for every refused call. It never contains
tokens, callback URLs beyond the host, or domain XML (which may contain passwords).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from netplugin.host.safe_files import open_own

LOG = logging.getLogger("netplugin.audit")
#: Maximum size in bytes of a logged body; for a larger one only the size is logged.
MAX_BODY = 4096
_MAX_PATH = 512


class AuditLog:
    """Writes to a file or, without a path, to the agent's log under the key ``audit``.

    A file is written by a thread of its own: a disk that hangs holds up the calls that have an entry, and
    not the event loop.
    The file may be moved at any time (logrotate): the next entry creates a new one.
    """

    def __init__(self, path: Path | None) -> None:
        """Raises: ValueError if the file cannot be written."""
        self._path = path
        self._thread = ThreadPoolExecutor(1, "audit")
        self._file: IO[bytes] | None = None
        if path is not None:
            try:
                self._file = self._opened(path)
            except OSError as wrong:
                raise ValueError(f"[api] audit_log: {wrong}") from None

    async def called(
        self,
        *,
        caller: str,
        role: str,
        peer: str,
        method: str,
        path: str,
        status: int,
        code: str | None = None,
        body: bytes = b"",
        taskuuid: str | None = None,
        callback: str | None = None,
        duration_ms: float | None = None,
    ) -> None:
        """Log a call; status 200 with a ``taskuuid`` means that it was journalled for later."""
        entry: dict[str, Any] = {
            "event": "accepted" if taskuuid and status == 200 else "call",
            "caller": caller,
            "role": role,
            "from": peer,
            "method": method,
            "path": path[:_MAX_PATH],
            "status": status,
        }
        if code is not None:
            entry["code"] = code
        if taskuuid:
            entry["taskuuid"] = taskuuid
        if callback:
            entry["callback"] = _host_of(callback)
        if duration_ms is not None:
            entry["duration_ms"] = round(duration_ms, 1)
        await self._write(entry | _shown(path, body))

    async def carried_out(self, taskuuid: str, method: str, target: str, status: int) -> None:
        """Log the execution of an asynchronous call.

        The ``accepted`` entry with the same taskuuid has the caller.
        """
        await self._write(
            {
                "event": "carried_out",
                "taskuuid": taskuuid,
                "method": method,
                "path": target[:_MAX_PATH],
                "status": status,
            }
        )

    def close(self) -> None:
        self._thread.shutdown()
        if self._file is not None:
            self._file.close()

    async def _write(self, entry: dict[str, Any]) -> None:
        now = time.time()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now))
        entry = {"time": f"{stamp}.{int(now % 1 * 1000):03d}Z", **entry}
        if self._path is None:
            LOG.info("%s %s", entry["method"], entry["path"], extra={"audit": entry})
            return
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._append, self._path, entry)

    def _append(self, path: Path, entry: dict[str, Any]) -> None:
        try:
            self._current(path).write(json.dumps(entry).encode() + b"\n")
        except OSError as failed:  # the call is already done and cannot be refused any more
            LOG.error("the audit log cannot be written: %s", failed, extra={"audit": entry})

    def _current(self, path: Path) -> IO[bytes]:
        assert self._file is not None
        try:
            there = path.stat()
            mine = os.fstat(self._file.fileno())
            same = (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)
        except FileNotFoundError:
            same = False
        if not same:
            opened = self._opened(path)
            self._file.close()
            self._file = opened
        return self._file

    @staticmethod
    def _opened(path: Path) -> IO[bytes]:
        return open(open_own(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab", buffering=0)


def _shown(path: str, body: bytes) -> dict[str, Any]:
    if not body:
        return {}
    if len(body) <= MAX_BODY and not path.startswith("/v1/vms/"):
        try:
            return {"body": json.loads(body)}
        except (ValueError, RecursionError):
            pass
    return {"body_bytes": len(body)}


def _host_of(url: str) -> str:
    """Scheme, host and port; the rest of a callback URL may be secret."""
    try:
        parts = urlsplit(url)
        return (
            f"{parts.scheme}://{parts.hostname}:{parts.port}"
            if parts.port
            else (f"{parts.scheme}://{parts.hostname}")
        )
    except ValueError:
        return "?"
