"""The operations of the agent, independent of the API; each call goes to the worker of its backend."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from agents.calls.migrations import Migrations
from agents.calls.service_ports import ServicePorts
from agents.host.health import Health
from agents.host.pmd import Pmd
from agents.host.vfs import Vfs
from agents.host.view import HostView
from agents.networks.physical import PhysicalNetworkService
from agents.networks.vxlan import Networks
from agents.off_loop import OffLoop
from agents.ports.admit import unknown_backend
from agents.ports.call import Amend, Call, delete_call, put_call
from agents.ports.claims import Quarantines
from agents.ports.reconciler import CHECK_S, Reconciler
from agents.ports.teams import Teams, TeamVfs, standby_id
from agents.store.marks import StoreMarks
from agents.store.port_table import Record
from agents.store.store import Store
from agents.telemetry.event_streams import EventStreams
from agents.telemetry.host_events import HostEvents
from agents.telemetry.metrics import Metrics
from agents.worker import BackendWorker, answer
from netplugin.api.batch_models import Batch, BatchResult, BatchResults, PortFilter, Retag
from netplugin.api.conditions import NO_CONDITION, Condition, intent_tag
from netplugin.api.errors import (
    Conflict,
    HostError,
    NetpluginError,
    NotFound,
)
from netplugin.api.models import (
    HostState,
    Port,
    PortSpec,
    PortState,
    ReconcileReport,
    ReconcileRequest,
    RenderRequest,
)
from netplugin.backend import Backend, Observation
from netplugin.host.shared import Host
from netplugin.host.usability import Usability, Wake

if TYPE_CHECKING:
    from agents.host.domains import Domains

LOG = logging.getLogger(__name__)
T = TypeVar("T")
# Seconds to wait for the workers at shutdown.
_STOP_S = 5.0
#: The call for a port of a batch: queued in its worker, running with its standby, refused, or not
#: needed.
_Answer: TypeAlias = Call | asyncio.Future[Any] | NetpluginError | None


class Service:
    """The agent without its API. Call ``start`` before use and ``stop`` after."""

    def __init__(
        self,
        conf: Any,
        store: Store,
        metrics: Metrics,
        host: Host,
        backends: dict[str, Backend[Observation]],
        broken: dict[str, str],
        view: HostView,
        marks: StoreMarks | None = None,
    ) -> None:
        self._store = store
        self._in_thread = store.database.in_thread
        self._host = host
        self._view = view
        self._backends = backends
        self._broken = broken
        self._timeout_s = float(conf.agent.operation_timeout)
        self.off_loop = OffLoop()
        quarantines, team_vfs = Quarantines(), TeamVfs()
        team_vfs.moved = self._wake_standby
        self._workers = {
            name: BackendWorker(
                Reconciler(backend, store, metrics, marks, quarantines, team_vfs),
                host.supervisor,
                batch_size=conf.agent.batch_size,
                interval_s=float(conf.agent.reconcile_interval),
                max_waiting=conf.api.max_waiting,
                max_jobs=conf.api.max_waiting_reads,
            )
            for name, backend in backends.items()
        }
        self._domains: Domains | None = None
        self.pmd = Pmd(host, view, store.placements)
        metrics.watch_pmd(self.pmd.scraped)
        self.vfs = Vfs(store, self._workers, self._timeout_s)
        metrics.watch_vfs(self.vfs.counters)
        metrics.count_as_failed_but(backends)
        metrics.watch_failures(host.supervisor.failures)
        self.physical_networks = PhysicalNetworkService(store, host.networks, self._workers, self._timeout_s)
        self.health = Health(
            store,
            view,
            self._workers,
            broken,
            host.supervisor,
            self._timeout_s,
            self.off_loop,
            self.physical_networks.findings,
        )
        self.events = EventStreams(store.events, store.database, max(1, conf.api.max_connections // 4))
        self.networks = Networks(store, self._workers, self._timeout_s)
        self.teams = Teams(
            store,
            conf.agent.teaming_backend,
            self._put_alone,
            self._delete_alone,
            self._has_call,
            host.supervisor,
        )
        self.service_ports = ServicePorts(store, self._put_alone, self._delete_alone, self._describe)
        self.migrations = Migrations(
            self._timeout_s,
            self.teams,
            self.vfs.all,
            self._check_step,
            lambda port_id: self._backend_with(port_id) or self._keeper_of(port_id),
            self._submit,
            self.describe,
            self.health.backends,
            self._validate,
            self._would_place,
        )

    def _wake_standby(self, port_id: str) -> None:
        """Have the standby of a team leave frames to the VF, or take them (callable from any thread)."""
        record = self._store.get(standby_id(port_id))
        worker = self._workers.get(record.spec.backend) if record is not None else None
        if record is not None and worker is not None:
            worker.wake(Wake("its VM took its VF or gave it back", frozenset({record.port_id})))

    async def _would_place(self, vm_id: str, request: RenderRequest) -> None:
        await (await self.domains()).would_place(vm_id, request)

    async def domains(self) -> Domains:
        """Imported by the first call, as what it places VMs with is, and not on the event loop."""
        if self._domains is None:
            self._domains = await self.off_loop.compute(self._made_domains)
        return self._domains

    def _made_domains(self) -> Domains:
        from agents.host.domains import Domains

        return Domains(self._store, self._view, self._nics_of, self.vfs.all, self.off_loop)

    def start(self) -> None:
        for worker in self._workers.values():
            worker.start()
            if worker.ports.extras.connections:
                worker.ports.extras.connections.follow_connections(worker.ports.events.connection)

        for name in {*self._broken, *self._store.events.backends()} - set(self._workers):
            events = HostEvents(self._store.events, name)
            events.usability(Usability(False, self.health.not_loaded(name).detail))
            events.findings(())

    async def compare_usability(self) -> None:
        """Store an event for each backend that has become usable or unusable since the last call."""
        for worker in self._workers.values():
            # It may read sysfs, and wait for a lock of the kernel.
            usability = await self.off_loop.look(worker.ports.usable, f"backend {worker.name}")
            await self._in_thread(worker.ports.events.usability, usability)

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
        self._view.close()
        self.off_loop.close()
        if not all(ended):
            return
        for backend in self._backends.values():
            backend.close()
        self._host.close()

    # -- ports -----------------------------------------------------------------------------------

    async def put(self, port_id: str, spec: PortSpec, condition: Condition = NO_CONDITION) -> Port:
        """Create or change a port. Raises: any NetpluginError; then the port is unchanged."""
        self.service_ports.refuse_service(port_id, spec)
        if self.teams.concerns(port_id, spec):
            return self.describe(await self.teams.put(port_id, spec, condition))
        return self.describe(await self._put_alone(port_id, spec, None, condition))

    async def delete(self, port_id: str, condition: Condition = NO_CONDITION) -> None:
        self.service_ports.refuse_service(port_id)
        if self.teams.concerns(port_id):
            await self.teams.delete(port_id, condition)
        else:
            await self._delete_alone(port_id, None, condition)

    def intent_tag(self, port: Port) -> str:
        """The part of the entity tag of a port that stands for what was requested."""
        return intent_tag(port.spec, self._store.stamp(port.port_id))

    async def batch(self, batch: Batch) -> BatchResults:
        """Run a batch; all of its ports are queued before the first result is awaited."""
        calls: list[tuple[str, _Answer]] = []
        for entry in batch.put:
            if refused := _or_error(self.service_ports.refuse_service, entry.port_id, entry.spec):
                calls.append((entry.port_id, refused))
            elif self.teams.concerns(entry.port_id, entry.spec):
                both = self.teams.put(entry.port_id, entry.spec, entry.condition)
                calls.append((entry.port_id, asyncio.ensure_future(both)))
            else:
                calls.append(
                    (entry.port_id, _or_error(self._put, entry.port_id, entry.spec, None, entry.condition))
                )
        for port_id in batch.delete:
            if refused := _or_error(self.service_ports.refuse_service, port_id):
                calls.append((port_id, refused))
            elif self.teams.concerns(port_id):
                calls.append((port_id, asyncio.ensure_future(self.teams.delete(port_id))))
            else:
                calls.append((port_id, _or_error(self._delete, port_id)))
        return await self._results(calls)

    async def retag(self, wanted: Retag) -> BatchResults:
        """Change the VLAN of ports, those of a backend in one batch."""
        group = object()
        calls: list[tuple[str, _Answer]] = []
        for port_id in wanted.ports or self.moved_by(wanted):
            if self.teams.concerns(port_id):
                both = self.teams.amend(port_id, wanted.amended)
                calls.append((port_id, asyncio.ensure_future(both)))
            else:
                calls.append((port_id, _or_error(self._amendment, port_id, wanted.amended, group)))
        return await self._results(calls)

    def moved_by(self, wanted: Retag) -> dict[str, PortSpec]:
        """The ports that a retag moves, with their specs before it."""
        records = self._store.records(network=wanted.network)
        if wanted.ports:
            records = [r for r in map(self._store.get, wanted.ports) if r is not None]
        return {
            record.port_id: record.spec
            for record in records
            if wanted.is_of(record.spec)
            and record.standby_of is None
            and record.state is not PortState.REMOVING
        }

    async def _results(self, calls: Sequence[tuple[str, _Answer]]) -> BatchResults:
        self._queue([call for _, call in calls if isinstance(call, Call)])
        return BatchResults(results=[await self._batch_result(port_id, call) for port_id, call in calls])

    def ports(self, wanted: PortFilter) -> Iterator[Port]:
        """The ports that match and are after the begin of the page, ordered by port id."""
        records = self._store.records(vm_id=wanted.vm_id, backend=wanted.backend, network=wanted.network)
        records = [r for r in records if r.spec.device is None and r.port_id > wanted.begin]
        ports = (self.describe(record) for record in records)
        # Filter by the reported state: see ``_describe``.
        return (port for port in ports if wanted.state in (None, port.state))

    def port(self, port_id: str) -> Port:
        record = self._store.get(port_id)
        if record is None or record.spec.device is not None:
            raise _no_port(port_id)
        return self.describe(record)

    def describe(self, record: Record) -> Port:
        return self.teams.reported(self._describe(record), self._describe)

    def _describe(self, record: Record) -> Port:
        backend = self._backends.get(record.spec.backend)
        worker = self._workers.get(record.spec.backend)
        seen = worker.ports.observed.get(record.port_id) if worker else None
        binding = None
        if backend is not None and record.state is not PortState.REMOVING:
            overlay = self._store.network(record.spec.overlay_id)
            try:
                binding = backend.binding(replace(record, overlay=overlay))
            except NetpluginError as error:
                LOG.warning("no binding: %s", error, extra={"port_id": record.port_id})
        # Without a backend, the state of the port is unknown.
        unseen = None if backend is not None else self.health.not_loaded(record.spec.backend, record.port_id)
        removing = record.state is PortState.REMOVING
        return Port(
            port_id=record.port_id,
            state=record.state if removing or unseen is None else PortState.FAILED,
            spec=record.spec,
            binding=binding,
            observed=dict(seen.details) if seen else None,
            error=unseen.problem() if unseen else record.error,
            timings_ms=dict(record.timings_ms or {}),
            standby_of=record.standby_of,
            migration=record.migration if record.migration and not record.migration.has_ended else None,
        )

    # -- other API calls -------------------------------------------------------------------------

    async def reconcile(self, request: ReconcileRequest) -> ReconcileReport:
        """Reconcile all backends. Raises: Overloaded."""
        report = ReconcileReport(dry_run=request.dry_run, ports=0, changes=[])
        deadline = time.monotonic() + self._timeout_s
        futures = {
            name: worker.reconcile(deadline, dry_run=request.dry_run, remove_orphans=request.remove_orphans)
            for name, worker in self._workers.items()
        }
        for name, future in futures.items():
            try:
                part = await answer(future, deadline + CHECK_S)
            except NetpluginError as error:
                LOG.warning("reconcile of %s: %s", name, error)
                report.errors.append(error.problem())
                continue
            report.ports += part.ports
            report.changes += part.changes
            report.orphans_kept += part.orphans_kept
            report.errors += part.errors
        return report

    async def host(self) -> HostState:
        """Raises: OperationTimeout."""
        return await self._view.within(self._view.state)

    def _nics_of(self, vm_id: str) -> list[Port]:
        """The ports of a VM; a standby port is part of another port's binding."""
        return [port for port in self.ports(PortFilter(vm_id=vm_id)) if port.standby_of is None]

    # -- internals -------------------------------------------------------------------------------

    async def _put_alone(
        self,
        port_id: str,
        spec: PortSpec,
        standby_of: str | None = None,
        condition: Condition = NO_CONDITION,
    ) -> Record:
        record: Record = await self._submit(self._put(port_id, spec, standby_of, condition))
        return record

    async def _delete_alone(
        self, port_id: str, standby_of: str | None = None, condition: Condition = NO_CONDITION
    ) -> None:
        call = self._delete(port_id, standby_of, condition)
        if call is not None:
            await self._submit(call)

    def _has_call(self, port_id: str) -> bool:
        return any(worker.is_at(port_id) for worker in self._workers.values())

    def _put(
        self,
        port_id: str,
        spec: PortSpec,
        standby_of: str | None = None,
        condition: Condition = NO_CONDITION,
    ) -> Call:
        self._worker(spec.backend, port_id)
        self.teams.refuse_half(port_id, standby_of)
        holder = self._backend_with(port_id)
        if holder not in (None, spec.backend):
            raise Conflict(
                f"the port is on backend {holder}; a backend is never changed silently",
                step="validate",
                port_id=port_id,
                fix="delete the port and ask for it again",
            )
        call = put_call(port_id, spec, time.monotonic() + self._timeout_s, standby_of)
        call.condition = condition
        return call

    async def _validate(self, spec: PortSpec) -> None:
        backend = self._backends[spec.backend]
        await self.off_loop.look(partial(backend.validate, spec), f"backend {spec.backend}")

    def _check_step(self, port_id: str, spec: PortSpec | None) -> None:
        """Refuse a step of a migration that is none of a VM's own port. Raises: NetpluginError."""
        self.service_ports.refuse_service(port_id, spec)
        if spec is not None:
            self._put(port_id, spec)
        else:
            self._delete(port_id)

    def _amendment(self, port_id: str, amend: Amend, group: object) -> Call:
        record = self._store.get(port_id)
        if record is None:
            raise _no_port(port_id)
        call = self._put(port_id, amend(record.spec))
        call.amend, call.group = amend, group
        return call

    def _delete(
        self, port_id: str, standby_of: str | None = None, condition: Condition = NO_CONDITION
    ) -> Call | None:
        self.teams.refuse_half(port_id, standby_of)
        backend = self._backend_with(port_id) or self._keeper_of(port_id)
        if backend is None:
            return None
        self._worker(backend, port_id)
        call = delete_call(port_id, time.monotonic() + self._timeout_s)
        call.condition = condition
        return call

    def _worker(self, backend: str, port_id: str) -> BackendWorker:
        worker = self._workers.get(backend)
        if worker is not None:
            return worker
        record = self._store.get(port_id)
        if backend in self._broken or (record is not None and record.spec.backend == backend):
            raise self.health.not_loaded(backend, port_id)
        raise unknown_backend(backend, self._workers)

    def _backend_of(self, call: Call) -> str:
        if call.port.spec is not None:
            return call.port.spec.backend
        # The port may be gone since: then any worker answers.
        port_id = call.port_id
        return self._backend_with(port_id) or self._keeper_of(port_id) or next(iter(self._workers))

    def _keeper_of(self, port_id: str) -> str | None:
        """The backend that may have kept an orphan of this name on the host."""
        workers = self._workers.items()
        return next((n for n, worker in workers if worker.ports.may_keep(port_id)), None)

    def _backend_with(self, port_id: str) -> str | None:
        """The backend that has the port, or has an operation on it in its queue."""
        record = self._store.get(port_id)
        if record is None:
            for name, worker in self._workers.items():
                if worker.is_at(port_id):
                    return name
            record = self._store.get(port_id)  # it may have been stored since
        return record.spec.backend if record else None

    def _queue(self, calls: Sequence[Call]) -> None:
        by_backend: dict[str, list[Call]] = {}
        for call in calls:
            by_backend.setdefault(self._backend_of(call), []).append(call)
        for backend, mine in by_backend.items():
            try:
                self._workers[backend].submit(*mine)
            except NetpluginError as error:
                for call in mine:
                    call.refuse(error)

    async def _submit(self, call: Call) -> Any:
        self._queue([call])
        return await self._wait(call)

    async def _wait(self, call: Call) -> Any:
        return await answer(call.future, call.deadline, call.port_id)

    async def _batch_result(self, port_id: str, call: _Answer) -> BatchResult:
        try:
            if isinstance(call, NetpluginError):
                raise call
            if isinstance(call, Call):
                done = await self._wait(call)
            else:
                done = await call if call else None
        except NetpluginError as error:
            return BatchResult(port_id=port_id, status=error.status, error=error.for_port(port_id).problem())
        except Exception as error:
            LOG.exception("unexpected", extra={"port_id": port_id})
            unexpected = HostError(repr(error), step="agent", port_id=port_id)
            return BatchResult(port_id=port_id, status=500, error=unexpected.problem())
        if isinstance(done, Record):
            return BatchResult(port_id=port_id, status=200, port=self.describe(done))
        return BatchResult(port_id=port_id, status=204)


def _no_port(port_id: str) -> NotFound:
    return NotFound(f"there is no port {port_id}", step="lookup", port_id=port_id)


def _or_error(make: Any, *args: Any) -> Any:
    try:
        return make(*args)
    except NetpluginError as error:
        return error
