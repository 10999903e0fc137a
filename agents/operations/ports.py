"""Calls about ports: put, delete, batch, retag, list. A change is queued in the worker of its backend."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from agents.host.health import Health
from agents.ports.call import Amend, Call
from agents.ports.reconciler import CHECK_S
from agents.ports.teams import Teams, standby_id
from agents.store.port_table import Record
from agents.store.store import Store
from agents.worker import BackendWorker, answer
from netplugin.api.batch_models import Batch, BatchResult, BatchResults, PortFilter, Retag
from netplugin.api.conditions import NO_CONDITION, Condition, intent_tag
from netplugin.api.errors import Conflict, HostError, InvalidRequest, NetpluginError, NotFound
from netplugin.api.migration_models import MigrateRequest
from netplugin.api.models import Binding, Port, PortSpec, PortState, ReconcileReport, ReconcileRequest
from netplugin.backend import Intent
from netplugin.fleet.names import Kind
from netplugin.host.supervisor import Supervisor
from netplugin.host.usability import Wake

LOG = logging.getLogger(__name__)
#: What is awaited for a port: a call for its worker, one that runs for it and its standby, or nothing.
_Pending: TypeAlias = Call | asyncio.Future[Any] | None


class PortOperations:
    """For the event loop only. Calls for a port with a standby are those of ``teams``."""

    def __init__(
        self,
        store: Store,
        workers: Mapping[str, BackendWorker],
        health: Health,
        supervisor: Supervisor,
        *,
        teaming_backend: str,
        timeout_s: float,
    ) -> None:
        self._store = store
        self._workers = workers
        self._health = health
        self._timeout_s = timeout_s
        self.teams = Teams(
            store, teaming_backend, self.put_alone, self.delete_alone, self._has_call, supervisor
        )

    async def put(self, port_id: str, spec: PortSpec, condition: Condition = NO_CONDITION) -> Port:
        """Create or change a port. Raises: any NetpluginError; then the port is unchanged."""
        return self.describe(await self._carried_out(self._put_call(port_id, spec, condition)))

    async def delete(self, port_id: str, condition: Condition = NO_CONDITION) -> None:
        await self._carried_out(self._delete_call(port_id, condition))

    async def batch(self, batch: Batch) -> BatchResults:
        calls = [
            (entry.port_id, partial(self._put_call, entry.port_id, entry.spec, batch.condition_of(entry)))
            for entry in batch.put
        ]
        condition = Condition(override=batch.override)
        deletes = [(port_id, partial(self._delete_call, port_id, condition)) for port_id in batch.delete]
        return await self._each([*calls, *deletes])

    async def retag(self, retag: Retag) -> BatchResults:
        """Change the VLAN of ports, those of a backend in one batch."""
        group = object()
        ports = retag.ports or self.moved_by(retag)
        return await self._each(
            [(port_id, partial(self._amend_call, port_id, retag.amended, group)) for port_id in ports]
        )

    def moved_by(self, retag: Retag) -> dict[str, PortSpec]:
        """The ports that a retag moves, with their specs before it."""
        records = self._store.records(network=retag.network)
        if retag.ports:
            records = [r for r in map(self._store.get, retag.ports) if r is not None]
        return {
            record.port_id: record.spec
            for record in records
            if retag.is_of(record.spec)
            and record.standby_of is None
            and record.state is not PortState.REMOVING
        }

    def find(self, criteria: PortFilter) -> Iterator[Port]:
        """The ports that match and are after the begin of the page, ordered by port id."""
        records = self._store.records(
            vm_id=criteria.vm_id, backend=criteria.backend, network=criteria.network
        )
        records = [r for r in records if r.spec.device is None and r.port_id > criteria.begin]
        ports = (self.describe(record) for record in records)
        # Filter by the reported state: see ``describe_alone``.
        return (port for port in ports if criteria.state in (None, port.state))

    def nics_of(self, vm_id: str) -> list[Port]:
        """The ports of a VM; a standby port is part of another port's binding."""
        return [port for port in self.find(PortFilter(vm_id=vm_id)) if port.standby_of is None]

    def get(self, port_id: str) -> Port:
        """Raises: NotFound."""
        record = self._store.get(port_id)
        if record is None or record.spec.device is not None:
            raise _no_port(port_id)
        return self.describe(record)

    def intent_tag(self, port: Port) -> str:
        """The part of the entity tag of a port that stands for what was requested."""
        return intent_tag(port.spec, self._store.stamp(port.port_id))

    def describe(self, record: Record) -> Port:
        """The port as it is reported, together with its standby."""
        return self.teams.reported(self.describe_alone(record), self.describe_alone)

    def describe_alone(self, record: Record) -> Port:
        worker = self._workers.get(record.spec.backend)
        observed = worker.ports.observed.get(record.port_id) if worker else None
        removing = record.state is PortState.REMOVING
        # Without a backend, the state of the port is unknown.
        not_loaded = None if worker else self._health.not_loaded(record.spec.backend, record.port_id)
        return Port(
            port_id=record.port_id,
            state=record.state if removing or not_loaded is None else PortState.FAILED,
            spec=record.spec,
            binding=self._binding(worker, record) if worker and not removing else None,
            observed=dict(observed.details) if observed else None,
            error=not_loaded.problem() if not_loaded else record.error,
            timings_ms=dict(record.timings_ms or {}),
            standby_of=record.standby_of,
            migration=record.migration if record.migration and not record.migration.has_ended else None,
        )

    def _binding(self, worker: BackendWorker, record: Record) -> Binding | None:
        overlay = self._store.network(record.spec.overlay_id)
        try:
            return worker.ports.backend.binding(replace(record, overlay=overlay))
        except NetpluginError as error:
            LOG.warning("no binding: %s", error, extra={"port_id": record.port_id})
            return None

    async def reconcile(self, request: ReconcileRequest) -> ReconcileReport:
        """Reconcile all backends. Raises: Overloaded."""
        report = ReconcileReport(dry_run=request.dry_run, ports=0, changes=[])
        deadline = self._deadline()
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

    # -- a single port, for callers that have checked what kind it is --------------------------------

    async def put_alone(
        self,
        port_id: str,
        spec: PortSpec,
        standby_of: str | None = None,
        condition: Condition = NO_CONDITION,
    ) -> Record:
        record: Record = await self._carried_out(self._put(port_id, spec, standby_of, condition))
        return record

    async def delete_alone(
        self, port_id: str, standby_of: str | None = None, condition: Condition = NO_CONDITION
    ) -> None:
        await self._carried_out(self._delete(port_id, standby_of, condition))

    async def migrate_alone(
        self, port_id: str, request: MigrateRequest, standby_of: str | None = None
    ) -> Record | None:
        port = Intent(port_id, None)
        if request.port is not None:
            port = Record(port_id, request.port, standby_of=standby_of)
        call = Call(port, self._deadline(), step=request.phase, activation=request.activation)
        record: Record | None = await self._carried_out(call)
        return record

    def check_step(self, port_id: str, spec: PortSpec | None) -> None:
        """Refuse a step of a migration that is none of a VM's own port. Raises: NetpluginError."""
        self._refuse_service(port_id, spec)
        if spec is not None:
            self._put(port_id, spec)
        else:
            self._delete(port_id)

    def backend_of(self, port_id: str) -> str | None:
        """The backend that has the port, has a call for it in its queue, or may have kept an orphan of it."""
        workers = self._workers.items()
        return self._holder(port_id) or next((n for n, w in workers if w.ports.may_keep(port_id)), None)

    def wake_standby(self, port_id: str) -> None:
        """Have the standby of a team leave frames to the VF, or take them (callable from any thread)."""
        record = self._store.get(standby_id(port_id))
        worker = self._workers.get(record.spec.backend) if record is not None else None
        if record is not None and worker is not None:
            worker.wake(Wake("its VM took its VF or gave it back", frozenset({record.port_id})))

    # -- calls -----------------------------------------------------------------------------------

    def _put_call(self, port_id: str, spec: PortSpec, condition: Condition) -> _Pending:
        self._refuse_service(port_id, spec)
        self._store.fleet.require_free(Kind.PORT, port_id, condition)
        if self.teams.concerns(port_id, spec):
            return asyncio.ensure_future(self.teams.put(port_id, spec, condition))
        return self._put(port_id, spec, condition=condition)

    def _delete_call(self, port_id: str, condition: Condition = NO_CONDITION) -> _Pending:
        self._refuse_service(port_id)
        self._store.fleet.require_free(Kind.PORT, port_id, condition)
        if self.teams.concerns(port_id):
            return asyncio.ensure_future(self.teams.delete(port_id, condition))
        return self._delete(port_id, condition=condition)

    def _amend_call(self, port_id: str, amend: Amend, group: object) -> _Pending:
        self._store.fleet.require_free(Kind.PORT, port_id, NO_CONDITION)
        if self.teams.concerns(port_id):
            return asyncio.ensure_future(self.teams.amend(port_id, amend))
        record = self._store.get(port_id)
        if record is None:
            raise _no_port(port_id)
        call = self._put(port_id, amend(record.spec))
        call.amend, call.group = amend, group
        return call

    def _put(
        self,
        port_id: str,
        spec: PortSpec,
        standby_of: str | None = None,
        condition: Condition = NO_CONDITION,
    ) -> Call:
        if spec.backend not in self._workers:
            raise self._health.missing(spec.backend, port_id)
        self.teams.refuse_half(port_id, standby_of)
        holder = self._holder(port_id)
        if holder not in (None, spec.backend):
            raise Conflict(
                f"the port is on backend {holder}; a backend is never changed silently",
                step="validate",
                port_id=port_id,
                fix="delete the port and ask for it again",
            )
        return Call(Record(port_id, spec, standby_of=standby_of), self._deadline(), condition=condition)

    def _delete(
        self, port_id: str, standby_of: str | None = None, condition: Condition = NO_CONDITION
    ) -> Call | None:
        self.teams.refuse_half(port_id, standby_of)
        backend = self.backend_of(port_id)
        if backend is None:
            return None
        if backend not in self._workers:
            raise self._health.missing(backend, port_id)
        return Call(Intent(port_id, None), self._deadline(), condition=condition)

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout_s

    def _refuse_service(self, port_id: str, spec: PortSpec | None = None) -> None:
        """For a call on a VM's port, which may share its id with a service port.

        Raises: Conflict, InvalidRequest.
        """
        field = None if spec is None else "device" if spec.device else "internal" if spec.internal else None
        if field is not None:
            fix = f"PUT /v1/service-ports/{port_id} puts a device of the host on a network"
            raise InvalidRequest.of_field(field, "it is of service ports only", fix=fix).for_port(port_id)
        record = self._store.get(port_id)
        if record is not None and record.spec.device is not None:
            raise Conflict(
                f"{port_id} is a service port, of device {record.spec.device}",
                step="validate",
                port_id=port_id,
                fix=f"use /v1/service-ports/{port_id}, or another id",
            )

    def _has_call(self, port_id: str) -> bool:
        return any(worker.is_at(port_id) for worker in self._workers.values())

    def _holder(self, port_id: str) -> str | None:
        """The backend that has the port, or has an operation on it in its queue."""
        record = self._store.get(port_id)
        if record is None:
            for name, worker in self._workers.items():
                if worker.is_at(port_id):
                    return name
            record = self._store.get(port_id)  # it may have been stored since
        return record.spec.backend if record else None

    def _worker_of(self, call: Call) -> BackendWorker:
        # The port may be gone since: then any worker answers.
        backend = call.port.spec.backend if call.port.spec else self.backend_of(call.port_id)
        return self._workers[backend or next(iter(self._workers))]

    def _queue(self, calls: Sequence[Call]) -> None:
        """Those of a worker at once: it may take them as one batch. An error is that of their futures."""
        by_worker: dict[BackendWorker, list[Call]] = {}
        for call in calls:
            by_worker.setdefault(self._worker_of(call), []).append(call)
        for worker, mine in by_worker.items():
            try:
                worker.submit(*mine)
            except NetpluginError as error:
                for call in mine:
                    call.refuse(error)

    async def _carried_out(self, call: _Pending) -> Any:
        if isinstance(call, Call):
            self._queue([call])
        return await _answered(call)

    async def _each(self, calls: Sequence[tuple[str, Callable[[], _Pending]]]) -> BatchResults:
        """The result of each call; all of them are queued before the first is awaited."""
        begun: list[tuple[str, _Pending | NetpluginError]] = []
        for port_id, make in calls:
            try:
                begun.append((port_id, make()))
            except NetpluginError as refused:
                begun.append((port_id, refused))
        self._queue([call for _, call in begun if isinstance(call, Call)])
        return BatchResults(results=[await self._result(port_id, call) for port_id, call in begun])

    async def _result(self, port_id: str, call: _Pending | NetpluginError) -> BatchResult:
        try:
            if isinstance(call, NetpluginError):
                raise call
            record = await _answered(call)
        except NetpluginError as error:
            return BatchResult(port_id=port_id, status=error.status, error=error.for_port(port_id).problem())
        except Exception as error:
            LOG.exception("unexpected", extra={"port_id": port_id})
            unexpected = HostError(repr(error), step="agent", port_id=port_id)
            return BatchResult(port_id=port_id, status=500, error=unexpected.problem())
        if record is None:
            return BatchResult(port_id=port_id, status=204)
        return BatchResult(port_id=port_id, status=200, port=self.describe(record))


async def _answered(call: _Pending) -> Any:
    """The result of a call that has been queued."""
    if isinstance(call, Call):
        return await answer(call.future, call.deadline, call.port_id)
    return await call if call is not None else None


def _no_port(port_id: str) -> NotFound:
    return NotFound(f"there is no port {port_id}", step="lookup", port_id=port_id)
