"""Asynchronous calls when much goes wrong: overload, clocks that step, platforms that answer too much."""

from __future__ import annotations

import gzip
import json
import shutil
import socketserver
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.functional.conftest import BASE
from tests.functional.test_process import make_spec, taps
from tests.lab.agent import PrivateAgent
from tests.lab.processes import wait_for
from tests.unit.agents.api.test_tasks import Receiver

DEADLINE_S = 60.0
OPTIONS = {
    "agent": {"reconcile_interval": "3600"},
    "linuxbridge": {"physical_interfaces": "physnet1:"},
    "api": {"max_waiting": "4"},
}


class Answering:
    """A callback server that answers with these bytes, and then with ``more`` without end."""

    def __init__(self, head: bytes, more: bytes = b"") -> None:
        self.calls = 0
        self.stopped = threading.Event()
        #: Bytes that the agent took of an answer.
        self.taken = 0
        server = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                server.calls += 1
                self.request.settimeout(DEADLINE_S)
                self.request.recv(65536)
                try:
                    self.request.sendall(head)
                    while more and not server.stopped.wait(0.02):
                        server.taken += self.request.send(more)
                except OSError:
                    pass  # the agent has closed the connection

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/cb"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def __enter__(self) -> Answering:
        return self

    def __exit__(self, *_: Any) -> None:
        self.stopped.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.stop()


def private(*urls: str, timeout_s: int = 60) -> PrivateAgent:
    """``timeout_s``: for a callback; who is not waited for is sent a result twice."""
    tasks = {"callback_allow": ",".join(urls), "callback_timeout": str(timeout_s)}
    return PrivateAgent(BASE / "agent", None, {**OPTIONS, "tasks": tasks})


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    shutil.rmtree(BASE / "agent")


def send(agent: PrivateAgent, uuid: str, url: str, method: str, path: str, body: Any = None) -> None:
    headers = {"taskuuid": uuid, "callbackurl": url}
    assert agent.call(method, path, body, headers=headers) == (200, None)


def task(agent: PrivateAgent, uuid: str) -> dict[str, Any]:
    found: dict[str, Any] = agent.get(f"/v1/tasks/{uuid}")[1]
    return found


def delete_all(agent: PrivateAgent) -> None:
    for port in agent.get("/v1/ports")[1]:
        agent.call("DELETE", f"/v1/ports/{port['port_id']}")


def test_accepted_calls_are_not_lost_to_overload(receiver: Receiver) -> None:
    """Twenty at once, where four may wait."""
    receiver.start()
    with private(receiver.url) as agent:
        for number in range(1, 21):
            path = f"/v1/ports/p{number}"
            send(agent, f"t{number}", receiver.url, "PUT", path, make_spec(number))
        answers = [receiver.calls.get(timeout=DEADLINE_S)[2] for _ in range(20)]
        assert [answer["status"] for answer in answers] == [200] * 20
        assert len(taps()) == 20
        delete_all(agent)


def test_calls_are_replayed_in_the_order_they_came_whatever_the_clock_says(
    receiver: Receiver,
) -> None:
    """The clock was set back between a PUT and the DELETE after it, and the agent was killed."""
    with private(receiver.url) as agent:
        agent.stop()
        path = Path(agent.groups["DEFAULT"]["state_path"]) / "agent.db"
        receiver.start()
        agent.start()
        send(agent, "t1", receiver.url, "PUT", "/v1/ports/p1", make_spec(1))
        receiver.calls.get(timeout=DEADLINE_S)
        send(agent, "t2", receiver.url, "DELETE", "/v1/ports/p1")
        receiver.calls.get(timeout=DEADLINE_S)
        agent.stop()
        with closing(sqlite3.connect(path, isolation_level=None)) as store:
            # As a kill before both, with an hour's step in between, would have left it.
            body = store.execute("SELECT body FROM tasks WHERE taskuuid = 't1'").fetchone()[0]
            text = json.dumps(make_spec(1)).encode()
            assert body in (b"", text)
            store.execute(
                "UPDATE tasks SET state = 'accepted', result = NULL, attempts = 0, "
                "body = CASE taskuuid WHEN 't1' THEN ? ELSE x'' END, "
                "created_at = created_at - CASE taskuuid WHEN 't2' THEN 3600 ELSE 0 END",
                (text,),
            )
        agent.start()
        order = [receiver.calls.get(timeout=DEADLINE_S)[1] for _ in range(2)]
        assert order == ["t1", "t2"]
        assert agent.get("/v1/ports/p1")[0] == 404 and taps() == set()


def test_the_answer_of_a_platform_is_not_read() -> None:
    """Only its status counts: a body of half a gigabyte, packed small, is left on the wire."""
    packed = gzip.compress(bytes(256 << 20), 1)
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % len(packed)
    )
    with Answering(head + packed) as platform, private(platform.url) as agent:
        send(agent, "t1", platform.url, "PUT", "/v1/ports/p1", make_spec(1))
        wait_for(lambda: task(agent, "t1")["state"] == "delivered", DEADLINE_S, "delivered")
        assert peak_mb(agent) < 200
        delete_all(agent)


def peak_mb(agent: PrivateAgent) -> int:
    """The most memory that the process ever had (VmHWM of proc(5))."""
    text = Path(f"/proc/{agent.daemon.pid}/status").read_text()
    return int(text.partition("VmHWM:")[2].split()[0]) // 1024


def test_an_answer_that_never_ends_is_given_up() -> None:
    """A byte of a header now and then: each keeps a limit on single reads from being reached."""
    with (
        Answering(b"HTTP/1.1 200 OK\r\nx-slow: ", b"a") as platform,
        private(platform.url, timeout_s=2) as agent,
    ):
        send(agent, "t1", platform.url, "PUT", "/v1/ports/p1", make_spec(1))
        wait_for(lambda: task(agent, "t1")["attempts"] >= 1, DEADLINE_S, "the attempt has ended")
        assert task(agent, "t1")["state"] == "done"
        wait_for(lambda: platform.calls >= 2, DEADLINE_S, "and is tried again")
        delete_all(agent)
