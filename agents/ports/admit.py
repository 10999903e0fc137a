"""Whether a call is accepted: the one place that refuses a spec, and that stores what was accepted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from agents.ports.backend_ports import BackendPorts, for_each, logged
from agents.ports.call import Call
from agents.ports.migration import outcome, refuse_in_migration
from agents.store.port_table import Record
from netplugin.api.conditions import NO_CONDITION
from netplugin.api.errors import (
    Conflict,
    InvalidRequest,
    NetpluginError,
    NotFound,
    OperationTimeout,
    Unsupported,
)
from netplugin.api.models import PortSpec, PortState
from netplugin.backend import Observation
from netplugin.host.usability import Usability

# -- admit ---------------------------------------------------------------------------------------


def admitted(ports: BackendPorts, calls: Iterable[Call], now: float) -> list[Call]:
    """Those to be carried out, each with the port before it and as it is to be; others are answered."""
    in_time = [call for call in calls if _is_in_time(call, now)]
    usable = ports.usable()  # once per batch, because it reads files
    return [call for call in in_time if _accept(ports, call, usable)]


def _is_in_time(call: Call, now: float) -> bool:
    if not call.future.set_running_or_notify_cancel():
        return False  # the caller has disconnected, perhaps after its timeout
    if now >= call.deadline:
        call.refuse(OperationTimeout("the operation's turn did not come in time", step="queue"))
    return now < call.deadline


def _accept(ports: BackendPorts, call: Call, usable: Usability) -> bool:
    stored = ports.store.get(call.port_id)
    there = None if stored is None or stored.state is PortState.REMOVING else stored
    if there is not None and there.state is PortState.PENDING:
        # The agent ended before it stored what became of the port, and may have answered that it works.
        there = replace(there, previous=there.spec)
    call.before = stored
    try:
        if call.kind == "put":
            call.record = _put(ports, call, there, usable)
        elif call.kind == "migrate":
            call.record = _migrated(ports, call, there, usable)
        if call.record is None:
            return _accept_removal(ports, call)
    except Exception as error:
        call.refuse(logged(error, "validate"))
        return False
    return True


def _put(ports: BackendPorts, call: Call, there: Record | None, usable: Usability) -> Record:
    """The port as a PUT makes it. Raises: NetpluginError."""
    if there is not None:
        refuse_in_migration(there.migration)
    spec = call.port.spec
    if call.amend is not None:
        if there is None or ports.get(call.port_id) is None:
            raise NotFound("the port was deleted meanwhile", step="validate")
        spec = call.amend(there.spec)
    assert spec is not None
    spec = _with_network(ports, spec)
    if call.condition != NO_CONDITION:
        is_done = there is not None and there.spec == spec
        tag = ports.store.intent_tag(there)
        call.condition.require(f"port {call.port_id}", tag, is_done=is_done)
    usable.require()
    _validate(ports, spec, there)
    if there is None:
        return _first(ports, call, spec)
    _refuse_fixed(there.spec, spec)
    if there.spec == spec:
        return there
    return replace(there, spec=spec, state=PortState.PENDING, previous=there.spec, error=None)


def _first(ports: BackendPorts, call: Call, spec: PortSpec) -> Record:
    """A port that was not there. One that was being removed keeps its claims."""
    before = call.before
    claims = before.claims if before else ports.store.claims_before(call.port_id)
    standby_of = call.port.standby_of if isinstance(call.port, Record) else None
    return Record(call.port_id, spec, claims, standby_of=standby_of)


def _migrated(ports: BackendPorts, call: Call, there: Record | None, usable: Usability) -> Record | None:
    """The port as a step of a migration makes it; None if it is removed. Raises: NetpluginError."""
    assert call.step is not None
    backend, migrates = ports.backend, ports.extras.migrates
    if not backend.features.live_migration:
        raise Unsupported(
            f"backend {backend.name} has no live migration",
            step="validate",
            fix="see the backend's features: GET /v1/backends",
        )
    spec = _with_network(ports, call.port.spec) if call.port.spec else None
    intent = ports.intent(there) if there is not None else replace(call.port, spec=spec)
    if migrates is not None and intent.spec is not None:
        migrates.check_migration(intent)
    now, had = datetime.now(UTC), (there.spec, there.migration) if there else None
    after = outcome(call.step, call.activation, spec, had, now)
    if after.removes:
        return None
    usable.require()
    if there is not None:
        return there if there.migration == after.migration else replace(there, migration=after.migration)
    assert spec is not None  # without a port, only ``prepare`` has an outcome
    _validate(ports, spec, None)
    return replace(_first(ports, call, spec), migration=after.migration)


def _accept_removal(ports: BackendPorts, call: Call) -> bool:
    """Mark the port as removing: it stays so until the host is clean. Raises: PreconditionFailed."""
    before = call.before
    call.condition.require_missing_or(f"port {call.port_id}", ports.store.intent_tag(before))
    if ports.get(call.port_id) is not None and before is not None:
        call.record = replace(before, state=PortState.REMOVING, previous=None, migration=None)
    elif before is not None or not ports.may_keep(call.port_id):
        call.future.set_result(None)
        return False
    return True


def _validate(ports: BackendPorts, spec: PortSpec, before: Record | None) -> None:
    """As ``Backend.validate``, but always allow a change of the filter.

    A live port that could not be created today (its network was removed from the options) still
    exists and needs its filter.
    """
    try:
        ports.backend.validate(spec)
    except NetpluginError as refused:
        if before is None or not spec.differing(before.spec) <= {"port_security"}:
            raise
        try:
            ports.backend.validate(before.spec)
        except NetpluginError as same:
            if (type(same), same.detail) == (type(refused), refused.detail):
                return
        raise


def _with_network(ports: BackendPorts, spec: PortSpec) -> PortSpec:
    """The spec with the MTU of its VXLAN network, which a port may leave out.

    Raises: InvalidRequest if the network does not exist or has another MTU.
    """
    if spec.overlay_id is None:
        return spec
    network = ports.store.network(spec.overlay_id)
    if network is None:
        raise InvalidRequest.of_field(
            "network.network_id",
            f"there is no network {spec.overlay_id!r} on this host",
            fix=f"PUT /v1/networks/{spec.overlay_id}",
        )
    mtu = network.spec.mtu
    if "mtu" in spec.network.model_fields_set and spec.network.mtu != mtu:
        message = f"is {spec.network.mtu}, and network {spec.overlay_id} has {mtu}"
        raise InvalidRequest.of_field("network.mtu", message, fix="leave it out")
    return spec.model_copy(update={"network": spec.network.model_copy(update={"mtu": mtu})})


# -- store ---------------------------------------------------------------------------------------


def store_removals(ports: BackendPorts, calls: Sequence[Call]) -> list[Call]:
    """Commit the removals: before the host is read, so that they are made later if it cannot be read.

    Returns the calls without those that the store refuses.
    """
    removed = {call.port_id: call.record for call in calls if call.record is not None and call.removes}
    unsaved = ports.store.save_each(removed.values())
    return _refused(calls, {i: logged(error, "store") for i, error in unsaved.items()})


def store(
    ports: BackendPorts, calls: Sequence[Call], observation: Observation, commit_sequence: int
) -> list[Call]:
    """Commit the other calls with their claims, in one transaction; one that cannot be fails alone.

    Returns the calls without these.
    """
    records = {call.port_id: call.record for call in calls if call.record and not call.removes}
    try:
        stored, failed = ports.save_with_claims(records, observation, commit_sequence)
    except Exception as error:
        stored, failed = {}, for_each(records, error, "store")
    for call in calls:
        call.record = stored.get(call.port_id, call.record)
    return _refused(calls, failed)


def _refused(calls: Sequence[Call], failed: dict[str, NetpluginError]) -> list[Call]:
    """Answer the calls that failed; returns the others."""
    for call in calls:
        if call.port_id in failed:
            call.refuse(failed[call.port_id])
    return [call for call in calls if call.port_id not in failed]


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
