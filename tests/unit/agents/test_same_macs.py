"""Two ports with one MAC on one network are a finding, and one on two networks is none."""

from __future__ import annotations

from typing import Any

from netplugin.api.client import Client
from netplugin.api.models import Network, NetworkSpec, PortSpec
from tests.unit.agent import SPEC

MAC = SPEC["mac"]
VLAN = SPEC["network"]


def put(client: Client, port_id: str, **fields: Any) -> None:
    client.put_port(port_id, PortSpec.model_validate({**SPEC, "vm_id": f"vm-{port_id}", **fields}))


def found(client: Client) -> list[tuple[str, str, str]]:
    return [(each.id, each.status, each.found) for each in client.checks()]


def test_two_ports_of_a_network_with_one_mac(client: Client) -> None:
    put(client, "a")
    assert found(client) == []
    put(client, "b", mac=MAC.upper())
    expected = f"a, b have {MAC} on physical network physnet1 VLAN 100"
    assert found(client) == [("same-mac", "warn", expected)]
    client.delete_port("a")
    assert found(client) == []


def test_a_mac_may_be_on_several_networks(client: Client) -> None:
    client.put_network("net-1", NetworkSpec(type="vxlan", vni=5001))
    client.put_network("net-2", NetworkSpec(type="vxlan", vni=5002))
    networks = [
        VLAN,
        {**VLAN, "vlan_id": 101},
        {**VLAN, "physical_network": "physnet2"},
        {"type": "flat", "physical_network": "physnet1"},
        {"type": "vxlan", "network_id": "net-1"},
        {"type": "vxlan", "network_id": "net-2"},
    ]
    for number, network in enumerate(networks):
        put(client, f"p{number}", network=network)
    assert found(client) == []
    put(client, "again", network=networks[-1])
    assert found(client) == [("same-mac", "warn", f"again, p5 have {MAC} on network net-2")]


def test_the_finding_has_an_end(client: Client) -> None:
    """Of many MACs some are named."""
    network = Network.model_validate(VLAN)
    for number in range(14):
        put(client, f"p{number:02}", mac=f"52:54:00:00:00:{number // 2:02x}", network=network)
    [(_, _, sentence)] = found(client)
    assert sentence.startswith("p00, p01 have 52:54:00:00:00:00 on ")
    last = "p08, p09 have 52:54:00:00:00:04 on physical network physnet1 VLAN 100"
    assert sentence.endswith(f"{last} and others")


def test_of_many_ports_with_one_mac_some_are_named(client: Client) -> None:
    for number in range(7):
        put(client, f"p{number}")
    [(_, _, sentence)] = found(client)
    assert sentence == f"p0, p1, p2, p3, p4 and others have {MAC} on physical network physnet1 VLAN 100"
