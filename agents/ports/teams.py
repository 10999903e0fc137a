"""Teaming: a VF with a standby virtio NIC; two ports that are managed and reported as one.

The guest uses the VF while it is attached, and otherwise the virtio NIC with the same MAC (the
guest's net_failover and QEMU's ``failover``). So the VF can be detached for a live migration. The
virtio NIC is a normal port on the configured backend; ``standby_of`` in its record names the port
of the VF. It is created before the VF and deleted after it. If a crash leaves only one of them,
comparing the two records detects it; failed calls are cleaned up in the same way.

Source: libvirt's formatdomain, "Teaming a virtio/hostdev NIC pair".
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from weakref import WeakValueDictionary

from agents.ports.migration import outcome
from agents.store.port_table import Record
from agents.store.store import Store
from netplugin.api.conditions import NO_CONDITION, Condition
from netplugin.api.errors import Conflict, NetpluginError, NotFound, Unsupported
from netplugin.api.migration_models import MigrateRequest
from netplugin.api.models import Binding, DomainRequirements, Port, PortSpec, PortState
from netplugin.backend import ObservedPort, TeamVf
from netplugin.host.names import device_name
from netplugin.host.supervisor import Supervisor
from netplugin.libvirt.interfaces import fragments, team_interfaces
from netplugin.libvirt.interfaces import text as interface_text

LOG = logging.getLogger(__name__)

_PREFIX = "standby-"
# Seconds between comparisons of the records, which are in memory.
_COMPARE_S = 5.0

PutPort = Callable[[str, PortSpec, str | None, Condition], Awaitable[Record]]
#: A step of a migration for a single port: its ID, the step, and the port that it is the standby of.
Step = Callable[[str, MigrateRequest, str | None], Awaitable[Record | None]]
DeletePort = Callable[[str, str | None, Condition], Awaitable[None]]


def standby_id(port_id: str) -> str:
    """The ID of a port's standby: deterministic and of limited length."""
    return device_name(_PREFIX, port_id)


def standby_spec(spec: PortSpec, backend: str) -> PortSpec:
    """The spec of the standby: that of the VF without the settings that only a VF supports."""
    same = {name: getattr(spec, name) for name, rule in PortSpec.rules().items() if rule.standby}
    same["qos"] = spec.qos.model_copy(update={"min_egress_kbps": None})
    return PortSpec(backend=backend, **same)


class TeamVfs:
    """Which VMs have the VFs of their teams, as it was observed last: a standby leaves frames to a VF in use.

    Shared by the backends: that of the VF reports, that of the standby asks. Any thread may use it.
    """

    def __init__(self) -> None:
        self._in_use: dict[str, bool] = {}
        #: Called with the ID of a team's port after its VM has taken its VF or given it back.
        self.moved: Callable[[str], None] = lambda port_id: None

    def of(self, port_id: str) -> TeamVf:
        """The VF of this port, for the intent of its standby."""
        in_use = self._in_use.get(port_id)
        return TeamVf.UNKNOWN if in_use is None else TeamVf.IN_USE if in_use else TeamVf.FREE

    def see(self, store: Store, observed: Mapping[str, ObservedPort]) -> None:
        """Use what the host has of these ports of one backend."""
        for port_id, port in observed.items():
            if port.guest is None or port.guest is self._in_use.get(port_id):
                continue
            record = store.get(port_id)
            if record is not None and record.spec.vf.teaming:
                self._in_use[port_id] = port.guest
                self.moved(port_id)
        for port_id in list(self._in_use):  # a copy at once: other backends add to it
            if store.get(port_id) is None:
                self._in_use.pop(port_id, None)


@dataclass
class Teams:
    """Not thread-safe: for the event loop only. ``_put`` and ``_delete`` operate on single ports."""

    _store: Store
    #: Of the virtio NICs of new teams; empty: no teams.
    backend: str
    _put: PutPort
    _delete: DeletePort
    _has_call: Callable[[str], bool]
    _supervisor: Supervisor
    # One call at a time per team, so that its two ports never belong to different calls.
    _locks: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)

    async def keep(self) -> None:
        """Compare the records periodically, to repair what a crash or a busy VF left."""
        await self._supervisor.every("teams", _COMPARE_S, self.settle)

    def concerns(self, port_id: str, spec: PortSpec | None = None) -> bool:
        """Whether a call for this port concerns a team: requested, existing, or being created."""
        record = self._store.get(port_id)
        return (
            (spec is not None and spec.vf.teaming)
            or (record is not None and record.spec.vf.teaming)
            or port_id in self._locks
        )

    async def put(self, port_id: str, spec: PortSpec, condition: Condition = NO_CONDITION) -> Record:
        """Create or change both ports, or none. Raises: any NetpluginError; then the team is unchanged."""
        async with self._lock(port_id):
            record = self._store.get(port_id)
            there = None if record is None or record.state is PortState.REMOVING else record
            is_done = there is not None and there.spec == spec
            # Before the standby is changed. Later calls for the team wait for the lock; those before it
            # are found by the worker.
            condition.require(f"port {port_id}", self._store.intent_tag(there), is_done=is_done)
            return await self._put_both(port_id, spec, condition)

    async def amend(self, port_id: str, amend: Callable[[PortSpec], PortSpec]) -> Record:
        """Change both ports by what is stored now. Raises: as ``put``; NotFound; what ``amend`` raises."""
        async with self._lock(port_id):
            record = self._store.get(port_id)
            if record is None or record.state is PortState.REMOVING:
                raise NotFound("the port was deleted meanwhile", step="validate", port_id=port_id)
            return await self._put_both(port_id, amend(record.spec))

    async def _put_both(self, port_id: str, spec: PortSpec, condition: Condition = NO_CONDITION) -> Record:
        self.refuse_half(port_id, None)
        self._refuse_change(port_id, spec)
        if not spec.vf.teaming:
            record = await self._put(port_id, spec, None, condition)
            await self._settle_or_later(port_id)
            return record
        standby = standby_spec(spec, self._chosen_backend())
        try:
            await self._put(standby_id(port_id), standby, port_id, NO_CONDITION)
            return await self._put(port_id, spec, None, condition)
        except BaseException:
            await self._settle_or_later(port_id)
            raise

    async def migrate(self, port_id: str, request: MigrateRequest, step: Step) -> Record | None:
        """Carry out a step of a live migration: the standby has the phases, and ``prepare`` claims a VF.

        The NIC has the MAC of that VF only while a VM uses it, so a prepared VF takes no frame. Returns
        the record of the port; None if both were removed. Raises: as ``put`` and ``Migrations.step``.
        """
        async with self._lock(port_id):
            self.refuse_half(port_id, None)
            if request.port is not None:
                return await self._prepare(port_id, request, request.port, step)
            standby = self._standby(port_id)
            there = (standby.spec, standby.migration) if standby else None
            if outcome(request.phase, request.activation, None, there, datetime.now(UTC)).removes:
                await self._delete(port_id, None, NO_CONDITION)
                await self._settle(port_id)
                return None
            await step(standby_id(port_id), request, port_id)
            return self._store.get(port_id)

    async def _prepare(self, port_id: str, request: MigrateRequest, spec: PortSpec, step: Step) -> Record:
        self._refuse_change(port_id, spec)
        standby = standby_spec(spec, self._chosen_backend())
        try:
            await step(standby_id(port_id), request.model_copy(update={"port": standby}), port_id)
            return await self._put(port_id, spec, None, NO_CONDITION)
        except BaseException:
            await self._settle_or_later(port_id)
            raise

    async def delete(self, port_id: str, condition: Condition = NO_CONDITION) -> None:
        async with self._lock(port_id):
            await self._delete(port_id, None, condition)
            await self._settle(port_id)

    def _lock(self, port_id: str) -> asyncio.Lock:
        return self._locks.setdefault(port_id, asyncio.Lock())

    def _chosen_backend(self) -> str:
        if not self.backend:
            raise Unsupported(
                "vf.teaming: no backend is chosen for the virtio NIC of the VF's team",
                step="validate",
                fix="set [agent] teaming_backend, or ask without vf.teaming",
            )
        return self.backend

    def refuse_half(self, port_id: str, standby_of: str | None) -> None:
        """Refuse direct calls for a standby, and a standby whose ID another port has.

        Raises: Conflict.
        """
        record = self._store.get(port_id)
        if record is not None and record.standby_of != standby_of:
            whose = f"the standby of port {record.standby_of}" if record.standby_of else "in use"
            raise Conflict(
                f"port {port_id} is {whose}",
                step="validate",
                port_id=port_id,
                fix=f"ask for port {record.standby_of}" if record.standby_of else "delete it before",
            )

    def _refuse_change(self, port_id: str, spec: PortSpec) -> None:
        record = self._store.get(port_id)
        if record is None or record.state is PortState.REMOVING:
            return
        if record.spec.vf.teaming != spec.vf.teaming:
            raise Conflict(
                "vf.teaming cannot change on a live port",
                step="validate",
                port_id=port_id,
                fix="delete the port and ask for it again",
            )

    # -- repair ----------------------------------------------------------------------------------

    def unsettled(self) -> list[str]:
        """The ports whose standby needs a repair, except those with an operation in progress."""
        records = {record.port_id: record for record in self._store.records()}
        teams = {i for i, record in records.items() if record.spec.vf.teaming}
        teams |= {record.standby_of for record in records.values() if record.standby_of}
        return sorted(
            port_id
            for port_id in teams
            if port_id not in self._locks
            and not self._has_call(port_id)
            and not self._has_call(standby_id(port_id))
            and not self._is_settled(port_id)
        )

    def _is_settled(self, port_id: str) -> bool:
        record, standby = self._store.get(port_id), self._standby(port_id)
        if record is not None and record.state is PortState.REMOVING:
            return True  # the standby is deleted after the VF
        if record is None or not record.spec.vf.teaming:
            return standby is None
        return standby is not None and (
            standby.spec == standby_spec(record.spec, standby.spec.backend)
            and standby.state is not PortState.REMOVING
        )

    def _standby(self, port_id: str) -> Record | None:
        record = self._store.get(standby_id(port_id))
        return record if record is not None and record.standby_of == port_id else None

    async def _settle(self, port_id: str) -> None:
        """Create, change or delete the standby according to the record of its port."""
        if self._is_settled(port_id):
            return
        record, standby = self._store.get(port_id), self._standby(port_id)
        if record is None or not record.spec.vf.teaming:
            await self._delete(standby_id(port_id), port_id, NO_CONDITION)
            return
        # An existing standby keeps its backend; the option applies to new teams only.
        backend = standby.spec.backend if standby else self._chosen_backend()
        await self._put(standby_id(port_id), standby_spec(record.spec, backend), port_id, NO_CONDITION)

    async def _settle_or_later(self, port_id: str) -> None:
        try:
            await self._settle(port_id)
        except NetpluginError as error:
            LOG.warning("its standby stays for now: %s", error, extra={"port_id": port_id})
        except Exception as error:  # must not hide the caller's error or stop other repairs
            self._supervisor.failed("teams", error)

    async def settle(self) -> None:
        """Repair teams; failures are retried at the next call."""
        for port_id in self.unsettled():
            async with self._lock(port_id):
                await self._settle_or_later(port_id)

    # -- reporting -------------------------------------------------------------------------------

    def reported(self, port: Port, describe: Callable[[Record], Port]) -> Port:
        """The port with the standby's NIC first in the binding, and degraded if the standby is not active.

        While it migrates, the binding has no VF: the VM moves with the standby alone.
        """
        if not port.spec.vf.teaming or port.binding is None:
            return port
        record = self._standby(port.port_id)
        standby = describe(record) if record is not None else None
        if standby is None or standby.binding is None:
            return port  # a call is between its two steps
        both = _joined(standby.port_id, standby.binding, port.binding)
        if standby.migration is not None:
            alone = interface_text(fragments(both.interface_xml)[0])
            both = both.model_copy(update={"interface_xml": alone})
        changed: dict[str, object] = {"binding": both, "migration": standby.migration}
        if port.state is PortState.ACTIVE and standby.state is not PortState.ACTIVE:
            changed |= {"state": PortState.DEGRADED, "error": standby.error}
        return port.model_copy(update=changed)


def _joined(name: str, persistent: Binding, transient: Binding) -> Binding:
    needs = [persistent.domain_requirements, transient.domain_requirements]
    nodes = [need.numa_node for need in needs if need.numa_node is not None]
    return transient.model_copy(
        update={
            "interface_xml": team_interfaces(persistent.interface_xml, transient.interface_xml, name),
            "domain_requirements": DomainRequirements(
                shared_memory=any(need.shared_memory for need in needs),
                hugepages=any(need.hugepages for need in needs),
                numa_node=nodes[0] if nodes else None,
                vfio=any(need.vfio for need in needs),
                qemu_user=persistent.domain_requirements.qemu_user,
            ),
            "standby_port_id": name,
        }
    )
