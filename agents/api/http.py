"""The HTTP API: the application, and the routes of ports, events and the agent itself."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Annotated, Any, TypeVar

# Starlette's streams import it with the first one, on the event loop.
import anyio._backends._asyncio  # noqa: F401
from fastapi import FastAPI, Header, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from pydantic import Field

import netplugin.api.errors as errors
from agents.api.answers import FOUND, LISTED, NOT_MODIFIED, joined, listed, tagged
from agents.api.application import Application
from agents.api.bodies import IfMatch, IfNoneMatch
from agents.api.problems import ANY_ERROR, documented, responses
from agents.api.roles import (
    Role,
    needs,
    of_batch,
    of_migration,
    of_port,
    of_reconcile,
    of_retag,
    of_service_port,
    open_to_all,
)
from agents.api.tasks import TaskRunner
from agents.networks.physical import tag_of
from agents.service import Service
from agents.telemetry.event_streams import MEDIA_TYPE
from agents.telemetry.metrics import Metrics
from netplugin.api.batch_models import Batch, BatchResults, PortFilter, Retag
from netplugin.api.conditions import intent_tag
from netplugin.api.counter_models import PortCounters
from netplugin.api.domain_models import CheckRequest, RenderedDomain, RenderRequest
from netplugin.api.event_models import EventFilter, EventKind
from netplugin.api.fields import Name, PciAddress
from netplugin.api.migration_models import MigrateCheck, MigrateRequest
from netplugin.api.models import (
    BackendInfo,
    Finding,
    HostState,
    NetworkInfo,
    NetworkSpec,
    Port,
    PortSpec,
    ReconcileReport,
    ReconcileRequest,
    VfInfo,
)
from netplugin.api.page_models import Page
from netplugin.api.physical_models import PhysicalNetworkInfo, PhysicalNetworkSpec
from netplugin.api.pmd_models import PmdInterval, PmdProposal, PmdRequest, PmdState
from netplugin.api.service_models import ServicePort, ServicePortSpec
from netplugin.api.task_models import Task

T = TypeVar("T")
Pages = Annotated[Page, Query()]
#: What deletes without a look at the host may answer.
_REMOVAL = documented(errors.Conflict, errors.PreconditionFailed, errors.HostError)


async def _results(service: Service, results: BatchResults) -> Response:
    """A batch may have thousands. It is dumped in a thread."""
    dumped = await service.off_loop.compute(joined, results.results)
    return Response(b'{"results":' + dumped + b"}", media_type="application/json")


def build(service: Service, tasks: TaskRunner, metrics: Metrics) -> Application:
    """The ASGI application, without the guard in front of it (authentication, limits, asynchronous calls)."""
    app = Application(service.off_loop)
    _add_ports(app, service)
    _add_service_ports(app, service)
    _add_networks(app, service)
    _add_physical_networks(app, service)
    _add_host(app, service)
    _add_agent(app, service, tasks, metrics)
    return app


def _add_ports(app: FastAPI, service: Service) -> None:
    @app.put("/v1/ports/{port_id}", responses=ANY_ERROR, response_model=Port)
    @needs(Role.PLUG, of_port)
    async def put_port(port_id: Name, spec: PortSpec, condition: IfMatch) -> Response:
        """Create a port or change it, and wait until it is verified on the host."""
        port = await service.ports.put(port_id, spec, condition)
        return tagged(port, service.ports.intent_tag(port))

    @app.get("/v1/ports", responses=LISTED, response_model=list[Port])
    @needs(Role.READ)
    async def list_ports(
        caller: Request, criteria: Annotated[PortFilter, Query()], condition: IfNoneMatch
    ) -> Response:
        """List the ports of this host; a port must match all given parameters."""
        return await listed(
            caller, criteria, condition, partial(service.ports.find, criteria), lambda port: port.port_id
        )

    @app.get("/v1/ports/{port_id}", responses=FOUND, response_model=Port)
    @needs(Role.READ)
    async def get_port(port_id: Name, condition: IfNoneMatch) -> Response:
        """Return a port."""
        port = service.ports.get(port_id)
        return tagged(port, service.ports.intent_tag(port), condition)

    @app.get("/v1/ports/{port_id}/counters", responses=documented(errors.NotFound, errors.Unsupported))
    @needs(Role.READ)
    async def get_port_counters(port_id: Name) -> PortCounters:
        """Return what a port and its uplinks have carried, and what was dropped, by place."""
        return await service.counters.of(port_id)

    @app.delete("/v1/ports/{port_id}", status_code=204, responses=ANY_ERROR)
    @needs(Role.PLUG)
    async def delete_port(port_id: Name, condition: IfMatch) -> None:
        """Delete a port; no error if it does not exist."""
        await service.ports.delete(port_id, condition)

    removed: dict[int | str, Any] = {204: {"description": "the port was removed, or there is none to remove"}}

    @app.post("/v1/ports/{port_id}:migrate", responses=ANY_ERROR | removed, response_model=Port)
    @needs(Role.PLUG, of_migration)
    async def migrate_port(port_id: Name, request: MigrateRequest) -> Response:
        """Carry out one step of a port's live migration, on the host that it leaves or comes to."""
        port = await service.migrations.step(port_id, request)
        if port is None:
            return Response(status_code=204)
        return tagged(port, service.ports.intent_tag(port))

    @app.post("/v1/ports:migrate-check", responses=ANY_ERROR)
    @needs(Role.READ)
    async def check_migration(request: MigrateCheck) -> list[Finding]:
        """Compare a port on the host that its VM leaves with the port that this host would have."""
        return await service.migrations.check(request)

    @app.post("/v1/ports:batch", responses=ANY_ERROR, response_model=BatchResults)
    @needs(Role.PLUG, of_batch)
    async def batch_ports(batch: Batch) -> Response:
        """Create, change and delete several ports; each has a result of its own."""
        return await _results(service, await service.ports.batch(batch))

    @app.post("/v1/ports:retag", responses=ANY_ERROR, response_model=BatchResults)
    @needs(Role.PLUG, of_retag)
    async def retag_ports(retag: Retag) -> Response:
        """Change the VLAN of ports while VMs use them; each has a result of its own."""
        return await _results(service, await service.ports.retag(retag))

    @app.post("/v1/vms/{vm_id}:render-domain", responses=ANY_ERROR)
    @needs(Role.PLUG)
    async def render_domain(vm_id: Name, request: RenderRequest) -> RenderedDomain:
        """Add the VM's interfaces and the elements they require to a libvirt domain."""
        return await (await service.domains()).render(vm_id, request)

    # It changes nothing, but as a POST it may be journalled.
    journalled = documented(errors.NotFound, errors.Conflict, errors.HostError)

    @app.post("/v1/vms/{vm_id}:check-domain", responses=journalled)
    @needs(Role.READ)
    async def check_domain(vm_id: Name, request: CheckRequest) -> list[Finding]:
        """Check the XML of an existing libvirt domain against the VM's ports."""
        return await (await service.domains()).check(vm_id, request)


def _add_service_ports(app: FastAPI, service: Service) -> None:
    ports = service.service_ports

    @app.put("/v1/service-ports/{port_id}", responses=ANY_ERROR, response_model=ServicePort)
    @needs(Role.PLUG, of_service_port)
    async def put_service_port(port_id: Name, spec: ServicePortSpec, condition: IfMatch) -> Response:
        """Put a device of the host on a network, or change its rules, and wait until it is verified."""
        port = await ports.put(port_id, spec, condition)
        return tagged(port, ports.intent_tag(port))

    @app.get("/v1/service-ports", responses=LISTED, response_model=list[ServicePort])
    @needs(Role.READ)
    async def list_service_ports(caller: Request, page: Pages, condition: IfNoneMatch) -> Response:
        """List the service ports of this host."""
        return await listed(caller, page, condition, ports.all, lambda port: port.port_id)

    @app.get("/v1/service-ports/{port_id}", responses=FOUND, response_model=ServicePort)
    @needs(Role.READ)
    async def get_service_port(port_id: Name, condition: IfNoneMatch) -> Response:
        """Return a service port."""
        port = ports.get(port_id)
        return tagged(port, ports.intent_tag(port), condition)

    @app.delete("/v1/service-ports/{port_id}", status_code=204, responses=ANY_ERROR)
    @needs(Role.PLUG)
    async def delete_service_port(port_id: Name, condition: IfMatch) -> None:
        """Take a device of the host off its network; the device stays. No error if there is none."""
        await ports.delete(port_id, condition)


def _add_networks(app: FastAPI, service: Service) -> None:
    @app.put("/v1/networks/{network_id}", responses=ANY_ERROR, response_model=NetworkInfo)
    @needs(Role.PLUG)
    async def put_network(network_id: Name, spec: NetworkSpec, condition: IfMatch) -> Response:
        """Create or change a VXLAN network; its peers can change while it has ports."""
        network = await service.networks.put(network_id, spec, condition)
        return tagged(network, intent_tag(network.spec))

    @app.get("/v1/networks", responses=LISTED, response_model=list[NetworkInfo])
    @needs(Role.READ)
    async def list_networks(caller: Request, page: Pages, condition: IfNoneMatch) -> Response:
        """List the VXLAN networks of this host."""
        return await listed(caller, page, condition, service.networks.all, lambda network: network.network_id)

    @app.get("/v1/networks/{network_id}", responses=FOUND, response_model=NetworkInfo)
    @needs(Role.READ)
    async def get_network(network_id: Name, condition: IfNoneMatch) -> Response:
        """Return a VXLAN network."""
        network = service.networks.get(network_id)
        return tagged(network, intent_tag(network.spec), condition)

    @app.delete("/v1/networks/{network_id}", status_code=204, responses=_REMOVAL)
    @needs(Role.PLUG)
    async def delete_network(network_id: Name, condition: IfMatch) -> None:
        """Delete a VXLAN network that has no ports; no error if it does not exist."""
        await service.networks.delete(network_id, condition)


def _add_physical_networks(app: FastAPI, service: Service) -> None:
    networks, look = service.physical_networks, service.off_loop.look

    @app.put("/v1/physical-networks/{name}", responses=ANY_ERROR, response_model=PhysicalNetworkInfo)
    @needs(Role.OPERATE)
    async def put_physical_network(name: Name, spec: PhysicalNetworkSpec, condition: IfMatch) -> Response:
        """Create or change a physical network; what it keeps is verified on the host."""
        network = await networks.put(name, spec, condition)
        return tagged(network, tag_of(network))

    @app.get("/v1/physical-networks", responses=LISTED, response_model=list[PhysicalNetworkInfo])
    @needs(Role.READ)
    async def list_physical_networks(caller: Request, page: Pages, condition: IfNoneMatch) -> Response:
        """List the physical networks: those of the configuration, and those that were PUT."""
        found = await look(networks.all, "physical networks")
        return await listed(caller, page, condition, lambda: found, lambda network: network.name)

    @app.get("/v1/physical-networks/{name}", responses=FOUND, response_model=PhysicalNetworkInfo)
    @needs(Role.READ)
    async def get_physical_network(name: Name, condition: IfNoneMatch) -> Response:
        """Return a physical network."""
        network = await look(partial(networks.get, name), f"physical network {name}")
        return tagged(network, tag_of(network), condition)

    @app.delete("/v1/physical-networks/{name}", status_code=204, responses=ANY_ERROR)
    @needs(Role.OPERATE)
    async def delete_physical_network(name: Name, condition: IfMatch) -> None:
        """Delete a physical network that has no ports; no error if it does not exist."""
        await networks.delete(name, condition)


def _add_host(app: FastAPI, service: Service) -> None:
    @app.get("/v1/backends", responses=documented())
    @needs(Role.READ)
    async def list_backends() -> list[BackendInfo]:
        """List the backends of this host and whether they are usable."""
        return await service.health.backends()

    @app.get("/v1/host", responses=documented())
    @needs(Role.READ)
    async def get_host() -> HostState:
        """Return facts about the host and its daemons."""
        return await service.view.state()

    @app.get("/v1/host/checks", responses=documented())
    @needs(Role.READ)
    async def host_checks(caller: Request) -> list[Finding]:
        """Check the host and return the findings."""
        return await _while_here(caller, service.health.checks())

    @app.get("/v1/vfs", responses=NOT_MODIFIED | ANY_ERROR, response_model=list[VfInfo])
    @needs(Role.READ)
    async def list_vfs(caller: Request, page: Pages, condition: IfNoneMatch) -> Response:
        """List the virtual functions of this host with their states and ports."""
        found = sorted(await _while_here(caller, service.vfs.all()), key=lambda vf: vf.pci_address)
        return await listed(caller, page, condition, lambda: found, lambda vf: vf.pci_address)

    @app.delete("/v1/vfs/{pci_address}/quarantine", status_code=204, responses=ANY_ERROR)
    @needs(Role.OPERATE)
    async def release_vf(caller: Request, pci_address: PciAddress) -> None:
        """End the quarantine of a virtual function of this host; no error if it is not quarantined."""
        await _while_here(caller, service.vfs.release(pci_address))

    @app.get("/v1/pmd", responses=ANY_ERROR)
    @needs(Role.READ)
    async def get_pmd(measured: Annotated[PmdInterval, Query()]) -> PmdState:
        """Return the PMD threads of OVS, measured since they started or over an interval."""
        return await service.pmd.show(measured.interval)

    @app.put("/v1/pmd", responses=ANY_ERROR)
    @needs(Role.OPERATE)
    async def set_pmd(request: PmdRequest) -> PmdState:
        """Set the CPUs of PMD threads, pin receive queues, or balance the load."""
        return await service.pmd.set(request)

    @app.get("/v1/pmd/proposal", responses=ANY_ERROR)
    @needs(Role.READ)
    async def propose_pmd(measured: Annotated[PmdInterval, Query()]) -> PmdProposal:
        """Propose an assignment of receive queues to PMD threads."""
        return await service.pmd.proposal(measured.interval)

    @app.post("/v1/reconcile", responses=ANY_ERROR)
    @needs(Role.PLUG, of_reconcile)
    async def reconcile(caller: Request, request: ReconcileRequest | None = None) -> ReconcileReport:
        """Reconcile the host with the stored intents, or return the plan (``dry_run``)."""
        return await _while_here(caller, service.ports.reconcile(request or ReconcileRequest()))


async def _while_here(caller: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await the work, and cancel it if the caller disconnects.

    Raises: what the work raises; CancelledError if the caller has disconnected.
    """

    async def cancel() -> None:
        while (await caller.receive())["type"] != "http.disconnect":
            pass
        working.cancel()

    working = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(cancel())
    try:
        return await working
    finally:
        watch.cancel()


#: One server-sent event, as tools that read OpenAPI take it apart.
_SERVER_SENT = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "pattern": "^[0-9]+$"},
        "event": {"enum": [*(kind.value for kind in EventKind), "lost"]},
        "data": {"type": "string", "contentMediaType": "application/json"},
    },
}
_STREAM: dict[int | str, Any] = {
    200: {
        "description": "server-sent events; the data of each is an `Event`. An event `lost` says "
        "that events between `after` and `first` are not stored any more.",
        "content": {MEDIA_TYPE: {"schema": _SERVER_SENT}},
    }
}
_UNREADY: dict[int | str, Any] = {503: {"description": "not ready; the body has the reasons"}}


def _add_agent(app: FastAPI, service: Service, tasks: TaskRunner, metrics: Metrics) -> None:
    @app.get("/v1/events", responses=documented() | _STREAM, response_class=StreamingResponse)
    @needs(Role.READ)
    async def follow_events(
        criteria: Annotated[EventFilter, Query()],
        last_event_id: Annotated[int | None, Field(ge=0, lt=1 << 63), Header()] = None,
    ) -> StreamingResponse:
        """Follow the events of this host: ports, drift, backends, quarantines, findings, physical networks.

        Resume with the header `Last-Event-ID` or with `after`.
        """
        service.events.require_room()
        body = service.events.follow(criteria, last_event_id)
        return StreamingResponse(body, media_type=MEDIA_TYPE, headers={"Cache-Control": "no-store"})

    @app.get("/v1/tasks/{taskuuid}", responses=documented(errors.NotFound))
    @needs(Role.READ)
    async def get_task(taskuuid: Name) -> Task:
        """Return an asynchronous call and its result."""
        return await tasks.get(taskuuid)

    @app.get("/metrics", operation_id="metrics", responses=documented(), response_class=PlainTextResponse)
    @needs(Role.READ)
    async def get_metrics() -> Response:
        """Return the metrics in the text format of Prometheus."""
        # In a thread, because it queries OVS, which may be slow.
        text = await asyncio.to_thread(metrics.render)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    # The guard requires no credential for these two, but refuses calls of browsers.
    @app.get("/healthz", responses=responses(errors.Forbidden))
    @open_to_all
    async def healthz() -> dict[str, str]:
        """Return 200 while the agent is running."""
        return {"status": "alive"}

    @app.get("/readyz", responses=responses(errors.Forbidden) | _UNREADY, response_model=dict[str, Any])
    @open_to_all
    async def readyz() -> JSONResponse:
        """Return 200 if the agent is ready, else 503 with the reasons."""
        reasons = await service.health.unready()
        return JSONResponse({"ready": not reasons, "reasons": reasons}, 503 if reasons else 200)

    @app.get("/openapi.json", include_in_schema=False)
    @needs(Role.READ)
    async def document() -> Response:
        return await service.off_loop.compute(lambda: JSONResponse(app.openapi()))
