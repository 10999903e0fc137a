"""A disk that takes its time for a commit: only what waits for that commit waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from agents.store.store import Store
from netplugin.backend import Claim
from tests.unit.agent import DEADLINE_S, SPEC, agent, caller, served_agent
from tests.unit.fakes import FakeBackend

NETWORK = {"type": "vxlan", "vni": 5001}
Call = Callable[[httpx.Client], httpx.Response]


class SlowDisk:
    """Holds every commit of a store, in SQLite and with its connection locked, until it is released."""

    def __init__(self, store: Store) -> None:
        self.holds = threading.Event()
        self._released = threading.Event()
        store.database.sql.set_trace_callback(self._hold)

    def _hold(self, statement: str) -> None:
        if statement == "COMMIT":
            self.holds.set()
            self._released.wait(DEADLINE_S)

    def release(self) -> None:
        self._released.set()


@contextmanager
def slow(store: Store) -> Iterator[SlowDisk]:
    disk = SlowDisk(store)
    try:
        yield disk
    finally:
        disk.release()


@pytest.mark.parametrize(
    "writes",
    [
        pytest.param(lambda c: c.put("/v1/networks/blue", json=NETWORK), id="network"),
        pytest.param(lambda c: c.delete("/v1/networks/green"), id="network-gone"),
        pytest.param(lambda c: c.put("/v1/ports/p2", json=SPEC), id="port"),
        pytest.param(lambda c: c.delete("/v1/vfs/0000:01:10.0/quarantine"), id="quarantine"),
    ],
)
def test_all_else_goes_on(tmp_path: Path, writes: Call) -> None:
    backends = {name: FakeBackend(name) for name in ("fake", "other")}
    other = {**SPEC, "backend": "other", "mac": "52:54:00:12:34:57"}
    with (
        agent(tmp_path, backends=backends) as running,
        served_agent(running) as url,
        caller(url) as client,
        ThreadPoolExecutor() as pool,
    ):
        assert client.put("/v1/networks/green", json={**NETWORK, "vni": 5002}).is_success
        # A plug is answered before its last commit; the same again, which writes nothing, after that.
        for _ in range(2):
            assert client.put("/v1/ports/p1", json=other).is_success
        running.store.quarantine({Claim("vf", "0000:01:10.0"): "it keeps no MAC"})
        with slow(running.store) as disk:
            written = pool.submit(writes, client)
            assert disk.holds.wait(DEADLINE_S)
            # It reads the disk, and is answered after the commit.
            task = pool.submit(client.get, "/v1/tasks/t1")
            for path in (
                "/healthz",
                "/readyz",
                "/v1/ports",
                "/v1/ports/p1",
                "/v1/networks",
                "/metrics",
            ):
                assert client.get(path).status_code == 200, path
            # Of another backend: what is stored already, and what there is not.
            assert client.put("/v1/ports/p1", json=other).json()["state"] == "active"
            assert client.delete("/v1/ports/p9").status_code == 204
            assert not written.done() and not task.done()
        assert written.result(DEADLINE_S).is_success
        assert task.result(DEADLINE_S).status_code == 404
        assert client.put("/v1/ports/p3", json={**other, "mac": "52:54:00:12:34:58"}).is_success


def test_a_disk_that_refuses_is_an_error_of_the_call(tmp_path: Path) -> None:
    with (
        agent(tmp_path) as running,
        served_agent(running) as url,
        caller(url) as client,
    ):
        running.store.database.sql.execute("PRAGMA query_only=ON")
        answer = client.put("/v1/networks/blue", json=NETWORK)
        assert (answer.status_code, answer.json()["code"]) == (502, "host_error"), answer.text
        assert answer.json()["step"] == "store"
        assert client.get("/v1/networks/blue").status_code == 404
        running.store.database.sql.execute("PRAGMA query_only=OFF")
        assert client.put("/v1/networks/blue", json=NETWORK).status_code == 200
