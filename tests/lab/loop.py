"""The agent's converge loop on a backend alone: the intents stand for its store."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

from agents.ports.backend_ports import BackendPorts
from agents.ports.converge import Converged, Stopwatch, converge
from netplugin.backend import Backend, Intent


class _Alone(BackendPorts):
    """No agent works on the host; other drivers of this process may have the lock."""

    def require_lock(self) -> None:
        pass


def converge_alone(
    backend: Backend[Any], intents: Sequence[Intent], *, whole: bool = False, within_s: float = 60.0
) -> Converged:
    """Bring the ports to the desired state, see ``agents.ports.converge``. Nothing is stored or counted."""
    return converge(
        _Alone(backend, Mock(), Mock(), Mock()),
        intents,
        time.monotonic() + within_s,
        Stopwatch(),
        "test",
        whole=whole,
    )
