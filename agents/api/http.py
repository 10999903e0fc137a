"""The HTTP API: the application, and the routes of ports, events and the agent itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

import netplugin.api.errors as errors
from agents.api.answers import NOT_MODIFIED, IfMatch, IfNoneMatch, listed, tagged
from agents.api.application import Application
from agents.api.host_routes import (
    NameParameter,
    add_host,
    add_networks,
    add_physical_networks,
    add_service_ports,
)
from agents.api.problems import ANY_ERROR, documented, responses
from agents.api.roles import Role, needs, of_batch, of_migration, of_port, of_retag, open_to_all
from agents.api.routing import Header, Query, Routes
from agents.api.tasks import TaskRunner
from agents.event_streams import MEDIA_TYPE
from agents.metrics import Metrics
from agents.service import Service
from netplugin.api.batch_models import Batch, BatchResults, PortFilter, Retag
from netplugin.api.conditions import NO_CONDITION
from netplugin.api.event_models import EventFilter, EventKind
from netplugin.api.migration_models import MigrateCheck, MigrateRequest
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
    """A batch may have thousands. It is dumped in a thread."""

    def dumped() -> bytes:
        parts = (result.model_dump_json().encode() for result in results.results)
        return b'{"results":[' + b",".join(parts) + b"]}"

    return Response(await service.off_loop.compute(dumped), media_type="application/json")


def build(
    service: Service, tasks: TaskRunner, metrics: Metrics, more: Callable[[Routes], None] | None = None
) -> Application:
    """The ASGI application, without the gate in front of it (authentication, limits, asynchronous calls).

    ``more`` adds the routes of a platform.
    """
    routes = Routes()
    _add_ports(routes, service)
    add_service_ports(routes, service)
    add_networks(routes, service)
    add_physical_networks(routes, service)
    add_host(routes, service)
    _add_events(routes, service)
    _add_tasks(routes, tasks)
    _add_health(routes, service, metrics)
    if more is not None:
        more(routes)

    @routes.get("/openapi.json", include_in_schema=False)
    @needs(Role.READ)
    async def document() -> Response:
        return await service.off_loop.compute(lambda: JSONResponse(app.openapi()))

    app = Application(routes, service.off_loop)
    return app


def _add_ports(routes: Routes, service: Service) -> None:
    @routes.put(
        "/v1/ports/{port_id}",
        responses=ANY_ERROR,
        operation_id="put_port",
        response_model=Port,
    )
    @needs(Role.PLUG, of_port)
    async def put_port(port_id: NameParameter, spec: PortSpec, condition: IfMatch) -> Response:
        """Create a port or change it, and wait until it is verified on the host."""
        port = await service.put(port_id, spec, condition)
        return tagged(port, NO_CONDITION, service.intent_tag(port))

    @routes.get(
        "/v1/ports",
        responses=NOT_MODIFIED | documented(),
        operation_id="list_ports",
        response_model=list[Port],
    )
    @needs(Role.READ)
    async def list_ports(
        caller: Request, wanted: Annotated[PortFilter, Query()], condition: IfNoneMatch
    ) -> Response:
        """List the ports of this host; a port must match all given parameters."""
        return await listed(
            caller, wanted, condition, partial(service.ports, wanted), lambda port: port.port_id
        )

    @routes.get(
        "/v1/ports/{port_id}",
        responses=NOT_MODIFIED | documented(errors.NotFound),
        operation_id="get_port",
        response_model=Port,
    )
    @needs(Role.READ)
    async def get_port(port_id: NameParameter, condition: IfNoneMatch) -> Response:
        """Return a port."""
        port = service.port(port_id)
        return tagged(port, condition, service.intent_tag(port))

    @routes.delete("/v1/ports/{port_id}", status_code=204, responses=ANY_ERROR, operation_id="delete_port")
    @needs(Role.PLUG)
    async def delete_port(port_id: NameParameter, condition: IfMatch) -> None:
        """Delete a port; no error if it does not exist."""
        await service.delete(port_id, condition)

    @routes.post(
        "/v1/ports/{port_id}:migrate",
        responses=ANY_ERROR | {204: {"description": "the port was removed, or there is none to remove"}},
        operation_id="migrate_port",
        response_model=Port,
    )
    @needs(Role.PLUG, of_migration)
    async def migrate_port(port_id: NameParameter, request: MigrateRequest) -> Response:
        """Carry out one step of a port's live migration, on the host that it leaves or comes to."""
        port = await service.migrations.step(port_id, request)
        if port is None:
            return Response(status_code=204)
        return tagged(port, NO_CONDITION, service.intent_tag(port))

    @routes.post("/v1/ports:migrate-check", responses=ANY_ERROR, operation_id="check_migration")
    @needs(Role.READ)
    async def check_migration(wanted: MigrateCheck) -> list[Finding]:
        """Compare a port on the host that its VM leaves with the port that this host would have."""
        return await service.migrations.check(wanted)

    @routes.post(
        "/v1/ports:batch",
        responses=ANY_ERROR,
        operation_id="batch_ports",
        response_model=BatchResults,
    )
    @needs(Role.PLUG, of_batch)
    async def batch_ports(batch: Batch) -> Response:
        """Create, change and delete several ports; each has a result of its own."""
        return await _results(service, await service.batch(batch))

    @routes.post(
        "/v1/ports:retag",
        responses=ANY_ERROR,
        operation_id="retag_ports",
        response_model=BatchResults,
    )
    @needs(Role.PLUG, of_retag)
    async def retag_ports(wanted: Retag) -> Response:
        """Change the VLAN of ports while VMs use them; each has a result of its own."""
        return await _results(service, await service.retag(wanted))

    @routes.post(
        "/v1/vms/{vm_id}:render-domain",
        responses=ANY_ERROR,
        operation_id="render_domain",
    )
    @needs(Role.PLUG)
    async def render_domain(vm_id: NameParameter, request: RenderRequest) -> RenderedDomain:
        """Add the VM's interfaces and the elements they require to a libvirt domain."""
        return await (await service.domains()).render(vm_id, request)

    @routes.post(
        "/v1/vms/{vm_id}:check-domain",
        # It changes nothing, but as a POST it may be journalled.
        responses=documented(errors.NotFound, errors.Conflict, errors.HostError),
        operation_id="check_domain",
    )
    @needs(Role.READ)
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


def _add_events(routes: Routes, service: Service) -> None:
    @routes.get(
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
    @needs(Role.READ)
    async def follow_events(
        wanted: Annotated[EventFilter, Query()],
        last_event_id: Annotated[int | None, Field(ge=0, lt=1 << 63), Header()] = None,
    ) -> StreamingResponse:
        """Follow the events of this host: ports, drift, backends, quarantines, findings, physical networks.

        Resume with the header `Last-Event-ID` or with `after`.
        """
        service.events.require_room()
        # Starlette's streams need it: 2 MB, which the event loop would read with the first one.
        await service.off_loop.compute(import_module, "anyio._backends._asyncio")
        body = service.events.follow(wanted, last_event_id)
        return StreamingResponse(body, media_type=MEDIA_TYPE, headers={"Cache-Control": "no-store"})


def _add_tasks(routes: Routes, tasks: TaskRunner) -> None:
    @routes.get("/v1/tasks/{taskuuid}", responses=documented(errors.NotFound), operation_id="get_task")
    @needs(Role.READ)
    async def get_task(taskuuid: NameParameter) -> Task:
        """Return an asynchronous call and its result."""
        return await tasks.get(taskuuid)


def _add_health(routes: Routes, service: Service, metrics: Metrics) -> None:
    @routes.get(
        "/metrics",
        operation_id="metrics",
        responses=documented(),
        response_class=PlainTextResponse,
    )
    @needs(Role.READ)
    async def get_metrics() -> Response:
        """Return the metrics in the text format of Prometheus."""
        # In a thread, because it queries OVS, which may be slow.
        text = await asyncio.to_thread(metrics.render)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    # The guard requires no credential for these two, but refuses calls of browsers.
    @routes.get("/healthz", operation_id="healthz", responses=responses(errors.Forbidden))
    @open_to_all
    async def healthz() -> dict[str, str]:
        """Return 200 while the agent is running."""
        return {"status": "alive"}

    @routes.get(
        "/readyz",
        operation_id="readyz",
        responses={
            **responses(errors.Forbidden),
            503: {"description": "not ready; the body has the reasons"},
        },
        response_model=dict[str, Any],
    )
    @open_to_all
    async def readyz() -> JSONResponse:
        """Return 200 if the agent is ready, else 503 with the reasons."""
        reasons = await service.health.unready()
        return JSONResponse({"ready": not reasons, "reasons": reasons}, 503 if reasons else 200)
