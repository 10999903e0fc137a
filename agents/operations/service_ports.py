"""Service ports: ports whose NIC is a device of the host. They share the store and the ids of VMs' ports."""

from __future__ import annotations

from collections.abc import Iterator

from agents.operations.ports import PortOperations
from agents.store.port_table import Record
from agents.store.store import Store
from netplugin.api.conditions import NO_CONDITION, Condition, intent_tag
from netplugin.api.errors import Conflict, NotFound
from netplugin.api.service_models import ServicePort, ServicePortSpec
from netplugin.fleet.names import Kind


class ServicePorts:
    """The operations on service ports; each is an operation on the port that the spec stands for."""

    def __init__(self, store: Store, ports: PortOperations) -> None:
        self._store = store
        self._ports = ports

    async def put(
        self, port_id: str, spec: ServicePortSpec, condition: Condition = NO_CONDITION
    ) -> ServicePort:
        """Create or change a service port. Raises: any NetpluginError; then the port is unchanged."""
        self._refuse_vms(port_id)
        self._store.fleet.require_free(Kind.SERVICE_PORT, port_id, condition)
        return self._reported(
            await self._ports.put_alone(port_id, spec.as_port(port_id), condition=condition)
        )

    async def delete(self, port_id: str, condition: Condition = NO_CONDITION) -> None:
        """Take the device off its network. Raises: any NetpluginError."""
        self._refuse_vms(port_id)
        self._store.fleet.require_free(Kind.SERVICE_PORT, port_id, condition)
        await self._ports.delete_alone(port_id, condition=condition)

    def all(self) -> Iterator[ServicePort]:
        """Ordered by port id."""
        return (self._reported(record) for record in self._store.records() if record.spec.device)

    def intent_tag(self, port: ServicePort) -> str:
        """The part of its entity tag that stands for what was requested."""
        return intent_tag(port.spec.as_port(port.port_id), self._store.stamp(port.port_id))

    def get(self, port_id: str) -> ServicePort:
        """Raises: NotFound."""
        record = self._store.get(port_id)
        if record is None or record.spec.device is None:
            raise NotFound(f"there is no service port {port_id}", step="lookup", port_id=port_id)
        return self._reported(record)

    def _refuse_vms(self, port_id: str) -> None:
        """A service port and a port of a VM share their ids. Raises: Conflict."""
        record = self._store.get(port_id)
        if record is not None and record.spec.device is None:
            raise Conflict(
                f"{port_id} is a port of VM {record.spec.vm_id}",
                step="validate",
                port_id=port_id,
                fix=f"use /v1/ports/{port_id}, or another id",
            )

    def _reported(self, record: Record) -> ServicePort:
        port = self._ports.describe_alone(record)
        return ServicePort(
            port_id=port.port_id,
            state=port.state,
            spec=ServicePortSpec.of(port.spec),
            observed=port.observed,
            error=port.error,
            timings_ms=port.timings_ms,
        )
