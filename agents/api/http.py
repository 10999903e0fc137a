"""The HTTP API: its routes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Header, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.exceptions import HTTPException

import netplugin.api.errors as errors
from agents.api.answers import NOT_MODIFIED, IfMatch, IfNoneMatch, listed, tagged
from agents.api.document import Application
from agents.api.problems import (
    ANY_ERROR,
    documented,
    http_error,
    netplugin_error,
    responses,
    unexpected,
    validation_error,
)
from agents.api.routes import Route
from agents.api.tasks import TaskRunner
from agents.event_streams import MEDIA_TYPE
from agents.metrics import Metrics
from agents.physical_networks import tag_of
from agents.service import Service
from netplugin.api.batch_models import Batch, BatchResults, PortFilter, Retag
from netplugin.api.conditions import NO_CONDITION, intent_tag
from netplugin.api.errors import NetpluginError
from netplugin.api.event_models import EventFilter, EventKind
from netplugin.api.fields import NAME_PATTERN, PciAddress
from netplugin.api.models import (
    BackendInfo,
    CheckRequest,
    Finding,
    HostState,
    NetworkInfo,
    NetworkSpec,
    Port,
    PortSpec,
    ReconcileReport,
    ReconcileRequest,
    RenderedDomain,
    RenderRequest,
    VfInfo,
)
from netplugin.api.page_models import Page
from netplugin.api.physical_models import PhysicalNetworkInfo, PhysicalNetworkSpec
from netplugin.api.pmd_models import PmdInterval, PmdProposal, PmdRequest, PmdState
from netplugin.api.service_models import ServicePort, ServicePortSpec
from netplugin.api.task_models import Task

T = TypeVar("T")
NameParameter = Annotated[str, Path(pattern=NAME_PATTERN)]


async def _results(service: Service, results: BatchResults) -> Response:
    """A batch may have thousands. FastAPI would validate each of them again."""

    def dumped() -> bytes:
        parts = (result.model_dump_json().encode() for result in results.results)
        return b'{"results":[' + b",".join(parts) + b"]}"

    return Response(await service.off_loop.compute(dumped), media_type="application/json")


def _port_id(port: Port | ServicePort) -> str:
    return port.port_id


def build(
    service: Service, tasks: TaskRunner, metrics: Metrics, more: Callable[[FastAPI], None] | None = None
) -> FastAPI:
    """The ASGI application, without the gate in front of it (authentication, limits, asynchronous calls).

    ``more`` adds the routes of a platform.
    """
    app = Application(
        title="netplugin agent",
        version="1",
        description="Configures the network interfaces of VMs on this hypervisor.",
        openapi_url=None,  # a route of its own, which does not hold up the event loop
        docs_url=None,
        redoc_url=None,
        # A redirect would break mutating and asynchronous calls.
        redirect_slashes=False,
    )
    app.router.route_class = Route
    app.state.off_loop = service.off_loop
    app.add_exception_handler(NetpluginError, netplugin_error)
    app.add_exception_handler(RequestValidationError, validation_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, unexpected)
    _add_ports(app, service)
    _add_service_ports(app, service)
    _add_networks(app, service)
    _add_physical_networks(app, service)
    _add_host(app, service)
    _add_events(app, service)
    _add_tasks(app, tasks)
    _add_health(app, service, metrics)
    if more is not None:
        more(app)

    @app.get("/openapi.json", include_in_schema=False)
    async def document() -> Response:
        return await service.off_loop.compute(lambda: JSONResponse(app.openapi()))

    return app


def _add_ports(app: FastAPI, service: Service) -> None:
    @app.put(
        "/v1/ports/{port_id}",
        responses=ANY_ERROR,
        operation_id="put_port",
        response_model=Port,
    )
    async def put_port(port_id: NameParameter, spec: PortSpec, condition: IfMatch) -> Response:
        """Create a port or change it, and wait until it is verified on the host."""
        port = await service.put(port_id, spec, condition)
        return tagged(port, NO_CONDITION, service.intent_tag(port))

    @app.get(
        "/v1/ports",
        responses=NOT_MODIFIED | documented(),
        operation_id="list_ports",
        response_model=list[Port],
    )
    async def list_ports(
        caller: Request, wanted: Annotated[PortFilter, Query()], condition: IfNoneMatch
    ) -> Response:
        """List the ports of this host; a port must match all given parameters."""
        return await listed(caller, wanted, condition, partial(service.ports, wanted), _port_id)

    @app.get(
        "/v1/ports/{port_id}",
        responses=NOT_MODIFIED | documented(errors.NotFound),
        operation_id="get_port",
        response_model=Port,
    )
    async def get_port(port_id: NameParameter, condition: IfNoneMatch) -> Response:
        """Return a port."""
        port = service.port(port_id)
        return tagged(port, condition, service.intent_tag(port))

    @app.delete("/v1/ports/{port_id}", status_code=204, responses=ANY_ERROR, operation_id="delete_port")
    async def delete_port(port_id: NameParameter, condition: IfMatch) -> None:
        """Delete a port; no error if it does not exist."""
        await service.delete(port_id, condition)

    @app.post(
        "/v1/ports:batch",
        responses=ANY_ERROR,
        operation_id="batch_ports",
        response_model=BatchResults,
    )
    async def batch_ports(batch: Batch) -> Response:
        """Create, change and delete several ports; each has a result of its own."""
        return await _results(service, await service.batch(batch))

    @app.post(
        "/v1/ports:retag",
        responses=ANY_ERROR,
        operation_id="retag_ports",
        response_model=BatchResults,
    )
    async def retag_ports(wanted: Retag) -> Response:
        """Change the VLAN of ports while VMs use them; each has a result of its own."""
        return await _results(service, await service.retag(wanted))

    @app.post(
        "/v1/vms/{vm_id}:render-domain",
        responses=ANY_ERROR,
        operation_id="render_domain",
    )
    async def render_domain(vm_id: NameParameter, request: RenderRequest) -> RenderedDomain:
        """Add the VM's interfaces and the elements they require to a libvirt domain."""
        return await service.domains.render(vm_id, request)

    @app.post(
        "/v1/vms/{vm_id}:check-domain",
        # It changes nothing, but as a POST it may be journalled.
        responses=documented(errors.NotFound, errors.Conflict, errors.HostError),
        operation_id="check_domain",
    )
    async def check_domain(vm_id: NameParameter, request: CheckRequest) -> list[Finding]:
        """Check the XML of an existing libvirt domain against the VM's ports."""
        return await service.domains.check(vm_id, request)


def _add_service_ports(app: FastAPI, service: Service) -> None:
    ports = service.service_ports

    @app.put(
        "/v1/service-ports/{port_id}",
        responses=ANY_ERROR,
        operation_id="put_service_port",
        response_model=ServicePort,
    )
    async def put_service_port(port_id: NameParameter, spec: ServicePortSpec, condition: IfMatch) -> Response:
        """Put a device of the host on a network, or change its rules, and wait until it is verified."""
        port = await ports.put(port_id, spec, condition)
        return tagged(port, NO_CONDITION, ports.intent_tag(port))

    @app.get(
        "/v1/service-ports",
        responses=NOT_MODIFIED | documented(),
        operation_id="list_service_ports",
        response_model=list[ServicePort],
    )
    async def list_service_ports(
        caller: Request, page: Annotated[Page, Query()], condition: IfNoneMatch
    ) -> Response:
        """List the service ports of this host."""
        return await listed(caller, page, condition, ports.all, _port_id)

    @app.get(
        "/v1/service-ports/{port_id}",
        responses=NOT_MODIFIED | documented(errors.NotFound),
        operation_id="get_service_port",
        response_model=ServicePort,
    )
    async def get_service_port(port_id: NameParameter, condition: IfNoneMatch) -> Response:
        """Return a service port."""
        port = ports.get(port_id)
        return tagged(port, condition, ports.intent_tag(port))

    @app.delete(
        "/v1/service-ports/{port_id}",
        status_code=204,
        responses=ANY_ERROR,
        operation_id="delete_service_port",
    )
    async def delete_service_port(port_id: NameParameter, condition: IfMatch) -> None:
        """Take a device of the host off its network; the device stays. No error if there is none."""
        await ports.delete(port_id, condition)


def _add_networks(app: FastAPI, service: Service) -> None:
    @app.put(
        "/v1/networks/{network_id}",
        responses=ANY_ERROR,
        operation_id="put_network",
        response_model=NetworkInfo,
    )
    async def put_network(network_id: NameParameter, spec: NetworkSpec, condition: IfMatch) -> Response:
        """Create or change a VXLAN network; its peers can change while it has ports."""
        network = await service.networks.put(network_id, spec, condition)
        return tagged(network, NO_CONDITION, intent_tag(network.spec))

    @app.get(
        "/v1/networks",
        responses=NOT_MODIFIED | documented(),
        operation_id="list_networks",
        response_model=list[NetworkInfo],
    )
    async def list_networks(
        caller: Request, page: Annotated[Page, Query()], condition: IfNoneMatch
    ) -> Response:
        """List the VXLAN networks of this host."""
        return await listed(caller, page, condition, service.networks.all, lambda network: network.network_id)

    @app.get(
        "/v1/networks/{network_id}",
        responses=NOT_MODIFIED | documented(errors.NotFound),
        operation_id="get_network",
        response_model=NetworkInfo,
    )
    async def get_network(network_id: NameParameter, condition: IfNoneMatch) -> Response:
        """Return a VXLAN network."""
        network = service.networks.get(network_id)
        return tagged(network, condition, intent_tag(network.spec))

    @app.delete(
        "/v1/networks/{network_id}",
        status_code=204,
        responses=documented(errors.Conflict, errors.PreconditionFailed, errors.HostError),
        operation_id="delete_network",
    )
    async def delete_network(network_id: NameParameter, condition: IfMatch) -> None:
        """Delete a VXLAN network that has no ports; no error if it does not exist."""
        await service.networks.delete(network_id, condition)


def _add_physical_networks(app: FastAPI, service: Service) -> None:
    networks, look = service.physical_networks, service.off_loop.look

    @app.put(
        "/v1/physical-networks/{name}",
        responses=ANY_ERROR,
        operation_id="put_physical_network",
        response_model=PhysicalNetworkInfo,
    )
    async def put_physical_network(
        name: NameParameter, spec: PhysicalNetworkSpec, condition: IfMatch
    ) -> Response:
        """Create or change a physical network; what it keeps is verified on the host."""
        network = await networks.put(name, spec, condition)
        return tagged(network, NO_CONDITION, tag_of(network))

    @app.get(
        "/v1/physical-networks",
        responses=NOT_MODIFIED | documented(errors.OperationTimeout),
        operation_id="list_physical_networks",
        response_model=list[PhysicalNetworkInfo],
    )
    async def list_physical_networks(
        caller: Request, page: Annotated[Page, Query()], condition: IfNoneMatch
    ) -> Response:
        """List the physical networks: those of the configuration, and those that were PUT."""
        found = await look(networks.all, "physical networks")
        return await listed(caller, page, condition, lambda: found, lambda network: network.name)

    @app.get(
        "/v1/physical-networks/{name}",
        responses=NOT_MODIFIED | documented(errors.NotFound, errors.OperationTimeout),
        operation_id="get_physical_network",
        response_model=PhysicalNetworkInfo,
    )
    async def get_physical_network(name: NameParameter, condition: IfNoneMatch) -> Response:
        """Return a physical network."""
        network = await look(partial(networks.get, name), f"physical network {name}")
        return tagged(network, condition, tag_of(network))

    @app.delete(
        "/v1/physical-networks/{name}",
        status_code=204,
        responses=ANY_ERROR,
        operation_id="delete_physical_network",
    )
    async def delete_physical_network(name: NameParameter, condition: IfMatch) -> None:
        """Delete a physical network that has no ports; no error if it does not exist."""
        await networks.delete(name, condition)


def _add_host(app: FastAPI, service: Service) -> None:
    @app.get("/v1/backends", responses=documented(), operation_id="list_backends")
    async def list_backends() -> list[BackendInfo]:
        """List the backends of this host and whether they are usable."""
        return await service.health.backends()

    @app.get("/v1/host", responses=documented(errors.OperationTimeout), operation_id="get_host")
    async def get_host() -> HostState:
        """Return facts about the host and its daemons."""
        return await service.host()

    @app.get("/v1/host/checks", responses=documented(), operation_id="host_checks")
    async def host_checks(caller: Request) -> list[Finding]:
        """Check the host and return the findings."""
        return await _while_here(caller, service.health.checks())

    @app.get(
        "/v1/vfs",
        responses=NOT_MODIFIED | ANY_ERROR,
        operation_id="list_vfs",
        response_model=list[VfInfo],
    )
    async def list_vfs(caller: Request, page: Annotated[Page, Query()], condition: IfNoneMatch) -> Response:
        """List the virtual functions of this host with their states and ports."""
        found = sorted(await _while_here(caller, service.vfs()), key=lambda vf: vf.pci_address)
        return await listed(caller, page, condition, lambda: found, lambda vf: vf.pci_address)

    @app.delete(
        "/v1/vfs/{pci_address}/quarantine",
        status_code=204,
        responses=ANY_ERROR,
        operation_id="release_vf",
    )
    async def release_vf(caller: Request, pci_address: PciAddress) -> None:
        """End the quarantine of a virtual function; no error if it is not quarantined."""
        await _while_here(caller, service.release_vf(pci_address))

    @app.get("/v1/pmd", responses=ANY_ERROR, operation_id="get_pmd")
    async def get_pmd(measured: Annotated[PmdInterval, Query()]) -> PmdState:
        """Return the PMD threads of OVS, measured since they started or over an interval."""
        return await service.pmd.show(measured.interval)

    @app.put("/v1/pmd", responses=ANY_ERROR, operation_id="set_pmd")
    async def set_pmd(request: PmdRequest) -> PmdState:
        """Set the CPUs of PMD threads, pin receive queues, or balance the load."""
        return await service.pmd.set(request)

    @app.get("/v1/pmd/proposal", responses=ANY_ERROR, operation_id="propose_pmd")
    async def propose_pmd(measured: Annotated[PmdInterval, Query()]) -> PmdProposal:
        """Propose an assignment of receive queues to PMD threads."""
        return await service.pmd.proposal(measured.interval)

    @app.post("/v1/reconcile", responses=ANY_ERROR, operation_id="reconcile")
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


#: One server-sent event, as tools that read OpenAPI take it apart.
_SERVER_SENT = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "pattern": "^[0-9]+$"},
        "event": {"enum": [*(kind.value for kind in EventKind), "lost"]},
        "data": {"type": "string", "contentMediaType": "application/json"},
    },
}


def _add_events(app: FastAPI, service: Service) -> None:
    @app.get(
        "/v1/events",
        operation_id="follow_events",
        responses={
            **documented(),
            200: {
                "description": "server-sent events; the data of each is an `Event`. An event `lost` says "
                "that events between `after` and `first` are not stored any more.",
                "content": {MEDIA_TYPE: {"schema": _SERVER_SENT}},
            },
        },
        response_class=StreamingResponse,
    )
    async def follow_events(
        wanted: Annotated[EventFilter, Query()],
        last_event_id: Annotated[int | None, Header(ge=0, lt=1 << 63)] = None,
    ) -> StreamingResponse:
        """Follow the events of this host: ports, drift, backends, quarantines, findings, physical networks.

        Resume with the header `Last-Event-ID` or with `after`.
        """
        service.events.require_room()
        body = service.events.follow(wanted, last_event_id)
        return StreamingResponse(body, media_type=MEDIA_TYPE, headers={"Cache-Control": "no-store"})


def _add_tasks(app: FastAPI, tasks: TaskRunner) -> None:
    @app.get("/v1/tasks/{taskuuid}", responses=documented(errors.NotFound), operation_id="get_task")
    async def get_task(taskuuid: NameParameter) -> Task:
        """Return an asynchronous call and its result."""
        return await tasks.get(taskuuid)


def _add_health(app: FastAPI, service: Service, metrics: Metrics) -> None:
    @app.get(
        "/metrics",
        operation_id="metrics",
        responses=documented(),
        response_class=PlainTextResponse,
    )
    async def get_metrics() -> Response:
        """Return the metrics in the text format of Prometheus."""
        # In a thread, because it queries OVS, which may be slow.
        text = await asyncio.to_thread(metrics.render)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    # The guard requires no credential for these two, but refuses calls of browsers.
    @app.get("/healthz", operation_id="healthz", responses=responses(errors.Forbidden))
    async def healthz() -> dict[str, str]:
        """Return 200 while the agent is running."""
        return {"status": "alive"}

    @app.get(
        "/readyz",
        operation_id="readyz",
        responses={
            **responses(errors.Forbidden),
            503: {"description": "not ready; the body has the reasons"},
        },
        response_model=dict[str, Any],
    )
    async def readyz() -> JSONResponse:
        """Return 200 if the agent is ready, else 503 with the reasons."""
        reasons = await service.health.unready()
        return JSONResponse({"ready": not reasons, "reasons": reasons}, 503 if reasons else 200)
