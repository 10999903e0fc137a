"""Whether a call is accepted: the one place that refuses a spec, and that stores what was accepted."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from agents.ports.backend_ports import BackendPorts, for_each, logged
from agents.ports.converge import Stopwatch, converge
from agents.ports.migration import outcome, refuse_in_migration
from agents.ports.operations import LOOK_S, UNDO_S, Delete, Migrate, Operation, Put
from agents.store.port_table import Record
from netplugin.api.conditions import NO_CONDITION
from netplugin.api.errors import (
    Conflict,
    FieldError,
    InvalidRequest,
    NetpluginError,
    NotFound,
    OperationTimeout,
    PreconditionFailed,
    Unsupported,
)
from netplugin.api.models import (
    PortSpec,
    PortState,
)
from netplugin.backend import Claim, Intent, Observation, chosen_name, claim_name
from netplugin.host.usability import Usability

LOG = logging.getLogger(__name__)


class Admission:
    """Refuses calls before anything is stored, and stores the intents of the others with their claims."""

    def __init__(self, ports: BackendPorts) -> None:
        self._ports = ports

    def in_time(self, op: Operation, now: float) -> bool:
        if not op.future.set_running_or_notify_cancel():
            return False  # the caller has disconnected, perhaps after its timeout
        if now < op.deadline:
            return True
        late = OperationTimeout("the operation's turn did not come in time", step="queue", port_id=op.port_id)
        op.future.set_exception(late)
        return False

    def acceptable(self, op: Put, usability: Usability) -> bool:
        """Refuse what cannot be done, before anything is stored, and complete the spec."""
        try:
            before = self._ports.store.get(op.port_id)
            if before is not None and before.state is PortState.REMOVING:
                before = None
            if before is not None:
                refuse_in_migration(before.migration)
            if op.amend is not None:
                op.spec = op.amend(self._stored(before))
            op.spec = self._with_network(op.spec)
            if op.condition != NO_CONDITION:
                is_done = before is not None and before.spec == op.spec
                there = self._ports.store.intent_tag(before)
                op.condition.require(f"port {op.port_id}", there, is_done=is_done)
            usability.require()
            self._validate(op.spec, before)
            if before is not None:
                _refuse_fixed(before.spec, op.spec)
        except Exception as error:
            op.future.set_exception(logged(error, "validate").for_port(op.port_id))
            return False
        return True

    def may_migrate(self, op: Migrate, usability: Usability) -> bool:
        """Refuse a step that does not follow or that the backend cannot do; set what it makes of the port."""
        try:
            if not self._ports.backend.features.live_migration:
                raise Unsupported(
                    f"backend {self._ports.backend.name} has no live migration",
                    step="validate",
                    fix="see the backend's features: GET /v1/backends",
                )
            before = self._ports.store.get(op.port_id)
            gone = before is None or before.state is PortState.REMOVING
            there = None if before is None or gone else (before.spec, before.migration)
            spec = self._with_network(op.spec) if op.spec else None
            self._check_migration(op.port_id, None if gone else before, spec)
            now = datetime.now(UTC)
            op.outcome = outcome(op.step, op.activation, spec, there, now)
            if not op.outcome.removes:
                usability.require()
            if there is None and spec is not None:
                self._validate(spec, None)
            op.spec = there[0] if there else spec
        except Exception as error:
            op.future.set_exception(logged(error, "validate").for_port(op.port_id))
            return False
        return True

    def _check_migration(self, port_id: str, before: Record | None, spec: PortSpec | None) -> None:
        """Refuse a step for a port that the backend does not migrate. Raises: Unsupported."""
        migrates = self._ports.extras.migrates
        intent = self._ports.intent(before) if before is not None else Intent(port_id, spec)
        if migrates is not None and intent.spec is not None:
            migrates.check_migration(intent)

    def _stored(self, record: Record | None) -> PortSpec:
        """The spec that an amendment changes. Raises: NotFound."""
        if record is None or record.spec.backend != self._ports.backend.name:
            raise NotFound("the port was deleted meanwhile", step="validate")
        return record.spec

    def _validate(self, spec: PortSpec, before: Record | None) -> None:
        """As ``Backend.validate``, but always allow a change of the filter.

        A live port that could not be created today (its network was removed from the options) still
        exists and needs its filter.
        """
        try:
            self._ports.backend.validate(spec)
        except NetpluginError as refused:
            if before is None or not spec.differing(before.spec) <= {"port_security"}:
                raise
            try:
                self._ports.backend.validate(before.spec)
            except NetpluginError as same:
                if (type(same), same.detail) == (type(refused), refused.detail):
                    return
            raise

    def _with_network(self, spec: PortSpec) -> PortSpec:
        """The spec with the MTU of its VXLAN network, which a port may leave out.

        Raises: InvalidRequest if the network does not exist or has another MTU.
        """
        if spec.overlay_id is None:
            return spec
        network = self._ports.store.network(spec.overlay_id)
        if network is None:
            raise _invalid(
                "network.network_id",
                f"there is no network {spec.overlay_id!r} on this host",
                f"PUT /v1/networks/{spec.overlay_id}",
            )
        mtu = network.spec.mtu
        if "mtu" in spec.network.model_fields_set and spec.network.mtu != mtu:
            message = f"is {spec.network.mtu}, and network {spec.overlay_id} has {mtu}"
            raise _invalid("network.mtu", message, "leave it out")
        return spec.model_copy(update={"network": spec.network.model_copy(update={"mtu": mtu})})

    def accept_deletes(self, operations: Sequence[Delete | Migrate]) -> dict[str, Record]:
        """Mark the ports as removing; they stay so until the host is clean."""
        records: dict[str, Record] = {}
        orphans: list[Delete | Migrate] = []
        for op in operations:
            record = self._ports.store.get(op.port_id)
            try:
                op.condition.require_missing_or(f"port {op.port_id}", self._ports.store.intent_tag(record))
            except PreconditionFailed as changed:
                op.future.set_exception(changed.for_port(op.port_id))
                continue
            if record is not None and record.spec.backend == self._ports.backend.name:
                records[op.port_id] = replace(record, state=PortState.REMOVING, previous=None, migration=None)
            elif record is None and self._ports.may_keep(op.port_id):
                orphans.append(op)
            else:
                op.future.set_result(None)
        if orphans:
            self._remove_orphans(orphans)
        unsaved = self._ports.store.save_each(records.values())
        for op in operations:
            if op.port_id in unsaved:
                op.future.set_exception(logged(unsaved[op.port_id], "store").for_port(op.port_id))
        return {i: record for i, record in records.items() if i not in unsaved}

    def _remove_orphans(self, operations: Sequence[Delete | Migrate]) -> None:
        """Remove kept orphans that a call names; there is no intent that could record the request."""
        until = min(op.deadline for op in operations) - UNDO_S / 2
        intents = [Intent(op.port_id, None) for op in operations]
        try:
            self._ports.backend.hold().require()
            until = max(until, time.monotonic() + 0.5)
            failed = converge(self._ports, intents, until, Stopwatch(), "orphan").failed
        except Exception as error:
            failed = for_each([op.port_id for op in operations], error, "converge")
        gone = {op.port_id for op in operations} - set(failed)
        self._ports.observed = {i: seen for i, seen in self._ports.observed.items() if i not in gone}
        if self._ports.orphans is not None:
            self._ports.orphans = {i: why for i, why in self._ports.orphans.items() if i not in gone}
        for op in operations:
            if op.port_id in failed:
                op.future.set_exception(failed[op.port_id])
            else:
                LOG.warning("a port without an intent is gone", extra={"port_id": op.port_id})
                op.future.set_result(None)

    def accept_puts(
        self, puts: Mapping[str, Put | Migrate], with_them: Sequence[str], watch: Stopwatch
    ) -> tuple[dict[str, Record], Observation | None]:
        """Commit the intents with their claims; a port that cannot be committed fails alone.

        Also returns the observation of the host, if one was needed (``with_them`` included).
        """
        records = {port_id: self._record_of(op) for port_id, op in puts.items()}
        seen: Observation | None = None
        try:
            commit_sequence = self._ports.store.commit_sequence()
            needs = self._ports.extras.claims
            if records and needs:
                with watch.part("observe"):
                    seen = self._ports.backend.observe([*records, *with_them], time.monotonic() + LOOK_S)
                watch.add(seen.timings_ms)
            with watch.part("store"):
                if needs is None and not any(chosen_name(record.spec) for record in records.values()):
                    unsaved = self._save_changed(records)
                else:
                    with self._ports.store.claiming(commit_sequence) as taken:
                        records = self._claim(records, puts, seen, taken)
                        unsaved = self._save_changed(records)
        except Exception as error:
            for port_id, wrong in for_each(records, error, "store").items():
                if not puts[port_id].future.done():
                    puts[port_id].future.set_exception(wrong)
            return {}, None
        for port_id, refused in unsaved.items():
            puts[port_id].future.set_exception(logged(refused, "store").for_port(port_id))
        return {i: record for i, record in records.items() if i not in unsaved}, seen

    def _save_changed(self, records: Mapping[str, Record]) -> dict[str, Exception]:
        changed = [r for r in records.values() if r != self._ports.store.get(r.port_id)]
        return self._ports.store.save_each(changed)

    def _record_of(self, op: Put | Migrate) -> Record:
        """The record of a requested port. A port that was being removed keeps its claims."""
        before = self._ports.store.get(op.port_id)
        migration = op.outcome.migration if isinstance(op, Migrate) and op.outcome else None
        assert op.spec is not None
        if before is None or before.state is PortState.REMOVING:
            return Record(
                op.port_id,
                op.spec,
                PortState.PENDING,
                claims=before.claims if before else self._ports.store.claims_before(op.port_id),
                standby_of=op.standby_of,
                migration=migration,
            )
        if isinstance(op, Migrate):
            return before if migration == before.migration else replace(before, migration=migration)
        if before.spec == op.spec:
            return before
        back_to = before.previous or (before.spec if before.state is not PortState.PENDING else None)
        return replace(before, spec=op.spec, state=PortState.PENDING, previous=back_to, error=None)

    def _claim(
        self,
        records: dict[str, Record],
        puts: Mapping[str, Put | Migrate],
        seen: Observation | None,
        taken: dict[Claim, str],
    ) -> dict[str, Record]:
        claimed: dict[str, Record] = {}
        needs = self._ports.extras.claims
        for port_id, record in records.items():
            try:
                intent = self._ports.intent(record)
                claims = needs.claims(intent, seen, taken) if needs and seen else claim_name(intent, taken)
            except NetpluginError as error:
                puts[port_id].future.set_exception(error.for_port(port_id))
                continue
            taken.update(dict.fromkeys(claims, port_id))
            claimed[port_id] = replace(record, claims=claims)
        return claimed


def _refuse_fixed(before: PortSpec, after: PortSpec) -> None:
    rules = ((name, type(after).rules()[name]) for name in after.differing(before))
    of_device = after.device is not None
    changed = sorted(name for name, rule in rules if not (rule.live or (rule.live_of_device and of_device)))
    if changed:
        raise Conflict(
            f"{', '.join(changed)} cannot change on a live port",
            step="validate",
            fix="delete the port and ask for it again",
        )


def unknown_backend(name: str, known: Iterable[str]) -> InvalidRequest:
    """The error for a backend that is not enabled on this host."""
    return _invalid(
        "backend", f"{name!r} is not enabled here (enabled: {', '.join(sorted(known)) or 'none'})"
    )


def _invalid(field: str, message: str, fix: str | None = None) -> InvalidRequest:
    return InvalidRequest(
        f"{field}: {message}",
        step="validate",
        fix=fix,
        errors=[FieldError(field=field, message=message)],
    )
