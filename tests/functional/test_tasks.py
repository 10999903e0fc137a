"""Asynchronous calls against the real agent: once, in order, delivered, and across a SIGKILL."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from netplugin.host.names import VHOST, device_name
from tests.functional.conftest import BASE, make_spec
from tests.functional.test_plug_ovs import planned, ports
from tests.lab.agent import PrivateAgent
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import wait_for
from tests.unit.agents.api.test_tasks import Receiver

DEADLINE_S = 90.0
#: For a receiver that answers: one that gets a result twice has not been waited for.
PATIENT_S, IMPATIENT_S = "60", "3"
#: Which dpdkvhostuser does not do.
LEAST_RATE = {"min_egress_kbps": 1000}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """A platform's callback server. Until it is started, connections to it are refused."""
    made = Receiver()
    yield made
    made.stop()


@pytest.fixture
def dead() -> Iterator[str]:
    """The URL of a server that takes connections and never answers."""
    with closing(socket.create_server(("127.0.0.1", 0), backlog=100)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/cb"


@pytest.fixture
def agent(ovs: PrivateOvs, receiver: Receiver, dead: str) -> Iterator[PrivateAgent]:
    tasks = {"callback_allow": f"{receiver.url},{dead}", "callback_timeout": PATIENT_S}
    with PrivateAgent(BASE / "agent", ovs, {"tasks": tasks}) as private:
        yield private
    for name in ovs.vsctl("list-br").split():
        ovs.vsctl("del-br", name)
    shutil.rmtree(BASE / "agent")


def send(
    agent: PrivateAgent, taskuuid: str, callback: str, method: str, path: str, body: Any = None
) -> tuple[int, Any]:
    headers = {"taskuuid": taskuuid, "callbackurl": callback}
    return agent.call(method, path, body, headers=headers, timeout=DEADLINE_S)


def delivered(receiver: Receiver) -> tuple[str, dict[str, Any]]:
    """The next result that comes: the task's uuid and the body."""
    _, taskuuid, body = receiver.calls.get(timeout=DEADLINE_S)
    return taskuuid, body


def task(agent: PrivateAgent, taskuuid: str) -> dict[str, Any]:
    status, body = agent.get(f"/v1/tasks/{taskuuid}")
    assert status == 200, body
    assert isinstance(body, dict)
    return body


def until_state(agent: PrivateAgent, taskuuid: str, state: str) -> dict[str, Any]:
    wait_for(lambda: task(agent, taskuuid)["state"] == state, DEADLINE_S, f"{taskuuid} is {state}")
    return task(agent, taskuuid)


def figures(agent: PrivateAgent, name: str) -> dict[str, float]:
    """The samples of one metric, by their labels."""
    text = agent.get("/metrics")[1]
    found = [line.rpartition(" ") for line in text.splitlines() if line.startswith(name + "{")]
    return {labels: float(value) for labels, _, value in found}


def operations(agent: PrivateAgent) -> float:
    return sum(figures(agent, "netplugin_operations_total").values())


# -- once ----------------------------------------------------------------------------------------


def test_sent_three_times_it_plugs_once(ovs: PrivateOvs, agent: PrivateAgent, receiver: Receiver) -> None:
    receiver.start()
    for _ in range(3):
        assert send(agent, "t1", receiver.url, "PUT", "/v1/ports/p1", make_spec()) == (200, None)
    taskuuid, body = delivered(receiver)
    assert taskuuid == "t1"
    until_state(agent, "t1", "delivered")
    assert ports(ovs) == [device_name(VHOST, "p1")]
    changes, written = (
        figures(agent, "netplugin_changes_total"),
        ovs.get("Open_vSwitch", ".", "next_cfg"),
    )
    assert operations(agent) == 1
    assert send(agent, "t1", receiver.url, "PUT", "/v1/ports/p1", make_spec()) == (200, None)
    assert agent.get("/v1/ports/p1")[1] == body["result"]
    assert operations(agent) == 1
    assert figures(agent, "netplugin_changes_total") == changes
    assert ovs.get("Open_vSwitch", ".", "next_cfg") == written
    assert receiver.calls.empty()


def test_sent_at_the_same_time_it_plugs_once(agent: PrivateAgent, receiver: Receiver) -> None:
    receiver.start()
    with ThreadPoolExecutor(8) as threads:
        sent = [
            threads.submit(send, agent, "t1", receiver.url, "PUT", "/v1/ports/p1", make_spec())
            for _ in range(24)
        ]
        assert {str(answer.result()) for answer in sent} == {"(200, None)"}
    assert delivered(receiver)[0] == "t1"
    until_state(agent, "t1", "delivered")
    assert operations(agent) == 1 and receiver.calls.empty()


def test_a_uuid_names_one_call(ovs: PrivateOvs, agent: PrivateAgent, receiver: Receiver) -> None:
    receiver.start()
    send(agent, "t1", receiver.url, "PUT", "/v1/ports/p1", make_spec())
    delivered(receiver)
    other = make_spec(vlan_id=200)
    for method, path, body, url in (
        ("PUT", "/v1/ports/p1", other, receiver.url),
        ("PUT", "/v1/ports/p2", make_spec(), receiver.url),
        ("DELETE", "/v1/ports/p1", make_spec(), receiver.url),
        ("PUT", "/v1/ports/p1", make_spec(), f"{receiver.url}/other"),
    ):
        status, error = send(agent, "t1", url, method, path, body)
        assert (status, error["code"], error["step"]) == (409, "conflict", "journal")
    assert agent.get("/v1/ports/p1")[1]["spec"]["network"]["vlan_id"] == 100
    assert len(ports(ovs)) == 1 and receiver.calls.empty()


def test_a_call_that_broke_off_is_no_call(agent: PrivateAgent, receiver: Receiver) -> None:
    """Half a body is not journalled: the whole one, sent again, must not be `another call`."""
    receiver.start()
    head = (
        "PUT /v1/ports/p1 HTTP/1.1\r\nHost: 127.0.0.1\r\ntaskuuid: t1\r\n"
        f"callbackurl: {receiver.url}\r\nContent-Length: 400\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", agent.port), DEADLINE_S) as half:
        half.sendall(head.encode() + b'{"vm_id": "vm')
        agent.get("/healthz")
    for _ in range(3):
        agent.get("/healthz")
    assert agent.get("/v1/tasks/t1")[0] == 404
    assert send(agent, "t1", receiver.url, "PUT", "/v1/ports/p1", make_spec()) == (200, None)
    assert delivered(receiver)[1]["success"]


def test_a_reconcile_that_broke_off_is_not_made(ovs: PrivateOvs, agent: PrivateAgent) -> None:
    """Without its body it would be one without dry_run."""
    port = agent.call("PUT", "/v1/ports/p1", make_spec())[1]
    # Nobody tells the agent of this: it is found by a look.
    Path(port["binding"]["socket_path"]).parent.chmod(0o755)
    head = "POST /v1/reconcile HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 17\r\n\r\n"
    with socket.create_connection(("127.0.0.1", agent.port), DEADLINE_S) as half:
        half.sendall(head.encode())
        agent.get("/healthz")
    changes = planned(agent)  # comes after it in the same queue
    assert changes and figures(agent, "netplugin_changes_total")
    assert not any("drift" in labels for labels in figures(agent, "netplugin_changes_total"))
    assert planned(agent) == changes


# -- delivered -----------------------------------------------------------------------------------


def test_what_is_delivered(ovs: PrivateOvs, agent: PrivateAgent, receiver: Receiver) -> None:
    """Success, nothing to return, refused by validation, refused by the backend, no such path."""
    receiver.start()
    assert send(agent, "ok", receiver.url, "PUT", "/v1/ports/p1", make_spec()) == (200, None)
    uuid, body = delivered(receiver)
    assert uuid == "ok"
    assert body == {
        "success": True,
        "error": "",
        "status": 200,
        "result": agent.get("/v1/ports/p1")[1],
    }
    assert body["result"]["binding"]["interface_xml"].startswith("<interface")

    send(agent, "gone", receiver.url, "DELETE", "/v1/ports/p1")
    expected = {"success": True, "error": "", "status": 204, "result": None}
    assert delivered(receiver) == ("gone", expected)

    for uuid, path, spec, status, code in (
        ("bad", "/v1/ports/p1", make_spec(queues="many"), 422, "invalid_request"),
        ("no", "/v1/ports/p1", make_spec(qos=LEAST_RATE), 409, "unsupported"),
        ("where", "/v1/nowhere", {}, 404, "not_found"),
    ):
        assert send(agent, uuid, receiver.url, "PUT", path, spec) == (200, None)
        reported, body = delivered(receiver)
        assert (reported, body["success"], body["status"]) == (uuid, False, status), body
        assert set(body) == {"success", "error", "status", "result"}
        assert body["result"]["code"] == code and body["error"] == body["result"]["detail"]
        assert task(agent, uuid)["result"] == body
    assert agent.get("/v1/ports")[1] == []


def test_a_batch_is_a_task_too(agent: PrivateAgent, receiver: Receiver) -> None:
    receiver.start()
    put = [{"port_id": f"p{n}", "spec": make_spec(n)} for n in range(3)]
    send(agent, "b", receiver.url, "POST", "/v1/ports:batch", {"put": put, "delete": ["none"]})
    _, body = delivered(receiver)
    assert [result["status"] for result in body["result"]["results"]] == [200, 200, 200, 204]


def test_the_callback_server_was_down_at_first(agent: PrivateAgent, receiver: Receiver) -> None:
    send(agent, "t1", receiver.url, "PUT", "/v1/ports/p1", make_spec())
    wait_for(lambda: task(agent, "t1")["attempts"] >= 2, DEADLINE_S, "it was tried twice")
    waiting = task(agent, "t1")
    assert waiting["state"] == "done" and waiting["result"]["success"]
    receiver.statuses = [503]  # up, but not yet itself
    receiver.start()
    assert [delivered(receiver)[0], delivered(receiver)[0]] == ["t1", "t1"]
    done = until_state(agent, "t1", "delivered")
    assert done["attempts"] >= 4 and done["taskuuid"] == "t1"
    assert agent.get("/v1/tasks/other")[0] == 404
    assert operations(agent) == 1 and receiver.calls.empty()


def test_done_then_killed_it_is_delivered_and_not_done_again(
    ovs: PrivateOvs, agent: PrivateAgent, receiver: Receiver
) -> None:
    send(agent, "t1", receiver.url, "PUT", "/v1/ports/p1", make_spec())
    done = until_state(agent, "t1", "done")
    written = ovs.get("Open_vSwitch", ".", "next_cfg")
    agent.kill()
    agent.start()
    receiver.start()
    assert delivered(receiver) == ("t1", done["result"])
    until_state(agent, "t1", "delivered")
    assert operations(agent) == 0
    assert ovs.get("Open_vSwitch", ".", "next_cfg") == written
    agent.kill()
    agent.start()
    assert send(agent, "t1", receiver.url, "PUT", "/v1/ports/p1", make_spec()) == (200, None)
    assert task(agent, "t1")["state"] == "delivered" and operations(agent) == 0
    assert receiver.calls.empty()


def test_answered_then_killed_it_is_carried_out_and_delivered(
    ovs: PrivateOvs, agent: PrivateAgent, receiver: Receiver
) -> None:
    """The answer came before anything could be done: vswitchd stands still."""
    agent.call("PUT", "/v1/ports/p0", make_spec(9))
    ovs.pause_vswitchd()
    try:
        for n in range(3):
            answer = send(agent, f"t{n}", receiver.url, "PUT", f"/v1/ports/p{n + 1}", make_spec(n + 1))
            assert answer == (200, None)
        send(agent, "t3", receiver.url, "DELETE", "/v1/ports/p0")
        assert task(agent, "t1")["state"] == "accepted"
        agent.kill()
    finally:
        ovs.resume_vswitchd()
    agent.start()
    receiver.start()
    reported = dict(delivered(receiver) for _ in range(4))
    assert set(reported) == {"t0", "t1", "t2", "t3"}
    assert all(body["success"] for body in reported.values()), reported
    assert sorted(ports(ovs)) == sorted(device_name(VHOST, f"p{n}") for n in (1, 2, 3))
    assert planned(agent) == []


# -- refused -------------------------------------------------------------------------------------


def test_a_callback_off_the_list_is_refused_and_nothing_journalled(
    ovs: PrivateOvs, agent: PrivateAgent, receiver: Receiver
) -> None:
    for url in (
        "http://127.0.0.1:1/cb",
        "http://evil.example.org/cb",
        "file:///etc/passwd",
        "http://127.0.0.1@evil.example.org/cb",
        "https://127.0.0.1/cb",
        f"{receiver.url}/../x",
        f"{receiver.url}x",
    ):
        status, error = send(agent, "t1", url, "PUT", "/v1/ports/p1", make_spec())
        assert (status, error["code"]) == (403, "forbidden"), url
        assert "[tasks] callback_allow" in error["fix"]
        assert agent.get("/v1/tasks/t1")[0] == 404
    assert agent.get("/v1/ports")[1] == []
    assert ovs.vsctl("list-br") == ""


def test_a_task_without_a_callback_is_refused(agent: PrivateAgent) -> None:
    headers = {"taskuuid": "t1"}
    status, error = agent.call("PUT", "/v1/ports/p1", make_spec(), headers=headers)
    assert (status, error["errors"][0]["field"]) == (422, "callbackurl")
    assert agent.get("/v1/tasks/t1")[0] == 404


# -- nobody waits for anybody --------------------------------------------------------------------


def test_a_callback_that_never_answers_blocks_nobody(
    agent: PrivateAgent, receiver: Receiver, dead: str
) -> None:
    receiver.start()
    agent.kill()
    agent.groups["tasks"]["callback_timeout"] = "300"
    agent.start()
    for n in range(40):
        send(agent, f"d{n}", dead, "PUT", f"/v1/ports/p{n % 4}", make_spec(n % 4))
    assert agent.get("/v1/ports")[0] == 200
    assert agent.call("PUT", "/v1/ports/p9", make_spec(9))[0] == 200
    send(agent, "t1", receiver.url, "PUT", "/v1/ports/p0", make_spec(0))
    assert delivered(receiver)[0] == "t1"
    assert {task(agent, f"d{n}")["state"] for n in range(40)} == {"done"}

    def attempts() -> list[int]:
        return [task(agent, f"d{n}")["attempts"] for n in range(40)]

    assert not any(attempts()), "none of those that never answer was waited for"
    agent.kill()
    agent.groups["tasks"]["callback_timeout"] = IMPATIENT_S
    agent.start()
    # After a rest with one result, and not with all at once.
    wait_for(lambda: any(attempts()), DEADLINE_S, "they are given up")
    before = sum(attempts())
    wait_for(lambda: sum(attempts()) > before, DEADLINE_S, "the receiver is tried again")
    assert agent.get("/readyz")[0] == 200


def test_calls_on_a_port_keep_their_order(
    ovs: PrivateOvs, agent: PrivateAgent, receiver: Receiver, dead: str
) -> None:
    """And are not held up by the delivery of the ones before."""
    receiver.start()
    for n in range(12):
        path, spec = "/v1/ports/p1", make_spec(vlan_id=100 + n)
        method, body = ("PUT", spec) if n % 3 else ("DELETE", None)
        send(agent, f"t{n}", dead if n % 2 else receiver.url, method, path, body)
    assert [delivered(receiver)[0] for _ in range(6)] == [f"t{n}" for n in range(0, 12, 2)]
    until_state(agent, "t11", "done")
    results = [task(agent, f"t{n}")["result"] for n in range(12)]
    assert all(result["success"] for result in results)
    vlans = [r["result"]["spec"]["network"]["vlan_id"] for r in results if r["status"] == 200]
    assert vlans == [100 + n for n in range(12) if n % 3]
    assert ovs.get("Port", device_name(VHOST, "p1"), "tag") == "111"
    send(agent, "last", receiver.url, "DELETE", "/v1/ports/p1")
    assert delivered(receiver)[0] == "last"
    assert ovs.vsctl("list-br") == ""
