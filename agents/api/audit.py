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
from dataclasses import dataclass, field
from datetime import UTC, datetime
from io import TextIOWrapper
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from agents.api.access import Caller, Peer
from netplugin.host.safe_files import open_own

LOG = logging.getLogger("netplugin.audit")
#: Maximum size in bytes of a logged body; for a larger one only the size is logged.
MAX_BODY = 4096
_MAX_PATH = 512


@dataclass
class AuditedCall:
    """What is known about a call so far."""

    peer: Peer
    method: str
    path: str
    begun: float = field(default_factory=time.monotonic)
    caller: Caller | None = None
    body: bytes = b""
    taskuuid: str | None = None
    callback: str | None = None


class _File(WatchedFileHandler):
    """A file that may be moved at any time (logrotate): the next entry creates a new one."""

    def _open(self) -> TextIOWrapper:
        descriptor = open_own(Path(self.baseFilename), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        return open(descriptor, "a", encoding="utf-8")

    def handleError(self, record: logging.LogRecord) -> None:
        raise  # the error for which this is called


class AuditLog:
    """Writes to a file or, without a path, to the agent's log under the key ``audit``.

    A file is written by a thread of its own: a disk that hangs holds up the calls that have an entry, and
    not the event loop.
    """

    def __init__(self, path: Path | None) -> None:
        """Raises: ValueError if the file cannot be written."""
        self._thread = ThreadPoolExecutor(1, "audit")
        try:
            self._file = _File(path) if path is not None else None
        except OSError as wrong:
            raise ValueError(f"[api] audit_log: {wrong}") from None

    async def called(self, call: AuditedCall, status: int, code: str | None = None) -> None:
        """Log a call; status 200 with a ``taskuuid`` means that it was journalled for later."""
        entry: dict[str, Any] = {
            "event": "accepted" if call.taskuuid and status == 200 else "call",
            "caller": call.caller.name if call.caller else "unknown",
            "role": str(call.caller.role) if call.caller else "none",
            "from": call.peer.address,
            "method": call.method,
            "path": call.path[:_MAX_PATH],
            "status": status,
        }
        more = {"code": code, "taskuuid": call.taskuuid, "callback": _host_of(call.callback)}
        entry |= {name: value for name, value in more.items() if value}
        entry["duration_ms"] = round((time.monotonic() - call.begun) * 1e3, 1)
        await self._write(entry | _shown(call.path, call.body))

    async def carried_out(self, taskuuid: str, method: str, target: str, status: int) -> None:
        """Log the execution of an asynchronous call.

        The ``accepted`` entry with the same taskuuid has the caller.
        """
        entry = {"event": "carried_out", "taskuuid": taskuuid, "method": method}
        await self._write({**entry, "path": target[:_MAX_PATH], "status": status})

    async def of_fleet(self, method: str, target: str, status: int, generation: int, revision: int) -> None:
        """Log what was carried out for a value of etcd that this revision wrote."""
        entry = {"event": "fleet", "method": method, "path": target[:_MAX_PATH], "status": status}
        await self._write({**entry, "generation": generation, "revision": revision})

    def close(self) -> None:
        self._thread.shutdown()
        if self._file is not None:
            self._file.close()

    async def _write(self, entry: dict[str, Any]) -> None:
        stamp = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        entry = {"time": stamp, **entry}
        if self._file is None:
            LOG.info("%s %s", entry["method"], entry["path"], extra={"audit": entry})
            return
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._append, self._file, entry)

    @staticmethod
    def _append(file: _File, entry: dict[str, Any]) -> None:
        try:
            file.handle(logging.makeLogRecord({"msg": json.dumps(entry)}))
        except OSError as failed:  # the call is already done and cannot be refused any more
            LOG.error("the audit log cannot be written: %s", failed, extra={"audit": entry})


def _shown(path: str, body: bytes) -> dict[str, Any]:
    if not body:
        return {}
    if len(body) <= MAX_BODY and not path.startswith("/v1/vms/"):
        try:
            return {"body": json.loads(body)}
        except (ValueError, RecursionError):
            pass
    return {"body_bytes": len(body)}


def _host_of(url: str | None) -> str | None:
    """Scheme, host and port; the rest of a callback URL may be secret."""
    try:
        parts = urlsplit(url or "")
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return "?"
    return f"{parts.scheme}://{parts.hostname}{port}" if url else None
