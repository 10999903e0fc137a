"""The data models of calls for several ports: which ones to list, batches, and changes of their VLAN."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, Field, model_validator

from netplugin.api.conditions import Condition
from netplugin.api.errors import Conflict, InvalidRequest
from netplugin.api.fields import Flag, Name, PortId, Value, VlanId, at_most
from netplugin.api.models import Port, PortSpec, PortState
from netplugin.api.page_models import Page
from netplugin.api.problem import Problem


class PortFilter(Page):
    """Selects the ports to list; a port must match all given fields."""

    vm_id: Name | None = None
    state: PortState | None = None
    backend: Name | None = None
    #: A physical network, or the ID of a VXLAN network.
    network: Name | None = None


def _tags(text: str) -> str:
    try:
        Condition.parse([text], ())
    except InvalidRequest as wrong:
        raise ValueError(wrong.errors[0].message) from wrong
    return text


class BatchPut(Value):
    """``if_match``: as the header If-Match of a PUT, for this port alone."""

    port_id: PortId
    spec: PortSpec
    if_match: Annotated[str, AfterValidator(_tags)] | None = None

    @property
    def condition(self) -> Condition:
        return Condition.parse([self.if_match] if self.if_match is not None else (), ())


class Batch(Value):
    """Several ports in one request; each has a result of its own.

    ``override``: those of the fleet are changed too, until its next change of them.
    """

    put: Annotated[tuple[BatchPut, ...], Field(max_length=4096), at_most(4096)] = ()
    delete: Annotated[tuple[PortId, ...], Field(max_length=4096), at_most(4096)] = ()
    override: Flag = False

    def condition_of(self, entry: BatchPut) -> Condition:
        return replace(entry.condition, override=self.override)

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


class Retag(Value):
    """Ports that get another VLAN: all on ``from_vlan`` of a physical network, or those in ``ports``."""

    to_vlan: VlanId
    network: Name | None = None
    from_vlan: VlanId | None = None
    ports: Annotated[tuple[PortId, ...], Field(max_length=4096), at_most(4096)] = ()

    @model_validator(mode="after")
    def _chosen_in_one_way(self) -> Self:
        if bool(self.ports) == (self.network is not None) or bool(self.ports) == (self.from_vlan is not None):
            raise ValueError("give network and from_vlan, or ports")
        if len(self.ports) != len(set(self.ports)):
            raise ValueError("ports: a port_id may occur once")
        if self.from_vlan == self.to_vlan:
            raise ValueError("to_vlan is the same as from_vlan")
        return self

    def is_of(self, spec: PortSpec) -> bool:
        """Whether a port with this spec is to be changed."""
        network = spec.network
        if network.type != "vlan":
            return False
        return bool(self.ports) or (network.physical_network, network.vlan_id) == (
            self.network,
            self.from_vlan,
        )

    def amended(self, spec: PortSpec) -> PortSpec:
        """The spec on the new VLAN. Raises: Conflict if the port is not, or no longer, to be changed."""
        if not self.is_of(spec):
            on = " ".join(str(part) for part in spec.network.model_dump(exclude={"mtu"}).values() if part)
            requested = f"VLAN {self.from_vlan} of {self.network}" if self.network else "a VLAN"
            raise Conflict(f"the port is on {on}, not on {requested}", step="validate", fix="PUT the port")
        network = spec.network.model_copy(update={"vlan_id": self.to_vlan})
        return spec.model_copy(update={"network": network})
