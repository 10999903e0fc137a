"""Client of the DPDK telemetry socket (DPDK's "Telemetry User Guide")."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

from netplugin.acceptance.vnf.contract import VnfError

_LONGEST = 1 << 16


class Telemetry:
    """A lazy connection. ``answer_s``: timeout of each answer in seconds."""

    def __init__(self, path: Path, answer_s: float = 5.0) -> None:
        self._path = path
        self._answer_s = answer_s
        self._socket: socket.socket | None = None
        #: DPDK version such as ``DPDK 22.11.11``, sent on connect.
        self.version = "unknown"

    def ask(self, command: str, *arguments: object) -> Any:
        """Send a command and return its result. Raises: VnfError."""
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
