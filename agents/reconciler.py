"""Brings the ports of one backend to the desired state: the only code path that changes the host.

A plug converges one port, a restart converges all ports, and a dry run stops after the plan. The
order is always: commit the intent, converge, read back, record the result, answer.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from agents.converge import Converged, Stopwatch, converge
from agents.metrics import Metrics
from agents.orphans import Orphans, findings
from agents.quarantines import Quarantines
from agents.store import Record, Store
from agents.store_marks import StoreMarks
from netplugin.backend import Backend, Change, Claim, Intent, Observation, ObservedPort, Usability
from netplugin.errors import (
    Conflict,
    FieldError,
    HostError,
    InvalidRequest,
    NetpluginError,
    OperationTimeout,
    TryAgain,
    as_host_error,
)
from netplugin.models import Finding, PlannedChange, PortSpec, PortState, ReconcileReport, VfInfo

LOG = logging.getLogger(__name__)

# Seconds for cleaning up after a failure; later reconciles remove what is left.
_UNDO_S = 5.0
#: Maximum duration of a reconcile of the whole host, in seconds.
CHECK_S = 120.0
_LOOK_S = 10.0
#: Maximum delay of a retry that the host requested, in seconds.
NEXT_TRY_S = 1.0


@dataclass
class Put:
    """A request to create or change a port. ``future`` gets the record or the error."""

    port_id: str
    spec: PortSpec
    deadline: float
    future: Future[Record]
    #: The port whose VF this one is the standby of, if any.
    standby_of: str | None = None
    queued_at: float = field(default_factory=time.monotonic)


@dataclass
class Delete:
    """A request to delete a port. ``future`` gets None or the error."""

    port_id: str
    deadline: float
    future: Future[None]
    queued_at: float = field(default_factory=time.monotonic)


Operation = Put | Delete


@dataclass(frozen=True)
class _Begun:
    """A call that is being retried: the state of its port before the call."""

    before: Record | None
    #: Whether the port existed on the host.
    was_there: bool


#: States of a port that the agent can manage.
_WORKING = (PortState.ACTIVE, PortState.DEGRADED)


@dataclass(frozen=True)
class Spread:
    """The result of a network change.

    ``reached`` is false if the change could not be applied to any port that worked before.
    """

    reached: bool = True
    failures: tuple[NetpluginError, ...] = ()


class Reconciler:
    """Not thread-safe: one lane calls it. Any thread may read ``observed``."""

    def __init__(
        self,
        backend: Backend[Observation],
        store: Store,
        metrics: Metrics,
        marks: StoreMarks | None = None,
        quarantines: Quarantines | None = None,
    ) -> None:
        """Backends that share a pool share ``quarantines``."""
        self.backend = backend
        self._marks = marks or StoreMarks(store)
        self.observed: dict[str, ObservedPort] = {}
        #: Marked ports without an intent that the last full reconcile left in place, with the
        #: reasons; None before the first one.
        self.orphans: Mapping[str, str] | None = None
        self._adopted = False
        self._store = store
        self._metrics = metrics
        #: Records after an undo that could not be saved.
        self._unsaved: dict[str, Record] = {}
        self._quarantines = quarantines or Quarantines()
        #: The calls that are being retried, by port.
        self._begun: dict[str, _Begun] = {}
        #: Whether the last reconcile left something to retry.
        self._looks_again = False

    def usable(self) -> Usability:
        """Whether the backend is usable and its locks are held by this agent (callable from any thread)."""
        held = self.backend.hold()
        return self.backend.probe() if held.usable else held

    # -- requests of platforms -------------------------------------------------------------------

    def serve(self, operations: Sequence[Operation]) -> list[Operation]:
        """Run the operations as one batch; each gets a result of its own.

        Returns the operations that the host asks to retry. The caller passes them to ``resume``,
        and serves no other operation on their ports before.

        Raises: errors that occur before anything is stored.
        """
        watch = Stopwatch()
        started = time.monotonic()
        self._save_unsaved()
        live = [op for op in operations if self._in_time(op, started)]
        usable = self.usable()  # once per batch, because it reads files
        puts = {
            op.port_id: op for op in live if isinstance(op, Put) and self._acceptable(op, usable)
        }
        before = {port_id: self._store.get(port_id) for port_id in puts}
        deletes = self._accept_deletes([op for op in live if isinstance(op, Delete)])
        records, seen = self._accept_puts(puts, list(deletes), watch)
        wanted = {**records, **deletes}
        waiting: dict[str, Operation] = {op.port_id: op for op in live if op.port_id in wanted}
        return self._carry_out(waiting, wanted, before, seen, watch, started)

    def resume(self, operations: Sequence[Operation], *, last: bool = False) -> list[Operation]:
        """Retry the operations that ``serve`` or ``resume`` returned; ``last``: return none."""
        begun = {op.port_id: self._begun.pop(op.port_id) for op in operations}
        records = {op.port_id: self._store.get(op.port_id) for op in operations}
        wanted = {i: record for i, record in records.items() if record is not None}
        waiting = {op.port_id: op for op in operations if op.port_id in wanted}
        gone = {op.port_id: op for op in operations if op.port_id not in wanted}
        self._answer(gone, {})  # deleted by ``abandon`` meanwhile
        return self._carry_out(
            waiting, wanted, {i: call.before for i, call in begun.items()}, None, Stopwatch(),
            time.monotonic(), begun=begun, last=last,
        )  # fmt: skip

    def _carry_out(
        self,
        waiting: dict[str, Operation],
        wanted: dict[str, Record],
        before: Mapping[str, Record | None],
        seen: Observation | None,
        watch: Stopwatch,
        started: float,
        *,
        begun: Mapping[str, _Begun] | None = None,
        last: bool = False,
    ) -> list[Operation]:
        """Apply the stored intents of these ports to the host. Returns the operations to retry.

        ``begun``: they were tried before.
        """
        if not waiting:
            return []
        deadline = min(op.deadline for op in waiting.values()) - _UNDO_S / 2
        try:
            self.backend.hold().require()
            until = max(deadline, started + 0.5)
            if seen is None:
                with watch.part("observe"):
                    seen = self.backend.observe(list(wanted), until)
                watch.add(seen.timings_ms)
            result = self._converge(wanted.values(), until, watch, "plug", seen)
        except Exception as error:
            result = Converged(_each(wanted, error, "converge"), {}, ())
        again = [
            op
            for op in waiting.values()
            if not last and _has_time(op) and _asks_again(op.port_id, result)
        ]
        still_begun: dict[str, _Begun] = {}
        for op in again:
            i = op.port_id
            was_there = seen is not None and i in seen.ports
            still_begun[i] = (begun or {}).get(i) or _Begun(before.get(i), was_there)
            del waiting[i], wanted[i]
        records = {i: wanted[i] for i, op in waiting.items() if isinstance(op, Put)}
        failures = {i: e for i, e in result.failed.items() if i in wanted}
        faults = _faults({i: r for i, r in records.items() if i not in failures}, result)
        for port_id in faults.keys() & records.keys():
            if not _is_only_impaired(port_id, result) and not _stays(
                before[port_id], records[port_id].spec
            ):
                fault = faults.pop(port_id)
                failures[port_id] = _lasting(fault) if begun else fault
        for port_id, op in waiting.items():
            queue_ms = (started - op.queued_at) * 1e3
            timings = {name: round(ms, 3) for name, ms in watch.timings_ms.items()}
            timings |= {"queue": round(queue_ms, 3)}
            timings |= {"total": round((time.monotonic() - op.queued_at) * 1e3, 3)}
            wanted[port_id] = replace(wanted[port_id], timings_ms=timings)
        failures |= self._record_done(wanted, failures, faults)
        for port_id, op in waiting.items():
            kind = type(op).__name__.lower()
            timings = dict(wanted[port_id].timings_ms or {})
            self._metrics.served(self.backend.name, kind, timings, failures.get(port_id))
        failed = {i: wanted[i] for i in records if i in failures}
        if seen is None and begun is None:
            failed = self._restore(failed, before)
        else:
            # Ports that existed before the call are not undone: after a lost store they are the
            # NICs of VMs. Ports whose deletion was requested are removed nevertheless.
            there = {
                i
                for i in failed
                if (begun[i].was_there if begun else seen is not None and i in seen.ports)
                and ((was := before[i]) is None or was.state is not PortState.REMOVING)
            }
            failed = self._keep(failed, failures, there)
        self._undo(failed, failures)
        self._answer(waiting, failures)
        self._begun |= still_begun
        return again

    def _in_time(self, op: Operation, now: float) -> bool:
        if not op.future.set_running_or_notify_cancel():
            return False  # the caller has disconnected, perhaps after its timeout
        if now < op.deadline:
            return True
        late = OperationTimeout(
            "the operation's turn did not come in time", step="queue", port_id=op.port_id
        )
        op.future.set_exception(late)
        return False

    def _acceptable(self, op: Put, usability: Usability) -> bool:
        """Refuse what cannot be done, before anything is stored."""
        try:
            usability.require()
            before = self._store.get(op.port_id)
            if before is not None and before.state is PortState.REMOVING:
                before = None
            self._validate(op.spec, before)
            self._require_network(op.spec)
            if before is not None:
                _refuse_fixed(self.backend.fixed_fields, before.spec, op.spec)
        except Exception as error:
            op.future.set_exception(_logged(error, "validate").for_port(op.port_id))
            return False
        return True

    def _validate(self, spec: PortSpec, before: Record | None) -> None:
        """As ``Backend.validate``, but always allow a change of the filter.

        A live port that could not be created today (its network was removed from the options) still
        exists and needs its filter.
        """
        try:
            self.backend.validate(spec)
        except NetpluginError as refused:
            if before is None or not _changed(before.spec, spec) <= {"port_security"}:
                raise
            try:
                self.backend.validate(before.spec)
            except NetpluginError as same:
                if (type(same), same.detail) == (type(refused), refused.detail):
                    return
            raise

    def _require_network(self, spec: PortSpec) -> None:
        if spec.overlay_id is not None and self._store.network(spec.overlay_id) is None:
            raise unknown_overlay(spec.overlay_id)

    def _accept_deletes(self, operations: Sequence[Delete]) -> dict[str, Record]:
        """Mark the ports as removing; they stay so until the host is clean."""
        records: dict[str, Record] = {}
        orphans: list[Delete] = []
        for op in operations:
            record = self._store.get(op.port_id)
            if record is not None and record.spec.backend == self.backend.name:
                records[op.port_id] = replace(record, state=PortState.REMOVING, previous=None)
            elif record is None and self.may_keep(op.port_id):
                orphans.append(op)
            else:
                op.future.set_result(None)
        if orphans:
            self._remove_orphans(orphans)
        try:
            if records:
                self._store.save(records.values())
        except Exception as error:
            wrong = _each(records, error, "store")
            for op in operations:
                if op.port_id in wrong:
                    op.future.set_exception(wrong[op.port_id])
            return {}
        return records

    def may_keep(self, port_id: str) -> bool:
        """Whether the host may have this port without an intent (callable from any thread)."""
        if self.orphans is None:
            return self.usable().usable
        return port_id in self.orphans

    def _remove_orphans(self, operations: Sequence[Delete]) -> None:
        """Remove kept orphans that a call names; there is no intent that could record the request."""
        until = min(op.deadline for op in operations) - _UNDO_S / 2
        intents = [Intent(op.port_id, None) for op in operations]
        try:
            self.backend.hold().require()
            until = max(until, time.monotonic() + 0.5)
            result = converge(self.backend, intents, until, Stopwatch())
            self._counted(result, "orphan")
            failed = result.failed
        except Exception as error:
            failed = _each([op.port_id for op in operations], error, "converge")
        gone = {op.port_id for op in operations} - set(failed)
        self.observed = {i: seen for i, seen in self.observed.items() if i not in gone}
        if self.orphans is not None:
            self.orphans = {i: why for i, why in self.orphans.items() if i not in gone}
        for op in operations:
            if op.port_id in failed:
                op.future.set_exception(failed[op.port_id])
            else:
                LOG.warning("a port without an intent is gone", extra={"port_id": op.port_id})
                op.future.set_result(None)

    def _accept_puts(
        self, puts: Mapping[str, Put], with_them: Sequence[str], watch: Stopwatch
    ) -> tuple[dict[str, Record], Observation | None]:
        """Commit the intents with their claims; a failed claim fails only its port.

        Also returns the observation of the host, if one was needed (``with_them`` included).
        """
        records = {port_id: self._record_of(op) for port_id, op in puts.items()}
        seen: Observation | None = None
        try:
            moment = self._store.moment()
            if records and self._takes:
                with watch.part("observe"):
                    seen = self.backend.observe([*records, *with_them], time.monotonic() + _LOOK_S)
                watch.add(seen.timings_ms)
            with watch.part("store"):
                if seen is None:
                    self._save_changed(records)
                else:
                    with self._store.claiming(moment) as taken:
                        records = self._claim(records, puts, seen, taken)
                        self._save_changed(records)
        except Exception as error:
            for port_id, wrong in _each(records, error, "store").items():
                if not puts[port_id].future.done():
                    puts[port_id].future.set_exception(wrong)
            return {}, None
        return records, seen

    def _save_changed(self, records: Mapping[str, Record]) -> None:
        changed = [r for r in records.values() if r != self._store.get(r.port_id)]
        if changed:
            self._store.save(changed)

    def _record_of(self, op: Put) -> Record:
        """The record of a requested port. A port that was being removed keeps its claims."""
        before = self._store.get(op.port_id)
        if before is None:
            return Record(
                op.port_id, op.spec, PortState.PENDING,
                claims=self._store.claims_before(op.port_id), standby_of=op.standby_of,
            )  # fmt: skip
        if before.state is PortState.REMOVING:
            return Record(
                op.port_id, op.spec, PortState.PENDING, claims=before.claims,
                standby_of=op.standby_of,
            )  # fmt: skip
        if before.spec == op.spec:
            return before
        back_to = before.previous or (
            before.spec if before.state is not PortState.PENDING else None
        )
        return replace(before, spec=op.spec, state=PortState.PENDING, previous=back_to, error=None)

    @property
    def _takes(self) -> bool:
        """Whether ports of this backend claim resources, so that the host is observed before storing."""
        return type(self.backend).claims is not Backend.claims

    def _claim(
        self,
        records: dict[str, Record],
        puts: Mapping[str, Put],
        seen: Observation,
        taken: dict[Claim, str],
    ) -> dict[str, Record]:
        claimed: dict[str, Record] = {}
        for port_id, record in records.items():
            try:
                claims = self.backend.claims(self._intent(record), seen, taken)
            except NetpluginError as error:
                puts[port_id].future.set_exception(error.for_port(port_id))
                continue
            taken.update(dict.fromkeys(claims, port_id))
            claimed[port_id] = replace(record, claims=claims)
        return claimed

    def _record_done(
        self,
        wanted: Mapping[str, Record],
        failures: Mapping[str, NetpluginError],
        faults: Mapping[str, NetpluginError],
    ) -> dict[str, NetpluginError]:
        """Record the results of the calls.

        Ports become active, or degraded if the host reports a fault; deleted ports are forgotten.
        Returns the ports that could not be saved, with the errors.
        """
        saved: list[Record] = []
        gone: list[str] = []
        for port_id, record in wanted.items():
            if port_id in failures:
                continue
            if record.state is PortState.REMOVING:
                gone.append(port_id)
                self.observed.pop(port_id, None)
                continue
            fault = faults.get(port_id)
            state = PortState.DEGRADED if fault else PortState.ACTIVE
            problem = fault.problem() if fault else None
            done = replace(record, state=state, previous=None, error=problem)
            if done != record:
                saved.append(done)
        try:
            if saved or gone:
                self._store.save(saved, forget=gone)
        except Exception as error:
            return _each([*gone, *(record.port_id for record in saved)], error, "store")
        return {}

    def _restore(
        self, records: Mapping[str, Record], before: Mapping[str, Record | None]
    ) -> dict[str, Record]:
        """Restore the store, because the host could not be observed and nothing was written to it.

        Returns the records that the call did not change: their state shows the failure.
        """
        changed = [i for i, record in records.items() if record.spec != _spec_of(before[i])]
        back = [was for i in changed if (was := before[i]) is not None]
        if changed:
            self._save_or_keep(back, [i for i in changed if before[i] is None])
        return {i: record for i, record in records.items() if i not in changed}

    def _keep(
        self,
        records: Mapping[str, Record],
        failures: Mapping[str, NetpluginError],
        there: Collection[str],
    ) -> dict[str, Record]:
        """Keep ports that were already ``there`` at their first plug, to be retried.

        Returns the other records.
        """
        kept = {
            i: replace(r, state=_fallen_state(i, self.observed), error=failures[i].problem())
            for i, r in records.items()
            if i in there and r.previous is None and r.state is PortState.PENDING
        }
        if kept:
            self._save_or_keep(list(kept.values()))
        return {i: record for i, record in records.items() if i not in kept}

    def _undo(self, records: Mapping[str, Record], failures: Mapping[str, NetpluginError]) -> None:
        """Undo failed calls: remove a first plug, revert a change; otherwise only record the failure."""
        undone: dict[str, Record] = {}
        for port_id, record in records.items():
            problem = failures[port_id].problem()
            if record.previous is not None:
                undone[port_id] = replace(record, spec=record.previous, error=problem)
            elif record.state is PortState.PENDING:
                undone[port_id] = replace(record, state=PortState.REMOVING, error=problem)
            else:
                state = _fallen_state(port_id, self.observed)
                self._save_or_keep([replace(record, state=state, error=problem)])
        if not undone:
            return
        deadline = time.monotonic() + _UNDO_S
        try:
            undone = self._save_undone(undone, deadline)
        except Exception as error:
            _logged(error, "store")  # clean up the host nevertheless
            self._unsaved.update(undone)
        try:
            result = self._converge(undone.values(), deadline, Stopwatch(), "undo")
        except Exception as error:
            result = Converged(_each(undone, error, "undo"), {}, ())
        saved, gone = [], []
        for port_id, record in undone.items():
            if record.state is PortState.REMOVING:
                if port_id not in result.failed:
                    gone.append(port_id)
                    self.observed.pop(port_id, None)
            elif port_id in result.failed:
                saved.append(replace(record, state=PortState.FAILED, previous=None))
            else:
                saved.append(replace(record, state=PortState.ACTIVE, previous=None, error=None))
        if not self._unsaved.keys() & undone.keys():
            self._save_or_keep(saved, gone)

    def _save_or_keep(self, records: Sequence[Record], forget: Collection[str] = ()) -> None:
        """Save the records. If the store fails (a full disk), save them before any other work.

        A port that cannot be forgotten is kept as removing; otherwise the next reconcile would plug
        it again.
        """
        try:
            self._store.save(records, forget=forget)
        except Exception as error:
            _logged(error, "store")
            self._unsaved.update({record.port_id: record for record in records})
            for port_id in forget:
                if (left := self._store.get(port_id)) is not None:
                    self._unsaved[port_id] = replace(left, state=PortState.REMOVING, previous=None)

    def _save_unsaved(self) -> None:
        """Save the records that could not be saved before.

        Otherwise an undone port would be plugged again.

        Raises: HostError.
        """
        if not self._unsaved:
            return
        try:
            self._store.save(self._unsaved.values())
        except Exception as error:
            raise as_host_error(error, "store") from error
        self._unsaved = {}

    def _save_undone(self, records: Mapping[str, Record], deadline: float) -> dict[str, Record]:
        """Save the reverted records; reverted changes get the claims of their previous spec."""
        back = dict(records)
        changes = [i for i, r in records.items() if r.state is not PortState.REMOVING]
        moment = self._store.moment()
        seen: Observation | None = None
        if changes and self._takes:
            try:
                seen = self.backend.observe(changes, deadline)
            except Exception as error:
                LOG.warning("claims stay as the change left them: %s", _logged(error, "undo"))
        with self._store.claiming(moment) as taken:
            for port_id in changes:
                if seen is None:
                    break
                try:
                    claims = self.backend.claims(self._intent(back[port_id]), seen, taken)
                except NetpluginError as error:
                    LOG.warning("claims stay as the change left them: %s", error)
                    continue
                taken.update(dict.fromkeys(claims, port_id))
                back[port_id] = replace(back[port_id], claims=claims)
            self._store.save(back.values())
        return back

    def _answer(
        self, waiting: Mapping[str, Operation], failures: Mapping[str, NetpluginError]
    ) -> None:
        for port_id, op in waiting.items():
            error = failures.get(port_id)
            if error is not None:
                LOG.warning("%s failed: %s", type(op).__name__, error, extra={"port_id": port_id})
                op.future.set_exception(error)
            elif isinstance(op, Delete):
                LOG.info("port is gone", extra={"port_id": port_id})
                op.future.set_result(None)
            else:
                record = self._store.get(port_id)
                assert record is not None
                LOG.info("port is %s", record.state.value, extra={"port_id": port_id})
                op.future.set_result(record)

    def converge_network(self, network_id: str, deadline: float) -> Spread:
        """Apply a network to the ports of this backend.

        Raises: what ``Backend.observe`` raises, BackendUnavailable.
        """
        records = {
            r.port_id: r
            for r in self._store.ports_on(network_id)
            if r.spec.backend == self.backend.name
        }
        if not records:
            return Spread()
        working = {i for i, r in records.items() if r.state in _WORKING}
        self.backend.hold().require()
        result = self._converge(records.values(), deadline, Stopwatch(), "network")
        self._record_checked(records, result)
        reached = not working or bool(working - set(result.failed))
        return Spread(reached, tuple(result.failed.values()))

    # -- reconciles and reads of the host ---------------------------------------------------------

    def findings(self) -> list[Finding]:
        """The findings about this backend's part of the host.

        Raises: what ``Backend.observe`` raises.
        """
        self.backend.hold().require()
        seen = self.backend.observe(None, time.monotonic() + _LOOK_S)
        intents = [self._intent(r) for r in self._store.records(backend=self.backend.name)]
        orphans = Orphans.among(self._store, self.backend.name, seen.ports).kept
        return [
            *_of_ports(self.backend.name, self._store),
            *self.backend.findings(seen),
            *self.backend.port_findings(intents, seen),
            *findings(self.backend.name, orphans),
            *self._marks.findings(self.backend.name),
        ]

    def vfs(self) -> list[VfInfo]:
        """All virtual functions of the backend's pool with their states.

        Raises: what ``Backend.observe`` raises.
        """
        seen = self.backend.observe(None, time.monotonic() + _LOOK_S)
        return list(self.backend.vfs(seen, self._store.claims(), self._store.unfit()))

    def _end_quarantines(self, seen: Observation) -> None:
        """End quarantines that are over (see ``Quarantines``)."""
        unfit = self._store.unfit() if self.has_vfs else {}
        there = {vf.pci_address for vf in self.backend.vfs(seen, {}, {})} if unfit else set()
        out_of_order = self.backend.out_of_order(seen) if unfit else ()
        ended = self._quarantines.ended(unfit, there, out_of_order, time.monotonic())
        for claim, why in ended.items():
            LOG.info("%s %s is out of quarantine: %s", claim.kind, claim.key, why)
        if ended:
            self._store.release(ended)

    def abandon(self, port_id: str, claim: Claim) -> None:
        """Forget a port that is being removed and whose virtual function no longer exists.

        Raises: Conflict if the function exists, even if its NIC does not report it now, because the
        port is then removed without help; what ``Backend.observe`` raises.
        """
        seen = self.backend.observe(None, time.monotonic() + _LOOK_S)
        waits = self.backend.plan([Intent(port_id, None, (claim,))], seen).refused.get(port_id)
        states = {vf.pci_address: vf.state for vf in self.backend.vfs(seen, {claim: port_id}, {})}
        if not isinstance(waits, OperationTimeout) or states.get(claim.key) != "stale":
            raise Conflict(
                f"{claim.kind} {claim.key} is there: port {port_id} goes when it is free",
                step="release", port_id=port_id, fix=waits.fix if waits else None,
            )  # fmt: skip
        LOG.warning("forgotten, with %s as it is", claim.key, extra={"port_id": port_id})
        self._store.save([], forget=[port_id])

    @property
    def has_vfs(self) -> bool:
        return type(self.backend).vfs is not Backend.vfs

    def check(
        self,
        ports: Collection[str] | None = None,
        *,
        dry_run: bool = False,
        remove_orphans: bool = False,
        batch_size: int = 32,
    ) -> ReconcileReport:
        """Reconcile these ports, or all ports of the backend, and report the changes.

        Raises: what ``Backend.observe`` raises.
        """
        started = time.monotonic()
        self._save_unsaved()
        self.backend.hold().require()
        # Before this check adds a report, which no operator has compared yet.
        accepts = remove_orphans and not dry_run and self._marks.told(self.backend.name)
        if ports is None and self._store.database.failure:
            self._store.database.try_to_write()  # there may be no other write for a long time
        records = {
            r.port_id: r
            for r in self._store.records(backend=self.backend.name)
            if ports is None or r.port_id in ports
        }
        if ports is not None and not records:
            return ReconcileReport(dry_run=dry_run, ports=0, changes=[])
        watch = Stopwatch()
        moment = self._store.moment()
        with watch.part("observe"):
            seen = self.backend.observe(
                None if ports is None else list(records), time.monotonic() + _LOOK_S
            )
        if not dry_run:
            self._end_quarantines(seen)
            if ports is None:
                self._compare_store(records, seen)
                records |= self._adopt_claims(records, seen, moment)
        intents = [self._intent(r) for r in records.values()]
        kept: Mapping[str, str] = {}
        if ports is None:
            orphans = Orphans.among(self._store, self.backend.name, seen.ports)
            kept = {} if remove_orphans else orphans.kept
            gone = {*orphans.forgotten, *orphans.kept} - set(kept)
            intents += [Intent(port_id, None) for port_id in sorted(gone)]
            if not dry_run:
                self.orphans = kept
        plan = self.backend.plan(intents, seen)
        planned = [
            PlannedChange(
                backend=self.backend.name,
                change=type(c).__name__,
                ports=c.ports,
                detail=c.describe(),
            )
            for c in plan.changes
        ]
        report = ReconcileReport(
            dry_run=dry_run, ports=len(records), changes=planned, orphans_kept=list(kept)
        )
        if dry_run:
            report.errors = [e.for_port(p).problem() for p, e in plan.refused.items()]
            return report
        for change in planned:
            LOG.warning("drift: %s", change.detail, extra={"port_id": ",".join(change.ports)})
        touched = {port for change in plan.changes for port in change.ports}
        if ports is None:
            self._looks_again = False
        result = self._converge_in_chunks(intents, touched, seen, watch, ports is None, batch_size)
        errors = [*result.failed.values(), *(_left(change) for change in result.left)]
        report.errors = [error.problem() for error in errors]
        self._record_checked(records, result)
        if accepts:
            self._marks.accept(self.backend.name)
        LOG.info(
            "%s: looked at %d ports in %.0f ms, %d changes, %d failures", self.backend.name,
            len(records), (time.monotonic() - started) * 1e3, len(result.changes), len(errors),
        )  # fmt: skip
        return report

    def _compare_store(self, records: Mapping[str, Record], seen: Observation) -> None:
        """Compare the store with the one that changed the host last, before applying the plan."""
        lacking = [
            i
            for i, r in records.items()
            if i not in seen.ports and r.state not in (PortState.REMOVING, PortState.PENDING)
        ]
        self._marks.compare(self.backend.name, seen.store_mark, lacking)

    def _adopt_claims(
        self, records: Mapping[str, Record], seen: Observation, moment: int
    ) -> dict[str, Record]:
        """Once: add the claims of ports that an earlier version created without them."""
        adopted: dict[str, Record] = {}
        if self._adopted or not self._takes:
            return adopted
        self._adopted = True
        with self._store.claiming(moment) as taken:
            for port_id, record in records.items():
                if record.state is PortState.REMOVING or port_id not in seen.ports:
                    continue
                try:
                    claims = self.backend.claims(self._intent(record), seen, taken)
                except NetpluginError as error:
                    LOG.debug("nothing to adopt: %s", error, extra={"port_id": port_id})
                    continue
                if set(record.claims) < set(claims):
                    adopted[port_id] = replace(record, claims=claims)
            if adopted:
                self._store.save(adopted.values())
        return adopted

    def _converge_in_chunks(
        self,
        intents: Sequence[Intent],
        touched: Collection[str],
        seen: Observation,
        watch: Stopwatch,
        whole: bool,
        batch_size: int,
    ) -> Converged:
        """Converge in chunks, because a large transaction stalls ovs-vswitchd for seconds."""
        deadline = time.monotonic() + CHECK_S
        changes = [i for i in intents if i.port_id in touched]
        fresh: Observation | None = seen
        if len(changes) > batch_size:
            for start in range(0, len(changes), batch_size):
                chunk = changes[start : start + batch_size]
                self._counted(converge(self.backend, chunk, deadline, watch), "drift")
            fresh = None
        result = converge(self.backend, intents, deadline, watch, whole=whole, seen=fresh)
        self._counted(result, "drift")
        if whole:
            self.observed = dict(result.observed)
        else:
            self.observed = {**self.observed, **result.observed}
        return result

    def _record_checked(self, records: Mapping[str, Record], result: Converged) -> None:
        saved: list[Record] = []
        gone: list[str] = []
        faults = _faults(records, result)
        for port_id, record in records.items():
            failure, fault = result.failed.get(port_id), faults.get(port_id)
            if port_id in self._begun:
                continue  # the call that is being retried decides
            if isinstance(failure, TryAgain):
                self._looks_again = True
                continue
            if record.state is PortState.REMOVING:
                if failure is None:
                    gone.append(port_id)
                continue
            if failure is not None:
                state = PortState.FAILED
            else:
                state = PortState.DEGRADED if fault else PortState.ACTIVE
            error = failure or fault
            problem = error.problem() if error else None
            previous = record.previous if failure else None
            checked = replace(record, state=state, error=problem, previous=previous)
            if checked != record:
                LOG.info("port is %s", state.value, extra={"port_id": port_id})
                saved.append(checked)
        if saved or gone:
            self._store.save(saved, forget=gone)

    def unsettled(self) -> bool:
        """Whether a port is not in its desired state yet, so that another reconcile is due soon."""
        return (
            bool(self._unsaved)
            or self._looks_again
            or self._store.any_in(
                self.backend.name, PortState.PENDING, PortState.REMOVING, PortState.FAILED
            )
        )

    def kept(self) -> dict[str, str]:
        """The orphans that no call has adopted since, with the reasons (callable from any thread)."""
        return {i: why for i, why in (self.orphans or {}).items() if not self._has_record(i)}

    def _has_record(self, port_id: str) -> bool:
        record = self._store.get(port_id)
        return record is not None and record.spec.backend == self.backend.name

    # -- shared ----------------------------------------------------------------------------------

    def _converge(
        self,
        records: Iterable[Record],
        deadline: float,
        watch: Stopwatch,
        why: str,
        seen: Observation | None = None,
    ) -> Converged:
        intents = [self._intent(record) for record in records]
        result = converge(self.backend, intents, deadline, watch, seen=seen)
        self._counted(result, why)
        self.observed = {**self.observed, **result.observed}
        return result

    def _intent(self, record: Record) -> Intent:
        if record.state is PortState.REMOVING:
            return Intent(record.port_id, None, record.claims)
        overlay = self._store.network(record.spec.overlay_id)
        stamp = self._store.stamp(record.port_id)
        return Intent(record.port_id, record.spec, record.claims, overlay, stamp)

    def _counted(self, result: Converged, why: str) -> None:
        for change in result.changes:
            self._metrics.changed(self.backend.name, type(change).__name__, why)
        for claim, reason in result.unfit.items():
            LOG.warning("%s %s goes into quarantine: %s", claim.kind, claim.key, reason)
        self._store.quarantine(result.unfit)


def _faults(records: Mapping[str, Record], result: Converged) -> dict[str, NetpluginError]:
    """The faults of ports that are configured correctly but do not work."""
    faults: dict[str, NetpluginError] = {}
    for port_id in records:
        seen, kept = result.observed.get(port_id), result.kept.get(port_id)
        if kept is not None:
            faults[port_id] = kept.for_port(port_id)
        elif seen is not None and (fault := seen.fault or seen.impaired):
            faults[port_id] = HostError(fault, step="verify", port_id=port_id)
    return faults


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
    return OperationTimeout(
        f"{fault.detail}: it did not end in time", step=fault.step, port_id=fault.port_id
    )


def _has_time(op: Operation) -> bool:
    """Whether enough time is left for a retry and an undo."""
    return time.monotonic() + NEXT_TRY_S < op.deadline - _UNDO_S / 2


def _changed(before: PortSpec, after: PortSpec) -> set[str]:
    return {f for f in PortSpec.model_fields if getattr(before, f) != getattr(after, f)}


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
    return before.state is not PortState.ACTIVE or _changed(before.spec, spec) <= {"port_security"}


def _of_ports(backend: str, store: Store) -> list[Finding]:
    """Findings about failed and degraded ports, one per state and cause."""
    alike: dict[tuple[str, str, str, str | None], list[Record]] = defaultdict(list)
    for record in store.records(backend=backend):
        error = record.error
        if error is not None and record.state in (PortState.FAILED, PortState.DEGRADED):
            alike[record.state.value, error.code, error.step, error.fix].append(record)
    findings = []
    for (state, code, step, fix), records in sorted(alike.items(), key=lambda item: item[0][:3]):
        ids = [record.port_id for record in records]
        some = ", ".join(ids[:5]) + (" and others" if len(ids) > 5 else "")
        why = records[0].error.detail if records[0].error else ""
        findings.append(
            Finding(
                id=f"{backend}-ports-{state}", status="fail",
                found=f"{len(ids)} ports are {state} ({some}), {code} at {step}: {why}",
                expected="every port is active", fix=fix,
            )
        )  # fmt: skip
    return findings


def _logged(error: Exception, step: str) -> NetpluginError:
    """Convert an exception to a NetpluginError; unexpected ones are logged with their traceback."""
    if not isinstance(error, NetpluginError):
        LOG.error("unexpected at %s", step, exc_info=error)
    return as_host_error(error, step)


def _each(port_ids: Iterable[str], error: Exception, step: str) -> dict[str, NetpluginError]:
    """The error as an error of each of these ports."""
    wrong = _logged(error, step)
    return {port_id: wrong.for_port(port_id) for port_id in port_ids}


def _left(change: Change) -> HostError:
    """The error of a failed change that belongs to no port; otherwise it would be retried silently."""
    error = HostError(f"the host does not let go: {change.describe()}", step="verify")
    LOG.warning("%s", error)
    return error


def _fallen_state(port_id: str, observed: Mapping[str, ObservedPort]) -> PortState:
    seen = observed.get(port_id)
    return PortState.DEGRADED if seen is not None and seen.fault else PortState.FAILED


def _spec_of(record: Record | None) -> PortSpec | None:
    """The spec that a record has on the host; None if it is being removed."""
    return None if record is None or record.state is PortState.REMOVING else record.spec


def _refuse_fixed(fixed: Collection[str], before: PortSpec, after: PortSpec) -> None:
    changed = sorted(_changed(before, after) & set(fixed))
    if changed:
        raise Conflict(
            f"{', '.join(changed)} cannot change on a live port", step="validate",
            fix="delete the port and ask for it again",
        )  # fmt: skip


def unknown_overlay(network_id: str) -> InvalidRequest:
    """The error for a port on a VXLAN network that was not created."""
    message = f"there is no network {network_id!r} on this host"
    return InvalidRequest(
        f"network.network_id: {message}", step="validate", fix=f"PUT /v1/networks/{network_id}",
        errors=[FieldError(field="network.network_id", message=message)],
    )  # fmt: skip


def unknown_backend(name: str, known: Iterable[str]) -> InvalidRequest:
    """The error for a backend that is not enabled on this host."""
    message = f"{name!r} is not enabled here (enabled: {', '.join(sorted(known)) or 'none'})"
    return InvalidRequest(
        f"backend: {message}",
        step="validate",
        errors=[FieldError(field="backend", message=message)],
    )
