"""Service ports through the API: ports of the same store and ids, and no VM's."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from agents.api.access import Access, Token
from agents.api.audit import AuditLog
from agents.api.guard import Limits, RequestGuard
from agents.api.roles import BodyRules, Right, Role, of_service_port
from agents.off_loop import OffLoop
from netplugin.api.batch_models import Batch, Retag
from netplugin.api.client import Client
from netplugin.api.errors import Conflict, InvalidRequest, NotFound
from netplugin.api.models import PortSpec, PortState
from netplugin.api.service_models import ServicePortSpec
from netplugin.cli.main import main
from tests.unit.agent import NO_DEVICES, SPEC, Agent, caller, with_access

SERVICE: dict[str, Any] = {
    "device": "veth0",
    "backend": "fake",
    "network": SPEC["network"],
    "mac": "52:54:00:00:05:01",
}


def service(**fields: Any) -> ServicePortSpec:
    return ServicePortSpec.model_validate({**SERVICE, **fields})


def test_from_put_to_delete(client: Client, running: Agent) -> None:
    desired = service(port_security={"roles": ["dhcp_server"]})
    port = client.put_service_port("svc", desired)
    assert (port.state, port.spec) == (PortState.ACTIVE, desired)
    assert client.put_service_port("svc", desired).spec == desired
    assert len(running.host.written) == 1, "the same body again writes nothing"
    stored = running.host.ports["svc"]
    assert (stored.device, stored.vm_id, stored.mac) == ("veth0", "svc", desired.mac)
    assert client.get_service_port("svc").spec == client.list_service_ports()[0].spec == desired
    client.delete_service_port("svc")
    client.delete_service_port("svc")
    assert client.list_service_ports() == [] and running.host.ports == {}
    with pytest.raises(NotFound, match="service port svc"):
        client.get_service_port("svc")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"trusted": True},
        {"internal": True},
        {"port_security": {"roles": ["router"], "allowed_addresses": [{"ip": "10.0.0.5"}]}},
    ],
)
def test_a_spec_is_the_same_after_it_was_stored(fields: dict[str, Any]) -> None:
    spec = service(**fields)
    stored = PortSpec.model_validate_json(spec.as_port("svc").model_dump_json())
    assert ServicePortSpec.of(stored) == spec
    assert stored.port_security.enabled is not spec.trusted


def test_it_is_no_vms_port(client: Client) -> None:
    """Not even of a VM with its id."""
    client.put_service_port("svc", service())
    client.put_port("nic", PortSpec.model_validate({**SPEC, "vm_id": "svc"}))
    assert [port.port_id for port in client.list_ports()] == ["nic"]
    assert "veth0" not in client.render_domain("svc", "<domain/>").xml
    with pytest.raises(NotFound):
        client.get_port("svc")
    assert [port.port_id for port in client.list_service_ports()] == ["svc"]
    with pytest.raises(NotFound):
        client.get_service_port("nic")


def test_an_id_is_of_one_kind(client: Client, running: Agent) -> None:
    client.put_service_port("svc", service())
    client.put_port("nic", PortSpec.model_validate(SPEC))
    before = dict(running.host.ports)
    for call in (
        lambda: client.put_port("svc", PortSpec.model_validate(SPEC)),
        lambda: client.delete_port("svc"),
        lambda: client.put_service_port("nic", service(device="veth1")),
        lambda: client.delete_service_port("nic"),
    ):
        with pytest.raises(Conflict) as refused:
            call()
        assert "/v1/service-ports/" in str(refused.value.fix) or "/v1/ports/" in str(refused.value.fix)
    batch = Batch.model_validate({"put": [{"port_id": "svc", "spec": SPEC}], "delete": ["nic"]})
    assert [result.status for result in client.batch(batch).results] == [409, 204]
    del before["nic"]
    assert running.host.ports == before


def test_the_device_of_a_service_port_is_its_own_for_life(client: Client, running: Agent) -> None:
    client.put_service_port("svc", service())
    with pytest.raises(Conflict, match="device"):
        client.put_service_port("svc", service(device="veth1"))
    with pytest.raises(Conflict, match="internal"):
        client.put_service_port("svc", service(internal=True))
    client.put_service_port("svc", service(trusted=True))
    assert running.host.ports["svc"].device == "veth0"


@pytest.mark.parametrize(("field", "value"), [("device", "veth0"), ("internal", True)])
def test_a_vms_port_has_no_device(client: Client, running: Agent, field: str, value: object) -> None:
    spec = PortSpec.model_validate({**SPEC, field: value})
    with pytest.raises(InvalidRequest) as refused:
        client.put_port("nic", spec)
    assert [error.field for error in refused.value.errors] == [field]
    batch = Batch.model_validate({"put": [{"port_id": "nic", "spec": spec.model_dump()}]})
    assert [result.status for result in client.batch(batch).results] == [422]
    assert running.host.ports == {}


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"device": "a-name-too-long0"}, "device"),
        ({"device": "../x"}, "device"),
        ({"trusted": "yes"}, "trusted"),
        ({"internal": 1}, "internal"),
        ({"trusted": True, "port_security": {"roles": ["router"]}}, "trusted"),
        ({"port_security": {"enabled": False}}, "trusted"),
        ({"vm_id": "vm-1"}, "vm_id"),
        ({"queues": 2}, "queues"),
    ],
)
def test_a_spec_that_is_none(client: Client, fields: dict[str, Any], word: str) -> None:
    with caller(client.url) as plain:
        answer = plain.put("/v1/service-ports/svc", json={**SERVICE, **fields})
    assert answer.status_code == 422 and word in answer.json()["detail"], answer.text
    assert client.list_service_ports() == []


def test_a_service_port_that_fails_leaves_nothing(client: Client, running: Agent) -> None:
    running.host.forgetful.add("svc")
    with caller(client.url) as plain:
        answer = plain.put("/v1/service-ports/svc", json=SERVICE)
    assert answer.status_code == 502, answer.text
    assert client.list_service_ports() == [] and running.store.get("svc") is None


def more(body: bytes, rules: BodyRules = NO_DEVICES) -> str | None:
    return Right(Role.PLUG, of_service_port).more(body, rules)


def test_the_roles() -> None:
    assert more(b'{"trusted": true}') == "trusted=true"
    assert more(b'{"port_security": {"roles": ["dhcp_server"]}}') == "port_security.roles"
    assert more(b'{"trusted": false}') is None


@pytest.mark.parametrize(
    ("device", "patterns", "allowed"),
    [
        ("vnet0", (), False),
        ("vnet0", ("dhcp*",), False),
        ("dhcp0", ("meta?", "dhcp*"), True),
        ("xdhcp0", ("dhcp*",), False),
        ("DHCP0", ("dhcp*",), False),
    ],
)
def test_any_device_of_the_host_is_for_operators(
    device: str, patterns: tuple[str, ...], allowed: bool
) -> None:
    """It may be another VM's, unless the operator has said what devices of this name are for."""
    body = json.dumps({**SERVICE, "device": device}).encode()
    needed = more(body, BodyRules(patterns, lambda retag: {}))
    assert needed is None if allowed else needed is not None and f"device={device}" in needed
    internal = json.dumps({**SERVICE, "device": device, "internal": True}).encode()
    assert more(internal, BodyRules(patterns, lambda retag: {})) is None, "the agent makes it"


def test_the_commands(
    client: Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NETPLUGIN_URL", client.url)
    put = ["service-port", "put", "svc", "--device", "veth0", "--mac", SERVICE["mac"], "--backend", "fake"]
    network = ["--physical-network", "physnet1", "--vlan-id", "100"]
    rules = ["--role", "dhcp_server", "--allowed-address", "10.0.0.5"]
    assert main([*put, *network, *rules]) == 0
    security = {"roles": ["dhcp_server"], "allowed_addresses": [{"ip": "10.0.0.5"}]}
    assert client.get_service_port("svc").spec == service(port_security=security)
    assert main(["service-port", "list", "-f", "csv"]) == 0
    assert "svc" in capsys.readouterr().out
    assert main(["service-port", "put", "int", *put[3:], *network, "--device", "int0", "--internal"]) == 0
    assert client.get_service_port("int").spec == service(device="int0", internal=True)
    client.delete_service_port("int")
    assert main([*put, *network, "--trusted"]) == 0
    assert client.get_service_port("svc").spec == service(trusted=True)
    assert main(["service-port", "delete", "svc", "other"]) == 0
    assert client.list_service_ports() == []


def test_a_device_serves_one_port(client: Client, running: Agent) -> None:
    """Also on a backend whose ports need no resources of its own."""
    client.put_service_port("svc", service())
    with pytest.raises(Conflict, match="is that of port svc"):
        client.put_service_port("other", service())
    client.delete_service_port("svc")
    assert client.put_service_port("other", service()).state is PortState.ACTIVE
    assert running.host.ports.keys() == {"other"}


def test_another_vlan_for_a_network_is_for_its_services_too(client: Client, running: Agent) -> None:
    """Otherwise its VMs would be left without their DHCP server."""
    client.put_service_port("svc", service(trusted=True))
    client.put_port("nic", PortSpec.model_validate(SPEC))
    to = Retag(network="physnet1", from_vlan=SPEC["network"]["vlan_id"], to_vlan=200)
    assert {result.port_id: result.status for result in client.retag(to).results} == {"svc": 200, "nic": 200}
    assert {port.network.vlan_id for port in running.host.ports.values()} == {200}
    assert client.get_service_port("svc").spec.trusted


@pytest.mark.parametrize(
    ("fields", "patterns", "why"),
    [
        ({"trusted": True}, ("veth*",), "port svc with port_security.enabled=false"),
        ({"port_security": {"roles": ["dhcp_server"]}}, ("veth*",), "port svc with port_security.roles"),
        ({}, (), "port svc with device=veth0"),
        ({}, ("veth*",), ""),
    ],
)
def test_what_an_operator_put_on_a_vlan_an_operator_moves(
    client: Client, running: Agent, fields: dict[str, Any], patterns: tuple[str, ...], why: str
) -> None:
    """A VM's port without a filter is the same; the call is refused as a whole, by the port's name."""
    client.put_service_port("svc", service(**fields))
    client.put_port("nic", PortSpec.model_validate(SPEC))
    rules = BodyRules(patterns, running.service.ports.moved_by)
    access = Access((Token(b"plug", "plugger", Role.PLUG), Token(b"op", "operator")))
    limits = Limits(1000, 1000)
    gate = RequestGuard(
        running.app, running.tasks, with_access(access), AuditLog(None), limits, OffLoop(), rules
    )

    async def retag(token: str, body: dict[str, Any]) -> httpx.Response:
        transport = httpx.ASGITransport(gate)
        async with httpx.AsyncClient(transport=transport, base_url="http://agent") as caller:
            headers = {"Authorization": f"Bearer {token}"}
            return await caller.post("/v1/ports:retag", json=body, headers=headers)

    vlan = SPEC["network"]["vlan_id"]
    for body in (
        {"network": "physnet1", "from_vlan": vlan, "to_vlan": 200},
        {"ports": ["nic", "svc"], "to_vlan": 200},
    ):
        answer = asyncio.run(retag("plug", body))
        assert answer.status_code == (403 if why else 200), answer.text
        assert not why or why in answer.json()["detail"]
        moved = {port.network.vlan_id for port in running.host.ports.values()}
        assert moved == {vlan if why else 200}, "the call moves all or nothing"
        client.retag(Retag(ports=("nic", "svc"), to_vlan=vlan))
    assert asyncio.run(retag("plug", {"ports": ["nic"], "to_vlan": 201})).status_code == 200
    assert asyncio.run(retag("op", {"ports": ["nic", "svc"], "to_vlan": 200})).status_code == 200
    assert {port.network.vlan_id for port in running.host.ports.values()} == {200}


def test_who_may_not_trust_a_port_can_move_it_only_without_its_rights(client: Client, running: Agent) -> None:
    """The body says what the port is from then on, and decides about the role."""
    rules = BodyRules(("veth*",), running.service.ports.moved_by)
    network = {**SPEC["network"], "vlan_id": 200}
    client.put_service_port("svc", service(trusted=True))
    trusted = json.dumps({**SERVICE, "network": network, "trusted": True}).encode()
    assert more(trusted, rules) == "trusted=true"
    assert more(json.dumps({**SERVICE, "network": network}).encode(), rules) is None
    client.put_service_port("svc", service(network=network))
    assert running.host.ports["svc"].port_security.enabled
