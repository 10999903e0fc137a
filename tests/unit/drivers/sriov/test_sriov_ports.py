"""Ports on VFs through the real reconciler: what is set, refused, given back, kept and repaired."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lxml import etree

from agents.ports.call import Call
from drivers.vf.memory import PLACEHOLDER_MAC
from drivers.vf.usability import tag_findings
from netplugin.api.errors import (
    CapacityExhausted,
    Conflict,
    HostError,
    InvalidRequest,
    NetpluginError,
    Unsupported,
)
from netplugin.api.models import Binding, PortState
from netplugin.backend import Claim, Intent
from netplugin.host.nic_models import MODELS
from netplugin.host.vf_messages import NO_MAC, VfAttributes
from netplugin.host.vfs import VFIO
from tests.unit.drivers.sriov.model import ModelPf
from tests.unit.drivers.sriov.world import World, make_spec

QUEUES = {name: model.vf.queues for name, model in MODELS.items() if model.vf.queues > 1}
TAGS = {name: model.vf.tags for name, model in MODELS.items() if model.vf.tags}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.store.close()


def interface_of(world: World, port_id: str) -> str:
    """The XML of a port's NIC."""
    record = world.store.get(port_id)
    assert record is not None
    binding: Binding = world.driver.binding(Intent(port_id, record.spec, record.claims))
    return binding.interface_xml


# -- what is set ---------------------------------------------------------------------------------


def test_a_vf_is_set_and_bound_and_given_back(world: World) -> None:
    spec = make_spec(
        7,
        200,
        vf={"spoofchk": True, "vlan_qos": 3, "link_state": "enable"},
        qos={"egress_kbps": 200_000, "min_egress_kbps": 50_000},
    )
    assert world.plug("a", spec) is None
    vf = world.vf_of("a")
    assert vf.attributes == VfAttributes(spec.mac, 200, 3, True, False, "enable", 50, 200)
    assert (vf.driver, vf.override) == (VFIO, VFIO)
    world.assert_settled()
    assert world.unplug("a") is None
    world.assert_settled()
    assert world.store.records() == []


def test_the_same_again_writes_nothing(world: World) -> None:
    assert world.plug("a", make_spec()) is None
    world.model.written.clear()
    assert world.plug("a", make_spec()) is None
    assert world.model.written == []


def test_a_change_on_a_live_port_keeps_its_vf(world: World) -> None:
    assert world.plug("a", make_spec()) is None
    address = world.address_of("a")
    world.model.start_vm(address)
    assert world.plug("a", make_spec(vlan_id=300, qos={"egress_kbps": 5000})) is None
    assert world.address_of("a") == address
    assert (world.vf_of("a").attributes.vlan, world.vf_of("a").attributes.max_mbps) == (300, 5)
    world.assert_settled()


@pytest.mark.parametrize(
    ("enabled", "spoofchk", "desired"),
    [(True, None, True), (True, True, True), (False, None, False), (False, True, True)],
)
def test_spoofchk_is_port_security(world: World, enabled: bool, spoofchk: bool | None, desired: bool) -> None:
    spec = make_spec(port_security={"enabled": enabled}, vf={"spoofchk": spoofchk})
    assert world.plug("a", spec) is None
    assert world.vf_of("a").attributes.spoofchk is desired


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"port_security": {"allowed_addresses": [{"ip": "10.0.0.5"}]}}, Unsupported, "never its IP"),
        ({"qos": {"ingress_kbps": 50_000}}, Unsupported, "not what it receives"),
        ({"qos": {"egress_kbps": 50_500}}, Unsupported, "whole Mbit/s"),
        ({"qos": {"egress_kbps": 3}}, InvalidRequest, "not one frame"),
        ({"vf": {"spoofchk": False}}, InvalidRequest, "vf.spoofchk"),
        ({"vf": {"trusted": True}}, InvalidRequest, "vf.trusted"),
        ({"vf": {"trusted": True, "spoofchk": True}}, InvalidRequest, "vf.trusted"),
        ({"rx_queue_size": 512}, Unsupported, "rings"),
        ({"network": {"physical_network": "net9"}}, InvalidRequest, "net9"),
        (
            {"network": {"type": "vxlan", "network_id": "n", "physical_network": None, "vlan_id": None}},
            Unsupported,
            "vxlan",
        ),
        ({"vlan_id": None, "vf": {"vlan_qos": 1}}, Unsupported, "vlan_qos"),
        ({"vlan_id": None, "vf": {"vlan_proto": "802.1ad"}}, InvalidRequest, "vf.vlan_proto"),
        ({"vf": {"trunk": True}}, InvalidRequest, "vf.trunk"),
        ({"vlan_id": None, "vf": {"allowed_vlans": [7]}}, InvalidRequest, "vf.allowed_vlans"),
        ({"vlan_id": None, "vf": {"trunk": True, "allowed_vlans": [7]}}, Unsupported, "no request that"),
        ({"vlan_id": None, "vf": {"trunk": True, "teaming": True}}, Unsupported, "takes no tags"),
        ({"vf": {"vlan_proto": "802.1ad", "teaming": True}}, Unsupported, "takes no tags"),
    ],
)
def test_what_no_vf_can_do_is_refused_before_it_is_stored(
    world: World, fields: dict[str, Any], error: type[NetpluginError], words: str
) -> None:
    with pytest.raises(error, match=words):
        world.driver.validate(make_spec(**fields))
    assert isinstance(world.plug("a", make_spec(**fields)), NetpluginError)
    world.assert_settled()
    assert world.store.records() == []


@pytest.mark.parametrize(
    ("driver", "vfs", "most"),
    [*((driver, 4, most) for driver, most in QUEUES.items()), ("ixgbe", 32, 2), ("hns3", 4, 1)],
)
def test_a_vf_has_the_queues_that_its_driver_can_give_it(
    tmp_path: Path, driver: str, vfs: int, most: int
) -> None:
    world = World(tmp_path, ModelPf("0000:03:00.0", "eth3", total=vfs, driver=driver))
    assert world.driver.offered().max_queues == most
    assert {vf.max_queues for vf in world.reconciler.claims.vfs()} == {most}
    if most < 128:
        for request in ({}, {"vf": {"pci_address": "0000:03:10.1"}}):
            refused = world.plug("a", make_spec(queues=most + 1, **request))
            assert isinstance(refused, Unsupported) and f"{most} at most" in refused.detail
            assert [error.field for error in refused.errors] == ["queues"]
        world.assert_settled()
        assert world.store.records() == []
    assert world.plug("a", make_spec(queues=most)) is None
    world.assert_settled()
    assert "queues" not in interface_of(world, "a"), "the guest's driver opens them"
    world.store.close()


def test_a_port_of_many_queues_gets_a_vf_of_a_nic_that_has_them(tmp_path: Path) -> None:
    world = World(
        tmp_path,
        ModelPf("0000:03:00.0", "eth3", total=2),
        ModelPf("0000:04:00.0", "eth4", total=1, driver="ice"),
    )
    assert world.driver.offered().max_queues == 16
    assert world.plug("a", make_spec(queues=8)) is None
    assert world.address_of("a").startswith("0000:04")
    refused = world.plug("b", make_spec(2, queues=8))
    assert isinstance(refused, CapacityExhausted) and "NICs that can serve the port" in refused.detail
    assert world.plug("b", make_spec(2, queues=2)) is None
    world.assert_settled()
    world.store.close()


def test_a_vlan_of_802_1ad_is_set_and_kept(tmp_path: Path) -> None:
    """ice_set_vf_port_vlan in double VLAN mode; ice_get_vf_cfg reports it."""
    world = World(tmp_path, ModelPf("0000:03:00.0", "eth3", total=1, driver="ice"))
    stacked = make_spec(vf={"vlan_proto": "802.1ad", "vlan_qos": 2})
    assert world.plug("a", stacked) is None
    vf = world.vf_of("a")
    assert (vf.attributes.vlan, vf.attributes.vlan_qos, vf.attributes.vlan_stacked) == (
        100,
        2,
        True,
    )
    world.assert_settled()
    vf.attributes = replace(vf.attributes, vlan_stacked=False)
    assert world.check() and vf.attributes.vlan_stacked
    device = etree.fromstring(interface_of(world, "a"))
    assert (device.tag, device.get("type"), device.get("managed")) == ("hostdev", "pci", "no")
    assert dict(device.find("source/address").attrib) == {
        "domain": "0x0000",
        "bus": "0x03",
        "slot": "0x10",
        "function": "0x0",
    }
    assert [part.tag for part in device] == ["source", "alias"], "libvirt has nothing to set"
    assert world.plug("a", make_spec()) is None
    assert not vf.attributes.vlan_stacked
    assert etree.fromstring(interface_of(world, "a")).find("vlan/tag").get("id") == "100"
    assert world.plug("a", stacked) is None and world.unplug("a") is None
    world.assert_settled()
    world.store.close()


@pytest.mark.parametrize(
    ("field", "drivers", "vlan_id"),
    [("vlan_proto", {"ice"}, 100), ("trunk", set(TAGS), None)],
)
@pytest.mark.parametrize("driver", [*QUEUES, "hns3"])
def test_what_a_driver_is_not_known_to_do_with_tags_is_refused(
    tmp_path: Path, driver: str, field: str, drivers: set[str], vlan_id: int | None
) -> None:
    world = World(tmp_path, ModelPf("0000:03:00.0", "eth3", total=2, driver=driver))
    asked = make_spec(vlan_id=vlan_id, vf={field: True if field == "trunk" else "802.1ad"})
    refused = world.plug("a", asked)
    if driver in drivers:
        assert refused is None
    else:
        assert isinstance(refused, Unsupported)
        assert [error.field for error in refused.errors] == [f"vf.{field}"]
        assert world.model.written == [] and world.store.records() == []
        assert world.plug("a", make_spec(vlan_id=vlan_id)) is None
        assert isinstance(world.plug("a", asked), Unsupported), "nor is a live port changed to it"
        assert world.check()
    world.assert_settled()
    world.store.close()


def test_a_trunk_is_a_vf_without_a_vlan_that_is_meant_to_be_one(world: World) -> None:
    assert world.plug("a", make_spec(vlan_id=None, vf={"trunk": True})) is None
    attributes = world.vf_of("a").attributes
    assert (attributes.vlan, attributes.spoofchk, attributes.trusted) == (0, True, False)
    assert etree.fromstring(interface_of(world, "a")).find("vlan") is None
    assert not [f for f in world.reconciler.findings() if f.id.startswith("vf-flat")]
    world.assert_settled()


def test_the_mtu_of_the_nic_is_looked_at(world: World) -> None:
    refused = world.plug("a", make_spec(network={"mtu": 9000}))
    assert isinstance(refused, Conflict) and "eth3 of net1 has MTU 1500" in refused.detail
    assert world.plug("a", make_spec()) is None
    refused = world.plug("a", make_spec(network={"mtu": 9000}))
    assert isinstance(refused, HostError) and "has MTU 1500" in refused.detail
    world.assert_settled()


# -- what the VM gets ----------------------------------------------------------------------------


def test_the_interface_has_the_vlan_or_libvirt_would_take_it_off(world: World) -> None:
    assert world.plug("a", make_spec(vlan_id=100, numa_node=0)) is None
    record = world.store.get("a")
    assert record is not None
    binding = world.driver.binding(Intent("a", record.spec, record.claims))
    xml = etree.fromstring(binding.interface_xml)
    assert (xml.get("type"), xml.get("managed")) == ("hostdev", "no")
    assert xml.find("mac").get("address") == record.spec.mac
    assert xml.find("vlan/tag").get("id") == "100"
    address = xml.find("source/address")
    assert dict(address.attrib) == {
        "type": "pci",
        "domain": "0x0000",
        "bus": "0x03",
        "slot": "0x10",
        "function": "0x0",
    }
    reported = json.loads(binding.model_dump_json())
    assert reported["domain_requirements"]["vfio"] is True
    assert reported["domain_requirements"]["numa_node"] == 0
    assert (
        reported["vif_type"],
        reported["pci_address"],
        reported["pf"],
        reported["vf_index"],
        reported["numa_node"],
    ) == (
        "hostdev",
        "0000:03:10.0",
        "eth3",
        0,
        0,
    )


def test_a_flat_network_has_no_vlan(world: World) -> None:
    assert world.plug("a", make_spec(vlan_id=None)) is None
    record = world.store.get("a")
    assert record is not None
    assert "<vlan" not in world.driver.binding(Intent("a", record.spec, record.claims)).interface_xml


def test_a_vf_of_mlx5_goes_to_vfio_and_back_too(world: World) -> None:
    """Only DPDK works next to mlx5_core: a VM has the VF by vfio, and libvirt binds nothing."""
    assert world.plug("a", make_spec(numa_node=1)) is None
    vf = world.vf_of("a")
    assert (vf.driver, vf.override) == (VFIO, VFIO)
    record = world.store.get("a")
    assert record is not None
    binding = world.driver.binding(Intent("a", record.spec, record.claims))
    assert etree.fromstring(binding.interface_xml).get("managed") == "no"
    world.model.start_vm(world.address_of("a"))
    world.assert_settled()
    world.model.stop_vm(world.address_of("a"))
    assert world.unplug("a") is None
    assert vf.driver == "mlx5_core"
    world.assert_settled()


# -- its owner ------------------------------------------------------------------------------------


def test_a_delete_while_the_vm_runs_is_a_conflict_and_happens_when_it_has_stopped(
    world: World,
) -> None:
    assert world.plug("a", make_spec()) is None
    address = world.address_of("a")
    world.model.start_vm(address)
    refused = world.unplug("a")
    assert isinstance(refused, Conflict) and "in use" in refused.detail
    assert world.state("a") is PortState.REMOVING and world.model.vf(address).is_open
    assert world.reconciler.unsettled(), "so that it is looked at soon again"
    assert isinstance(world.plug("b", make_spec(2, vf={"pci_address": address})), Conflict)
    world.model.stop_vm(address)
    assert world.check()
    assert world.store.records() == []
    world.assert_settled()


def test_a_late_delete_leaves_the_vf_alone_that_another_port_has(world: World) -> None:
    assert world.plug("old", make_spec()) is None
    address = world.address_of("old")
    assert world.unplug("old") is None
    assert world.plug("new", make_spec(2, vf={"pci_address": address})) is None
    world.model.start_vm(address)
    world.model.written.clear()
    late: list[Call] = [world.delete("old"), world.delete("old")]
    for operation in late:
        assert world.serve(operation) and operation.future.exception() is None
    plan = world.driver.plan([Intent("old", None)], world.driver.observe(None, 0.0))
    assert plan.changes == () and world.model.written == []
    world.assert_settled()


def test_a_port_that_is_requested_again_while_it_goes_keeps_its_vf(world: World) -> None:
    assert world.plug("a", make_spec()) is None
    address = world.address_of("a")
    world.model.start_vm(address)
    assert isinstance(world.unplug("a"), Conflict)
    before = world.store.get("a")
    assert world.plug("a", make_spec(vlan_id=200)) is None
    after = world.store.get("a")
    assert before is not None and after is not None
    assert [c.memory for c in after.claims] == [c.memory for c in before.claims]
    assert world.address_of("a") == address
    world.assert_settled()


def test_after_a_lost_store_running_vms_keep_their_vfs(world: World) -> None:
    for number in range(3):
        assert world.plug(f"p{number}", make_spec(number, numa_node=0)) is None
        world.model.start_vm(world.address_of(f"p{number}"))
    had = world.holders()
    world.store.close()
    for file in world.path.parent.glob("agent.db*"):
        file.unlink()
    world.start()
    assert world.check()
    assert world.plug("new", make_spec(9, numa_node=0)) is None
    assert world.address_of("new") not in had, "a VM runs with those"
    for number in (2, 0, 1):
        assert world.plug(f"p{number}", make_spec(number, numa_node=0)) is None
    assert {**had, world.address_of("new"): "new"} == world.holders()
    for port_id in ("p0", "p1", "p2"):
        world.model.stop_vm(world.address_of(port_id))
        assert world.unplug(port_id) is None
    assert world.unplug("new") is None
    world.assert_settled()


def test_after_a_lost_store_the_running_vms_vf_is_not_reset(world: World) -> None:
    """Whoever asks for another MAC gets no VF that a VM has open, even if it is the only one left."""
    for number in range(4):
        assert world.plug(f"p{number}", make_spec(number, numa_node=0)) is None
        world.model.start_vm(world.address_of(f"p{number}"))
    world.store.close()
    for file in world.path.parent.glob("agent.db*"):
        file.unlink()
    world.start()
    assert isinstance(world.plug("x", make_spec(9, numa_node=0)), CapacityExhausted)
    assert all(world.model.vf(a).is_open for a in world.model.addresses() if ":03:" in a)


# -- what the NIC refuses, and what is ill -------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "fields"),
    [
        ("rate", {"qos": {"min_egress_kbps": 50_000}}),
        ("link_state", {"vf": {"link_state": "enable"}}),
    ],
)
def test_what_the_nic_does_not_support_leaves_the_vf_as_it_was_and_fit(
    world: World, group: str, fields: dict[str, Any]
) -> None:
    world.model.unsupported = {group}
    refused = world.plug("a", make_spec(**fields))
    assert isinstance(refused, Unsupported) and refused.port_id == "a"
    assert world.store.records() == [] and world.store.unfit() == {}
    world.assert_as_before()
    assert world.plug("a", make_spec()) is None
    assert isinstance(world.plug("a", make_spec(**fields)), Unsupported)
    world.assert_settled()


def test_a_vf_that_refuses_is_rolled_back_and_quarantined_until_released(world: World) -> None:
    world.model.broken = {"0000:03:10.0"}
    assert isinstance(world.plug("a", make_spec(numa_node=0)), HostError)
    world.assert_as_before()
    assert world.store.unfit() == {Claim("vf", "0000:03:10.0"): "mac: Input/output error"}
    assert world.plug("a", make_spec(numa_node=0)) is None
    assert world.address_of("a") == "0000:03:10.1", "another is taken"
    named = world.plug("b", make_spec(2, vf={"pci_address": "0000:03:10.0"}))
    assert isinstance(named, Conflict) and "quarantined" in named.detail
    [info] = [v for v in world.reconciler.claims.vfs() if v.pci_address == "0000:03:10.0"]
    assert (info.state, info.reason) == ("quarantined", "mac: Input/output error")
    world.restart()
    assert isinstance(world.plug("b", make_spec(2, vf={"pci_address": "0000:03:10.0"})), Conflict)
    world.model.broken = set()
    world.store.release([Claim("vf", "0000:03:10.0")])
    assert world.plug("b", make_spec(2, vf={"pci_address": "0000:03:10.0"})) is None
    world.assert_settled()


@pytest.mark.parametrize("ill", ["forgetful", "unbindable"])
def test_a_vf_that_forgets_is_quarantined_too(world: World, ill: str) -> None:
    setattr(world.model, ill, {"0000:03:10.0"})
    refused = world.plug("a", make_spec(numa_node=0))
    assert isinstance(refused, HostError) and "does not keep" in refused.detail
    setattr(world.model, ill, set())
    assert world.check()
    assert [claim.key for claim in world.store.unfit()] == ["0000:03:10.0"]
    world.assert_settled()


def test_a_quarantine_ends_when_the_vf_goes(world: World) -> None:
    world.model.broken = {"0000:03:10.0"}
    assert isinstance(world.plug("a", make_spec(numa_node=0)), HostError)
    pf = world.model.pfs["0000:03:00.0"]
    pf.make_vfs(0)
    assert world.reconciler.check(dry_run=True) and world.store.unfit(), "a dry run decides nothing"
    assert world.check()
    assert world.store.unfit() == {}


# -- what others do ------------------------------------------------------------------------------


def test_a_nic_that_loses_its_vfs_degrades_its_ports_until_they_are_back(world: World) -> None:
    assert world.plug("a", make_spec(numa_node=0)) is None
    assert world.plug("b", make_spec(2, numa_node=1)) is None
    pf = world.model.pfs["0000:03:00.0"]
    pf.make_vfs(0)
    assert world.check()
    record = world.store.get("a")
    assert record is not None and record.state is PortState.DEGRADED
    assert record.error is not None and "eth3 has 0 VFs" in record.error.detail
    assert world.state("b") is PortState.ACTIVE
    [info] = [v for v in world.reconciler.claims.vfs() if v.state == "stale"]
    assert (info.pci_address, info.port_id) == ("0000:03:10.0", "a")
    pf.make_vfs(4)
    assert world.check()
    world.assert_settled()


def test_a_port_whose_vf_is_gone_can_be_deleted(world: World) -> None:
    assert world.plug("a", make_spec(numa_node=0)) is None
    world.model.pfs["0000:03:00.0"].make_vfs(0)
    assert world.unplug("a") is None
    world.model.pfs["0000:03:00.0"].make_vfs(4)
    world.assert_settled()


def test_renumbered_the_port_fails_with_the_new_place_and_nothing_is_touched(
    world: World,
) -> None:
    assert world.plug("a", make_spec(numa_node=0)) is None
    old = world.model.pfs.pop("0000:03:00.0")
    moved = ModelPf("0000:05:00.0", "eth3", total=4, mac=old.mac)
    moved.make_vfs(4)
    world.model.pfs["0000:05:00.0"] = moved
    world.model.written.clear()
    assert world.check()
    record = world.store.get("a")
    assert record is not None and record.state is PortState.FAILED and record.error is not None
    assert "is now 0000:05:10.0" in record.error.detail
    assert world.model.written == []
    assert world.unplug("a") is None
    assert world.store.records() == [] and world.model.written == []


def test_what_another_process_changes_is_repaired(world: World) -> None:
    assert world.plug("a", make_spec()) is None
    vf = world.vf_of("a")
    vf.attributes = VfAttributes("02:66:00:00:00:01", 7, 0, False, True)
    vf.driver = vf.override = None
    assert world.check()
    world.assert_settled()


def test_what_libvirt_takes_off_is_put_back(world: World) -> None:
    """It sets MAC and VLAN again when the VM starts, without the VLAN's priority."""
    assert world.plug("a", make_spec(vf={"vlan_qos": 5})) is None
    world.model.start_vm(world.address_of("a"))
    vf = world.vf_of("a")
    vf.attributes = VfAttributes(vf.attributes.mac, 100, 0, True, False)
    assert world.check()
    assert vf.attributes.vlan_qos == 5 and vf.is_open
    world.assert_settled()


def test_a_trusted_vm_may_set_its_mac(world: World) -> None:
    assert world.plug("a", make_spec(vf={"trusted": True}, port_security={"enabled": False})) is None
    world.model.start_vm(world.address_of("a"))
    vf = world.vf_of("a")
    vf.attributes = VfAttributes("02:77:00:00:00:01", 100, 0, False, True)
    assert world.check()
    assert vf.attributes.mac == "02:77:00:00:00:01"
    assert world.state("a") is PortState.ACTIVE


@pytest.mark.parametrize(("driver", "none"), [("igb", NO_MAC), ("qede", PLACEHOLDER_MAC)])
def test_a_teamed_vf_has_its_mac_in_the_nic_only_while_a_vm_has_it(
    tmp_path: Path, driver: str, none: str
) -> None:
    """While it is away the NIC must give the VM's frames to the virtio NIC next to it."""
    world = World(tmp_path, ModelPf("0000:03:00.0", "eth3", total=1, driver=driver))
    spec = make_spec(vf={"teaming": True})
    assert world.plug("a", spec) is None
    vf, address = world.vf_of("a"), world.address_of("a")

    def settled(mac: str) -> bool:
        is_done = world.reconciler.check(dry_run=True).changes == []
        return is_done and (vf.attributes.mac, vf.attributes.vlan) == (mac, 100)

    def guest() -> bool | None:
        """What the standby is told of."""
        assert world.check()
        return world.reconciler.ports.observed["a"].guest

    assert settled(none) and vf.driver == VFIO and guest() is False
    world.model.start_vm(address, mac=spec.mac)
    assert settled(spec.mac) and guest() is True
    vf.is_open = False
    assert settled(spec.mac), "libvirt starts a VM: it has written the MAC, and QEMU is to come"
    assert guest() is True
    world.model.stop_vm(address)
    assert settled(none) and guest() is False
    boundary, through = 0, False
    while not through:  # what is left, at whichever step the agent ends
        world.model.start_vm(address, mac=spec.mac)
        vf.saved = (spec.mac, 100)
        world.model.stop_vm(address)
        assert vf.attributes.mac == spec.mac
        through = world.check(crash_at=boundary)
        world.restart()
        assert world.check() and settled(none), boundary
        boundary += 1
    vf.is_open = True
    assert world.check() and settled(spec.mac), "who opens it without libvirt gets the MAC late"
    vf.is_open = False
    assert world.unplug("a") is None
    assert world.store.records() == [] and vf.attributes.mac != spec.mac
    world.store.close()


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "libvirt is about to"])
def test_the_mac_of_a_teamed_vf_stays_when_a_vm_starts_after_the_look(
    world: World, is_open: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_spec(vf={"teaming": True})
    assert world.plug("a", spec) is None
    model, vf, address = world.model, world.vf_of("a"), world.address_of("a")
    vf.attributes = replace(vf.attributes, mac=spec.mac, vlan=7)  # left of a VM, by another program
    looked = model.look

    def look() -> Any:
        found = looked()
        model.start_vm(address, mac=spec.mac)
        vf.is_open, vf.saved = is_open, None if is_open else (spec.mac, 100)
        return found

    monkeypatch.setattr(model, "look", look)
    model.written.clear()
    assert world.check()
    assert model.written == [(address, "vlan")] and vf.attributes.mac == spec.mac
    assert world.state("a") is PortState.ACTIVE


def test_a_nic_with_ports_of_flat_networks_is_reported_with_what_its_driver_does(world: World) -> None:
    assert world.plug("a", make_spec(1, vlan_id=100, numa_node=0)) is None
    assert "vf-flat-0000:03:00.0" not in {f.id for f in world.reconciler.findings()}
    assert world.plug("b", make_spec(2, vlan_id=None, numa_node=0)) is None
    [reported] = [f for f in world.reconciler.findings() if f.id.startswith("vf-flat")]
    assert (reported.id, reported.status) == ("vf-flat-0000:03:00.0", "warn")
    assert "eth3 has ports of flat networks (b)" in reported.found
    assert world.unplug("b") is None
    assert not [f for f in world.reconciler.findings() if f.id.startswith("vf-flat")]


@pytest.mark.parametrize(("driver", "words"), [*TAGS.items(), ("bnxt_en", "unknown")])
def test_what_is_known_of_a_driver_is_reported(world: World, driver: str, words: str) -> None:
    inventory = world.model.look()
    address = "0000:03:00.0"
    known = {**inventory.pfs, address: replace(inventory.pfs[address], driver=driver)}
    assert world.plug("a", make_spec(vlan_id=None, numa_node=0)) is None
    record = world.store.get("a")
    assert record is not None
    intent = Intent("a", record.spec, record.claims)
    [reported] = tag_findings([intent], replace(inventory, pfs=known))
    assert words in reported.found and driver in reported.found and reported.fix and "relay" in reported.fix


def test_a_nic_that_is_down_is_reported_and_not_repaired(world: World) -> None:
    assert world.plug("a", make_spec(numa_node=0)) is None
    world.model.pfs["0000:03:00.0"].link = {"up": False}
    assert world.check()
    record = world.store.get("a")
    assert record is not None and record.state is PortState.DEGRADED and record.error is not None
    assert "ip link set eth3 up" in record.error.detail
    world.model.pfs["0000:03:00.0"].link = {}
    assert world.check()
    world.assert_settled()


# -- how much is read ----------------------------------------------------------------------------


def test_a_plug_looks_at_all_once_and_then_at_its_own_nic_alone(world: World) -> None:
    world.model.looks = world.model.looks_again = 0
    assert world.plug("a", make_spec()) is None
    assert (world.model.looks, world.model.looks_again) == (1, 1)
    assert world.unplug("a") is None
    assert (world.model.looks, world.model.looks_again) == (2, 2)
