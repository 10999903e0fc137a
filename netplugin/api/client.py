"""Python client of the agent's HTTP API: takes and returns models, and raises typed errors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from netplugin.api.batch_models import Batch, BatchResults, Retag
from netplugin.api.conditions import ANY
from netplugin.api.connection import Answer, Connection, path_of
from netplugin.api.counter_models import PortCounters
from netplugin.api.domain_models import CheckRequest, DomainPolicy, RenderedDomain, RenderRequest
from netplugin.api.errors import InvalidRequest
from netplugin.api.event_models import EventFilter
from netplugin.api.event_reader import EventReader
from netplugin.api.field_errors import message, valid
from netplugin.api.fields import PciAddress
from netplugin.api.migration_models import MigrateCheck, MigrateRequest
from netplugin.api.models import (
    BackendInfo,
    Finding,
    HostState,
    NetworkInfo,
    NetworkSpec,
    Port,
    PortSpec,
    PortState,
    ReconcileReport,
    ReconcileRequest,
    VfInfo,
)
from netplugin.api.physical_models import PhysicalNetworkInfo, PhysicalNetworkSpec
from netplugin.api.pmd_models import PmdProposal, PmdRequest, PmdState
from netplugin.api.service_models import ServicePort, ServicePortSpec
from netplugin.api.task_models import Task

_NEXT = re.compile(r'<([^>]*)>; rel="next"')
_PCI_ADDRESS: TypeAdapter[str] = TypeAdapter(PciAddress)
_T = TypeVar("_T")


class Readiness(BaseModel):
    """Whether the agent is ready and, if not, the reasons."""

    ready: bool
    reasons: list[str] = []


@dataclass(frozen=True)
class Tagged(Generic[_T]):
    """What the agent answered, and its entity tag, for ``if_match``."""

    value: _T
    tag: str


class Client(Connection):
    """A client of one agent, with a method for each call of the API."""

    # -- ports -----------------------------------------------------------------------------------

    def put_port(
        self, port_id: str, spec: PortSpec, *, if_match: str | None = None, create_only: bool = False
    ) -> Port:
        """``if_match``: the tag from ``read_port``; if somebody has changed the port since, or with
        ``create_only`` if there is one, PreconditionFailed is raised and nothing is changed."""
        headers = _condition(if_match) | ({"If-None-Match": ANY} if create_only else {})
        return self._ask(Port, "PUT", path_of("ports", port_id), spec, headers=headers)

    def get_port(self, port_id: str) -> Port:
        return self._ask(Port, "GET", path_of("ports", port_id))

    def read_port(self, port_id: str) -> Tagged[Port]:
        """The port with its entity tag."""
        answer = self._call("GET", path_of("ports", port_id))
        return Tagged(_parsed(Port, answer), answer.headers.get("etag", ANY))

    def list_ports(
        self,
        *,
        vm_id: str | None = None,
        state: PortState | str | None = None,
        backend: str | None = None,
        network: str | None = None,
    ) -> list[Port]:
        """``network``: a physical network, or the ID of a VXLAN network. All in one answer."""
        parameters = {"vm_id": vm_id, "state": state, "backend": backend, "network": network}
        return self._ask(list[Port], "GET", "/v1/ports", parameters=parameters)

    def each_port(self, page: int = 500) -> Iterator[Port]:
        """All ports, read in pages of this size while they are used."""
        path, parameters = "/v1/ports", {"limit": str(page)}
        while path:
            answer = self._call("GET", path, parameters=parameters)
            yield from _parsed(list[Port], answer)
            following = _NEXT.match(answer.headers.get("Link", ""))
            path, parameters = following[1] if following else "", {}

    def delete_port(self, port_id: str, *, if_match: str | None = None) -> None:
        """``if_match``: as in ``put_port``."""
        self._call("DELETE", path_of("ports", port_id), headers=_condition(if_match))

    def port_counters(self, port_id: str) -> PortCounters:
        return self._ask(PortCounters, "GET", f"{path_of('ports', port_id)}/counters")

    def migrate_port(self, port_id: str, step: MigrateRequest) -> Port | None:
        """Carry out one step of a live migration; None if the port was removed, or there is none."""
        answer = self._call("POST", f"{path_of('ports', port_id)}:migrate", step)
        return None if answer.status == 204 else _parsed(Port, answer)

    def check_migration(self, request: MigrateCheck) -> list[Finding]:
        """Ask the destination what does not fit, before a migration."""
        return self._ask(list[Finding], "POST", "/v1/ports:migrate-check", request, changes=False)

    def batch(self, batch: Batch) -> BatchResults:
        """Create, change and delete several ports.

        Raises only if the whole call failed: check each result.
        """
        return self._ask(BatchResults, "POST", "/v1/ports:batch", batch)

    def retag(self, request: Retag) -> BatchResults:
        """Change the VLAN of ports. Raises only if the whole call failed: check each result."""
        return self._ask(BatchResults, "POST", "/v1/ports:retag", request)

    def render_domain(self, vm_id: str, xml: str, policy: DomainPolicy | None = None) -> RenderedDomain:
        path = f"{path_of('vms', vm_id)}:render-domain"
        request = valid(RenderRequest, {"xml": xml, "policy": policy or DomainPolicy()})
        return self._ask(RenderedDomain, "POST", path, request, changes=False)

    def check_domain(self, vm_id: str, xml: str) -> list[Finding]:
        """Check the XML of an existing domain against the VM's ports and the host's CPU plan."""
        path = f"{path_of('vms', vm_id)}:check-domain"
        return self._ask(list[Finding], "POST", path, valid(CheckRequest, {"xml": xml}), changes=False)

    def put_service_port(self, port_id: str, spec: ServicePortSpec) -> ServicePort:
        return self._ask(ServicePort, "PUT", path_of("service-ports", port_id), spec)

    def get_service_port(self, port_id: str) -> ServicePort:
        return self._ask(ServicePort, "GET", path_of("service-ports", port_id))

    def list_service_ports(self) -> list[ServicePort]:
        return self._ask(list[ServicePort], "GET", "/v1/service-ports")

    def delete_service_port(self, port_id: str) -> None:
        self._call("DELETE", path_of("service-ports", port_id))

    # -- networks --------------------------------------------------------------------------------

    def put_network(self, network_id: str, spec: NetworkSpec) -> NetworkInfo:
        return self._ask(NetworkInfo, "PUT", path_of("networks", network_id), spec)

    def get_network(self, network_id: str) -> NetworkInfo:
        return self._ask(NetworkInfo, "GET", path_of("networks", network_id))

    def list_networks(self) -> list[NetworkInfo]:
        return self._ask(list[NetworkInfo], "GET", "/v1/networks")

    def delete_network(self, network_id: str) -> None:
        self._call("DELETE", path_of("networks", network_id))

    def put_physical_network(self, name: str, spec: PhysicalNetworkSpec) -> PhysicalNetworkInfo:
        return self._ask(PhysicalNetworkInfo, "PUT", path_of("physical-networks", name), spec)

    def get_physical_network(self, name: str) -> PhysicalNetworkInfo:
        return self._ask(PhysicalNetworkInfo, "GET", path_of("physical-networks", name))

    def list_physical_networks(self) -> list[PhysicalNetworkInfo]:
        return self._ask(list[PhysicalNetworkInfo], "GET", "/v1/physical-networks")

    def delete_physical_network(self, name: str) -> None:
        self._call("DELETE", path_of("physical-networks", name))

    # -- the host --------------------------------------------------------------------------------

    def backends(self) -> list[BackendInfo]:
        return self._ask(list[BackendInfo], "GET", "/v1/backends")

    def host(self) -> HostState:
        """Facts about the host, as ``netplugin host facts`` prints them."""
        return self._ask(HostState, "GET", "/v1/host")

    def checks(self) -> list[Finding]:
        """The findings of the agent about the host."""
        return self._ask(list[Finding], "GET", "/v1/host/checks")

    def list_vfs(self) -> list[VfInfo]:
        return self._ask(list[VfInfo], "GET", "/v1/vfs")

    def release_vf(self, pci_address: str) -> None:
        """End the quarantine of a virtual function; no error if it is not quarantined."""
        try:
            address = _PCI_ADDRESS.validate_python(pci_address)
        except ValidationError as wrong:
            text = message(wrong.errors(include_url=False)[0])
            raise InvalidRequest.of_field("pci_address", text) from None
        self._call("DELETE", f"/v1/vfs/{address}/quarantine")

    def pmd(self, interval_s: float | None = None) -> PmdState:
        """The PMD threads, since they started or over the next ``interval_s`` seconds (at most 60)."""
        return self._ask(PmdState, "GET", "/v1/pmd", **_over(interval_s))

    def pmd_proposal(self, interval_s: float | None = None) -> PmdProposal:
        """The proposed assignment of receive queues to PMD threads."""
        return self._ask(PmdProposal, "GET", "/v1/pmd/proposal", **_over(interval_s))

    def set_pmd(self, request: PmdRequest) -> PmdState:
        return self._ask(PmdState, "PUT", "/v1/pmd", request)

    def reconcile(self, request: ReconcileRequest | None = None) -> ReconcileReport:
        return self._ask(ReconcileReport, "POST", "/v1/reconcile", request or ReconcileRequest())

    # -- the agent -------------------------------------------------------------------------------

    def events(self, selection: EventFilter | None = None) -> EventReader:
        """Follow the events of the host, in order: see ``EventReader``."""
        return EventReader(self, selection or EventFilter())

    def task(self, taskuuid: str) -> Task:
        return self._ask(Task, "GET", path_of("tasks", taskuuid))

    def ready(self) -> Readiness:
        """The readiness of the agent; "not ready" is a result, not an error."""
        return self._ask(Readiness, "GET", "/readyz", expected=(503,))

    # -- internals -------------------------------------------------------------------------------

    def _ask(self, kind: type[_T], method: str, path: str, body: BaseModel | None = None, **more: Any) -> _T:
        """The answer of a call as a value of this type; for ``more`` see ``_call``."""
        return _parsed(kind, self._call(method, path, body, **more))

    def _call(self, method: str, path: str, body: BaseModel | None = None, **more: Any) -> Answer:
        # Fields that were not set are not sent: a port on a VXLAN network takes the network's MTU.
        text = None if body is None else body.model_dump_json(exclude_unset=True)
        return self.call(method, path, text, **more)


def _over(interval_s: float | None) -> dict[str, Any]:
    """How a call is made that takes so long."""
    return {} if interval_s is None else {"parameters": {"interval": f"{interval_s:g}"}, "more_s": interval_s}


def _condition(tag: str | None) -> dict[str, str]:
    return {} if tag is None else {"If-Match": tag}


def _parsed(kind: type[_T], answer: Answer) -> _T:
    try:
        return TypeAdapter(kind).validate_json(answer.body)
    except ValidationError as wrong:
        raise answer.foreign() from wrong
