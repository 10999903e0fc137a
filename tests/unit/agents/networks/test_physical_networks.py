"""Physical networks by the API: stored and kept on the host, changed under ports or refused, undone whole."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from netplugin.api.client import Client
from netplugin.api.errors import (
    BackendUnavailable,
    Conflict,
    HostError,
    InvalidRequest,
    NetpluginError,
    NotFound,
    Unsupported,
)
from netplugin.api.models import PortSpec
from netplugin.api.physical_models import OvsUplinkSpec, PhysicalNetworkSpec
from netplugin.backend import Change
from netplugin.host.physical_networks import PhysicalNetworks
from netplugin.host.usability import Usability, Wake
from tests.lab.processes import wait_for
from tests.unit.agent import DEADLINE_S, SPEC, Agent, agent, caller, served_agent
from tests.unit.agents.networks.keeper import Keep, Keeper, KeeperHost, VfKeeper

NIC = "0000:03:00.0"


def network(**fields: Any) -> PhysicalNetworkSpec:
    return PhysicalNetworkSpec.model_validate({"ovs": {"devices": [NIC]}, **fields})


def kept(**fields: Any) -> PhysicalNetworkSpec:
    return network(keep=True, **fields)


def port(name: str = "net-1", mtu: int = 1500, **fields: Any) -> PortSpec:
    on = {"type": "flat", "physical_network": name, "mtu": mtu}
    return PortSpec.model_validate({**SPEC, "network": on, **fields})


@pytest.fixture
def host() -> KeeperHost:
    return KeeperHost()


@pytest.fixture
def registry() -> PhysicalNetworks:
    """The configuration has one network."""
    made = PhysicalNetworks()
    made.configure({"physnet1": network(bridge="br-phys1", ovs={"devices": ["0000:01:00.0"]})})
    return made


@pytest.fixture
def running(tmp_path: Path, host: KeeperHost, registry: PhysicalNetworks) -> Iterator[Agent]:
    backends = {"fake": Keeper(registry, host), "vf": VfKeeper(registry, KeeperHost(), "vf")}
    with agent(tmp_path, backends=backends, networks=registry) as made:
        yield made


def stored(running: Agent) -> dict[str, PhysicalNetworkSpec]:
    return dict(running.store.physical_networks.all())


def test_from_put_to_delete(client: Client, running: Agent, host: KeeperHost) -> None:
    made = client.put_physical_network("net-1", kept(mtu=9000))
    assert (made.name, made.origin, made.bridge, made.mtu) == ("net-1", "api", "br-net-1", 9000)
    assert made.ovs == OvsUplinkSpec(devices=(NIC,)) and made.keep and made.ports == 0
    assert host.kept == {"net-1": kept(mtu=9000)}
    before = len(host.made)
    assert client.put_physical_network("net-1", kept(mtu=9000)) == made
    assert client.get_physical_network("net-1") == made
    assert len(host.made) == before, "the same again writes nothing"
    assert [each.name for each in client.list_physical_networks()] == ["net-1", "physnet1"]
    assert not client.put_physical_network("net-1", network(mtu=9000)).keep
    assert host.kept == {}
    for _ in range(2):
        client.delete_physical_network("net-1")
    with pytest.raises(NotFound, match="net-1"):
        client.get_physical_network("net-1")
    assert stored(running) == {}


def test_a_network_that_is_not_kept_is_there_for_ports_alone(
    client: Client, running: Agent, host: KeeperHost
) -> None:
    host.usability = Usability(False, "OVS is not there")
    client.put_physical_network("net-1", network())
    assert host.made == [], "nothing is kept, so that nothing is to be done"
    host.usability = Usability(True)
    client.put_port("p1", port())
    assert client.get_physical_network("net-1").ports == 1
    assert [each.port_id for each in client.list_ports(network="net-1")] == ["p1"]


def test_a_port_needs_its_network(client: Client) -> None:
    with pytest.raises(InvalidRequest, match="net-1") as refused:
        client.put_port("p1", port())
    assert "PUT /v1/physical-networks/net-1" in str(refused.value.fix)


def test_a_network_with_ports_is_not_deleted(client: Client, running: Agent, host: KeeperHost) -> None:
    client.put_physical_network("net-1", kept())
    client.put_port("p1", port())
    with pytest.raises(Conflict, match="1 ports here: p1"):
        client.delete_physical_network("net-1")
    assert "net-1" in host.kept and "net-1" in stored(running)
    client.delete_port("p1")
    host.tunnels = {"net-1": ("VXLAN network blue",)}
    for spec in (None, network(), kept(bridge="br-other")):
        with pytest.raises(Conflict, match=r"used by others: VXLAN network blue"):
            if spec is None:
                client.delete_physical_network("net-1")
            else:
                client.put_physical_network("net-1", spec)
    client.put_physical_network("net-1", kept(mtu=9000))
    host.tunnels = {}
    client.delete_physical_network("net-1")
    assert host.kept == {} and stored(running) == {}


@pytest.mark.parametrize(
    ("changed", "fields"),
    [
        ({"bridge": "br-other"}, ["bridge"]),
        ({"ovs": {"devices": ["0000:04:00.0"]}}, ["ovs.devices"]),
        ({"ovs": {"devices": [NIC, "0000:04:00.0"]}}, ["ovs.devices"]),
        ({"ovs": {}, "bridge": "br-other"}, ["bridge", "ovs.devices"]),
        ({"ovs": None, "keep": False, "sriov": {"devices": ["eth1"]}}, ["ovs"]),
        ({"mtu": 1400}, ["mtu"]),
    ],
)
def test_what_ports_need_does_not_change_under_them(
    client: Client, running: Agent, host: KeeperHost, changed: dict[str, Any], fields: list[str]
) -> None:
    client.put_physical_network("net-1", kept())
    client.put_port("p1", port())
    before = len(host.made)
    with pytest.raises(Conflict, match="p1") as refused:
        client.put_physical_network("net-1", network(**{"keep": True, **changed}))
    assert [error.field for error in refused.value.errors] == fields
    assert stored(running) == {"net-1": kept()} and len(host.made) == before
    client.delete_port("p1")
    client.put_physical_network("net-1", network(**{"keep": True, **changed}))


@pytest.mark.parametrize(
    "changed",
    [
        {"mtu": 9000},
        {"keep": False},
        {"bridge": "br-net-1"},  # which it has
        {"sriov": {"devices": ["eth1#0-7"]}},
        {"ovs": {"devices": ["0000:04:00.0", NIC], "bond": "lacp"}},
    ],
)
def test_what_may_change_under_ports(client: Client, changed: dict[str, Any]) -> None:
    first = {"ovs": {"devices": [NIC, "0000:04:00.0"]}} if "ovs" in changed else {}
    client.put_physical_network("net-1", kept(**first))
    client.put_port("p1", port())
    desired = PhysicalNetworkSpec.model_validate({**kept(**first).model_dump(), **changed})
    made = client.put_physical_network("net-1", desired)
    assert made.ovs == desired.ovs and (made.mtu, made.keep) == (desired.mtu, desired.keep)


def fail(host: KeeperHost, how: str) -> None:
    def refuse(change: Change) -> None:
        if isinstance(change, Keep) and change.spec is not None and change.spec.mtu == 9000:
            raise HostError("no room for 9000", step="plan")

    if how == "refused":
        host.on_apply = refuse
    elif how == "lost":
        host.lost = {"net-1"}
    elif how == "broken":
        host.broken = {"net-1"}
    else:
        host.usability = Usability(False, "OVS is not there")


@pytest.mark.parametrize("how", ["refused", "lost", "broken", "unusable"])
def test_a_first_put_that_fails_leaves_nothing(
    client: Client, running: Agent, host: KeeperHost, registry: PhysicalNetworks, how: str
) -> None:
    fail(host, how)
    expected = BackendUnavailable if how == "unusable" else HostError
    with pytest.raises(expected):
        client.put_physical_network("net-1", kept(mtu=9000))
    assert stored(running) == {} and host.kept == {} and "net-1" not in registry.now.all
    with pytest.raises(NotFound):
        client.get_physical_network("net-1")


@pytest.mark.parametrize("how", ["refused", "lost", "unusable"])
def test_a_change_that_fails_goes_back(client: Client, running: Agent, host: KeeperHost, how: str) -> None:
    client.put_physical_network("net-1", kept(mtu=1500))
    client.put_port("p1", port())
    fail(host, how)
    with pytest.raises(NetpluginError):
        client.put_physical_network("net-1", kept(mtu=9000))
    assert stored(running) == {"net-1": kept(mtu=1500)} == host.kept
    host.usability = Usability(True)
    assert client.get_port("p1").state == "active"


def test_a_delete_that_fails_leaves_it(client: Client, running: Agent, host: KeeperHost) -> None:
    client.put_physical_network("net-1", kept())
    host.usability = Usability(False, "OVS is not there")
    with pytest.raises(BackendUnavailable):
        client.delete_physical_network("net-1")
    assert stored(running) == {"net-1": kept()} == host.kept
    host.usability = Usability(True)
    client.delete_physical_network("net-1")
    assert host.kept == {}


def test_what_is_wrong_with_the_devices_is_reported_and_not_changed(client: Client, host: KeeperHost) -> None:
    """There is no such NIC on the machine of the tests."""
    [finding] = client.put_physical_network("net-1", kept(ovs={"devices": ["fffe:1f:1f.7"]})).findings
    assert finding.status == "warn" and finding.found == "there is no PCI device fffe:1f:1f.7"
    assert finding in client.checks()
    host.broken = {"net-1"}
    client.reconcile()
    assert [f.found for f in client.get_physical_network("net-1").findings] == [
        "there is no PCI device fffe:1f:1f.7",
        "the uplink of net-1 does not work",
    ]
    assert "physical-network-net-1" in [f.id for f in client.checks()]
    with pytest.raises(HostError, match=r"does not work \(there is no PCI device fffe:1f:1f.7\)"):
        client.put_physical_network("net-1", kept(ovs={"devices": ["fffe:1f:1f.7"]}, mtu=1400))


def test_what_others_remove_is_put_back(client: Client, host: KeeperHost) -> None:
    client.put_physical_network("net-1", kept())
    host.kept.clear()
    host.wake(Wake("a bridge was changed"))
    wait_for(lambda: host.kept == {"net-1": kept()}, DEADLINE_S, "it is there again")


@pytest.mark.parametrize(
    ("other", "field"),
    [
        ({"bridge": "br-net-1"}, "bridge"),
        ({"ovs": {"devices": [NIC]}}, "ovs.devices"),
        ({"ovs": {"devices": ["0000:05:00.0", "0000:03:00.0"]}}, "ovs.devices"),
        ({"sriov": {"devices": ["eth1#8-15"]}}, "sriov.devices"),
    ],
)
def test_a_bridge_or_device_is_that_of_one_network(
    client: Client, running: Agent, other: dict[str, Any], field: str
) -> None:
    first = network(sriov={"devices": ["eth1#0-7"]})
    client.put_physical_network("net-1", first)
    with pytest.raises(Conflict, match="physical network net-1") as refused:
        client.put_physical_network("net-2", PhysicalNetworkSpec.model_validate({"ovs": {}, **other}))
    assert [error.field for error in refused.value.errors] == [field]
    with pytest.raises(Conflict, match="physical network physnet1"):
        client.put_physical_network("net-2", network(bridge="br-phys1", ovs={}))
    assert stored(running) == {"net-1": first}


def test_networks_of_the_configuration_are_the_operators(client: Client, running: Agent) -> None:
    made = client.get_physical_network("physnet1")
    assert (made.origin, made.bridge) == ("config", "br-phys1")
    same = network(bridge="br-phys1", ovs={"devices": ["0000:01:00.0"]})
    assert client.put_physical_network("physnet1", same) == made
    with pytest.raises(Conflict, match="of the agent's configuration, with other values"):
        client.put_physical_network("physnet1", same.model_copy(update={"keep": True}))
    with pytest.raises(Conflict, match="of the agent's configuration"):
        client.delete_physical_network("physnet1")
    assert stored(running) == {}


@pytest.mark.parametrize(
    ("name", "configured"),
    [("net-1", network(bridge="br-new", ovs={})), ("net-2", network(bridge="br-other"))],
)
def test_a_configuration_that_gains_a_stored_network_wins_and_tells(
    tmp_path: Path, host: KeeperHost, name: str, configured: PhysicalNetworkSpec
) -> None:
    """The same name, or the same device."""
    for gained in ({}, {name: configured}, {}):
        registry = PhysicalNetworks()
        registry.configure(gained)
        backends = {"fake": Keeper(registry, host)}
        with (
            agent(tmp_path, backends=backends, networks=registry) as running,
            served_agent(running) as url,
            Client(url) as client,
        ):
            if "net-1" not in stored(running):
                client.put_physical_network("net-1", kept())
            assert host.kept == ({} if gained else {"net-1": kept()})
            ids = [finding.id for finding in client.checks()]
            assert ("physical-network-net-1-unused" in ids) == bool(gained)
            names = {each.name: each.origin for each in client.list_physical_networks()}
            assert names == {"net-1": "api", **dict.fromkeys(gained, "config")}
            if gained:
                with pytest.raises(Conflict):
                    client.put_physical_network("net-1", kept())
    with agent(tmp_path, backends=backends, networks=registry) as running:
        assert stored(running) == {"net-1": kept()}


def test_a_definition_that_the_configuration_replaced_can_be_deleted(
    tmp_path: Path, host: KeeperHost
) -> None:
    registry = PhysicalNetworks()
    with agent(tmp_path, backends={"fake": Keeper(registry, host)}, networks=registry) as running:
        running.store.physical_networks.save("net-1", kept())
    registry = PhysicalNetworks()
    registry.configure({"net-1": network()})
    backends = {"fake": Keeper(registry, host)}
    with agent(tmp_path, backends=backends, networks=registry) as running, served_agent(running) as url:
        with Client(url) as client:
            client.put_port("p1", port())
            client.delete_physical_network("net-1")
            assert stored(running) == {}
            assert client.get_physical_network("net-1").origin == "config"
            client.put_port("p2", port(mac="52:54:00:12:34:57"))
            with pytest.raises(Conflict):
                client.delete_physical_network("net-1")


def test_what_no_backend_does_is_refused(client: Client, running: Agent, host: KeeperHost) -> None:
    for part in ({"linuxbridge": {}}, {"ovs": {}, "linuxbridge": {"interface": "eth1"}}):
        with pytest.raises(InvalidRequest, match=r"no enabled backend uses it") as refused:
            client.put_physical_network("net-1", PhysicalNetworkSpec.model_validate(part))
        assert [error.field for error in refused.value.errors] == ["linuxbridge"]
    spec = PhysicalNetworkSpec.model_validate({"sriov": {"devices": ["eth1"]}, "keep": True})
    with pytest.raises(Unsupported, match="no enabled backend keeps sriov"):
        client.put_physical_network("net-1", spec)
    host.impossible["net-1"] = Conflict("bridge: it is not ours", step="validate")
    with pytest.raises(Conflict, match="it is not ours"):
        client.put_physical_network("net-1", network())
    assert stored(running) == {}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "body"),
        ({"keep": True}, "body"),
        ({"ovs": {}, "more": 1}, "more"),
        ({"bridge": "br-1", "sriov": {"devices": ["eth1"]}}, "bridge"),
        ({"bridge": "a-name-of-16-char", "ovs": {}}, "bridge"),
        ({"bridge": "br/1", "ovs": {}}, "bridge"),
        ({"bridge": "--help", "ovs": {}}, "bridge"),
        ({"mtu": 100, "ovs": {}}, "mtu"),
        ({"mtu": "1500", "ovs": {}}, "mtu"),
        ({"keep": "yes", "ovs": {}}, "keep"),
        ({"ovs": {"devices": [NIC], "bond": "lacp"}}, "ovs.bond"),
        ({"mtu": 9000, "sriov": {"devices": ["eth1"]}}, "mtu"),
        ({"mtu": 9000, "ovs": {}}, "mtu"),
        ({"ovs": {"devices": [NIC, NIC]}}, "ovs.devices"),
        ({"ovs": {"devices": ["net_pcap0, iface=eth0"]}}, "ovs.devices.0"),
        ({"ovs": {"devices": [NIC, "0000:04:00.0"], "bond": "balance-xor"}}, "ovs.bond"),
        ({"linuxbridge": {"interface": "eth1 eth2"}}, "linuxbridge.interface"),
        ({"sriov": {"devices": []}}, "sriov.devices"),
        ({"sriov": {"devices": [f"eth{n}" for n in range(33)]}}, "sriov.devices"),
    ],
)
def test_a_body_that_is_not_valid_names_the_field(
    client: Client, running: Agent, body: dict[str, Any], field: str
) -> None:
    with caller(client.url) as plain:
        answer = plain.put("/v1/physical-networks/net-1", json=body)
    assert answer.status_code == 422
    assert field in [error["field"] for error in answer.json()["errors"]], answer.text
    assert stored(running) == {}


def test_what_is_undone_moves_no_network_under_a_port_that_came_meanwhile(
    client: Client, running: Agent, host: KeeperHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A PUT with a new bridge and NIC fails; before it is undone, a port is plugged on the new bridge."""
    client.put_physical_network("net-1", kept())
    service = running.service.physical_networks
    in_thread, undoing = service._in_thread, threading.Event()

    async def slow(work: Callable[..., Any], *args: Any) -> Any:
        """The database's thread has other work before it undoes the change."""
        if work.__name__ == "restore":
            undoing.set()
            await asyncio.to_thread(
                wait_for, lambda: (p1 := running.store.get("p1")) and p1.state == "active", DEADLINE_S, "p1"
            )
        return await in_thread(work, *args)

    monkeypatch.setattr(service, "_in_thread", slow)
    host.broken = {"net-1"}
    failed: list[NetpluginError] = []

    def put() -> None:
        with Client(client.url) as own:
            try:
                own.put_physical_network("net-1", kept(bridge="br-new", ovs={"devices": ["0000:04:00.0"]}))
            except NetpluginError as error:
                failed.append(error)

    caller = threading.Thread(target=put)
    caller.start()
    assert undoing.wait(DEADLINE_S)
    host.broken = set()
    client.put_port("p1", port())  # on br-new
    caller.join(DEADLINE_S)
    assert failed and stored(running)["net-1"].bridge == "br-new", "p1 is on br-new"


def test_the_mtu_does_not_become_smaller_than_tunnels_need(client: Client, host: KeeperHost) -> None:
    client.put_physical_network("net-1", kept(mtu=9000))
    host.tunnels = {"net-1": ("blue",)}
    with pytest.raises(Conflict):
        client.put_physical_network("net-1", kept(mtu=576))


def test_an_mtu_left_out_does_not_shrink_a_new_uplink_under_ports(client: Client, host: KeeperHost) -> None:
    """Without mtu an uplink that OVS gets again (a reboot, a new database) has 1500."""
    client.put_physical_network("net-1", kept(mtu=9000))
    client.put_port("p1", port(mtu=9000))
    with pytest.raises(Conflict, match="p1"):
        client.put_physical_network("net-1", kept())
