"""The data models of calls for several ports: which ones to list, and batches with their results."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, Field, model_validator

from netplugin.api.errors import Problem
from netplugin.api.fields import Name, PortId, Value, at_most
from netplugin.api.models import Port, PortSpec, PortState


class PortFilter(Value):
    """Selects the ports to list; a port must match all given fields."""

    vm_id: Name | None = None
    state: PortState | None = None
    backend: Name | None = None
    #: A physical network, or the ID of a VXLAN network.
    network: Name | None = None


class BatchPut(Value):
    port_id: PortId
    spec: PortSpec


class Batch(Value):
    """Several ports in one request; each has a result of its own."""

    put: Annotated[tuple[BatchPut, ...], Field(max_length=4096), at_most(4096)] = ()
    delete: Annotated[tuple[PortId, ...], Field(max_length=4096), at_most(4096)] = ()

    @model_validator(mode="after")
    def _once_each(self) -> Self:
        ids = [entry.port_id for entry in self.put] + list(self.delete)
        if len(ids) != len(set(ids)):
            raise ValueError("a port_id may occur in a batch once")
        return self


class BatchResult(BaseModel):
    port_id: PortId
    status: int
    port: Port | None = None
    error: Problem | None = None


class BatchResults(BaseModel):
    results: list[BatchResult]
