"""The parts of the agent behind its API: made from the configuration, started and stopped together."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from agents.host.counters import Counters
from agents.host.health import Health
from agents.host.pmd import Pmd
from agents.host.vfs import SharedVfs
from agents.host.view import HostView
from agents.networks.physical import PhysicalNetworkService
from agents.networks.vxlan import Networks
from agents.off_loop import OffLoop
from agents.operations.migrations import Migrations
from agents.operations.ports import PortOperations
from agents.operations.service_ports import ServicePorts
from agents.ports.claims import Quarantines
from agents.ports.reconciler import Reconciler
from agents.ports.teams import TeamVfs
from agents.store.store import Store
from agents.telemetry.event_streams import EventStreams
from agents.telemetry.metrics import Metrics
from agents.worker import BackendWorker
from netplugin.api.domain_models import RenderRequest
from netplugin.backend import Backend, Observation
from netplugin.host.shared import Host

if TYPE_CHECKING:
    from agents.host.domains import Domains

# Seconds to wait for the workers at shutdown.
_STOP_S = 5.0


class Service:
    """Its parts are what the API calls. Call ``start`` before use and ``stop`` after."""

    def __init__(
        self,
        conf: Any,
        store: Store,
        metrics: Metrics,
        host: Host,
        backends: dict[str, Backend[Observation]],
        broken: dict[str, str],
        view: HostView,
    ) -> None:
        """``broken``: the backends that could not be loaded, with the reasons."""
        self._store = store
        self._host = host
        self._backends = backends
        timeout_s = float(conf.agent.operation_timeout)
        quarantines, team_vfs = Quarantines(), TeamVfs()
        self._workers = workers = {
            name: BackendWorker(
                Reconciler(backend, store, metrics, quarantines, team_vfs),
                host.supervisor,
                batch_size=conf.agent.batch_size,
                interval_s=float(conf.agent.reconcile_interval),
                max_waiting=conf.api.max_waiting,
                max_jobs=conf.api.max_waiting_reads,
            )
            for name, backend in backends.items()
        }
        self.off_loop = OffLoop()
        self.view = view
        self._domains: Domains | None = None
        self.events = EventStreams(store.events, max(1, conf.api.max_connections // 4))
        self.pmd = Pmd(host, view, store.placements)
        self.vfs = SharedVfs(store, workers, timeout_s)
        self.counters = Counters(store, workers, self.off_loop)
        self.networks = Networks(store, workers, timeout_s)
        self.physical_networks = PhysicalNetworkService(store, host.networks, workers, timeout_s)
        self.health = Health(
            store,
            view,
            workers,
            broken,
            host.supervisor,
            timeout_s,
            self.off_loop,
            self.physical_networks.findings,
        )
        self.ports = PortOperations(
            store,
            workers,
            self.health,
            host.supervisor,
            teaming_backend=conf.agent.teaming_backend,
            timeout_s=timeout_s,
        )
        team_vfs.moved = self.ports.wake_standby
        self.service_ports = ServicePorts(store, self.ports)
        self.migrations = Migrations(self.ports, self.health, self.vfs, self._would_place)
        metrics.watch_pmd(self.pmd.scraped)
        metrics.watch_vfs(self.vfs.counters)
        metrics.watch_counters(self.counters.text)
        metrics.watch_failures(host.supervisor.failures)
        metrics.loaded = backends

    async def domains(self) -> Domains:
        """Imported by the first call, as what it places VMs with is, and not on the event loop."""
        if self._domains is None:
            self._domains = await self.off_loop.compute(self._made_domains)
        return self._domains

    def _made_domains(self) -> Domains:
        from agents.host.domains import Domains

        return Domains(self._store, self.view, self.ports.nics_of, self.vfs.all, self.off_loop)

    async def _would_place(self, vm_id: str, request: RenderRequest) -> None:
        await (await self.domains()).would_place(vm_id, request)

    def start(self) -> None:
        for worker in self._workers.values():
            worker.start()
            if worker.ports.extras.connections:
                worker.ports.extras.connections.follow_connections(worker.ports.events.connection)
        self.health.note_not_loaded()

    def wait_looked(self, wait_s: float) -> None:
        """Wait until every backend has reconciled the host once, or until the timeout."""
        deadline = time.monotonic() + wait_s
        for worker in self._workers.values():
            worker.looked_once.wait(max(0.0, deadline - time.monotonic()))

    def refuse_waiting(self) -> None:
        """Refuse queued calls; calls in progress continue."""
        for worker in self._workers.values():
            worker.refuse()

    def stop(self) -> None:
        """Wait a few seconds for work in progress in all backends.

        The locks on the host are released only if nothing is in progress any more, so that no other
        agent works at the same time. Otherwise they are released when the process ends.
        """
        self.refuse_waiting()
        until = time.monotonic() + _STOP_S
        ended = [worker.stop(until) for worker in self._workers.values()]
        self.view.close()
        self.off_loop.close()
        if not all(ended):
            return
        for backend in self._backends.values():
            backend.close()
        self._host.close()
