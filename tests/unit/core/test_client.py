"""The Python client against the real agent over HTTP."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lxml import etree

import agents.host.pmd
from netplugin import options
from netplugin.api import errors
from netplugin.api.batch_models import Batch, BatchPut
from netplugin.api.client import Client
from netplugin.api.models import (
    NetworkSpec,
    PortSpec,
    PortState,
    ReconcileRequest,
)
from netplugin.api.pmd_models import PmdCore, PmdRequest, PmdState, RxQueue
from netplugin.api.task_models import TaskState
from netplugin.host.shared import Host
from netplugin.host.usability import Usability
from netplugin.pmd.propose import propose
from netplugin.pmd.read import PmdReading
from tests.unit.agent import SPEC, Agent, agent, caller, certificate, served, served_agent

TOKEN = b"s3cret-token"
SPEC_MODEL = PortSpec.model_validate(SPEC)


def test_a_port_from_put_to_delete(client: Client, running: Agent) -> None:
    port = client.put_port("p1", SPEC_MODEL)
    assert (port.state, port.spec) == (PortState.ACTIVE, SPEC_MODEL)
    assert port.binding is not None
    assert port.binding.vif_type == "tap"
    assert running.host.ports == {"p1": SPEC_MODEL}
    assert client.put_port("p1", SPEC_MODEL).state is PortState.ACTIVE
    assert len(running.host.written) == 1, "the same again writes nothing"
    assert client.get_port("p1").spec == SPEC_MODEL
    client.delete_port("p1")
    client.delete_port("p1")
    assert running.host.ports == {}
    with pytest.raises(errors.NotFound) as caught:
        client.get_port("p1")
    assert caught.value.port_id == "p1"


def test_list_filters(client: Client) -> None:
    other = SPEC_MODEL.model_copy(update={"vm_id": "vm-2", "mac": "52:54:00:00:00:02"})
    client.put_port("p1", SPEC_MODEL)
    client.put_port("p2", other)

    def ids(**filters: Any) -> list[str]:
        return [port.port_id for port in client.list_ports(**filters)]

    assert ids() == ["p1", "p2"]
    assert ids(vm_id="vm-2") == ["p2"]
    assert ids(state=PortState.ACTIVE) == ids(state="active") == ["p1", "p2"]
    assert ids(state=PortState.FAILED) == []
    assert ids(backend="fake", vm_id="vm-1") == ["p1"]
    assert ids(backend="other") == []


def test_a_list_of_a_network_has_the_ports_of_all_its_segments(client: Client) -> None:
    def on(number: int, **network: object) -> PortSpec:
        mac = f"52:54:00:00:01:{number:02x}"
        return PortSpec.model_validate({**SPEC, "mac": mac, "network": network})

    blue = NetworkSpec(type="vxlan", vni=5001, peers=("10.0.0.2",))
    client.put_network("blue", blue)
    client.put_port("flat", on(1, type="flat", physical_network="physnet1"))
    client.put_port("vlan", on(2, type="vlan", physical_network="physnet1", vlan_id=7))
    client.put_port("other", on(3, type="vlan", physical_network="physnet2", vlan_id=7))
    client.put_port("vxlan", on(4, type="vxlan", network_id="blue"))
    of = {
        name: [port.port_id for port in client.list_ports(network=name)]
        for name in ("physnet1", "physnet2", "blue", "physnet")
    }
    assert of == {"physnet1": ["flat", "vlan"], "physnet2": ["other"], "blue": ["vxlan"], "physnet": []}
    assert client.list_ports(network="physnet1", vm_id="vm-2") == []
    with pytest.raises(errors.InvalidRequest) as refused:
        client.list_ports(network="../blue")
    assert [wrong.field for wrong in refused.value.errors] == ["network"]


def test_batch_answers_each_on_its_own(client: Client, running: Agent) -> None:
    wrong = SPEC_MODEL.model_copy(update={"backend": "none"})
    puts = (BatchPut(port_id="p1", spec=SPEC_MODEL), BatchPut(port_id="p2", spec=wrong))
    results = client.batch(Batch(put=puts, delete=("p3",))).results
    assert [(r.port_id, r.status) for r in results] == [("p1", 200), ("p2", 422), ("p3", 204)]
    assert results[1].error is not None
    assert results[1].error.errors[0].field == "backend"


def test_the_rest_of_the_api(client: Client, running: Agent) -> None:
    [backend] = client.backends()
    assert (backend.name, backend.usable) == ("fake", True)
    client.put_port("p1", SPEC_MODEL)
    del running.host.ports["p1"]
    plan = client.reconcile(ReconcileRequest(dry_run=True))
    assert [change.ports for change in plan.changes] == [("p1",)]
    assert running.host.ports == {}
    assert client.reconcile().dry_run is False
    assert running.host.ports == {"p1": SPEC_MODEL}
    domain = client.render_domain("vm-1", "<domain><name>a</name></domain>")
    macs = etree.fromstring(domain.xml).xpath("devices/interface/mac/@address")
    assert macs == [SPEC["mac"]]


def test_pmd(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = RxQueue(port="vh1", queue=0, enabled=True, usage_percent=None)
    core = PmdCore(cpu=2, numa_node=0, isolated=False, busy_percent=1.5, queues=(queue,))
    state = PmdState(cpus="2", cores=(core,))
    asked: list[PmdRequest] = []

    def set_pmd(ovs: object, request: PmdRequest, chosen: object) -> PmdState:
        asked.append(request)
        return state

    there = SimpleNamespace(usable=lambda: Usability(True))
    monkeypatch.setattr(Host, "ovs_of_others", property(lambda self: there))
    monkeypatch.setattr(agents.host.pmd, "look", lambda ovs, usage_s=None: PmdReading(state, {}))
    monkeypatch.setattr(agents.host.pmd, "set_pmd", set_pmd)
    monkeypatch.setattr(agents.host.pmd.Pmd, "_choose", lambda self, request, scene: ())
    assert client.pmd() == state
    assert client.pmd(0.01).interval_s == 0.01
    with pytest.raises(errors.InvalidRequest, match="interval"):
        client.pmd(61)
    assert client.pmd_proposal() == client.pmd_proposal(0.01) == propose(state)
    assert client.set_pmd(PmdRequest(count=1)) == state
    assert asked == [PmdRequest(count=1)]


def test_ready_is_an_answer_either_way(client: Client, running: Agent) -> None:
    assert client.ready().ready
    running.host.usability = Usability(False, "no hugepages", "reserve some")
    readiness = client.ready()
    assert not readiness.ready
    assert readiness.reasons == ["fake: no hugepages"]


@pytest.mark.parametrize("kind", errors.ALL, ids=lambda kind: kind.code)
def test_every_error_comes_back_as_its_type(
    client: Client, running: Agent, kind: type[errors.NetpluginError]
) -> None:
    refusal = kind("it said no", step="some-step", fix="do this")

    def refuse(change: object) -> None:
        raise refusal

    running.host.on_apply = refuse
    with pytest.raises(kind) as caught:
        client.put_port("p1", SPEC_MODEL)
    error = caught.value
    assert type(error) is kind
    reported = (error.detail, error.step, error.fix, error.port_id)
    assert reported == ("it said no", "some-step", "do this", "p1")


def test_a_mistake_of_the_agent_is_a_problem_document_too(
    client: Client, running: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(port_id: str) -> None:
        raise RuntimeError("secret of the agent")

    monkeypatch.setattr(running.service.ports, "get", broken)
    with pytest.raises(errors.HostError) as caught:
        client.get_port("p1")
    assert caught.value.step == "agent"
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("name", ["", "..", "a/b", "a?b", "a#b", "a\n", "x" * 65, "%2e", "ä"])
def test_a_name_that_is_none_never_leads_to_another_path(client: Client, name: str) -> None:
    for call, field in (
        (client.get_port, "port_id"),
        (client.delete_port, "port_id"),
        (client.task, "taskuuid"),
        (lambda vm_id: client.render_domain(vm_id, "<domain/>"), "vm_id"),
    ):
        with pytest.raises(errors.InvalidRequest) as caught:
            call(name)
        assert [wrong.field for wrong in caught.value.errors] == [field]


def test_task(tmp_path: Path) -> None:
    with agent(tmp_path, callback_allow=["http://127.0.0.1:1/cb"]) as running:
        with served_agent(running) as url, Client(url) as client, caller(url) as platform:
            with pytest.raises(errors.NotFound):
                client.task("t1")
            headers = {"taskuuid": "t1", "callbackurl": "http://127.0.0.1:1/cb"}
            platform.delete("/v1/ports/p1", headers=headers)
            task = client.task("t1")
            assert task.taskuuid == "t1"
            assert task.state in (TaskState.ACCEPTED, TaskState.DONE)


def test_token(running: Agent, tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_bytes(b"# of the operator\n\n" + TOKEN + b"\n")
    with served_agent(running, tokens=(TOKEN,)) as url:
        environment = {"NETPLUGIN_URL": url, "NETPLUGIN_TOKEN_FILE": str(token_file)}
        with Client.from_environment(environment) as client:
            assert client.list_ports() == []
        for token in (None, "wrong"):
            with Client(url, token=token) as unauthorized:
                with pytest.raises(errors.Unauthorized) as caught:
                    unauthorized.list_ports()
                assert caught.value.fix
                assert unauthorized.ready().ready


def test_nobody_there() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # bound and not listening: refused, and nobody else gets it
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        with Client(url) as client, pytest.raises(errors.BackendUnavailable) as caught:
            client.list_ports()
    assert url in caught.value.detail
    assert "refused" in caught.value.detail
    assert "agent running" in str(caught.value.fix)


def test_no_answer_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with Client(url, timeout_s=0.1) as client, pytest.raises(errors.OperationTimeout) as caught:
            client.list_ports()
    assert url in caught.value.detail


@pytest.mark.parametrize(
    ("status", "body"), [(200, b"<html>hello</html>"), (404, b""), (302, b"{}"), (500, b"oops")]
)
def test_something_else_listens_there(status: int, body: bytes) -> None:
    async def other(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"location", b"/elsewhere")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    with served(other) as url, Client(url) as client:
        for call in (client.list_ports, client.ready, lambda: client.get_port("p1")):
            with pytest.raises(errors.HostError) as caught:
                call()
            assert str(status) in caught.value.detail
            assert url in caught.value.detail


def test_no_proxy_from_the_environment(running: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    with served_agent(running) as url, Client(url) as client:
        assert client.ready().ready


def test_mutual_tls(running: Agent, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    listen: dict[str, Any] = {
        "ssl_certfile": cert,
        "ssl_keyfile": key,
        "ssl_ca_certs": cert,
        "ssl_cert_reqs": 2,
    }
    with served_agent(running, **listen) as url:
        environment = {
            "NETPLUGIN_URL": url,
            "NETPLUGIN_CA": cert,
            "NETPLUGIN_CERT": cert,
            "NETPLUGIN_KEY": key,
        }
        with Client.from_environment(environment) as client:
            assert client.list_ports() == []
        with Client(url, cert=(cert, key)) as distrustful:
            with pytest.raises(errors.BackendUnavailable) as caught:
                distrustful.list_ports()
            assert "NETPLUGIN_CA" in str(caught.value.fix)
        for lost in (Client(url, verify=cert), Client(url.replace("https", "http"))):
            with lost, pytest.raises(errors.BackendUnavailable) as caught:
                lost.list_ports()
            assert "NETPLUGIN_CERT" in str(caught.value.fix)


@pytest.mark.parametrize(
    ("environment", "names"),
    [
        ({"NETPLUGIN_URL": "127.0.0.1:7071"}, "NETPLUGIN_URL"),
        ({"NETPLUGIN_URL": "http://"}, "NETPLUGIN_URL"),
        ({"NETPLUGIN_URL": "unix:agent.sock"}, "NETPLUGIN_URL"),
        ({"NETPLUGIN_URL": "unix:/" + "x" * 107}, "NETPLUGIN_URL"),
        ({"NETPLUGIN_URL": "http://h:99999"}, "NETPLUGIN_URL"),
        ({"NETPLUGIN_URL": "http://user:secret@h"}, "NETPLUGIN_URL"),
        ({"NETPLUGIN_URL": "ftp://h"}, "NETPLUGIN_URL"),
        ({"NETPLUGIN_TOKEN_FILE": "/nonexistent"}, "NETPLUGIN_TOKEN_FILE"),
        ({"NETPLUGIN_TOKEN_FILE": "/dev/null"}, "NETPLUGIN_TOKEN_FILE"),
        ({"NETPLUGIN_KEY": "/k"}, "NETPLUGIN_CERT"),
        ({"NETPLUGIN_URL": "https://h", "NETPLUGIN_CA": "/nonexistent"}, "NETPLUGIN_CA"),
        ({"NETPLUGIN_URL": "https://h", "NETPLUGIN_CERT": "/dev/null"}, "NETPLUGIN_CERT"),
    ],
)
def test_a_wrong_environment_is_named(environment: dict[str, str], names: str) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        Client.from_environment(environment)
    assert names in str(caught.value)
    assert caught.value.fix


def test_the_default_is_the_local_agent() -> None:
    with Client.from_environment({}) as client:
        assert client.url == f"unix:{options.DEFAULT_SOCKET}"
    with pytest.raises(errors.InvalidRequest):
        Client("http://127.0.0.1", token="two\nlines")


def test_a_query_that_is_misspelt_lists_nothing(client: Client, running: Agent) -> None:
    with served(running.app) as url, caller(url) as plain:
        answer = plain.get("/v1/ports", params={"vmid": "vm1"})
    assert answer.status_code == 422
    assert [error["field"] for error in answer.json()["errors"]] == ["vmid"]
