"""The HTTP API: routes, and errors as ``application/problem+json``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Annotated, Any, TypeVar

from fastapi import Depends, FastAPI, Header, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

import netplugin.api.errors as errors
from agents.api.bodies import refuse_unfit
from agents.api.document import Application
from agents.api.tasks import TaskRunner
from agents.event_streams import MEDIA_TYPE
from agents.metrics import Metrics
from agents.service import Service
from netplugin.api.batch_models import Batch, BatchResults, PortFilter, Retag
from netplugin.api.errors import (
    FieldError,
    InvalidRequest,
    NetpluginError,
    NotFound,
)
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
from netplugin.api.physical_models import PhysicalNetworkInfo, PhysicalNetworkSpec
from netplugin.api.pmd_models import PmdInterval, PmdProposal, PmdRequest, PmdState
from netplugin.api.service_models import ServicePort, ServicePortSpec
from netplugin.api.task_models import Task

T = TypeVar("T")
PROBLEM = "application/problem+json"
# Maximum number of reported errors; a body of a megabyte could have a million.
_MOST_ERRORS = 100
NameParameter = Annotated[str, Path(pattern=NAME_PATTERN)]


def problem_response(error: NetpluginError) -> JSONResponse:
    headers = {}
    if isinstance(error, errors.Overloaded):
        headers["Retry-After"] = "1"
    if isinstance(error, errors.Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error.problem().model_dump(), error.status, headers=headers, media_type=PROBLEM)


def _json(model: BaseModel) -> Response:
    """Serialize a valid model once; FastAPI would validate it again (0.4 ms)."""
    return Response(model.model_dump_json(), media_type="application/json")


def _documented(*kinds: type[NetpluginError]) -> dict[int | str, dict[str, Any]]:
    """The documented error responses of a route: its own, and those of the guard and of validation."""
    return _responses(*kinds, errors.InvalidRequest, errors.Unauthorized, errors.Forbidden, errors.Overloaded)


def _responses(*kinds: type[NetpluginError]) -> dict[int | str, dict[str, Any]]:
    """The documentation of these errors; one status may have several codes."""
    titles: dict[int, list[str]] = {}
    for kind in dict.fromkeys(kinds):
        titles.setdefault(kind.status, []).append(kind.code)
    schema = {"$ref": "#/components/schemas/Problem"}
    return {
        status: {"description": ", ".join(codes), "content": {PROBLEM: {"schema": schema}}}
        for status, codes in titles.items()
    }


ANY_ERROR = _documented(*errors.ALL)


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
        dependencies=[Depends(refuse_unfit)],
    )
    app.add_exception_handler(NetpluginError, _netplugin_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)
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
    def document() -> JSONResponse:
        return JSONResponse(app.openapi())

    return app


def _add_ports(app: FastAPI, service: Service) -> None:
    @app.put(
        "/v1/ports/{port_id}",
        responses=ANY_ERROR,
        operation_id="put_port",
        response_model=Port,
    )
    async def put_port(port_id: NameParameter, spec: PortSpec) -> Response:
        """Create a port or change it, and wait until it is verified on the host."""
        return _json(await service.put(port_id, spec))

    @app.get("/v1/ports", responses=_documented(), operation_id="list_ports")
    async def list_ports(wanted: Annotated[PortFilter, Query()]) -> list[Port]:
        """List the ports of this host; a port must match all given parameters."""
        return service.ports(wanted)

    @app.get("/v1/ports/{port_id}", responses=_documented(errors.NotFound), operation_id="get_port")
    async def get_port(port_id: NameParameter) -> Port:
        """Return a port."""
        return service.port(port_id)

    @app.delete("/v1/ports/{port_id}", status_code=204, responses=ANY_ERROR, operation_id="delete_port")
    async def delete_port(port_id: NameParameter) -> None:
        """Delete a port; no error if it does not exist."""
        await service.delete(port_id)

    @app.post(
        "/v1/ports:batch",
        responses=ANY_ERROR,
        operation_id="batch_ports",
        response_model=BatchResults,
    )
    async def batch_ports(batch: Batch) -> Response:
        """Create, change and delete several ports; each has a result of its own."""
        return _json(await service.batch(batch))

    @app.post(
        "/v1/ports:retag",
        responses=ANY_ERROR,
        operation_id="retag_ports",
        response_model=BatchResults,
    )
    async def retag_ports(wanted: Retag) -> Response:
        """Change the VLAN of ports while VMs use them; each has a result of its own."""
        return _json(await service.retag(wanted))

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
        responses=_documented(errors.NotFound, errors.Conflict, errors.HostError),
        operation_id="check_domain",
    )
    async def check_domain(vm_id: NameParameter, request: CheckRequest) -> list[Finding]:
        """Check the XML of an existing libvirt domain against the VM's ports."""
        return await service.domains.check(vm_id, request)


def _add_service_ports(app: FastAPI, service: Service) -> None:
    @app.put("/v1/service-ports/{port_id}", responses=ANY_ERROR, operation_id="put_service_port")
    async def put_service_port(port_id: NameParameter, spec: ServicePortSpec) -> ServicePort:
        """Put a device of the host on a network, or change its rules, and wait until it is verified."""
        return await service.service_ports.put(port_id, spec)

    @app.get("/v1/service-ports", responses=_documented(), operation_id="list_service_ports")
    async def list_service_ports() -> list[ServicePort]:
        """List the service ports of this host."""
        return service.service_ports.all()

    @app.get(
        "/v1/service-ports/{port_id}",
        responses=_documented(errors.NotFound),
        operation_id="get_service_port",
    )
    async def get_service_port(port_id: NameParameter) -> ServicePort:
        """Return a service port."""
        return service.service_ports.get(port_id)

    @app.delete(
        "/v1/service-ports/{port_id}",
        status_code=204,
        responses=ANY_ERROR,
        operation_id="delete_service_port",
    )
    async def delete_service_port(port_id: NameParameter) -> None:
        """Take a device of the host off its network; the device stays. No error if there is none."""
        await service.service_ports.delete(port_id)


def _add_networks(app: FastAPI, service: Service) -> None:
    @app.put("/v1/networks/{network_id}", responses=ANY_ERROR, operation_id="put_network")
    async def put_network(network_id: NameParameter, spec: NetworkSpec) -> NetworkInfo:
        """Create or change a VXLAN network; its peers can change while it has ports."""
        return await service.networks.put(network_id, spec)

    @app.get("/v1/networks", responses=_documented(), operation_id="list_networks")
    async def list_networks() -> list[NetworkInfo]:
        """List the VXLAN networks of this host."""
        return service.networks.all()

    @app.get(
        "/v1/networks/{network_id}",
        responses=_documented(errors.NotFound),
        operation_id="get_network",
    )
    async def get_network(network_id: NameParameter) -> NetworkInfo:
        """Return a VXLAN network."""
        return service.networks.get(network_id)

    @app.delete(
        "/v1/networks/{network_id}",
        status_code=204,
        responses=_documented(errors.Conflict, errors.HostError),
        operation_id="delete_network",
    )
    async def delete_network(network_id: NameParameter) -> None:
        """Delete a VXLAN network that has no ports; no error if it does not exist."""
        await service.networks.delete(network_id)


def _add_physical_networks(app: FastAPI, service: Service) -> None:
    @app.put("/v1/physical-networks/{name}", responses=ANY_ERROR, operation_id="put_physical_network")
    async def put_physical_network(name: NameParameter, spec: PhysicalNetworkSpec) -> PhysicalNetworkInfo:
        """Create or change a physical network; what it keeps is verified on the host."""
        return await service.physical_networks.put(name, spec)

    @app.get("/v1/physical-networks", responses=_documented(), operation_id="list_physical_networks")
    async def list_physical_networks() -> list[PhysicalNetworkInfo]:
        """List the physical networks: those of the configuration, and those that were PUT."""
        return await service.physical_networks.all()

    @app.get(
        "/v1/physical-networks/{name}",
        responses=_documented(errors.NotFound),
        operation_id="get_physical_network",
    )
    async def get_physical_network(name: NameParameter) -> PhysicalNetworkInfo:
        """Return a physical network."""
        return await asyncio.to_thread(service.physical_networks.get, name)

    @app.delete(
        "/v1/physical-networks/{name}",
        status_code=204,
        responses=ANY_ERROR,
        operation_id="delete_physical_network",
    )
    async def delete_physical_network(name: NameParameter) -> None:
        """Delete a physical network that has no ports; no error if it does not exist."""
        await service.physical_networks.delete(name)


def _add_host(app: FastAPI, service: Service) -> None:
    @app.get("/v1/backends", responses=_documented(), operation_id="list_backends")
    async def list_backends() -> list[BackendInfo]:
        """List the backends of this host and whether they are usable."""
        return service.health.backends()

    @app.get("/v1/host", responses=_documented(errors.OperationTimeout), operation_id="get_host")
    async def get_host() -> HostState:
        """Return facts about the host and its daemons."""
        return await service.host()

    @app.get("/v1/host/checks", responses=_documented(), operation_id="host_checks")
    async def host_checks(caller: Request) -> list[Finding]:
        """Check the host and return the findings."""
        return await _while_here(caller, service.health.checks())

    @app.get("/v1/vfs", responses=ANY_ERROR, operation_id="list_vfs")
    async def list_vfs(caller: Request) -> list[VfInfo]:
        """List the virtual functions of this host with their states and ports."""
        return await _while_here(caller, service.vfs())

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
            **_documented(),
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
    @app.get("/v1/tasks/{taskuuid}", responses=_documented(errors.NotFound), operation_id="get_task")
    async def get_task(taskuuid: NameParameter) -> Task:
        """Return an asynchronous call and its result."""
        return await tasks.get(taskuuid)


def _add_health(app: FastAPI, service: Service, metrics: Metrics) -> None:
    @app.get(
        "/metrics",
        operation_id="metrics",
        responses=_documented(),
        response_class=PlainTextResponse,
    )
    async def get_metrics() -> Response:
        """Return the metrics in the text format of Prometheus."""
        # In a thread, because it queries OVS, which may be slow.
        text = await asyncio.to_thread(metrics.render)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    # The guard requires no credential for these two, but refuses calls of browsers.
    @app.get("/healthz", operation_id="healthz", responses=_responses(errors.Forbidden))
    async def healthz() -> dict[str, str]:
        """Return 200 while the agent is running."""
        return {"status": "alive"}

    @app.get(
        "/readyz",
        operation_id="readyz",
        responses={
            **_responses(errors.Forbidden),
            503: {"description": "not ready; the body has the reasons"},
        },
    )
    async def readyz(response: Response) -> dict[str, Any]:
        """Return 200 if the agent is ready, else 503 with the reasons."""
        reasons = service.health.unready()
        response.status_code = 503 if reasons else 200
        return {"ready": not reasons, "reasons": reasons}


async def _netplugin_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, NetpluginError)
    return problem_response(error)


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    """Convert errors of the router: unknown path, unknown method, invalid JSON."""
    assert isinstance(error, HTTPException)
    if error.status_code == 400:
        field = FieldError(field="body", message="could not be parsed as JSON")
        return problem_response(
            InvalidRequest("body: could not be parsed as JSON", step="validate", errors=[field])
        )
    wrong: NetpluginError = NotFound(f"{request.method} {request.url.path}", step="route")
    problem = wrong.problem().model_copy(update={"status": error.status_code})
    return JSONResponse(problem.model_dump(), error.status_code, headers=error.headers, media_type=PROBLEM)


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    """An internal error. The server logs its traceback."""
    wrong = errors.HostError("unexpected; the agent's log says what", step="agent")
    problem = wrong.problem().model_copy(update={"status": 500})
    return JSONResponse(problem.model_dump(), 500, media_type=PROBLEM)


async def _validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return problem_response(invalid(error.errors()))


def invalid(found: Sequence[Any]) -> InvalidRequest:
    """Convert pydantic's errors to an error that names each field as in the request."""
    fields = []
    for finding in found[:_MOST_ERRORS]:
        place = [str(part) for part in finding["loc"]]
        if place and place[0] in ("body", "path", "query"):
            del place[0]
        if finding["type"] == "json_invalid":
            place = []
        fields.append(FieldError(field=".".join(place) or "body", message=str(finding["msg"])))
    detail = "; ".join(f"{field.field[:80]}: {field.message}" for field in fields[:5])
    return InvalidRequest(detail, step="validate", errors=fields)
