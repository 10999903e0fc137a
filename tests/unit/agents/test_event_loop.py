"""The event loop waits for nobody and computes nothing long: found by what is called on its thread."""

from __future__ import annotations

import asyncio
import json
import socket
import sqlite3
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import httpx
import pytest

from agents.api import bodies, tasks
from agents.api.application import Application
from agents.api.audit import AuditLog
from agents.api.roles import Role, needs
from agents.off_loop import OffLoop
from agents.operations.ports import PortOperations
from agents.store import database
from netplugin.api.batch_models import Batch
from netplugin.host.usability import Usability
from tests.lab.loop_watch import LoopWatch
from tests.unit.agent import DEADLINE_S, SPEC, agent, caller, served, served_agent
from tests.unit.fakes import FakeBackend

NETWORK = {"type": "vxlan", "vni": 5001}
DOMAIN = f"<domain><name>vm-1</name><description>{'x' * 70_000}</description><devices/></domain>"


@pytest.fixture(scope="module")
def installed() -> LoopWatch:
    """An audit hook stays as long as the process: it is off between the tests."""
    watch = LoopWatch()
    watch.install()
    watch.on = False
    return watch


@pytest.fixture
def watch(installed: LoopWatch, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopWatch]:
    connect = sqlite3.connect

    def watched(*args: Any, **kwargs: Any) -> sqlite3.Connection:
        made = connect(*args, **kwargs)
        installed.connection(made)
        return made

    monkeypatch.setattr(database, "sqlite3", SimpleNamespace(**vars(sqlite3) | {"connect": watched}))
    monkeypatch.setattr(database, "threading", SimpleNamespace(**vars(threading) | {"RLock": installed.lock}))
    installed.found.clear()
    yield installed
    installed.on = False


class _Receiver(BaseHTTPRequestHandler):
    taken: ClassVar[threading.Event] = threading.Event()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()
        self.taken.set()

    def log_message(self, *args: Any) -> None:
        """Says nothing."""


@pytest.fixture
def receiver() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Receiver)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def large_batch(ports: int = 500) -> dict[str, Any]:
    return {"put": [{"port_id": f"b{n}", "spec": SPEC} for n in range(ports)]}


def test_the_watch_finds_what_waits(watch: LoopWatch, tmp_path: Path) -> None:
    """So that no test passes because nothing is found."""
    import grp

    watch.on = True

    async def waits() -> None:
        (tmp_path / "file").write_text("")
        grp.getgrgid(0)
        socket.getaddrinfo("127.0.0.1", 80)
        database.sqlite3.connect(tmp_path / "db").execute("SELECT 1")
        time.sleep(0)
        with watch.lock():
            pass
        await asyncio.to_thread(time.sleep, 0)

    time.sleep(0)
    asyncio.run(waits())
    watch.on = False
    found = [each["what"] for each in watch.found]
    names = ["open", "grp.getgrgid", "socket.getaddrinfo", "sqlite3.connect", "sqlite3.execute", "lock"]
    assert set(names) <= set(found) and found.count("time.sleep") <= 1, found


def test_no_call_makes_the_event_loop_wait(
    watch: LoopWatch, tmp_path: Path, receiver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "audit.log"
    monkeypatch.setattr("tests.unit.agent.AuditLog", lambda _: AuditLog(log))
    backends = {name: FakeBackend(name) for name in ("fake", "other")}
    with (
        agent(
            tmp_path,
            backends=backends,
            teaming_backend="other",
            callback_allow=[receiver],
            new_app=True,
        ) as running,
        served_agent(running, (b"secret",)) as url,
        httpx.Client(
            base_url=url, trust_env=False, timeout=DEADLINE_S, headers={"Authorization": "Bearer secret"}
        ) as client,
    ):
        # What Python imports or compiles at the first call of its kind is no wait of a running agent.
        assert client.get("/healthz").status_code == 200
        assert client.put("/v1/ports/p0", json={"vm_id": 1}).status_code == 422
        watch.on = True
        calls: list[tuple[str, str, Any]] = [
            ("PUT", "/v1/networks/blue", NETWORK),
            ("PUT", "/v1/ports/p1", SPEC),
            ("PUT", "/v1/ports/p2", {**SPEC, "network": {"type": "vxlan", "network_id": "blue"}}),
            ("PUT", "/v1/ports/p3", {**SPEC, "vf": {"teaming": True}}),
            ("PUT", "/v1/ports/p4", {**SPEC, "backend": "none"}),
            ("POST", "/v1/ports:batch", large_batch()),
            ("POST", "/v1/ports:retag", {"network": "physnet1", "from_vlan": 100, "to_vlan": 200}),
            ("POST", "/v1/vms/vm-1:render-domain", {"xml": DOMAIN}),
            ("POST", "/v1/vms/vm-1:check-domain", {"xml": DOMAIN}),
            ("PUT", "/v1/physical-networks/phys1", {"ovs": {}}),
            ("POST", "/v1/reconcile", {"dry_run": True}),
            ("POST", "/v1/reconcile", None),
            *(("GET", path, None) for path in READ),
            ("DELETE", "/v1/ports/p1", None),
            ("DELETE", "/v1/ports/never", None),
            ("DELETE", "/v1/ports/p3", None),
            ("DELETE", "/v1/ports/p2", None),
            ("DELETE", "/v1/networks/blue", None),
            ("DELETE", "/v1/physical-networks/none", None),
            ("DELETE", "/v1/vfs/0000:01:10.0/quarantine", None),
        ]
        log.rename(tmp_path / "audit.log.1")  # the next entry makes it anew
        for method, path, body in calls:
            answer = client.request(method, path, json=body)
            assert answer.status_code < 500, f"{method} {path}: {answer.text}"
        task = {"taskuuid": "t1", "callbackurl": receiver}
        for _ in range(2):
            assert client.put("/v1/ports/p5", json=SPEC, headers=task).status_code == 200
        assert _Receiver.taken.wait(DEADLINE_S)
        assert client.get("/v1/tasks/t1").status_code == 200
        watch.on = False
    assert len(log.read_text().splitlines()) > len(calls) / 2
    assert not watch.found, json.dumps(watch.found[:10], indent=1)


READ = (
    "/v1/ports",
    "/v1/ports?limit=10",
    "/v1/ports/p1",
    "/v1/ports/none",
    "/v1/service-ports",
    "/v1/networks",
    "/v1/networks/blue",
    "/v1/physical-networks",
    "/v1/physical-networks/phys1",
    "/v1/vfs",
    "/v1/backends",
    "/v1/host",
    "/v1/host/checks",
    "/v1/events?follow=false",
    "/v1/tasks/none",
    "/metrics",
    "/healthz",
    "/readyz",
    "/openapi.json",
)


def test_the_source_of_an_endpoint_is_not_read_when_it_was_replaced(
    watch: LoopWatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by an upgrade, between the start of the agent and the first call."""
    source = tmp_path / "endpoint_of_a_test.py"
    source.write_text("async def endpoint() -> dict[str, str]:\n    return {}\n")
    monkeypatch.syspath_prepend(tmp_path)
    app = Application(OffLoop())
    app.get("/first")(needs(Role.READ)(import_module(source.stem).endpoint))
    source.write_text("# A line more.\n" + source.read_text())
    with served(app) as url, caller(url) as client:
        assert client.get("/none").status_code == 404
        watch.on = True
        assert client.get("/first").json() == {}
        watch.on = False
    assert not watch.found, json.dumps(watch.found, indent=1)


def test_long_lists_and_bodies_are_made_elsewhere(
    watch: LoopWatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, receiver: str
) -> None:
    """Each is counted where it is made: on the event loop nothing that grows with its length."""
    on_loop: list[str] = []

    def noted(owner: Any, name: str, grows: Any) -> None:
        function = getattr(owner, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            if asyncio._get_running_loop() is not None and grows(*args):
                on_loop.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, called)

    def is_long(text: Any, *_: Any) -> bool:
        return isinstance(text, str | bytes) and len(text) > bodies.SMALL

    noted(PortOperations, "describe_alone", lambda *_: True)
    noted(json, "loads", is_long)
    noted(Batch, "model_validate", lambda *_: True)
    noted(tasks, "_fingerprint", lambda *_: True)
    with (
        agent(tmp_path, callback_allow=[receiver], new_app=True) as running,
        served_agent(running) as url,
        caller(url) as client,
    ):
        body = large_batch()
        assert len(json.dumps(body)) > bodies.SMALL
        assert client.post("/v1/ports:batch", json=body).status_code == 200
        made = on_loop.count("describe_alone")
        assert made == 500 and set(on_loop) == {"describe_alone"}, "one for each answer, between other calls"
        assert len(client.get("/v1/ports").json()) == 500
        assert client.get("/v1/ports", params={"state": "failed"}).json() == []
        wrong = {"put": [{"port_id": "x", "spec": {}}] * 3000}
        assert client.post("/v1/ports:batch", json=wrong).status_code == 422
        task = {"taskuuid": "t1", "callbackurl": receiver}
        _Receiver.taken.clear()
        assert client.post("/v1/ports:batch", json=body, headers=task).status_code == 200
        assert _Receiver.taken.wait(DEADLINE_S)
        assert on_loop.count("describe_alone") == 1000 and set(on_loop) == {"describe_alone"}, set(on_loop)


class Hanging(FakeBackend):
    """Whether it can be used is not answered: a driver waits for a lock of the kernel."""

    hangs = False

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.asked, self.released = threading.Event(), threading.Event()

    def probe(self) -> Usability:
        if self.hangs:
            self.asked.set()
            self.released.wait(DEADLINE_S)
        return super().probe()


def test_a_backend_that_hangs_holds_up_nobody_else(tmp_path: Path) -> None:
    sick = Hanging("sick")
    with (
        agent(tmp_path, backends={"sick": sick, "fake": FakeBackend("fake")}, new_app=True) as running,
        served_agent(running) as url,
        caller(url) as client,
        ThreadPoolExecutor(20) as pool,
    ):
        sick.hangs, running.service.off_loop.look_s = True, 1.0
        try:
            # More than there are threads for looks.
            waiting = [pool.submit(client.get, "/readyz") for _ in range(16)]
            assert sick.asked.wait(DEADLINE_S)
            assert client.get("/healthz").status_code == 200
            assert client.put("/v1/ports/p1", json=SPEC).status_code == 200
            assert client.post("/v1/ports:batch", json=large_batch()).status_code == 200
            assert len(client.get("/v1/ports").json()) == 501
            assert client.delete("/v1/ports/never").status_code == 204
            for ready in waiting:
                answer = ready.result(DEADLINE_S)
                assert answer.status_code == 503
                assert any("sick: backend sick could not be read" in why for why in answer.json()["reasons"])
        finally:
            sick.hangs, running.service.off_loop.look_s = False, DEADLINE_S
            sick.released.set()
        assert client.get("/readyz").status_code == 200
