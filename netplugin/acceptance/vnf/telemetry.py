"""Asks a DPDK program of its ports through its telemetry socket (DPDK's guide, "Telemetry User Guide")."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

from netplugin.acceptance.vnf.contract import VnfError

_LONGEST = 1 << 16


class Telemetry:
    """A connection, made when it is first needed. ``answer_s`` is for each answer."""

    def __init__(self, path: Path, answer_s: float = 5.0) -> None:
        self._path = path
        self._answer_s = answer_s
        self._socket: socket.socket | None = None
        #: Of DPDK, like ``DPDK 22.11.11``; it says so when a connection is made.
        self.version = "unknown"

    def ask(self, command: str, *arguments: object) -> Any:
        """What stands under the command's name in the answer. Raises: VnfError."""
        question = ",".join([command, *map(str, arguments)])
        try:
            connection = self._connected()
            connection.send(question.encode())
            answer = json.loads(connection.recv(_LONGEST))
            return answer[command]
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.close()
            raise VnfError(f"{self._path}: no answer to {question}: {error!r}") from error

    @property
    def there(self) -> bool:
        return self._path.is_socket()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connected(self) -> socket.socket:
        if self._socket is None:
            fresh = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                fresh.settimeout(self._answer_s)
                fresh.connect(str(self._path))
                self.version = str(json.loads(fresh.recv(_LONGEST))["version"])
            except BaseException:
                fresh.close()
                raise
            self._socket = fresh
        return self._socket
