"""Calls about ports that do not work, or whose backend is away: what stays, what is reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from netplugin.api.client import Client
from netplugin.api.errors import BackendUnavailable, HostError, InvalidRequest, NetpluginError
from netplugin.api.models import NetworkSpec, PortSpec, PortState
from netplugin.backend import Change
from tests.unit.agent import SPEC, Agent, agent, served_agent
from tests.unit.fakes import FakeBackend, FakeHost, Write

RATE = {"egress_kbps": 1000}
SECURITY = {"allowed_addresses": [{"ip": "10.0.0.5"}]}
BLUE = {"network": {"type": "vxlan", "network_id": "blue"}}


def spec(**fields: Any) -> PortSpec:
    return PortSpec.model_validate({**SPEC, **fields})


def test_a_filter_stays_whatever_the_host_says_of_the_port(client: Client, running: Agent) -> None:
    client.put_port("p1", spec())
    running.host.faults["p1"] = "the cable is out"
    reported = client.put_port("p1", spec(port_security=SECURITY))
    assert reported.state is PortState.DEGRADED and reported.error is not None
    assert running.host.ports["p1"] == spec(port_security=SECURITY) == reported.spec
    slow = client.put_port("p1", spec(qos=RATE, port_security=SECURITY))
    assert (slow.state, slow.spec.qos.egress_kbps) == (PortState.DEGRADED, 1000), "as before"
    running.host.faults.clear()
    assert client.put_port("p1", spec(port_security=SECURITY)).state is PortState.ACTIVE


def test_the_change_that_broke_a_port_goes_back(client: Client, running: Agent) -> None:
    client.put_port("p1", spec())

    def breaks(change: Change) -> None:
        if isinstance(change, Write) and change.spec is not None:
            running.host.faults = {"p1": "no buffers"} if change.spec.qos.egress_kbps else {}

    running.host.on_apply = breaks
    with pytest.raises(HostError, match="no buffers"):
        client.put_port("p1", spec(qos=RATE, port_security=SECURITY))
    reported = client.get_port("p1")
    assert (reported.state, reported.spec) == (PortState.ACTIVE, spec()) and running.host.faults == {}


def test_a_filter_changes_on_a_network_that_is_not_configured_any_more(tmp_path: Path) -> None:
    """The rest of the spec was accepted once; only its filter is requested again."""

    class Configured(FakeBackend):
        networks: tuple[str, ...] = ("physnet1",)

        def validate(self, spec: PortSpec) -> None:
            if spec.network.physical_network not in self.networks:
                raise InvalidRequest(f"{spec.network.physical_network} is unknown", step="validate")

    backend = Configured()
    with agent(tmp_path, backends={"fake": backend}) as made, served_agent(made) as url:
        with Client(url) as client:
            client.put_port("p1", spec())
            backend.networks = ()
            assert client.put_port("p1", spec(port_security=SECURITY)).state is PortState.ACTIVE
            assert backend.host.ports["p1"] == spec(port_security=SECURITY)
            for port_id, desired in (("p1", spec(queues=2)), ("p2", spec())):
                with pytest.raises(InvalidRequest, match="physnet1 is unknown"):
                    client.put_port(port_id, desired)


def test_no_number_is_given_to_a_network_before_the_host_can_be_read(tmp_path: Path) -> None:
    class Unread(FakeBackend):
        read = False

        def held_vlans(self) -> dict[int, str]:
            if not self.read:
                raise BackendUnavailable("not read yet", step="ovsdb-connect")
            return {1: "red"}

    backend = Unread()
    blue = NetworkSpec(type="vxlan", vni=5001)
    with agent(tmp_path, backends={"fake": backend}) as made, served_agent(made) as url:
        with Client(url) as client:
            with pytest.raises(BackendUnavailable, match="not read yet"):
                client.put_network("blue", blue)
            assert client.list_networks() == []
            backend.read = True
            assert client.put_network("blue", blue).local_vlan == 2


def test_a_network_changes_for_all_but_the_port_that_fails(client: Client, running: Agent) -> None:
    before, after = (NetworkSpec(type="vxlan", vni=5001, peers=peers) for peers in (("10.9.0.2",), ()))
    client.put_network("blue", before)
    for port_id in ("bad", "good"):
        client.put_port(port_id, spec(**BLUE))

    def refuses(change: Change) -> None:
        if isinstance(change, Write) and change.ports == ("bad",):
            raise HostError("not this one", step="apply")

    running.host.on_apply = refuses
    del running.host.ports["bad"]
    reported = client.put_network("blue", after)
    assert [(e.port_id, e.detail) for e in reported.errors] == [("bad", "not this one")]
    assert running.host.networks["blue"].spec == after == client.get_network("blue").spec
    assert client.get_port("bad").state is PortState.FAILED
    assert client.get_network("blue").errors == ()


def test_a_delete_of_what_was_never_requested(tmp_path: Path) -> None:
    """It is looked for on a host that may have it, and nowhere else."""
    host = FakeHost()
    with agent(tmp_path, backends={"fake": FakeBackend("fake", host)}) as made:
        with served_agent(made) as url, Client(url) as client:
            client.delete_port("never")
            assert host.written == []
    host.ports["orphan"] = host.ports["kept"] = spec()
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    with agent(fresh, backends={"fake": FakeBackend("fake", host)}) as made:
        with served_agent(made) as url, Client(url) as client:
            host.on_apply = _refuse
            with pytest.raises(HostError, match="not now"):
                client.delete_port("orphan")
            host.on_apply = lambda change: None
            client.delete_port("orphan")
            assert set(host.ports) == {"kept"}


def _refuse(change: Change) -> None:
    raise HostError("not now", step="apply")


def test_ports_of_a_backend_that_could_not_be_loaded(tmp_path: Path) -> None:
    host = FakeHost()
    with agent(tmp_path, backends={"fake": FakeBackend("fake", host)}) as made:
        with served_agent(made) as url, Client(url) as client:
            client.put_port("p1", spec())
    with agent(tmp_path, backends={}, broken={"fake": "could not be loaded: no libfake"}) as made:
        with served_agent(made) as url, Client(url) as client:
            reported = client.get_port("p1")
            assert reported.state is PortState.FAILED and reported.error is not None
            assert reported.error.code == "backend_unavailable" and "libfake" in reported.error.detail
            with pytest.raises(NetpluginError, match="libfake") as refused:
                client.delete_port("p1")
            assert refused.value.code == "backend_unavailable"
            assert [p.port_id for p in client.list_ports(state="failed")] == ["p1"]
