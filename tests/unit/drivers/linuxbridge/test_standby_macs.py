"""A bridge has the MAC of a VM at its standby, but while a VF of the VM has it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from drivers.linuxbridge.watch import VfNews
from netplugin.api.physical_models import PhysicalNetworkSpec, VfPoolSpec
from netplugin.backend import Intent
from netplugin.host.link_values import LinkEvent
from netplugin.host.names import TAP, device_name
from netplugin.host.vf_macs import VfMac, VfMacs
from netplugin.host.vf_messages import NO_MAC
from tests.unit.drivers.linuxbridge.model import Model, ModelVfs
from tests.unit.drivers.linuxbridge.strategies import converge, make_spec, planned

MAC, OTHER = "52:54:00:00:00:01", "52:54:00:00:00:02"
VLAN: dict[str, Any] = {"type": "vlan", "physical_network": "net2", "vlan_id": 7}
STANDBY = Intent("s", make_spec(network=VLAN), standby=True)


def host(vfs: bool = True) -> Model:
    model = Model()
    if vfs:
        pool = VfPoolSpec.model_construct(devices=("eth7",))
        model.host.networks.configure({"net2": PhysicalNetworkSpec.model_construct(sriov=pool)})
    return model


def is_fixed(model: Model, port_id: str = "s") -> bool:
    tap = model.links.links[device_name(TAP, port_id)]
    assert model.fdb.fixed(tap.index) in (frozenset(), frozenset({MAC}))
    assert not tap.learning, "what the guest sends while its VF comes would keep frames from the VF"
    return bool(model.fdb.fixed(tap.index))


def test_the_mac_follows_the_vf() -> None:
    model = host()
    converge(model, [STANDBY])
    assert is_fixed(model)
    model.vfs.place("eth7", 7, (NO_MAC, 7), (MAC, 7))
    converge(model, [STANDBY])
    assert not is_fixed(model)
    assert planned(model, [STANDBY]) == ()
    model.vfs.place("eth7", 7, (NO_MAC, 7), (NO_MAC, 7))
    converge(model, [STANDBY], whole=False)
    assert is_fixed(model)


def test_a_standby_that_comes_back_beside_its_vf_leaves_it_the_mac() -> None:
    """The agent was away, and the tap is made again."""
    model = host()
    model.vfs.place("eth7", 7, (MAC, 7))
    converge(model, [STANDBY])
    assert not is_fixed(model)


def test_the_vfs_of_others_move_no_mac() -> None:
    """A VF with a MAC of its guest's choice, and one of another network that has the same MAC."""
    model = host()
    model.vfs.place("eth7", 7, (MAC, 7))
    alone = replace(STANDBY, standby=False)
    converge(model, [alone])
    assert is_fixed(model)
    model.vfs.place("eth7", 7, (MAC, 8), (MAC, 0), (OTHER, 7))
    converge(model, [STANDBY])
    assert is_fixed(model)


def test_a_look_at_one_port_asks_known_nics_alone_and_a_host_without_vfs_is_not_asked() -> None:
    model = host()
    model.vfs.place("eth7", 7, (NO_MAC, 0))
    converge(model, [STANDBY])
    listed = model.vfs.listed
    assert listed
    model.vfs.asked.clear()
    planned(model, [STANDBY], whole=False)
    assert (model.vfs.listed, model.vfs.asked) == (listed, [7])
    del model.vfs.nics[7]
    assert planned(model, [STANDBY], whole=False) == (), "the NIC is gone"
    without = host(vfs=False)
    converge(without, [STANDBY])
    assert is_fixed(without) and not without.vfs.listed and not without.vfs.asked


def test_a_change_of_a_nic_wakes_the_ports_whose_macs_came_or_went() -> None:
    vfs = ModelVfs()
    vfs.place("eth7", 7, (NO_MAC, 7))
    vfs.place("eth9", 9, (OTHER, 7))
    nics = {"eth7": 7, "eth9": 9}
    news = VfNews(lambda: nics, VfMacs(vfs))

    def heard(name: str = "eth7") -> list[frozenset[str] | None]:
        return [wake.ports for wake in news.heard(LinkEvent(False, name, None, True, 1500, 0))]

    news.observed(frozenset({VfMac(OTHER, 7)}), {"s": MAC, "other": OTHER}, whole=True)
    assert heard() == [], "something else changed"
    vfs.place("eth7", 7, (MAC, 7))
    assert heard("eth2") == [], "a NIC without VFs"
    assert heard() == [frozenset({"s"})]
    assert heard() == [], "once"
    vfs.place("eth7", 7, (NO_MAC, 7))
    assert heard() == [frozenset({"s"})]
    vfs.place("eth7", 7, (MAC, 7))
    news.observed(frozenset({VfMac(OTHER, 7), VfMac(MAC, 7)}), {"s": MAC}, whole=False)
    assert heard() == [], "an observation has seen it"
    news.observed(frozenset({VfMac(OTHER, 7), VfMac(MAC, 7)}), {"other": OTHER}, whole=True)
    del vfs.nics[7]
    assert heard() == [], "no port has this MAC any more"
