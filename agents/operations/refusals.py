"""A service port and a port of a VM share their ids: which call refuses which (pure)."""

from __future__ import annotations

from agents.store.port_table import Record
from netplugin.api.errors import Conflict, FieldError, InvalidRequest
from netplugin.api.models import PortSpec


def refuse_service(record: Record | None, port_id: str, spec: PortSpec | None = None) -> None:
    """For a call on a VM's port. ``record``: what is stored with this id; ``spec``: what is requested.

    Raises: Conflict, InvalidRequest.
    """
    field = None if spec is None else "device" if spec.device else "internal" if spec.internal else None
    if field is not None:
        message = "it is of service ports only"
        raise InvalidRequest(
            f"{field}: {message}",
            step="validate",
            port_id=port_id,
            fix=f"PUT /v1/service-ports/{port_id} puts a device of the host on a network",
            errors=[FieldError(field=field, message=message)],
        )
    if record is not None and record.spec.device is not None:
        raise Conflict(
            f"{port_id} is a service port, of device {record.spec.device}",
            step="validate",
            port_id=port_id,
            fix=f"use /v1/service-ports/{port_id}, or another id",
        )


def refuse_vms(record: Record | None, port_id: str) -> None:
    """For a call on a service port. Raises: Conflict."""
    if record is not None and record.spec.device is None:
        raise Conflict(
            f"{port_id} is a port of VM {record.spec.vm_id}",
            step="validate",
            port_id=port_id,
            fix=f"use /v1/ports/{port_id}, or another id",
        )
