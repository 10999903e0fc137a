"""VXLAN networks: kept in the store, changed on the host without the ports, gone with nothing left."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agents.networks.vxlan import Networks
from agents.ports.reconciler import NetworkOutcome
from agents.store.port_table import Record
from agents.store.store import Store
from netplugin.api.batch_models import Batch, BatchPut
from netplugin.api.client import Client
from netplugin.api.errors import (
    BackendUnavailable,
    CapacityExhausted,
    Conflict,
    HostError,
    InvalidRequest,
    NetpluginError,
    NotFound,
)
from netplugin.api.models import NetworkSpec, PortSpec, PortState
from netplugin.backend import Change
from netplugin.host.usability import Usability
from tests.unit.agent import DEADLINE_S, SPEC, Agent, agent, caller, served_agent
from tests.unit.fakes import FakeBackend, FakeHost, Write, WriteNetwork

#: For what must not happen meanwhile.
WHILE_S = 1.0


def network(vni: int = 5001, *peers: str, **fields: Any) -> NetworkSpec:
    return NetworkSpec(type="vxlan", vni=vni, peers=peers, **fields)


def port(network_id: str = "net-1", **fields: Any) -> PortSpec:
    on = {"type": "vxlan", "network_id": network_id, **fields.pop("network", {})}
    return PortSpec.model_validate({**SPEC, "network": on, **fields})


def written(host: FakeHost, since: int) -> list[Write | WriteNetwork]:
    return host.written[since:]


def test_from_put_to_delete(client: Client, running: Agent) -> None:
    made = client.put_network("net-1", network(5001, "10.0.0.2"))
    assert (made.spec, made.local_vlan, made.ports) == (network(5001, "10.0.0.2"), 1, 0)
    assert client.put_network("net-1", made.spec) == made == client.get_network("net-1")
    assert client.put_network("net-2", network(5002)).local_vlan == 2
    assert [info.network_id for info in client.list_networks()] == ["net-1", "net-2"]
    client.delete_network("net-1")
    client.delete_network("net-1")
    with pytest.raises(NotFound, match="net-1"):
        client.get_network("net-1")
    assert client.put_network("net-3", network(5003)).local_vlan == 1, "it is free again"
    assert running.host.written == [], "no port, nothing on the host"


def test_a_port_takes_its_network_along_and_the_network_goes_with_the_last(
    client: Client, running: Agent
) -> None:
    made = client.put_network("net-1", network(5001, "10.0.0.2"))
    client.put_port("p1", port())
    client.put_port("p2", port(mac="52:54:00:12:34:57"))
    assert running.host.networks["net-1"].spec == made.spec
    assert client.get_network("net-1").ports == 2
    client.delete_port("p1")
    assert "net-1" in running.host.networks
    client.delete_port("p2")
    assert running.host.networks == {}
    client.delete_network("net-1")


def test_peers_change_and_no_port_is_touched(client: Client, running: Agent) -> None:
    client.put_network("net-1", network(5001, "10.0.0.2"))
    client.put_port("p1", port())
    before = len(running.host.written)
    client.put_network("net-1", network(5001, "10.0.0.2", "10.0.0.3"))
    [change] = written(running.host, before)
    assert isinstance(change, WriteNetwork)
    assert change.overlay is not None
    assert change.overlay.spec.peers == ("10.0.0.2", "10.0.0.3")
    client.put_network("net-1", network(5001, "10.0.0.2", "10.0.0.3"))
    assert len(running.host.written) == before + 1, "the same again writes nothing"


@pytest.mark.parametrize("other", [{"vni": 6000}, {"mtu": 1400}, {"udp_port": 8472}])
def test_what_vms_and_other_hosts_rely_on_does_not_change_under_ports(
    client: Client, running: Agent, other: dict[str, int]
) -> None:
    changed = NetworkSpec(**{"type": "vxlan", "vni": 5001, **other})
    client.put_network("net-1", network())
    client.put_port("p1", port())
    before = len(running.host.written)
    with pytest.raises(Conflict, match=f"{next(iter(other))} of network net-1 cannot") as refused:
        client.put_network("net-1", changed)
    assert [error.field for error in refused.value.errors] == list(other)
    assert client.get_network("net-1").spec == network()
    assert len(running.host.written) == before
    client.delete_port("p1")
    assert client.put_network("net-1", changed).spec == changed


def test_two_networks_cannot_share_a_vni(client: Client) -> None:
    client.put_network("net-1", network())
    with pytest.raises(Conflict, match="VNI 5001 is network net-1's"):
        client.put_network("net-2", network())
    with pytest.raises(NotFound):
        client.get_network("net-2")


def test_a_network_with_ports_is_not_deleted(client: Client) -> None:
    client.put_network("net-1", network())
    client.put_port("p1", port())
    with pytest.raises(Conflict, match="1 ports here: p1"):
        client.delete_network("net-1")
    assert client.get_network("net-1").ports == 1


def test_a_port_needs_its_network(client: Client, running: Agent) -> None:
    with pytest.raises(InvalidRequest, match="no network 'net-1'") as refused:
        client.put_port("p1", port())
    assert [error.field for error in refused.value.errors] == ["network.network_id"]
    entries = (BatchPut(port_id="p1", spec=port()), BatchPut(port_id="p2", spec=flat()))
    results = client.batch(Batch(put=entries)).results
    assert [result.status for result in results] == [422, 200]
    assert client.list_ports()[0].port_id == "p2"


def flat() -> PortSpec:
    return PortSpec.model_validate(
        {**SPEC, "network": {"type": "flat", "physical_network": "physnet1", "network_id": "net-9"}}
    )


def test_a_port_has_its_networks_mtu(client: Client, running: Agent) -> None:
    client.put_network("net-1", network(mtu=8950))
    assert client.put_port("p1", port()).spec.network.mtu == 8950
    before = len(running.host.written)
    client.put_port("p1", port(network={"mtu": 8950}))
    client.put_port("p1", port())
    assert len(running.host.written) == before
    with pytest.raises(InvalidRequest, match="is 1500, and network net-1 has 8950") as refused:
        client.put_port("p2", port(network={"mtu": 1500}))
    assert [error.field for error in refused.value.errors] == ["network.mtu"]


def test_what_the_host_refuses_goes_back(client: Client, running: Agent) -> None:
    client.put_network("net-1", network(5001, "10.0.0.2"))
    client.put_port("p1", port())

    def refuse(change: Change) -> None:
        if isinstance(change, WriteNetwork) and change.overlay and len(change.overlay.spec.peers) > 1:
            raise HostError("no room for a peer", step="fdb")

    running.host.on_apply = refuse
    with pytest.raises(HostError, match="no room for a peer"):
        client.put_network("net-1", network(5001, "10.0.0.2", "10.0.0.3"))
    assert client.get_network("net-1").spec == network(5001, "10.0.0.2")
    assert running.host.networks["net-1"].spec == network(5001, "10.0.0.2")
    assert client.get_port("p1").state is PortState.ACTIVE


def test_it_goes_back_to_what_a_call_made_whose_caller_has_gone(
    running: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has begun to be stored is stored, though the call was cancelled meanwhile."""
    networks, save = running.service.networks, running.store.save_network
    begun, go_on = threading.Event(), threading.Event()

    def slow(*args: Any) -> Any:
        begun.set()
        assert go_on.wait(DEADLINE_S)
        return save(*args)

    async def refuse(*_: Any, **__: Any) -> NetworkOutcome:
        return NetworkOutcome(False, (HostError("the host refuses", step="apply"),))

    async def both() -> None:
        monkeypatch.setattr(running.store, "save_network", slow)
        first = asyncio.create_task(networks.put("net-1", network(5001, "10.0.0.2")))
        assert await asyncio.to_thread(begun.wait, DEADLINE_S)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        monkeypatch.setattr(Networks, "_converge", refuse)
        second = asyncio.create_task(networks.put("net-1", network(5001, "10.0.0.3")))
        await asyncio.sleep(0)  # it has begun
        go_on.set()
        with pytest.raises(HostError, match="the host refuses"):
            await second

    asyncio.run(both())
    kept = running.store.network("net-1")
    assert kept is not None and kept.spec == network(5001, "10.0.0.2")


def test_a_host_that_cannot_be_read_is_reported(client: Client, running: Agent) -> None:
    client.put_network("net-1", network(5001, "10.0.0.2"))
    client.put_port("p1", port())

    def away(ports: object) -> None:
        raise BackendUnavailable("the host is away", step="observe")

    running.host.on_observe = away
    with pytest.raises(BackendUnavailable, match="the host is away"):
        client.put_network("net-1", network())
    assert client.get_network("net-1").spec == network(5001, "10.0.0.2")
    [finding] = client.checks()
    assert (finding.id, finding.status, finding.found) == (
        "fake-unseen",
        "fail",
        "the host is away",
    )


def test_no_backend_writes_the_network_of_before_after_another_has_changed_it(tmp_path: Path) -> None:
    """A plug of one backend is under way with the old peers, and fails: it has no port that could go on."""
    host, at_work, changed, goes_on = FakeHost(), threading.Event(), threading.Event(), threading.Event()
    backends = {name: FakeBackend(name, host) for name in ("fake", "other")}

    def slowly(change: Change) -> None:
        if "p2" in change.ports and not at_work.is_set():
            at_work.set()
            assert goes_on.wait(DEADLINE_S)
        elif isinstance(change, WriteNetwork) and "p1" in change.ports:
            changed.set()

    with (
        agent(tmp_path, backends=backends) as made,
        served_agent(made) as url,
        Client(url) as client,
        ThreadPoolExecutor() as threads,
    ):
        client.put_network("net-1", network(5001, "10.0.0.2"))
        client.put_port("p1", port())
        host.networks.clear()  # somebody has taken it away
        host.forgetful, host.on_apply = {"p2"}, slowly
        plugged = threads.submit(client.put_port, "p2", port(backend="other"))
        assert at_work.wait(DEADLINE_S)
        put = threads.submit(client.put_network, "net-1", network(5001, "10.0.0.3"))
        changed.wait(WHILE_S)  # in vain: the worker that is at work comes first
        goes_on.set()
        with pytest.raises(HostError):
            plugged.result(DEADLINE_S)
        put.result(DEADLINE_S)
        assert host.networks["net-1"].spec.peers == ("10.0.0.3",)


def test_an_unusable_backend_is_a_finding(client: Client, running: Agent) -> None:
    assert client.checks() == []
    running.host.usability = Usability(False, "no cable", "plug it in")
    [finding] = client.checks()
    assert (finding.status, finding.found, finding.fix) == ("fail", "no cable", "plug it in")


def test_a_network_that_drifted_is_repaired(client: Client, running: Agent) -> None:
    client.put_network("net-1", network(5001, "10.0.0.2"))
    client.put_port("p1", port())
    running.host.networks.clear()
    report = client.reconcile()
    assert [change.change for change in report.changes] == ["WriteNetwork"]
    assert running.host.networks["net-1"].spec.peers == ("10.0.0.2",)
    assert client.reconcile().changes == []


def test_all_is_there_after_a_restart(tmp_path: Path) -> None:
    host = FakeHost()
    for count in (1, 2):
        with (
            agent(tmp_path, backends={"fake": FakeBackend("fake", host)}) as made,
            served_agent(made) as url,
            Client(url) as client,
        ):
            client.put_network("net-2", network(5002))
            client.put_network("net-1", network(5001, "10.0.0.2"))
            client.put_port("p1", port())
            assert client.get_network("net-1").local_vlan == 2
            assert len(host.written) == 2, f"run {count}"


def test_after_a_lost_store_a_network_keeps_its_number_and_takes_no_others(tmp_path: Path) -> None:
    host = FakeHost()
    with (
        agent(tmp_path / "a", backends={"fake": FakeBackend("fake", host)}) as made,
        served_agent(made) as url,
        Client(url) as client,
    ):
        for number in (1, 2):
            client.put_network(f"net-{number}", network(5000 + number))
            client.put_port(f"p{number}", port(f"net-{number}"))
    with (
        agent(tmp_path / "b", backends={"fake": FakeBackend("fake", host)}) as made,
        served_agent(made) as url,
        Client(url) as client,
    ):
        assert client.put_network("net-3", network(5003)).local_vlan == 3
        assert client.put_network("net-2", network(5002)).local_vlan == 2
        assert client.put_network("net-1", network(5001)).local_vlan == 1


def test_a_number_for_each_network_until_there_are_none(tmp_path: Path) -> None:
    store = Store(tmp_path / "agent.db")
    store.database.sql.execute("PRAGMA synchronous=OFF")
    vlans = {store.save_network(f"n{i}", network(i + 1)).local_vlan for i in range(4094)}
    assert vlans == set(range(1, 4095))
    with pytest.raises(CapacityExhausted, match="all 4094 local VLANs"):
        store.save_network("one-more", network(9999))
    assert store.network("one-more") is None
    store.forget_network("n7")
    assert store.save_network("one-more", network(9999)).local_vlan == 8
    store.close()


def test_a_port_whose_network_went_meanwhile_is_not_stored(tmp_path: Path) -> None:
    store = Store(tmp_path / "agent.db")
    with pytest.raises(NetpluginError, match="was deleted meanwhile"):
        store.save([Record("p1", port(), state=PortState.PENDING)])
    assert store.records() == []
    store.save_network("net-1", network())
    store.save([Record("p1", flat(), state=PortState.PENDING, previous=port())])
    with pytest.raises(Conflict, match="has 1 ports"):  # what the port may go back to stays
        store.forget_network("net-1")
    store.close()


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "vni"),
    ({"vni": 0}, "vni"),
    ({"vni": 1 << 24}, "vni"),
    ({"vni": "5001"}, "vni"),
    ({"vni": 1, "type": "vlan"}, "type"),
    ({"vni": 1, "peers": ["10.0.0.0/24"]}, "peers.0"),
    ({"vni": 1, "peers": ["10.0.0.1", "ff02::1"]}, "peers.1"),
    ({"vni": 1, "peers": ["0.0.0.0"]}, "peers.0"),
    ({"vni": 1, "peers": ["127.0.0.1"]}, "peers.0"),
    ({"vni": 1, "peers": ["10.0.0.1", "10.0.0.1"]}, "body"),
    ({"vni": 1, "peers": ["10.0.0.1", "2001:db8::1"]}, "body"),
    ({"vni": 1, "peers": [f"10.1.{i // 256}.{i % 256}" for i in range(1025)]}, "peers"),
    ({"vni": 1, "udp_port": 0}, "udp_port"),
    ({"vni": 1, "mtu": 575}, "mtu"),
    ({"vni": 1, "mtu": 1450.5}, "mtu"),
    ({"vni": 1, "colour": "red"}, "colour"),
]


@pytest.mark.parametrize(("body", "field"), WRONG)
def test_a_wrong_field_is_named_and_nothing_changes(client: Client, body: dict[str, Any], field: str) -> None:
    with caller(client.url) as plain:
        answer = plain.put("/v1/networks/net-1", json={"type": "vxlan", **body})
    assert answer.status_code == 422
    assert [error["field"] for error in answer.json()["errors"]] == [field]
    assert client.list_networks() == []


def test_peers_are_one_way_of_writing(client: Client) -> None:
    made = client.put_network("net-1", network(5001, "2001:DB8:0::2"))
    assert made.spec.peers == ("2001:db8::2",)


QOS_WRONG: list[tuple[dict[str, int], str]] = [
    ({"egress_kbps": 100, "min_egress_kbps": 200}, "qos"),
    ({"egress_kbps": 0}, "qos.egress_kbps"),
    ({"ingress_kbps": -5}, "qos.ingress_kbps"),
    ({"ingress_kbps": 400_000_001}, "qos.ingress_kbps"),
]


@pytest.mark.parametrize(("qos", "field"), QOS_WRONG)
def test_an_impossible_rate_is_refused(client: Client, qos: dict[str, int], field: str) -> None:
    with caller(client.url) as plain:
        answer = plain.put("/v1/ports/p1", json={**SPEC, "qos": qos})
    assert answer.status_code == 422
    assert [error["field"] for error in answer.json()["errors"]] == [field]
    assert client.list_ports() == []
