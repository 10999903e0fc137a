"""The routes of the HTTP API for networks, devices and the host itself."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Annotated, Any, TypeVar

from pydantic import StringConstraints
from starlette.requests import Request
from starlette.responses import Response

import netplugin.api.errors as errors
from agents.api.answers import NOT_MODIFIED, IfMatch, IfNoneMatch, listed, tagged
from agents.api.problems import ANY_ERROR, documented
from agents.api.roles import Role, needs, of_reconcile, of_service_port
from agents.api.routing import Query, Routes
from agents.physical_networks import tag_of
from agents.service import Service
from netplugin.api.conditions import NO_CONDITION, intent_tag
from netplugin.api.fields import NAME_PATTERN, PciAddress
from netplugin.api.models import (
    BackendInfo,
    Finding,
    HostState,
    NetworkInfo,
    NetworkSpec,
    ReconcileReport,
    ReconcileRequest,
    VfInfo,
)
from netplugin.api.page_models import Page
from netplugin.api.physical_models import PhysicalNetworkInfo, PhysicalNetworkSpec
from netplugin.api.pmd_models import PmdInterval, PmdProposal, PmdRequest, PmdState
from netplugin.api.service_models import ServicePort, ServicePortSpec

T = TypeVar("T")
NameParameter = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]


def add_service_ports(routes: Routes, service: Service) -> None:
    ports = service.service_ports

    @routes.put(
        "/v1/service-ports/{port_id}",
        responses=ANY_ERROR,
        operation_id="put_service_port",
        response_model=ServicePort,
    )
    @needs(Role.PLUG, of_service_port)
    async def put_service_port(port_id: NameParameter, spec: ServicePortSpec, condition: IfMatch) -> Response:
        """Put a device of the host on a network, or change its rules, and wait until it is verified."""
        port = await ports.put(port_id, spec, condition)
        return tagged(port, NO_CONDITION, ports.intent_tag(port))

    @routes.get(
        "/v1/service-ports",
        responses=NOT_MODIFIED | documented(),
        operation_id="list_service_ports",
        response_model=list[ServicePort],
    )
    @needs(Role.READ)
    async def list_service_ports(
        caller: Request, page: Annotated[Page, Query()], condition: IfNoneMatch
    ) -> Response:
        """List the service ports of this host."""
        return await listed(caller, page, condition, ports.all, lambda port: port.port_id)

    @routes.get(
        "/v1/service-ports/{port_id}",
        responses=NOT_MODIFIED | documented(errors.NotFound),
        operation_id="get_service_port",
        response_model=ServicePort,
    )
    @needs(Role.READ)
    async def get_service_port(port_id: NameParameter, condition: IfNoneMatch) -> Response:
        """Return a service port."""
        port = ports.get(port_id)
        return tagged(port, condition, ports.intent_tag(port))

    @routes.delete(
        "/v1/service-ports/{port_id}",
        status_code=204,
        responses=ANY_ERROR,
        operation_id="delete_service_port",
    )
    @needs(Role.PLUG)
    async def delete_service_port(port_id: NameParameter, condition: IfMatch) -> None:
        """Take a device of the host off its network; the device stays. No error if there is none."""
        await ports.delete(port_id, condition)


def add_networks(routes: Routes, service: Service) -> None:
    @routes.put(
        "/v1/networks/{network_id}",
        responses=ANY_ERROR,
        operation_id="put_network",
        response_model=NetworkInfo,
    )
    @needs(Role.PLUG)
    async def put_network(network_id: NameParameter, spec: NetworkSpec, condition: IfMatch) -> Response:
        """Create or change a VXLAN network; its peers can change while it has ports."""
        network = await service.networks.put(network_id, spec, condition)
        return tagged(network, NO_CONDITION, intent_tag(network.spec))

    @routes.get(
        "/v1/networks",
        responses=NOT_MODIFIED | documented(),
        operation_id="list_networks",
        response_model=list[NetworkInfo],
    )
    @needs(Role.READ)
    async def list_networks(
        caller: Request, page: Annotated[Page, Query()], condition: IfNoneMatch
    ) -> Response:
        """List the VXLAN networks of this host."""
        return await listed(caller, page, condition, service.networks.all, lambda network: network.network_id)

    @routes.get(
        "/v1/networks/{network_id}",
        responses=NOT_MODIFIED | documented(errors.NotFound),
        operation_id="get_network",
        response_model=NetworkInfo,
    )
    @needs(Role.READ)
    async def get_network(network_id: NameParameter, condition: IfNoneMatch) -> Response:
        """Return a VXLAN network."""
        network = service.networks.get(network_id)
        return tagged(network, condition, intent_tag(network.spec))

    @routes.delete(
        "/v1/networks/{network_id}",
        status_code=204,
        responses=documented(errors.Conflict, errors.PreconditionFailed, errors.HostError),
        operation_id="delete_network",
    )
    @needs(Role.PLUG)
    async def delete_network(network_id: NameParameter, condition: IfMatch) -> None:
        """Delete a VXLAN network that has no ports; no error if it does not exist."""
        await service.networks.delete(network_id, condition)


def add_physical_networks(routes: Routes, service: Service) -> None:
    networks, look = service.physical_networks, service.off_loop.look

    @routes.put(
        "/v1/physical-networks/{name}",
        responses=ANY_ERROR,
        operation_id="put_physical_network",
        response_model=PhysicalNetworkInfo,
    )
    @needs(Role.OPERATE)
    async def put_physical_network(
        name: NameParameter, spec: PhysicalNetworkSpec, condition: IfMatch
    ) -> Response:
        """Create or change a physical network; what it keeps is verified on the host."""
        network = await networks.put(name, spec, condition)
        return tagged(network, NO_CONDITION, tag_of(network))

    @routes.get(
        "/v1/physical-networks",
        responses=NOT_MODIFIED | documented(errors.OperationTimeout),
        operation_id="list_physical_networks",
        response_model=list[PhysicalNetworkInfo],
    )
    @needs(Role.READ)
    async def list_physical_networks(
        caller: Request, page: Annotated[Page, Query()], condition: IfNoneMatch
    ) -> Response:
        """List the physical networks: those of the configuration, and those that were PUT."""
        found = await look(networks.all, "physical networks")
        return await listed(caller, page, condition, lambda: found, lambda network: network.name)

    @routes.get(
        "/v1/physical-networks/{name}",
        responses=NOT_MODIFIED | documented(errors.NotFound, errors.OperationTimeout),
        operation_id="get_physical_network",
        response_model=PhysicalNetworkInfo,
    )
    @needs(Role.READ)
    async def get_physical_network(name: NameParameter, condition: IfNoneMatch) -> Response:
        """Return a physical network."""
        network = await look(partial(networks.get, name), f"physical network {name}")
        return tagged(network, condition, tag_of(network))

    @routes.delete(
        "/v1/physical-networks/{name}",
        status_code=204,
        responses=ANY_ERROR,
        operation_id="delete_physical_network",
    )
    @needs(Role.OPERATE)
    async def delete_physical_network(name: NameParameter, condition: IfMatch) -> None:
        """Delete a physical network that has no ports; no error if it does not exist."""
        await networks.delete(name, condition)


def add_host(routes: Routes, service: Service) -> None:
    @routes.get("/v1/backends", responses=documented(), operation_id="list_backends")
    @needs(Role.READ)
    async def list_backends() -> list[BackendInfo]:
        """List the backends of this host and whether they are usable."""
        return await service.health.backends()

    @routes.get("/v1/host", responses=documented(errors.OperationTimeout), operation_id="get_host")
    @needs(Role.READ)
    async def get_host() -> HostState:
        """Return facts about the host and its daemons."""
        return await service.host()

    @routes.get("/v1/host/checks", responses=documented(), operation_id="host_checks")
    @needs(Role.READ)
    async def host_checks(caller: Request) -> list[Finding]:
        """Check the host and return the findings."""
        return await _while_here(caller, service.health.checks())

    @routes.get(
        "/v1/vfs",
        responses=NOT_MODIFIED | ANY_ERROR,
        operation_id="list_vfs",
        response_model=list[VfInfo],
    )
    @needs(Role.READ)
    async def list_vfs(caller: Request, page: Annotated[Page, Query()], condition: IfNoneMatch) -> Response:
        """List the virtual functions of this host with their states and ports."""
        found = sorted(await _while_here(caller, service.vfs.all()), key=lambda vf: vf.pci_address)
        return await listed(caller, page, condition, lambda: found, lambda vf: vf.pci_address)

    @routes.delete(
        "/v1/vfs/{pci_address}/quarantine",
        status_code=204,
        responses=ANY_ERROR,
        operation_id="release_vf",
    )
    @needs(Role.OPERATE)
    async def release_vf(caller: Request, pci_address: PciAddress) -> None:
        """End the quarantine of a virtual function; no error if it is not quarantined."""
        await _while_here(caller, service.vfs.release(pci_address))

    @routes.get("/v1/pmd", responses=ANY_ERROR, operation_id="get_pmd")
    @needs(Role.READ)
    async def get_pmd(measured: Annotated[PmdInterval, Query()]) -> PmdState:
        """Return the PMD threads of OVS, measured since they started or over an interval."""
        return await service.pmd.show(measured.interval)

    @routes.put("/v1/pmd", responses=ANY_ERROR, operation_id="set_pmd")
    @needs(Role.OPERATE)
    async def set_pmd(request: PmdRequest) -> PmdState:
        """Set the CPUs of PMD threads, pin receive queues, or balance the load."""
        return await service.pmd.set(request)

    @routes.get("/v1/pmd/proposal", responses=ANY_ERROR, operation_id="propose_pmd")
    @needs(Role.READ)
    async def propose_pmd(measured: Annotated[PmdInterval, Query()]) -> PmdProposal:
        """Propose an assignment of receive queues to PMD threads."""
        return await service.pmd.proposal(measured.interval)

    @routes.post("/v1/reconcile", responses=ANY_ERROR, operation_id="reconcile")
    @needs(Role.PLUG, of_reconcile)
    async def reconcile(caller: Request, request: ReconcileRequest | None = None) -> ReconcileReport:
        """Reconcile the host with the stored intents, or return the plan (``dry_run``)."""
        return await _while_here(caller, service.reconcile(request or ReconcileRequest()))


async def _while_here(caller: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await the work, and cancel it if the caller disconnects.

    Raises: what the work raises; CancelledError if the caller has disconnected.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(caller))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            working.cancel()
        return await working
    finally:
        working.cancel()
        gone.cancel()


async def _gone(caller: Request) -> None:
    while (await caller.receive())["type"] != "http.disconnect":
        pass
