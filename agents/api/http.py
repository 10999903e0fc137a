"""The HTTP API: how a route is served, and the routes of ports, events and the agent itself.

FastAPI registers the routes and makes their OpenAPI document. It does not serve them: its solver of
dependencies takes longest of all in a call, it validates each answer a second time, and it reads its own
source at the first call of each route, on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from importlib import import_module
from inspect import iscoroutinefunction
from typing import Annotated, Any

from fastapi import FastAPI, Header, Query, Request, Response
from fastapi.dependencies.utils import request_params_to_args
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException

import netplugin.api.errors as errors
from agents.api.answers import (
    CONDITIONS,
    NOT_MODIFIED,
    IfMatch,
    IfNoneMatch,
    listed,
    refuse_conditions,
    tagged,
)
from agents.api.bodies import SMALL, parsed, parsed_json
from agents.api.document import Application
from agents.api.host_routes import (
    NameParameter,
    add_host,
    add_networks,
    add_physical_networks,
    add_service_ports,
)
from agents.api.problems import (
    ANY_ERROR,
    documented,
    http_error,
    invalid,
    netplugin_error,
    problem_response,
    responses,
    unexpected,
    validation_error,
)
from agents.api.tasks import TaskRunner
from agents.event_streams import MEDIA_TYPE
from agents.metrics import Metrics
from agents.off_loop import OffLoop
from agents.service import Service
from netplugin.api.batch_models import Batch, BatchResults, PortFilter, Retag
from netplugin.api.conditions import NO_CONDITION
from netplugin.api.errors import NetpluginError
from netplugin.api.event_models import EventFilter, EventKind
from netplugin.api.models import (
    CheckRequest,
    Finding,
    Port,
    PortSpec,
    RenderedDomain,
    RenderRequest,
)
from netplugin.api.task_models import Task


async def _results(service: Service, results: BatchResults) -> Response:
    """A batch may have thousands. FastAPI would validate each of them again."""

    def dumped() -> bytes:
        parts = (result.model_dump_json().encode() for result in results.results)
        return b'{"results":[' + b",".join(parts) + b"]}"

    return Response(await service.off_loop.compute(dumped), media_type="application/json")


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
    add_service_ports(app, service)
    add_networks(app, service)
    add_physical_networks(app, service)
    add_host(app, service)
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
        return await listed(
            caller, wanted, condition, partial(service.ports, wanted), lambda port: port.port_id
        )

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
        return await (await service.domains()).render(vm_id, request)

    @app.post(
        "/v1/vms/{vm_id}:check-domain",
        # It changes nothing, but as a POST it may be journalled.
        responses=documented(errors.NotFound, errors.Conflict, errors.HostError),
        operation_id="check_domain",
    )
    async def check_domain(vm_id: NameParameter, request: CheckRequest) -> list[Finding]:
        """Check the XML of an existing libvirt domain against the VM's ports."""
        return await (await service.domains()).check(vm_id, request)


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
        # Starlette's streams need it: 2 MB, which the event loop would read with the first one.
        await service.off_loop.compute(import_module, "anyio._backends._asyncio")
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


class Route(APIRoute):
    """A route with parameters in path, query and headers, a body, conditions, and the request itself.

    A large body is validated in a thread.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Raises: TypeError for an endpoint with anything else."""
        super().__init__(*args, **kwargs)
        known = self.dependant
        #: The name of the endpoint's condition, and how it is made of a request.
        self._conditions = {
            str(each.name): CONDITIONS[each.call] for each in known.dependencies if each.call in CONDITIONS
        }
        if (
            len(self._conditions) < len(known.dependencies)
            or known.cookie_params
            or known.response_param_name
            or known.background_tasks_param_name
            or not iscoroutinefunction(self.endpoint)
        ):
            raise TypeError(f"{self.path}: the endpoint needs more of FastAPI than this route has")

    async def handle(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["method"] not in (self.methods or ()):
            await super().handle(scope, receive, send)  # 405
            return
        try:
            response = await self._answer(Request(scope, receive, send))
        except NetpluginError as error:
            response = problem_response(error)
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        """Raises: NetpluginError."""
        values: dict[str, Any] = {}
        errors: list[Any] = []
        for field in self.dependant.path_params:
            value = request.path_params.get(field.alias)
            values[field.name], wrong = field.validate(value, {}, loc=("path", field.alias))
            errors += wrong or ()
        for fields, sent in (
            (self.dependant.query_params, request.query_params),
            (self.dependant.header_params, request.headers),
        ):
            if fields:
                found, wrong = request_params_to_args(fields, sent)
                values |= found
                errors += wrong
        if self.body_field is not None:
            values[self.body_field.name], wrong = await self._body(request, self.body_field)
            errors += wrong or ()
        if errors:
            raise invalid(errors)
        for name, made_of in self._conditions.items():
            values[name] = made_of(request)
        if not self._conditions:
            refuse_conditions(request)
        if self.dependant.request_param_name:
            values[self.dependant.request_param_name] = request
        return _response(await self.endpoint(**values), self.status_code or 200)

    async def _body(self, request: Request, field: Any) -> tuple[Any, Any]:
        """The model, or the errors. Raises: InvalidRequest."""
        body = await request.body()
        if len(body) > SMALL:
            off_loop: OffLoop = request.app.state.off_loop
            return await off_loop.compute(parsed, body, field.field_info.annotation), ()
        if not body and not field.field_info.is_required():
            return field.get_default(), ()
        if not body:
            return None, [{"type": "missing", "loc": ("body",), "msg": "Field required"}]
        found: tuple[Any, Any] = field.validate(parsed_json(body), {}, loc=("body",))
        return found


def _response(made: Any, status: int) -> Response:
    if isinstance(made, Response):
        return made
    if made is None:
        return Response(status_code=status)
    if isinstance(made, BaseModel):
        return Response(made.model_dump_json(), status, media_type="application/json")
    if isinstance(made, list):
        body = b"[" + b",".join(each.model_dump_json().encode() for each in made) + b"]"
        return Response(body, status, media_type="application/json")
    return JSONResponse(made, status)
