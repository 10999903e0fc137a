"""The registry of physical networks: names of bridges, what two networks cannot share, what drivers see."""

from __future__ import annotations

from typing import Any

import pytest

from netplugin.api.physical_models import PhysicalNetworkSpec
from netplugin.host.ovs import OvsSettings
from netplugin.host.physical_networks import Derived, PhysicalNetworks, bridge_of, clash, linux_bridge_of
from tests.unit.drivers.dpdkvhostuser.model import SETTINGS


def network(**fields: Any) -> PhysicalNetworkSpec:
    return PhysicalNetworkSpec.model_validate(fields)


def test_each_network_has_a_bridge_of_its_own_that_fits() -> None:
    ovs = network(ovs={})
    assert bridge_of("physnet1", ovs) == "br-physnet1"
    assert bridge_of("twelve-chars", ovs) == "br-twelve-chars"
    long = [bridge_of(name, ovs) for name in ("a" * 13, "b" * 13, "a" * 64)]
    assert len(set(long)) == 3 and all(name and len(name) < 15 for name in long)
    assert bridge_of("a", network(ovs={}, bridge="br7")) == "br7"
    assert bridge_of("a", network(linuxbridge={})) is None


def test_a_name_is_that_of_the_linux_bridge_if_there_is_none_of_ovs() -> None:
    only, both = network(linuxbridge={}, bridge="br7"), network(linuxbridge={}, ovs={}, bridge="br7")
    assert (bridge_of("a", only), linux_bridge_of(only)) == (None, "br7")
    assert (bridge_of("a", both), linux_bridge_of(both)) == ("br7", None)
    assert linux_bridge_of(network(linuxbridge={})) is None, "as those of older stores"


@pytest.mark.parametrize(
    ("one", "other", "field"),
    [
        ({"ovs": {}}, {"ovs": {}, "bridge": "br-one"}, "bridge"),
        ({"ovs": {"devices": ["0000:0A:00.0"]}}, {"ovs": {"devices": ["0000:0a:00.0"]}}, "ovs.devices"),
        (
            {"linuxbridge": {"interface": "eth1"}},
            {"linuxbridge": {"interface": "eth1"}},
            "linuxbridge.interface",
        ),
        ({"sriov": {"devices": ["eth1#0-7"]}}, {"sriov": {"devices": ["eth1"]}}, "sriov.devices"),
        ({"sriov": {"devices": ["8086:10C9"]}}, {"sriov": {"devices": ["8086:10c9"]}}, "sriov.devices"),
        ({"ovs": {}}, {"ovs": {}}, None),
        ({"linuxbridge": {}}, {"linuxbridge": {}}, None),
        ({"linuxbridge": {}, "bridge": "br7"}, {"linuxbridge": {}, "bridge": "br7"}, "bridge"),
        ({"linuxbridge": {}, "bridge": "br7"}, {"ovs": {}, "bridge": "br7"}, "bridge"),
        ({"ovs": {"devices": ["0000:0a:00.0"]}}, {"ovs": {"devices": ["0000:0a:00.0,a=1"]}}, "ovs.devices"),
        ({"sriov": {"devices": ["eth1"]}}, {"sriov": {"devices": ["ETH1"]}}, None),
    ],
)
def test_two_networks_share_nothing(one: dict[str, Any], other: dict[str, Any], field: str | None) -> None:
    for name, spec, others in (("two", other, {"one": one}), ("one", one, {"two": other})):
        found = clash(name, network(**spec), {n: network(**s) for n, s in others.items()})
        assert [e.field for e in found.errors] == [field] if found else field is None
    assert clash("one", network(**one), {"one": network(**one)}) is None, "it is itself"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"ovs": {"devices": ["0000:03:00.0"]}}, {"sriov": {"devices": ["0000:03:00.0"]}}),
        ({"linuxbridge": {"interface": "eth1"}}, {"sriov": {"devices": ["eth1"]}}),
    ],
)
def test_a_nic_is_on_one_wire_whoever_uses_it(one: dict[str, Any], other: dict[str, Any]) -> None:
    for desired, there in ((one, other), (other, one)):
        assert clash("wish", network(**desired), {"there": network(**there)}) is not None
    assert clash("one", network(**{**one, **other}), {}) is None, "parts of one network share it"


def test_an_address_has_one_spelling() -> None:
    """The name of an uplink is made from it: another spelling would be another port, with the same NIC."""
    devices = ["0000:AF:00.0,Rx=A", "net_pcap0,iface=A"]
    made = network(ovs={"devices": devices, "bond": None}).ovs
    assert made is not None and made.devices == ("0000:af:00.0,Rx=A", "net_pcap0,iface=A")


def test_parts_of_the_configuration_are_one_network() -> None:
    registry = PhysicalNetworks()
    registry.configure({"physnet1": network(ovs={}, bridge="br1", mtu=9000)})
    registry.configure({"physnet1": network(linuxbridge={"interface": "eth1"})})
    registry.configure({"physnet1": network(linuxbridge={"interface": "eth1"})})  # a second backend
    merged = network(ovs={}, bridge="br1", mtu=9000, linuxbridge={"interface": "eth1"})
    assert registry.now.configured == {"physnet1": merged}
    assert registry.now.made == {} == registry.now.set_aside


def test_ovs_has_the_networks_of_both() -> None:
    registry = PhysicalNetworks()
    registry.configure(SETTINGS.networks())
    derived = Derived(registry, SETTINGS.with_networks)
    assert derived.value is derived.value
    assert derived.value.kept == frozenset() == derived.value.made
    registry.replace_stored(
        {
            "net7": network(ovs={"devices": ["net_tap0", "net_tap1"], "bond": "lacp"}, mtu=9000, keep=True),
            "net8": network(linuxbridge={}, bridge="br-net8"),
            "net1": network(ovs={}),  # the configuration has one
        }
    )
    now = derived.value
    assert isinstance(now, OvsSettings)
    assert now.bridge_mappings == {**SETTINGS.bridge_mappings, "net7": "br-net7"}
    assert now.uplinks["net7"] == ("net_tap0", "net_tap1") and now.bonds == {"net3": "lacp", "net7": "lacp"}
    assert now.uplink_mtu["net7"] == 9000 and now.kept == now.made == {"net7"}
    assert set(registry.now.set_aside) == {"net1"}
    registry.replace_stored({})
    assert derived.value.bridge_mappings == SETTINGS.bridge_mappings
    assert (
        registry.now.configured["net3"].ovs
        == network(ovs={"devices": ["0000:04:00.0", "0000:04:00.1"], "bond": "lacp"}).ovs
    )
