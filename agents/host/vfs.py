"""What the agent tells and does of virtual functions: the pool, its counters, the end of a quarantine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from agents.store.store import Store
from agents.telemetry.vf_figures import PortCounters
from agents.worker import BackendWorker, ask
from netplugin.api.errors import NetpluginError, NotFound, Overloaded
from netplugin.api.models import PortState, VfInfo
from netplugin.backend import NOBODY, Claim


class SharedVfs:
    """The pool that the backends on VFs share; ``timeout_s`` is that of a look at it."""

    def __init__(self, store: Store, workers: Mapping[str, BackendWorker], timeout_s: float) -> None:
        self._store = store
        self._workers = workers
        self._timeout_s = timeout_s

    async def all(self) -> list[VfInfo]:
        """All virtual functions of the pool, from one of the backends that share it.

        Raises: Overloaded; what ``Backend.observe`` raises.
        """
        workers = [worker for worker in self._workers.values() if worker.ports.extras.vfs]
        for worker in workers:
            try:
                return await ask(worker, self._timeout_s, worker.reconciler.claims.vfs)
            except NetpluginError as error:
                if worker is workers[-1] or isinstance(error, Overloaded):
                    raise  # a backend that also needs OVS may fail while another succeeds
        return []

    def counters(self) -> Iterator[PortCounters]:
        """Those of the functions of ports, for the metrics."""
        for name, worker in self._workers.items():
            pool = worker.ports.extras.vfs
            if pool is None:
                continue
            records = self._store.records(backend=name)
            ports = {claim: record.port_id for record in records for claim in record.claims}
            for claim, counters in pool.counters(list(ports)).items():
                yield PortCounters(ports[claim], claim.key, counters)

    async def release(self, pci_address: str) -> None:
        """End the quarantine of a virtual function; no error if it is not quarantined.

        A port that is being removed and waits for the NIC of this function is forgotten.

        Raises: NotFound; Conflict if a port that is being removed has it and it exists; Overloaded, what
        ``Backend.observe`` raises.
        """
        claim = Claim("vf", pci_address)
        if claim not in self._store.unfit() and claim not in self._store.claims():
            if all(vf.pci_address != pci_address for vf in await self.all()):
                raise NotFound(
                    f"there is no virtual function {pci_address}",
                    step="lookup",
                    fix="GET /v1/vfs has them all",
                )
        await self._store.database.in_thread(self._store.release, [claim])
        record = self._store.get(self._store.claims().get(claim, NOBODY))
        worker = self._workers.get(record.spec.backend) if record else None
        if record is None or worker is None or record.state is not PortState.REMOVING:
            return
        held = next(c for c in record.claims if c == claim)
        await ask(worker, self._timeout_s, partial(worker.reconciler.claims.abandon, record.port_id, held))
