"""The caller of an open loop, at a server that answers as an agent does."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.bench.arrivals import outcome, poisson
from tests.bench.names import PLUGS, TURNOVER
from tests.bench.open_loop_caller import OpenLoop, port_of
from tests.lab.processes import wait_for

TIMES = poisson(200, 0.2, seed=1)


class Agent(ThreadingHTTPServer):
    """Has ports; refuses those of which ``refuses`` has the id. ``held`` stops all PUTs until it is set,
    ``kept`` all DELETEs."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, refuses: frozenset[str] = frozenset()) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.refuses = refuses
        self.ports: set[str] = set()
        self.kept = threading.Event()
        self.kept.set()
        self.come: list[str] = []
        self.seen: list[str] = []
        self.held = threading.Event()
        self.held.set()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Agent

    def do_PUT(self) -> None:
        self.server.come.append(self.path)
        self.server.held.wait()
        self.rfile.read(int(self.headers["content-length"]))
        port_id = self.path.rsplit("/", 1)[1]
        self.server.seen.append(port_id)
        if port_id in self.server.refuses:
            self._answer(503, {"code": "overloaded"})
        else:
            self.server.ports.add(port_id)
            self._answer(200, {"state": "active"})

    def do_DELETE(self) -> None:
        self.server.kept.wait()
        self.server.ports.remove(self.path.rsplit("/", 1)[1])
        self._answer(204, None)

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, status: int, body: object) -> None:
        text = b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@contextmanager
def served(agent: Agent) -> Iterator[int]:
    thread = threading.Thread(target=agent.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield agent.server_address[1]
    finally:
        agent.shutdown()
        thread.join()
        agent.server_close()


def test_each_call_is_made_once_and_its_port_is_removed() -> None:
    agent = Agent(refuses=frozenset({"open3", "open7"}))
    with served(agent) as port:
        loop = OpenLoop(port, "dpdkvhostuser", TURNOVER, until=60)
        loop.run(TIMES)
    assert sorted(agent.seen) == sorted(f"open{n}" for n in range(len(TIMES)))
    assert agent.ports == set()
    found = outcome(loop.calls)
    assert len(found.removals_ms) == len(found.latencies_ms) and min(found.removals_ms) > 0
    assert found.refused == {"overloaded": 2}
    assert len(found.latencies_ms) == len(TIMES) - 2
    assert sorted(call.intended for call in loop.calls) == TIMES


def test_calls_do_not_wait_for_each_other() -> None:
    """An agent that answers nobody yet has all the calls there are."""
    agent = Agent()
    agent.held.clear()
    with served(agent) as port:
        loop = OpenLoop(port, "dpdkvhostuser", TURNOVER, until=60)
        thread = threading.Thread(target=loop.run, args=(TIMES,))
        thread.start()
        wait_for(lambda: len(agent.come) == len(TIMES), 20, "all calls are made")
        assert loop.calls == []
        agent.held.set()
        thread.join()
    assert {call.outcome for call in loop.calls} == {"ok"}
    # The first was held for as long as the last ones were still to come.
    latest = max(call.latency_ms or 0 for call in loop.calls)
    assert latest >= (TIMES[-1] - TIMES[0]) * 1e3


def test_plugs_do_not_wait_for_removals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which there are fewer connections than ports."""
    monkeypatch.setattr("tests.bench.open_loop_caller.CONNECTIONS", 8)
    agent = Agent()
    agent.kept.clear()
    with served(agent) as port:
        loop = OpenLoop(port, "dpdkvhostuser", TURNOVER, until=60)
        thread = threading.Thread(target=loop.run, args=(TIMES,))
        thread.start()
        wait_for(lambda: len(agent.ports) == len(TIMES), 20, "all ports are made")
        agent.kept.set()
        thread.join()
    assert agent.ports == set()
    assert len(outcome(loop.calls).removals_ms) == len(TIMES)


def test_ports_stay_without_turnover() -> None:
    agent = Agent()
    with served(agent) as port:
        loop = OpenLoop(port, "dpdkvhostuser", PLUGS, until=60)
        loop.run(TIMES)
    assert agent.ports == {port_of(number) for number in range(len(TIMES))}
    assert outcome(loop.calls).removals_ms == ()


def test_nobody_answers() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nobody = probe.getsockname()[1]
    loop = OpenLoop(nobody, "dpdkvhostuser", TURNOVER, until=60)
    loop.run(TIMES)
    assert outcome(loop.calls).refused == {"no answer": len(TIMES)}


def test_calls_whose_time_is_over_are_not_made() -> None:
    agent = Agent()
    with served(agent) as port:
        loop = OpenLoop(port, "dpdkvhostuser", TURNOVER, until=0.0)
        loop.run(TIMES)
    assert agent.seen == []
    assert outcome(loop.calls).refused == {"no answer": len(TIMES)}
