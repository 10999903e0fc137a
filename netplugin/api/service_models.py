"""The data models of service ports: devices of the host that join a network, such as a DHCP server's."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, model_validator

from netplugin.api.fields import DeviceName, Flag, Mac, Name, PortId, Value
from netplugin.api.models import Network, PortSecurity, PortSpec, PortState
from netplugin.api.problem import Problem


class ServicePortSpec(Value):
    """The requested configuration of a service port.

    ``device`` is a veth, tap or dummy device of the host that exists already; it stays when the port
    is deleted. With ``internal`` it is an internal port of OVS of this name, which the agent makes and
    deletes; the caller moves it into a namespace. ``mac`` is the address that the service sends from.
    ``trusted``: untagged frames from any address are admitted, and ``port_security`` does not apply.
    """

    device: DeviceName
    internal: Flag = False
    backend: Name
    network: Network
    mac: Mac
    trusted: Flag = False
    port_security: PortSecurity = PortSecurity()

    @model_validator(mode="after")
    def _one_rule(self) -> Self:
        if not self.port_security.enabled:
            raise ValueError("port_security.enabled is true for a service port; trusted: true is without it")
        if self.trusted and self.port_security != PortSecurity():
            raise ValueError("port_security does not belong to a trusted port")
        return self

    def as_port(self, port_id: str) -> PortSpec:
        """The port as the agent stores it; in place of a VM it has its own id."""
        security = PortSecurity(enabled=False) if self.trusted else self.port_security
        return PortSpec(
            vm_id=port_id,
            mac=self.mac,
            backend=self.backend,
            network=self.network,
            port_security=security,
            device=self.device,
            internal=self.internal,
        )

    @classmethod
    def of(cls, spec: PortSpec) -> Self:
        """The reverse of ``as_port``."""
        trusted = not spec.port_security.enabled
        return cls(
            device=str(spec.device),
            internal=spec.internal,
            backend=spec.backend,
            network=spec.network,
            mac=spec.mac,
            trusted=trusted,
            port_security=PortSecurity() if trusted else spec.port_security,
        )


class ServicePort(BaseModel):
    """A service port of this host; ``observed`` is its configuration as last read from the host."""

    port_id: PortId
    state: PortState
    spec: ServicePortSpec
    observed: dict[str, Any] | None = None
    error: Problem | None = None
    timings_ms: dict[str, float] = {}
