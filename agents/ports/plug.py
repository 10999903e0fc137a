"""Calls carried out together: accept, store, converge, read back, record, answer."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from agents.ports.admit import Admission
from agents.ports.backend_ports import BackendPorts, for_each, logged
from agents.ports.converge import Converged, Stopwatch, converge, faults_of
from agents.ports.migration import followed, opens
from agents.ports.operations import NEXT_TRY_S, UNDO_S, Begun, Delete, Migrate, Operation, Put
from agents.ports.undo import Undo
from agents.store.port_table import Record
from netplugin.api.errors import (
    NetpluginError,
    OperationTimeout,
    TryAgain,
)
from netplugin.api.models import (
    PortSpec,
    PortState,
)
from netplugin.backend import Observation

LOG = logging.getLogger(__name__)


class Plug:
    """Carries out PUTs and DELETEs of one backend. Not thread-safe."""

    def __init__(self, ports: BackendPorts) -> None:
        self._ports = ports
        self._admission = Admission(ports)
        self._undo = Undo(ports)

    def serve(self, operations: Sequence[Operation]) -> list[Operation]:
        """Run the operations as one batch; each gets a result of its own.

        Returns the operations that the host asks to retry. The caller passes them to ``resume``,
        and serves no other operation on their ports before.

        Raises: errors that occur before anything is stored.
        """
        watch = Stopwatch()
        started = time.monotonic()
        self._ports.save_unsaved()
        live = [op for op in operations if self._admission.in_time(op, started)]
        usable = self._ports.usable()  # once per batch, because it reads files
        puts = {
            op.port_id: op for op in live if isinstance(op, Put) and self._admission.acceptable(op, usable)
        }
        steps = [op for op in live if isinstance(op, Migrate) and self._admission.may_migrate(op, usable)]
        changes: dict[str, Put | Migrate] = {**puts, **{op.port_id: op for op in steps if not _removes(op)}}
        before = {port_id: self._ports.store.get(port_id) for port_id in changes}
        deletes = self._admission.accept_deletes(
            [op for op in live if isinstance(op, Delete)] + [op for op in steps if _removes(op)]
        )
        records, seen = self._admission.accept_puts(changes, list(deletes), watch)
        wanted = {**records, **deletes}
        waiting: dict[str, Operation] = {op.port_id: op for op in live if op.port_id in wanted}
        return self._carry_out(waiting, wanted, before, seen, watch, started)

    def resume(self, operations: Sequence[Operation], *, last: bool = False) -> list[Operation]:
        """Retry the operations that ``serve`` or ``resume`` returned; ``last``: return none."""
        begun = {op.port_id: self._ports.begun.pop(op.port_id) for op in operations}
        records = {op.port_id: self._ports.store.get(op.port_id) for op in operations}
        wanted = {i: record for i, record in records.items() if record is not None}
        waiting = {op.port_id: op for op in operations if op.port_id in wanted}
        gone = {op.port_id: op for op in operations if op.port_id not in wanted}
        self._answer(gone, {})  # deleted by ``abandon`` meanwhile
        return self._carry_out(
            waiting,
            wanted,
            {i: call.before for i, call in begun.items()},
            None,
            Stopwatch(),
            time.monotonic(),
            begun=begun,
            last=last,
        )

    def _carry_out(
        self,
        waiting: dict[str, Operation],
        wanted: dict[str, Record],
        before: Mapping[str, Record | None],
        seen: Observation | None,
        watch: Stopwatch,
        started: float,
        *,
        begun: Mapping[str, Begun] | None = None,
        last: bool = False,
    ) -> list[Operation]:
        """Apply the stored intents of these ports to the host. Returns the operations to retry.

        ``begun``: they were tried before.
        """
        if not waiting:
            return []
        deadline = min(op.deadline for op in waiting.values()) - UNDO_S / 2
        try:
            self._ports.backend.hold().require()
            until = max(deadline, started + 0.5)
            if seen is None:
                with watch.part("observe"):
                    seen = self._ports.backend.observe(list(wanted), until)
                watch.add(seen.timings_ms)
            intents = self._ports.intents(wanted.values())
            result = converge(self._ports, intents, until, watch, "plug", seen=seen)
        except Exception as error:
            result = Converged(for_each(wanted, error, "converge"), {}, ())
        again = [
            op for op in waiting.values() if not last and _has_time(op) and _asks_again(op.port_id, result)
        ]
        still_begun: dict[str, Begun] = {}
        for op in again:
            i = op.port_id
            was_there = seen is not None and i in seen.ports
            still_begun[i] = (begun or {}).get(i) or Begun(before.get(i), was_there)
            del waiting[i], wanted[i]
        records = {i: wanted[i] for i in waiting if wanted[i].state is not PortState.REMOVING}
        failures = {i: e for i, e in result.failed.items() if i in wanted}
        faults = faults_of({i: r for i, r in records.items() if i not in failures}, result)
        for port_id in faults.keys() & records.keys():
            is_step = isinstance(waiting[port_id], Migrate) and before[port_id] is not None
            stays = is_step or _stays(before[port_id], records[port_id].spec)
            if not _is_only_impaired(port_id, result) and not stays:
                fault = faults.pop(port_id)
                failures[port_id] = _lasting(fault) if begun else fault
        for port_id, op in waiting.items():
            queue_ms = (started - op.queued_at) * 1e3
            timings = {name: round(ms, 3) for name, ms in watch.timings_ms.items()}
            timings |= {"queue": round(queue_ms, 3)}
            timings |= {"total": round((time.monotonic() - op.queued_at) * 1e3, 3)}
            wanted[port_id] = replace(wanted[port_id], timings_ms=timings)
        done, gone = self._outcomes(wanted, failures, faults)
        # Before they are committed: the intents are, and a start after a crash finds these states
        # again by looking at the host.
        self._ports.store.show(done)
        opened = [op.port_id for op in waiting.values() if isinstance(op, Migrate) and _opens(op, before)]
        self._ports.announcer.expect(opened)
        self._ports.announcer.begin(i for i in waiting if i not in failures)
        self._ports.follow([wanted[i] for i in waiting if i not in failures])
        self._ports.follow_again |= any(_is_followed(wanted[i], result) for i in waiting)
        self._answer({i: op for i, op in waiting.items() if i in records and i not in failures}, {})
        failures |= self._save_outcomes(done, gone)
        for port_id, op in waiting.items():
            kind = type(op).__name__.lower()
            timings = dict(wanted[port_id].timings_ms or {})
            self._ports.metrics.served(self._ports.backend.name, kind, timings, failures.get(port_id))
        failed = {i: wanted[i] for i in records if i in failures}
        if seen is None and begun is None:
            failed = self._undo.restore(failed, before)
        else:
            # Ports that existed before the call are not undone: after a lost store they are the
            # NICs of VMs. Ports whose deletion was requested are removed nevertheless.
            there = {
                i
                for i in failed
                if (begun[i].was_there if begun else seen is not None and i in seen.ports)
                and ((was := before[i]) is None or was.state is not PortState.REMOVING)
            }
            failed = self._undo.keep(failed, failures, there)
        self._undo.undo(failed, failures)
        self._answer({i: op for i, op in waiting.items() if not op.future.done()}, failures)
        self._tell(waiting, failures)
        self._ports.begun |= still_begun
        return again

    def _outcomes(
        self,
        wanted: Mapping[str, Record],
        failures: Mapping[str, NetpluginError],
        faults: Mapping[str, NetpluginError],
    ) -> tuple[list[Record], list[str]]:
        """The records that become active, or degraded if the host reports a fault, where that is a change;
        and the ports that are deleted."""
        done: list[Record] = []
        gone: list[str] = []
        for port_id, record in wanted.items():
            if port_id in failures:
                continue
            if record.state is PortState.REMOVING:
                gone.append(port_id)
                self._ports.observed.pop(port_id, None)
                continue
            fault = faults.get(port_id)
            state = PortState.DEGRADED if fault else PortState.ACTIVE
            problem = fault.problem() if fault else None
            settled = replace(record, state=state, previous=None, error=problem)
            if settled != record:
                done.append(settled)
        return done, gone

    def _save_outcomes(self, done: Sequence[Record], gone: Sequence[str]) -> dict[str, NetpluginError]:
        """Commit what became of the calls.

        Returns the deleted ports that could not be forgotten, with the errors. The other records are kept
        until the store takes them: their callers have been answered.
        """
        unsaved = self._ports.store.save_each(done, forget=gone)
        self._ports.unsaved.update({r.port_id: r for r in done if r.port_id in unsaved})
        return {i: logged(unsaved[i], "store").for_port(i) for i in gone if i in unsaved}

    def _answer(self, waiting: Mapping[str, Operation], failures: Mapping[str, NetpluginError]) -> None:
        for port_id, op in waiting.items():
            error = failures.get(port_id)
            if error is not None:
                op.future.set_exception(error)
            elif isinstance(op, Delete) or (isinstance(op, Migrate) and _removes(op)):
                op.future.set_result(None)
            else:
                record = self._ports.store.get(port_id)
                assert record is not None
                op.future.set_result(record)

    def _tell(self, operations: Mapping[str, Operation], failures: Mapping[str, NetpluginError]) -> None:
        """Log what became of calls: after all else, as the log is a lock that answers need too."""
        for port_id, op in operations.items():
            error, record = failures.get(port_id), self._ports.store.get(port_id)
            if error is not None:
                LOG.warning("%s failed: %s", type(op).__name__, error, extra={"port_id": port_id})
            elif isinstance(op, Delete) or record is None:
                LOG.info("port is gone", extra={"port_id": port_id})
            else:
                LOG.info("port is %s", record.state.value, extra={"port_id": port_id})


def _removes(step: Migrate) -> bool:
    return step.outcome is not None and step.outcome.removes


def _is_followed(record: Record, result: Converged) -> bool:
    """Whether the guest does not do, by now, what the phase of its port waits for."""
    seen, now = result.observed.get(record.port_id), datetime.now(UTC)
    return seen is not None and followed(record.migration, seen.guest, now) is not record.migration


def _opens(step: Migrate, before: Mapping[str, Record | None]) -> bool:
    """Whether a step opens a port that was closed, or may have been forwarded to elsewhere."""
    was = before.get(step.port_id)
    migration = step.outcome.migration if step.outcome else None
    return was is not None and was.migration != migration and opens(was.migration, migration)


def _is_only_impaired(port_id: str, result: Converged) -> bool:
    """Whether the only fault of a port is outside of it (``impaired``)."""
    seen = result.observed.get(port_id)
    return port_id not in result.kept and seen is not None and not seen.fault


def _asks_again(port_id: str, result: Converged) -> bool:
    """Whether the host asks to retry the operation on a port."""
    if port_id in result.failed:
        return isinstance(result.failed[port_id], TryAgain)
    seen = result.observed.get(port_id)
    return seen is not None and seen.passes


def _lasting(fault: NetpluginError) -> OperationTimeout:
    """The error of a call that was retried for a fault that did not clear."""
    return OperationTimeout(f"{fault.detail}: it did not end in time", step=fault.step, port_id=fault.port_id)


def _has_time(op: Operation) -> bool:
    """Whether enough time is left for a retry and an undo."""
    return time.monotonic() + NEXT_TRY_S < op.deadline - UNDO_S / 2


def _stays(before: Record | None, spec: PortSpec) -> bool:
    """Whether a change stays in force although the host reports a fault of the port.

    False for a first plug, and for a change of anything but the filter of a port that worked: that
    may have caused the fault. Otherwise the fault is unrelated, and an undo could, for example,
    revert a tightened filter.
    """
    if before is None or before.state is PortState.REMOVING:
        return False
    if before.state is PortState.PENDING and before.previous is None:
        return False
    return before.state is not PortState.ACTIVE or spec.differing(before.spec) <= {"port_security"}
