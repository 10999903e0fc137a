"""The counters of ports: of one for the API, and of all for the metrics."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial

from agents.off_loop import OffLoop
from agents.store.store import Store
from agents.telemetry.counter_text import counter_text
from agents.telemetry.port_counters import BackendCounters
from agents.worker import BackendWorker
from netplugin.api.counter_models import PortCounters
from netplugin.api.errors import NotFound, Unsupported
from netplugin.backend import Intent

#: Seconds that a scrape waits for all backends, and a call for one. Then the answer is what is known.
_SCRAPE_S, _CALL_S = 1.0, 2.0


class Counters:
    """Those of the backends that count; without the workers' threads, which may be busy with plugs."""

    def __init__(self, store: Store, workers: Mapping[str, BackendWorker], off_loop: OffLoop) -> None:
        self._store = store
        self._off_loop = off_loop
        self._backends = {
            name: BackendCounters(name, counts, partial(_intents, worker))
            for name, worker in workers.items()
            if (counts := worker.ports.extras.counters) is not None
        }

    async def of(self, port_id: str) -> PortCounters:
        """Raises: NotFound; Unsupported if the backend of the port does not count."""
        record = self._store.get(port_id)
        if record is None:
            raise NotFound(f"there is no port {port_id}", step="lookup", fix="GET /v1/ports has them all")
        backend = self._backends.get(record.spec.backend)
        if backend is None:
            raise Unsupported(
                f"backend {record.spec.backend} has no counters, or is not loaded",
                step="counters",
                fix="GET /v1/backends says whether it is",
            )
        known = await self._off_loop.look(partial(backend.known, _CALL_S), "counters")
        return known.of(port_id)

    def text(self) -> bytes:
        """The lines of a scrape. It blocks: do not call it from the event loop."""
        until = time.monotonic() + _SCRAPE_S
        for backend in self._backends.values():
            backend.begin()
        return counter_text(
            [each.known(max(0.0, until - time.monotonic())) for each in self._backends.values()]
        )


def _intents(worker: BackendWorker) -> list[Intent]:
    return worker.ports.intents(worker.ports.records())
