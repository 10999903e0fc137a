"""The real agent in this process, over fake backends and a real HTTP server on a free port."""

from __future__ import annotations

import asyncio
import json
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from agents.api import http
from agents.api.access import Access, Token
from agents.api.application import Application
from agents.api.audit import AuditLog
from agents.api.callbacks import TaskSettings
from agents.api.guard import Limits, RequestGuard
from agents.api.listen import Credentials, Listen
from agents.api.roles import BodyRules
from agents.api.tasks import TaskRunner
from agents.host.view import HostView
from agents.off_loop import OffLoop
from agents.service import Service
from agents.store.store import Store
from agents.telemetry.metrics import Metrics
from netplugin import options
from netplugin.backend import Backend
from netplugin.host.ovs_sockets import OvsSockets
from netplugin.host.physical_networks import PhysicalNetworks
from netplugin.host.shared import Host
from netplugin.tuning.intent import HostIntent
from tests.unit.fakes import FakeBackend, FakeHost
from tests.unit.tuning.machines import MemoryRoot, Tree, load
from tests.unit.tuning.trees import tree

#: Seconds after which a test that waits has failed. It is never reached when all is well.
DEADLINE_S = 60.0

SPEC: dict[str, Any] = {
    "vm_id": "vm-1",
    "mac": "52:54:00:12:34:56",
    "backend": "fake",
    "network": {"type": "vlan", "physical_network": "physnet1", "vlan_id": 100},
}


HUGEPAGES = {"/sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages": "8"}


@dataclass
class Agent:
    """The parts of one agent; ``host`` is what its backend ``fake`` has."""

    host: FakeHost
    store: Store
    service: Service
    tasks: TaskRunner
    app: Application
    #: What its backends share.
    shared: Host


@contextmanager
def agent(
    directory: Path,
    *,
    callback_allow: Sequence[str] = (),
    backends: Mapping[str, Backend[Any]] | None = None,
    broken: Mapping[str, str] | None = None,
    teaming_backend: str = "",
    view: HostView | None = None,
    networks: PhysicalNetworks | None = None,
    new_app: bool = False,
) -> Iterator[Agent]:
    """An agent that has had its first look at the host; its tasks are started by who serves it.

    Nothing is wrong with its machine, as long as no other ``view`` is given. ``networks``: the registry
    that its backends use. ``new_app``: with routes that no other agent has had, for a test of first calls.
    """
    conf = options.load([])
    conf.set_override("teaming_backend", teaming_backend, group="agent")
    host = FakeHost()
    loaded: dict[str, Backend[Any]] = (
        dict(backends) if backends is not None else {"fake": FakeBackend("fake", host)}
    )
    store = Store(directory / "agent.db")
    metrics = Metrics(store)
    view = view or view_of(Tree(tree(load("small")).files | HUGEPAGES), directory)
    shared = Host(conf)
    shared.networks = networks or shared.networks
    service = Service(conf, store, metrics, shared, loaded, dict(broken or {}), view)
    tasks = TaskRunner(TaskSettings(tuple(callback_allow), 60.0, 5.0), store.tasks)
    service.start()
    try:
        for worker in service._workers.values():
            assert worker.looked_once.wait(DEADLINE_S)
        parts = (service, tasks, metrics)
        with nullcontext(http.build(*parts)) if new_app else _routed(parts) as app:
            yield Agent(host, store, service, tasks, app, shared)
    finally:
        service.stop()
        store.close()


class _Later:
    """Stands for a part of an agent: what is taken of it before there is one is taken of that one then."""

    def __init__(self, part: Callable[[], Any]) -> None:
        vars(self)["part"] = part

    def __getattr__(self, name: str) -> Any:
        part = self.part()
        return _Later(lambda: self._of(self.part(), name)) if part is None else getattr(part, name)

    @staticmethod
    def _of(part: Any, name: str) -> Any:
        return None if part is None else getattr(part, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.part(), name, value)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.part()(*args, **options)


class _Routes:
    """An application for one agent after the other: to make its routes takes longer than most tests."""

    def __init__(self) -> None:
        self.parts: tuple[Any, ...] = (None,) * 3
        self.app = http.build(*(_Later(lambda n=n: self.parts[n]) for n in range(3)))  # type: ignore[misc]


_ROUTES: list[_Routes] = []


@contextmanager
def _routed(parts: tuple[Any, ...]) -> Iterator[Application]:
    """An application that no other agent has now."""
    routes = _ROUTES.pop() if _ROUTES else _Routes()
    routes.parts = parts
    routes.app.state.off_loop = parts[0].off_loop
    routes.app.openapi_schema = None
    yield routes.app
    _ROUTES.append(routes)


def view_of(machine: Tree, directory: Path, intent: HostIntent | None = None) -> HostView:
    """A machine in memory, where no OVS and no libvirt run."""
    return HostView(intent, OvsSockets.below(directory), "", MemoryRoot(machine))


@contextmanager
def served(app: Any, **listen: Any) -> Iterator[str]:
    """An ASGI application behind uvicorn on loopback; the value is its URL."""
    server = _Server(
        uvicorn.Config(
            app,
            host="127.0.0.1",
            port=0,
            log_config=None,
            access_log=False,
            lifespan="off",
            **listen,
        )
    )
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    try:
        assert server.up.wait(DEADLINE_S)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"{'https' if listen else 'http'}://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(DEADLINE_S)


def answering(status: int, body: Any, wait_s: float = 0.0) -> Any:
    """An ASGI application that gives this answer to each call, as JSON."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(wait_s)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(body, ensure_ascii=False).encode()})

    return app


@contextmanager
def served_agent(running: Agent, tokens: tuple[bytes, ...] = (), **listen: Any) -> Iterator[str]:
    """The agent behind its gate, as ``netplugin-agent`` serves it."""
    with served(_WithTasks(gated(running.app, running.tasks, tokens), running), **listen) as url:
        yield url


def caller(url: str) -> httpx.Client:
    """A client of one test for calls that have no method in the API's own client.

    httpx itself would give up after 5 s, in which a disk may still be busy with a commit.
    """
    return httpx.Client(base_url=url, trust_env=False, timeout=DEADLINE_S)


#: Changes per second, and calls at once.
GENEROUS = (10_000, 10_000)
NO_DEVICES = BodyRules((), lambda retag: {})


def gated(
    app: Any, tasks: Any, tokens: tuple[bytes, ...] = (), limits: tuple[int, int] = GENEROUS
) -> RequestGuard:
    """With its audit log in the agent's."""
    access = Access(tuple(Token(token, token.decode()) for token in tokens))
    return RequestGuard(
        app, tasks, with_access(access), AuditLog(None), Limits(*limits), OffLoop(), NO_DEVICES
    )


def with_access(access: Access) -> Credentials:
    """Credentials that are in no file."""
    return Credentials(Listen(None, None, 0, access))


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = threading.Event()

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self.up.set()


class _WithTasks:
    """Starts the task runner on the server's loop, with the first call."""

    def __init__(self, app: Any, running: Agent) -> None:
        self._app = app
        self._running = running
        self._started: asyncio.Task[None] | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self._started is None:
            self._started = asyncio.create_task(self._running.tasks.start(self._running.app))
        await self._started
        await self._app(scope, receive, send)


def certificate(directory: Path) -> tuple[str, str]:
    """Make a certificate for 127.0.0.1, signed by itself. Return its file, and that of its key."""
    cert, key = directory / "cert.pem", directory / "key.pem"
    request = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=agent"
    named = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert]
    subprocess.run([*request.split(), *named], check=True, capture_output=True, timeout=DEADLINE_S)
    return str(cert), str(key)
