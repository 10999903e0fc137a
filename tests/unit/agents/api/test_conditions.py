"""Entity tags, conditions of calls, and pages of lists, over a real HTTP server and store."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from netplugin.api.client import Client
from netplugin.api.conditions import Condition
from netplugin.api.errors import InvalidRequest, PreconditionFailed
from netplugin.api.models import PortSpec
from netplugin.api.page_models import MOST, Page, key_of, token_of
from netplugin.host.physical_networks import PhysicalNetworks
from tests.unit.agent import DEADLINE_S, SPEC, Agent, agent, caller, served_agent
from tests.unit.agents.networks.keeper import Keeper, KeeperHost
from tests.unit.fakes import FakeBackend, FakeHost

NETWORK = {"type": "vxlan", "vni": 5001, "peers": ["10.0.0.2"]}


@contextmanager
def called(directory: Path, **how: Any) -> Iterator[tuple[Agent, httpx.Client]]:
    with (
        agent(directory, **how) as running,
        served_agent(running) as url,
        caller(url) as client,
    ):
        yield running, client


def on_vlan(vlan_id: int, **more: Any) -> dict[str, Any]:
    return {**SPEC, "network": {**SPEC["network"], "vlan_id": vlan_id}, **more}


def refused(answer: httpx.Response) -> dict[str, Any]:
    problem: dict[str, Any] = answer.json()
    assert (answer.status_code, problem["code"]) == (412, "precondition_failed"), answer.text
    assert problem["fix"]
    return problem


# -- tags ----------------------------------------------------------------------------------------


def test_the_tag_of_a_port_follows_what_its_answer_shows(tmp_path: Path) -> None:
    with called(tmp_path) as (running, client):
        put = client.put("/v1/ports/p1", json=SPEC)
        got = client.get("/v1/ports/p1")
        assert got.headers["etag"] == put.headers["etag"] and got.content == put.content
        same = {"If-None-Match": got.headers["etag"]}
        unchanged = client.get("/v1/ports/p1", headers=same)
        assert (unchanged.status_code, unchanged.content) == (304, b"")
        assert unchanged.headers["etag"] == got.headers["etag"]
        assert (
            client.get("/v1/ports/p1", headers={"If-None-Match": f'"x", W/{got.headers["etag"]}'}).status_code
            == 304
        )
        assert client.get("/v1/ports/p1", headers={"If-None-Match": "*"}).status_code == 304

        running.host.faults["p1"] = "no memory"
        assert client.post("/v1/reconcile", json={}).status_code == 200
        degraded = client.get("/v1/ports/p1", headers=same)
        assert (degraded.status_code, degraded.json()["state"]) == (200, "degraded")
        old, new = (tag.strip('"').split(".") for tag in (got.headers["etag"], degraded.headers["etag"]))
        assert old[0] == new[0] and old[1] != new[1], "the intent is the same"


@pytest.mark.parametrize(
    "path",
    [
        "/v1/ports",
        "/v1/service-ports",
        "/v1/networks",
        "/v1/networks/blue",
        "/v1/physical-networks",
        "/v1/vfs",
    ],
)
def test_every_list_has_a_tag(tmp_path: Path, path: str) -> None:
    with called(tmp_path) as (_, client):
        assert client.put("/v1/networks/blue", json=NETWORK).status_code == 200
        first = client.get(path)
        assert first.status_code == 200
        again = client.get(path, headers={"If-None-Match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        other = {**SPEC, "network": {"type": "vxlan", "network_id": "blue"}}
        assert client.put("/v1/ports/p1", json=other).status_code == 200
        changed = client.get(path, headers={"If-None-Match": first.headers["etag"]})
        shows_ports = path in ("/v1/ports", "/v1/networks", "/v1/networks/blue")
        assert changed.status_code == (200 if shows_ports else 304)


# -- conditions ----------------------------------------------------------------------------------


def test_a_change_needs_the_port_as_it_was_read(tmp_path: Path) -> None:
    with called(tmp_path) as (running, client):
        first = client.put("/v1/ports/p1", json=on_vlan(100)).headers["etag"]
        second = client.put("/v1/ports/p1", json=on_vlan(200), headers={"If-Match": first})
        assert second.status_code == 200
        writes = len(running.host.written)
        refused(client.put("/v1/ports/p1", json=on_vlan(300), headers={"If-Match": first}))
        refused(client.delete("/v1/ports/p1", headers={"If-Match": first}))
        assert len(running.host.written) == writes, "nothing was changed"
        assert client.get("/v1/ports/p1").headers["etag"] == second.headers["etag"]
        # Its state is no change of what was requested.
        running.host.faults["p1"] = "no memory"
        assert client.post("/v1/reconcile", json={}).status_code == 200
        held = {"If-Match": f'"other", {second.headers["etag"]}'}
        assert client.delete("/v1/ports/p1", headers=held).status_code == 204
        assert client.delete("/v1/ports/p1", headers=held).status_code == 204, "the answer was lost"
        refused(client.put("/v1/ports/p1", json=on_vlan(300), headers=held))
        refused(client.put("/v1/ports/p1", json=on_vlan(300), headers={"If-Match": "*"}))
        assert client.get("/v1/ports/p1").status_code == 404


def test_a_port_that_was_made_again_is_another(tmp_path: Path) -> None:
    with called(tmp_path) as (_, client):
        first = client.put("/v1/ports/p1", json=SPEC).headers["etag"]
        assert client.delete("/v1/ports/p1").status_code == 204
        assert client.put("/v1/ports/p1", json=SPEC).status_code == 200
        refused(client.delete("/v1/ports/p1", headers={"If-Match": first}))


def test_a_call_that_is_sent_again_is_not_refused(tmp_path: Path) -> None:
    """Its first answer was lost, so its tag is that of before."""
    with called(tmp_path) as (_, client):
        first = client.put("/v1/ports/p1", json=on_vlan(100)).headers["etag"]
        answers = [
            client.put("/v1/ports/p1", json=on_vlan(200), headers={"If-Match": first}) for _ in range(2)
        ]
        assert [answer.status_code for answer in answers] == [200, 200]
        assert answers[0].headers["etag"] == answers[1].headers["etag"]


def test_only_one_creates(tmp_path: Path) -> None:
    with called(tmp_path) as (_, client):
        none = {"If-None-Match": "*"}
        assert client.put("/v1/ports/p1", json=SPEC, headers=none).status_code == 200
        refused(client.put("/v1/ports/p1", json=SPEC, headers=none))
        assert client.put("/v1/networks/blue", json=NETWORK, headers=none).status_code == 200
        refused(client.put("/v1/networks/blue", json=NETWORK, headers=none))


def test_of_several_at_once_one_wins(tmp_path: Path) -> None:
    """They are all in the queue before the first is looked at: it is not the door that decides."""
    host = FakeHost()
    backend = FakeBackend("fake", host)
    with (
        called(tmp_path, backends={"fake": backend}) as (running, client),
        ThreadPoolExecutor(16) as pool,
    ):
        tag = client.put("/v1/ports/p1", json=on_vlan(1)).headers["etag"]
        assert client.put("/v1/ports/p0", json=SPEC).status_code == 200
        holds, go_on = threading.Event(), threading.Event()

        def hold(ports: Any) -> None:
            holds.set()
            go_on.wait(DEADLINE_S)

        host.on_observe = hold
        busy = pool.submit(client.put, "/v1/ports/p0", json=on_vlan(7))
        assert holds.wait(DEADLINE_S)
        calls = [
            pool.submit(client.put, "/v1/ports/p1", json=on_vlan(vlan), headers={"If-Match": tag})
            for vlan in range(2, 10)
        ]
        calls.append(pool.submit(client.delete, "/v1/ports/p1", headers={"If-Match": tag}))
        worker = running.service._workers["fake"]
        deadline = threading.Event()
        while len(worker._schedule.waiting) < len(calls):
            assert not deadline.wait(0.01)
        go_on.set()
        statuses = sorted(call.result(DEADLINE_S).status_code for call in calls)
        assert statuses[0] in (200, 204) and statuses[1:] == [412] * (len(calls) - 1), statuses
        assert busy.result(DEADLINE_S).status_code == 200


def test_networks_have_conditions_too(tmp_path: Path) -> None:
    registry, host = PhysicalNetworks(), KeeperHost()
    backends = {"fake": Keeper(registry, host)}
    with called(tmp_path, backends=backends, networks=registry) as (_, client):
        for path, one, two in (
            ("/v1/networks/blue", NETWORK, {**NETWORK, "peers": ["10.0.0.3"]}),
            ("/v1/physical-networks/phys1", {"ovs": {}}, {"ovs": {}, "keep": True}),
        ):
            put = client.put(path, json=one)
            first = put.headers["etag"]
            assert client.get(path).headers["etag"].split(".")[0] == first.split(".")[0]
            assert client.put(path, json=two, headers={"If-Match": first}).status_code == 200
            assert client.put(path, json=two, headers={"If-Match": first}).status_code == 200, "sent again"
            refused(client.put(path, json=one, headers={"If-Match": first}))
            refused(client.delete(path, headers={"If-Match": first}))
            now = client.get(path).headers["etag"]
            assert client.delete(path, headers={"If-Match": now}).status_code == 204
            assert client.delete(path, headers={"If-Match": now}).status_code == 204
            refused(client.put(path, json=one, headers={"If-Match": now}))


def test_a_team_is_changed_as_one(tmp_path: Path) -> None:
    backends = {name: FakeBackend(name) for name in ("fake", "other")}
    team = {**SPEC, "vf": {"teaming": True}}
    with called(tmp_path, backends=backends, teaming_backend="other") as (running, client):
        first = client.put("/v1/ports/p1", json=team)
        assert first.status_code == 200, first.text
        held = {"If-Match": first.headers["etag"]}
        changed = client.put("/v1/ports/p1", json=team | on_vlan(200, vf=team["vf"]), headers=held)
        assert changed.status_code == 200
        before = [dict(backend.host.ports) for backend in backends.values()]
        refused(client.put("/v1/ports/p1", json=on_vlan(300, vf=team["vf"]), headers=held))
        refused(client.delete("/v1/ports/p1", headers=held))
        put = {"port_id": "p1", "spec": on_vlan(300, vf=team["vf"]), "if_match": held["If-Match"]}
        batch = client.post("/v1/ports:batch", json={"put": [put]}).json()
        assert [each["status"] for each in batch["results"]] == [412]
        assert [backend.host.ports for backend in backends.values()] == before
        assert client.get("/v1/ports/p1").headers["etag"] == changed.headers["etag"]
        now = {"If-Match": changed.headers["etag"]}
        assert client.delete("/v1/ports/p1", headers=now).status_code == 204
        assert running.store.records() == []


def test_each_port_of_a_batch_has_its_condition(tmp_path: Path) -> None:
    with called(tmp_path) as (running, client):
        tags = {name: client.put(f"/v1/ports/{name}", json=SPEC).headers["etag"] for name in ("p1", "p2")}
        assert client.put("/v1/ports/p2", json=on_vlan(200)).status_code == 200, "somebody else"
        writes = len(running.host.written)

        def batch(**conditions: str) -> dict[str, int]:
            puts = [{"port_id": n, "spec": on_vlan(300), "if_match": tag} for n, tag in conditions.items()]
            answer = client.post("/v1/ports:batch", json={"put": [*puts, {"port_id": "p4", "spec": SPEC}]})
            assert answer.status_code == 200, answer.text
            return {each["port_id"]: each["status"] for each in answer.json()["results"]}

        for _ in range(2):  # sent again, because the answer was lost
            assert batch(**tags, p3="*") == {"p1": 200, "p2": 412, "p3": 412, "p4": 200}
        assert len(running.host.written) == writes + 2
        assert client.get("/v1/ports/p3").status_code == 404
        assert client.get("/v1/ports/p2").json()["spec"]["network"]["vlan_id"] == 200


@pytest.mark.parametrize("value", ["", "abc", '"a""b"', '*, "a"', 7, ["*"]])
@pytest.mark.parametrize("large", [False, True])
def test_what_is_no_tag_in_a_batch_is_refused_by_name(tmp_path: Path, value: Any, large: bool) -> None:
    with called(tmp_path) as (_, client):
        put = {"port_id": "p1", "spec": SPEC, "if_match": value}
        more = {"delete": [f"p{'0' * 50}{number}" for number in range(2000)]} if large else {}
        answer = client.post("/v1/ports:batch", json={"put": [put], **more})
        assert answer.status_code == 422
        assert [error["field"] for error in answer.json()["errors"]] == ["put.0.if_match"]


@pytest.mark.parametrize("header", ["If-Match", "If-None-Match"])
@pytest.mark.parametrize("path", ["/v1/ports:batch", "/v1/ports:retag", "/v1/reconcile"])
def test_a_condition_where_none_is_looked_at_is_no_call(tmp_path: Path, path: str, header: str) -> None:
    with called(tmp_path) as (running, client):
        body: dict[str, Any] = {"put": [{"port_id": "p1", "spec": SPEC}]} if "batch" in path else {}
        body = {"to_vlan": 7, "ports": ["p1"]} if "retag" in path else body
        answer = client.post(path, json=body, headers={header: "*"})
        assert answer.status_code == 422 and answer.json()["errors"][0]["field"] == header
        assert running.store.records() == []
        assert client.get("/v1/backends", headers={header: "*"}).status_code == 200


@pytest.mark.parametrize("header", ["If-Match", "If-None-Match"])
def test_the_journal_takes_no_condition_because_it_would_lose_it(tmp_path: Path, header: str) -> None:
    with called(tmp_path, callback_allow=["http://127.0.0.1:1/"]) as (_, client):
        task = {"taskuuid": "t1", "callbackurl": "http://127.0.0.1:1/", header: "*"}
        answer = client.put("/v1/ports/p1", json=SPEC, headers=task)
        assert answer.status_code == 422 and answer.json()["errors"][0]["field"] == header
        assert client.get("/v1/tasks/t1").status_code == 404


@pytest.mark.parametrize(
    "value",
    ["", " ", "abc", '"', '"a', 'a"', '"a""b"', '"a" "b"', "*, *", '*, "a"', "W/", '"\xe9"', '"a b"',
     '"' + "a" * 5000 + '"', ", ".join(['"a"'] * 65), '"a\x7f"'],
)  # fmt: skip
@pytest.mark.parametrize("header", ["If-Match", "If-None-Match"])
def test_what_is_no_tag_is_refused_by_name(header: str, value: str) -> None:
    with pytest.raises(InvalidRequest) as wrong:
        Condition.parse(*(([value], []) if header == "If-Match" else ([], [value])))
    assert [error.field for error in wrong.value.errors] == [header]
    assert len(wrong.value.detail) < 200, "what was sent is not sent back"


@given(st.lists(st.text(st.characters(min_codepoint=0x23, max_codepoint=0x7E)), min_size=1, max_size=20))
def test_tags_are_read_as_they_were_written(tags: list[str]) -> None:
    written = [f'"{tag}"' for tag in tags]
    half = len(tags) // 2
    one_line = Condition.parse([", ".join(written)], [])
    assert one_line == Condition.parse(
        [",".join(written[:half])] * bool(half) + [" , ".join(written[half:])], []
    )
    assert one_line.match == tuple(tags)


@given(st.text(max_size=60))
def test_any_header_is_a_condition_or_an_error(text: str) -> None:
    try:
        condition = Condition.parse([text], [text])
    except InvalidRequest:
        return
    assert condition.match and condition.match == condition.none_match
    with pytest.raises(PreconditionFailed):
        condition.require("port p1", None)


# -- pages ---------------------------------------------------------------------------------------


def pages(client: httpx.Client, path: str, parameters: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    answer = client.get(path, params=parameters)
    while True:
        assert answer.status_code == 200, answer.text
        yield answer.json()
        if "next" not in answer.links:
            return
        answer = client.get(answer.links["next"]["url"])


def ids(entries: list[dict[str, Any]]) -> list[str]:
    return [entry["port_id"] for entry in entries]


def fill(client: httpx.Client, names: list[str]) -> None:
    put = [
        {"port_id": name, "spec": SPEC | {"vm_id": "even" if int(name[1:]) % 2 == 0 else "odd"}}
        for name in names
    ]
    assert client.post("/v1/ports:batch", json={"put": put}).status_code == 200


def test_pages_make_up_the_list(tmp_path: Path) -> None:
    names = [f"p{n:02}" for n in range(25)]
    with called(tmp_path) as (_, client):
        fill(client, names)
        whole = client.get("/v1/ports")
        assert ids(whole.json()) == names and "link" not in whole.headers
        for limit in (1, 7, 24, 25, 26):
            found = list(pages(client, "/v1/ports", {"limit": limit}))
            assert [name for page in found for name in ids(page)] == names
            assert {len(page) for page in found[:-1]} <= {limit}
        of_vm = [ids(page) for page in pages(client, "/v1/ports", {"limit": 5, "vm_id": "odd"})]
        assert [name for page in of_vm for name in page] == names[1::2] and len(of_vm) == 3
        assert ids(client.get("/v1/ports", params={"after": token_of("p22")}).json()) == ["p23", "p24"]
        for path in ("/v1/networks", "/v1/service-ports", "/v1/physical-networks", "/v1/vfs"):
            assert client.get(path, params={"limit": 1}).json() == []


def test_a_list_that_changes_while_it_is_read(tmp_path: Path) -> None:
    """No entry comes twice, and none is missing that was there all the time."""
    names = [f"p{n:02}" for n in range(30)]
    with called(tmp_path) as (_, client):
        fill(client, names[::2])
        seen: list[str] = []
        gone: set[str] = set()
        for number, page in enumerate(pages(client, "/v1/ports", {"limit": 4})):
            seen += ids(page)
            fill(client, [names[4 * number + 1]])
            gone |= {seen[-1], names[26 - 2 * number]}  # the one that the next page begins after, and another
            assert client.post("/v1/ports:batch", json={"delete": sorted(gone)}).status_code == 200
        assert len(seen) == len(set(seen)) and seen == sorted(seen)
        assert set(names[::2]) - gone <= set(seen)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("limit", value) for value in (0, -1, MOST + 1, "x", "1e3", 2**70)),
        *(("after", value) for value in ("", "p1", "=", "cDE=", "cDE==", "c", "cDF", "a/b+")),
        *(("after", value) for value in ("../x", "\x00", "é", "_" * 3)),
        ("after", "A" * 200),
        ("before", "cDE"),
    ],
)  # fmt: skip
def test_what_is_no_page_is_refused_by_name(tmp_path: Path, field: str, value: Any) -> None:
    with called(tmp_path) as (_, client):
        for path in ("/v1/ports", "/v1/networks", "/v1/vfs"):
            answer = client.get(path, params={field: value})
            assert answer.status_code == 422, f"{path}: {answer.text}"
            assert [error["field"] for error in answer.json()["errors"]] == [field]


@given(st.text(min_size=1, max_size=64))
def test_a_token_leads_to_its_entry(key: str) -> None:
    try:
        token = token_of(key)
    except UnicodeEncodeError:  # a surrogate alone, which no name has
        return
    assert key_of(token) == key


@given(st.text(max_size=130))
def test_any_token_is_one_of_ours_or_an_error(token: str) -> None:
    try:
        page = Page(after=token)
    except ValidationError:
        return
    assert token_of(page.begin) == token


def test_tags_do_not_depend_on_the_process(tmp_path: Path) -> None:
    with called(tmp_path) as (_, client):
        first = client.put("/v1/ports/p1", json=SPEC).headers["etag"]
    host = FakeHost()
    with called(tmp_path, backends={"fake": FakeBackend("fake", host)}) as (_, client):
        held = {"If-Match": first}
        assert client.put("/v1/ports/p1", json=on_vlan(200), headers=held).status_code == 200
        assert json.loads(client.get("/v1/ports/p1").content)["state"] == "active"


# -- the client ----------------------------------------------------------------------------------


def test_the_client_changes_what_it_has_read(tmp_path: Path) -> None:
    with agent(tmp_path) as running, served_agent(running) as url, Client(url) as client:
        one, two, three = (PortSpec.model_validate(on_vlan(vlan)) for vlan in (100, 200, 300))
        client.put_port("p1", one, create_only=True)
        with pytest.raises(PreconditionFailed):
            client.put_port("p1", two, create_only=True)
        read = client.read_port("p1")
        assert read.value == client.get_port("p1")
        client.put_port("p1", two, if_match=read.tag)
        for changes in (
            lambda: client.put_port("p1", three, if_match=read.tag),
            lambda: client.delete_port("p1", if_match=read.tag),
        ):
            with pytest.raises(PreconditionFailed) as failed:
                changes()
            assert failed.value.fix
        client.delete_port("p1", if_match=client.read_port("p1").tag)


def test_the_client_reads_all_pages(tmp_path: Path) -> None:
    with called(tmp_path) as (_, client):
        fill(client, [f"p{n}" for n in range(11)])
        with Client(str(client.base_url)) as typed:
            assert list(typed.each_port(page=4)) == typed.list_ports()
            assert len(typed.list_ports()) == 11
