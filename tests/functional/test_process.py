"""The agent's process when the system refuses: no descriptors, a store that is locked, news lost."""

from __future__ import annotations

import http.client
import json
import os
import resource
import select
import shutil
import signal
import socket
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from netplugin.host.names import TAP, device_name
from tests.functional.conftest import BASE
from tests.lab.agent import PrivateAgent
from tests.lab.namespaces import namespace, within
from tests.lab.processes import Daemon, run, wait_for

DEADLINE_S = 60.0
READERS = 24
OPTIONS = {
    # It looks by itself only when it is notified.
    "agent": {"reconcile_interval": "3600"},
    "linuxbridge": {"physical_interfaces": "physnet1:"},
}


@pytest.fixture(scope="module")
def process() -> Iterator[PrivateAgent]:
    with PrivateAgent(BASE / "agent", None, OPTIONS) as private:
        yield private
    shutil.rmtree(BASE / "agent")


@pytest.fixture
def agent(process: PrivateAgent) -> Iterator[PrivateAgent]:
    """It is as it was after each test: alive, ready, and without ports."""
    yield process
    wait_for(lambda: process.get("/readyz")[0] == 200, DEADLINE_S, "the agent is ready again")
    for port in process.get("/v1/ports")[1]:
        assert process.call("DELETE", f"/v1/ports/{port['port_id']}")[0] == 204


def make_spec(number: int, **fields: Any) -> dict[str, Any]:
    network = {"type": "flat", "physical_network": "physnet1"}
    mac = f"52:54:00:00:00:{number:02x}"
    return {"vm_id": f"vm{number}", "mac": mac, "backend": "linuxbridge", "network": network, **fields}


@contextmanager
def descriptors_below(agent: PrivateAgent, limit: int) -> Iterator[None]:
    """What is open stays open, and the agent gets EMFILE for a number from the limit on."""
    before = resource.prlimit(agent.daemon.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(agent.daemon.pid, resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.prlimit(agent.daemon.pid, resource.RLIMIT_NOFILE, before)


@contextmanager
def out_of_descriptors(agent: PrivateAgent, left: int = 1) -> Iterator[None]:
    """The agent can open so many more (one is the connection of a call), and those that it closes."""
    opened = {int(number) for number in os.listdir(f"/proc/{agent.daemon.pid}/fd")}
    free = [number for number in range(len(opened) + left + 1) if number not in opened]
    with descriptors_below(agent, free[left]):
        yield


@contextmanager
def locked_store(agent: PrivateAgent) -> Iterator[None]:
    """Somebody else writes the store: a backup that hangs, say."""
    path = Path(agent.groups["DEFAULT"]["state_path"]) / "agent.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


def taps() -> set[str]:
    return {name for name in os.listdir("/sys/class/net") if name.startswith(TAP)}


def unexpected(agent: PrivateAgent, where: str) -> float:
    """How many unexpected errors the agent counts there."""
    text = agent.get("/metrics")[1]
    sample = f'netplugin_unexpected_errors_total{{where="{where}"}} '
    values = [line.removeprefix(sample) for line in text.splitlines() if line.startswith(sample)]
    return float(values[0]) if values else 0.0


# -- errors that are the system's ------------------------------------------------------------------


def assert_undone(agent: PrivateAgent, status: int, answer: Any) -> None:
    assert (status, answer["code"]) == (502, "host_error"), answer
    assert "Too many open files" in answer["detail"], answer
    wait_for(lambda: agent.get("/v1/ports/p1")[0] == 404, DEADLINE_S, "the port is gone")
    assert taps() == set()


def test_a_plug_without_a_descriptor_is_undone(agent: PrivateAgent) -> None:
    """The call comes on a connection that was there; whatever the agent closes, it can open nothing."""
    where = urlsplit(agent.url)
    with closing(http.client.HTTPConnection(where.hostname or "", where.port, timeout=DEADLINE_S)) as kept:
        kept.request("GET", "/readyz")
        assert kept.getresponse().read()
        with descriptors_below(agent, limit=3):
            kept.request(
                "PUT", "/v1/ports/p1", json.dumps(make_spec(1)), {"content-type": "application/json"}
            )
            answered = kept.getresponse()
            status, answer = answered.status, json.load(answered)
    assert_undone(agent, status, answer)


def test_a_plug_that_runs_out_of_descriptors_anywhere_is_undone(agent: PrivateAgent) -> None:
    """Each plug gets one step further: to the kernel, to the tap, to the program for the filters."""
    status = 0
    for left in range(1, 12):
        with out_of_descriptors(agent, left):
            status, answer = agent.call("PUT", "/v1/ports/p1", make_spec(1))
        if status == 200:
            break
        assert_undone(agent, status, answer)
    assert status == 200, "with enough of them it is made"


def test_a_change_that_runs_out_of_descriptors_goes_back(agent: PrivateAgent) -> None:
    """It needs few, or none: the connections to the kernel and the store are kept."""
    assert agent.call("PUT", "/v1/ports/p1", make_spec(1))[0] == 200
    changed = make_spec(1, qos={"ingress_kbps": 1000}, port_security={"enabled": False})
    status = 0

    def back() -> bool:
        port = agent.get("/v1/ports/p1")[1]
        return bool(port["state"] == "active" and port["spec"]["qos"]["ingress_kbps"] is None)

    for left in range(1, 12):
        with out_of_descriptors(agent, left):
            status, answer = agent.call("PUT", "/v1/ports/p1", changed)
        if status == 200:
            break
        assert (status, answer["code"]) == (502, "host_error"), answer
        wait_for(back, DEADLINE_S, "the port is as it was")
    assert status == 200, "with enough of them it is made"


def test_a_plug_that_the_store_does_not_take(agent: PrivateAgent) -> None:
    """SQLite waits for some seconds before it gives up; all others are answered meanwhile."""
    with locked_store(agent), ThreadPoolExecutor(1) as pool:
        plug = pool.submit(agent.call, "PUT", "/v1/ports/p1", make_spec(1))
        answered = 0
        while not plug.done():
            assert agent.get("/v1/ports")[0] == 200
            answered += 1
        # At most those that were on their way when the wait began, and when it ended.
        assert answered > 3
        status, error = plug.result()
        assert (status, error["code"], error["step"]) == (502, "host_error", "store"), error
        assert "locked" in error["detail"]
    assert agent.get("/v1/ports/p1")[0] == 404 and taps() == set()
    assert agent.call("PUT", "/v1/ports/p1", make_spec(1))[0] == 200


def test_readiness_does_not_write(agent: PrivateAgent) -> None:
    """SQLite's data_version changes with each commit of another connection."""
    path = Path(agent.groups["DEFAULT"]["state_path"]) / "agent.db"
    with closing(sqlite3.connect(path)) as other:

        def version() -> int:
            return int(other.execute("PRAGMA data_version").fetchone()[0])

        def unchanged() -> bool:  # the agent also writes by itself, once a minute
            before = version()
            assert all(agent.get("/readyz")[0] == 200 for _ in range(5))
            return version() == before

        assert any(unchanged() for _ in range(3))


def test_a_store_that_cannot_be_written_is_not_ready(agent: PrivateAgent) -> None:
    with locked_store(agent):
        assert agent.call("PUT", "/v1/ports/p1", make_spec(1))[0] == 502
        status, body = agent.get("/readyz")
        assert status == 503 and any("locked" in reason for reason in body["reasons"])
    assert agent.call("PUT", "/v1/ports/p1", make_spec(1))[0] == 200
    assert agent.get("/readyz")[0] == 200


# -- what watches goes on --------------------------------------------------------------------------


def test_events_are_received_after_the_watch_has_failed(agent: PrivateAgent) -> None:
    """Which port a removed rate belonged to is asked of the kernel, and that takes a descriptor."""
    rates = {"qos": {"ingress_kbps": 1000}}
    assert agent.call("PUT", "/v1/ports/p1", make_spec(1, **rates))[0] == 200
    tap = device_name(TAP, "p1")
    before = unexpected(agent, "linuxbridge-watch")
    logged = len(agent.log.read_text())
    with ExitStack() as limits:

        def failed() -> bool:
            # What was open for a moment when they were counted is free by now: it would do.
            limits.enter_context(out_of_descriptors(agent, left=0))
            # Until it has to ask again: events that come while it asks cost no descriptor.
            run(["tc", "qdisc", "replace", "dev", tap, "root", "pfifo"])
            run(["tc", "qdisc", "del", "dev", tap, "root"])
            return "linuxbridge-watch" in agent.log.read_text()[logged:]

        # Nothing can be asked of the agent meanwhile.
        agent.daemon.wait_for(failed, DEADLINE_S, "it failed")
    wait_for(lambda: "tbf" in run(["tc", "qdisc", "show", "dev", tap]), DEADLINE_S, "put back")
    assert unexpected(agent, "linuxbridge-watch") > before
    # And it notices what comes after.
    run(["nft", "flush", "ruleset"])
    wait_for(lambda: "npt" in run(["nft", "list", "ruleset"]), DEADLINE_S, "the filter is back")


def test_a_misspelled_option_is_reported_and_the_agent_goes_on(agent: PrivateAgent) -> None:
    logged = len(agent.log.read_text())
    agent.restart_with({"agent": {"reconcile_intervall": "1"}})
    try:
        log = agent.log.read_text()[logged:]
        assert f"{agent.config}: [agent] has no option reconcile_intervall: it is ignored" in log
        assert log.count("it is ignored") == 1, "all others are options"
    finally:
        del agent.groups["agent"]["reconcile_intervall"]
        agent.restart_with({})


# -- calls, reads and looks take turns -------------------------------------------------------------


def test_a_plug_during_events_that_never_end(agent: PrivateAgent) -> None:
    """Somebody changes what the agent watches for as long as the plug takes."""
    assert agent.call("PUT", "/v1/ports/p1", make_spec(1))[0] == 200
    plugged = threading.Event()

    def disturb(number: int) -> None:
        change = f"chain bridge netplugin disturbance{number}\n"
        lines = f"add {change}delete {change}" * 200
        while not plugged.is_set():
            run(["nft", "-i"], stdin=lines)  # a transaction a line

    with ThreadPoolExecutor() as pool:
        disturbed = [pool.submit(disturb, number) for number in range(3)]
        try:
            for number in range(2, 8):
                assert agent.call("PUT", f"/v1/ports/p{number}", make_spec(number))[0] == 200
        finally:
            plugged.set()
        for one in disturbed:
            one.result(DEADLINE_S)


def test_plugs_during_reads_that_never_end(agent: PrivateAgent) -> None:
    """Each reader asks again as soon as it is answered, so that some always wait for their turn."""
    done, started = threading.Event(), threading.Barrier(READERS + 1, timeout=DEADLINE_S)

    def read() -> set[int]:
        started.wait()
        statuses = set()
        while not done.is_set():
            statuses.add(agent.call("POST", "/v1/reconcile", {"dry_run": True})[0])
        return statuses

    with ThreadPoolExecutor(READERS) as pool:
        readers = [pool.submit(read) for _ in range(READERS)]
        started.wait()
        try:
            for number in range(1, 4):
                assert agent.call("PUT", f"/v1/ports/p{number}", make_spec(number))[0] == 200
        finally:
            done.set()
        assert set().union(*(reader.result(DEADLINE_S) for reader in readers)) == {200}


# -- connections -----------------------------------------------------------------------------------


def connect(agent: PrivateAgent) -> socket.socket:
    return socket.create_connection(("127.0.0.1", agent.port), timeout=DEADLINE_S)


def is_ended(connection: socket.socket) -> bool:
    """Wait until the agent ends the connection; what it says before is passed over."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionError:
        pass
    return True  # not within the timeout: TimeoutError


def test_connections_that_keep_the_agent_waiting_are_closed(process: PrivateAgent) -> None:
    process.restart_with({"api": {"header_timeout": "1", "body_timeout": "1", "idle_timeout": "1"}})
    begun = b"PUT /v1/ports/p1 HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    whole = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    for sent in (b"", b"\r\n", begun, begun + b"content-length: 9\r\n\r\n{", whole):
        with closing(connect(process)) as connection:
            connection.sendall(sent)
            assert is_ended(connection), sent
    # A caller without a CPU may not send its request in a second either.
    wait_for(lambda: process.get("/readyz")[0] == 200, DEADLINE_S, "others are served")


def test_a_drip_of_bytes_is_not_waited_for(process: PrivateAgent) -> None:
    with closing(connect(process)) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nx-slow: ")
        ended = threading.Event()

        def drip() -> None:
            with suppress(OSError):
                while not ended.wait(0.2):
                    connection.sendall(b"a")

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            assert is_ended(connection)
        finally:
            ended.set()
            dripping.join(DEADLINE_S)


def test_silent_connections_keep_no_caller_out(process: PrivateAgent) -> None:
    """The one that is idle for longest makes room."""
    process.restart_with({"api": {"max_connections": "8", "header_timeout": "3600", "idle_timeout": "3600"}})
    with ExitStack() as opened:
        silent = [opened.enter_context(closing(connect(process))) for _ in range(20)]
        assert process.get("/readyz")[0] == 200
        assert is_ended(silent[0])


# -- the end ---------------------------------------------------------------------------------------


def test_a_call_in_hand_is_answered_before_the_end(process: PrivateAgent) -> None:
    body = json.dumps(make_spec(1)).encode()
    head = b"PUT /v1/ports/p1 HTTP/1.1\r\nHost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n" % len(body)
    with closing(connect(process)) as caller:
        with locked_store(process):
            caller.sendall(head + body)
            # It was sent before this, which is answered: the call has been taken.
            assert process.get("/healthz")[0] == 200
            os.kill(process.daemon.pid, signal.SIGTERM)
            wait_for(lambda: process.get("/healthz")[0] == 0, DEADLINE_S, "no call is taken")
            assert process.daemon.running
        assert caller.recv(65536).startswith(b"HTTP/1.1 200 ")
        wait_for(lambda: process.daemon.status == 0, DEADLINE_S, "it has ended")
    process.daemon.kill()
    process.start()
    assert process.get("/v1/ports/p1")[1]["state"] == "active"
    assert process.call("DELETE", "/v1/ports/p1")[0] == 204


def test_the_heartbeat_is_sent_to_systemd(tmp_path: Path) -> None:
    """sd_notify(3): as the unit asks for it, on the socket of the unit."""
    path = tmp_path / "notify"
    received: list[bytes] = []
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as notify:
        notify.bind(str(path))

        def listen() -> None:
            while (message := notify.recv(100)) != b"END":
                received.append(message)

        # Like systemd, all the time: the socket has room for ten.
        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        with (
            namespace("np-watched"),
            PrivateAgent(BASE / "watched", None, OPTIONS, netns="np-watched") as agent,
        ):
            agent.stop()
            agent.daemon = Daemon(
                "netplugin-agent",
                within("np-watched", agent.daemon.args),
                agent.log,
                {"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": "600000"},
            )
            agent.start()
            reported = received.count(b"WATCHDOG=1")
            wait_for(lambda: received.count(b"WATCHDOG=1") > reported + 3, DEADLINE_S, "its heart beats")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.sendto(b"END", str(path))
        listener.join(DEADLINE_S)
    assert [message for message in received if message != b"WATCHDOG=1"] == [b"READY=1", b"STOPPING=1"]
    shutil.rmtree(BASE / "watched")


# -- large bodies ----------------------------------------------------------------------------------


def test_others_are_answered_while_a_large_batch_is_validated(process: PrivateAgent) -> None:
    """Its last port alone is wrong. A caller who is answered asks again, until the batch is."""
    addresses = {"allowed_addresses": [{"ip": f"10.0.0.{n}"} for n in range(1, 33)]}
    ports = [{"port_id": f"p{n}", "spec": make_spec(n % 100, port_security=addresses)} for n in range(4000)]
    ports.append({"port_id": "last", "spec": {}})
    body = json.dumps({"put": ports}).encode()
    head = b"POST /v1/ports:batch HTTP/1.1\r\nHost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n" % len(body)
    answered = 0
    with closing(connect(process)) as caller:
        caller.sendall(head + body[:-1])
        assert process.get("/healthz")[0] == 200
        caller.sendall(body[-1:])
        while not select.select([caller], [], [], 0)[0]:
            assert process.get("/healthz")[0] == 200
            answered += 1
        answer = caller.recv(65536)
    assert answer.startswith(b"HTTP/1.1 422 ") and b"put.4000.spec" in answer
    # At most those that were on their way when the validation began, and when it ended.
    assert answered > 3
