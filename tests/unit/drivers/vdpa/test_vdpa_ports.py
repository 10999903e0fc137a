"""Ports of the vdpa backend through the real reconciler: relay, native, whose VF it is, what is reported."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from lxml import etree

from drivers.ovs import switch
from drivers.ovs.filters import TO_SWITCH
from drivers.ovs.switch import Switch
from drivers.vdpa.model import BRIDGE, NATIVE_TYPE
from drivers.vf.commands import KIND
from netplugin.api.errors import (
    CapacityExhausted,
    Conflict,
    HostError,
    InvalidRequest,
    NetpluginError,
    Unsupported,
)
from netplugin.api.models import PortState
from netplugin.backend import Applied, Claim, Intent
from netplugin.host.flow import Flow
from netplugin.host.flow_actions import DROP, NORMAL, output
from netplugin.host.names import RELAY, SOCKETS, VHOST, device_name
from netplugin.host.ovs_rows import OvsPort
from netplugin.host.vf_messages import VfAttributes
from netplugin.host.vfs import VFIO
from tests.unit.drivers.dpdkvhostuser.model import Bridge
from tests.unit.drivers.dpdkvhostuser.scenes import kinds
from tests.unit.drivers.sriov.model import ModelPf
from tests.unit.drivers.vdpa.world import NATIVE_ROOT, RELAY_ROOT, VdpaWorld, vdpa_spec

NPV, NPR = device_name(VHOST, "a"), device_name(RELAY, "a")
NPS = device_name(SOCKETS, "a")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[VdpaWorld]:
    made = VdpaWorld(tmp_path)
    yield made
    made.store.close()


@pytest.fixture
def native(tmp_path: Path) -> Iterator[VdpaWorld]:
    """A NIC in switchdev mode, which leaves all but a VF's MAC to its representor, and a vendor's OVS."""
    nic = ModelPf("0000:81:00.0", "eth8", total=3, vf_driver="mlx5_core", switchdev=True)
    made = VdpaWorld(tmp_path, nic)
    made.model.unsupported = {"vlan", "spoofchk", "trust", "rate", "link_state"}
    made.switch.reported = NATIVE_ROOT
    yield made
    made.store.close()


def binding_of(world: VdpaWorld, port_id: str = "a") -> dict[str, Any]:
    record = world.store.get(port_id)
    assert record is not None
    reported = world.driver.binding(Intent(port_id, record.spec, record.claims))
    found = json.loads(reported.model_dump_json())
    assert isinstance(found, dict)
    return found


def row(world: VdpaWorld, name: str, bridge: str = BRIDGE) -> OvsPort:
    return world.switch.ovs.bridges[bridge].ports[name]


def problem_of(world: VdpaWorld, port_id: str = "a") -> str:
    record = world.store.get(port_id)
    assert record is not None and record.error is not None
    return record.error.detail


# -- relay ---------------------------------------------------------------------------------------


def test_a_vf_is_relayed_and_given_back(world: VdpaWorld) -> None:
    spec = vdpa_spec(7, 200, vf={"trusted": True, "vlan_qos": 3}, queues=2, network={"mtu": 1400})
    assert world.plug("a", spec) is None
    vf = world.vf_of("a")
    assert vf.attributes == VfAttributes(spec.mac, 200, 3, True, True)
    assert (vf.driver, vf.is_open) == (VFIO, True)
    npv, npr = row(world, NPV).interface, row(world, NPR).interface
    assert npv and npr
    assert (npv.type, npr.type) == ("dpdkvhostuserclient", "dpdk")
    assert npv.options == {"vhost-server-path": f"/run/vhost/{NPS}/{NPV}"}
    assert npr.options == {"dpdk-devargs": "0000:03:10.0", "n_rxq": "2"}
    assert npv.mtu_request == npr.mtu_request == 1400
    world.assert_settled()
    assert world.unplug("a") is None
    world.assert_settled()
    assert world.switch.ovs.bridges == {} and world.store.records() == []


def test_a_port_has_the_name_that_was_chosen(world: VdpaWorld) -> None:
    assert world.plug("a", vdpa_spec(port_name="vnic0")) is None
    assert binding_of(world)["device"] == "vnic0" == row(world, "vnic0").name and row(world, NPR)
    refused = world.plug("b", vdpa_spec(2, port_name="vnic0"))
    assert isinstance(refused, Conflict) and "that of port a" in refused.detail
    world.assert_settled()
    assert world.unplug("a") is None
    assert world.plug("b", vdpa_spec(2, port_name="vnic0")) is None
    world.assert_settled()


def test_the_socket_is_at_the_path_that_was_chosen(world: VdpaWorld) -> None:
    spec = vdpa_spec(vhost_user_socket="/run/vhost/vm/nic0")
    assert world.plug("a", spec) is None and world.plug("a", spec) is None
    npv = row(world, NPV).interface
    assert npv and npv.options == {"vhost-server-path": "/run/vhost/vm/nic0"}
    assert binding_of(world)["socket_path"] == "/run/vhost/vm/nic0"
    refused = world.plug("b", vdpa_spec(2, vhost_user_socket="/run/vhost/vm/nic0"))
    assert isinstance(refused, Conflict) and "port a" in refused.detail
    assert isinstance(world.plug("b", vdpa_spec(2, vhost_user_socket="/etc/vm/nic0")), InvalidRequest)
    world.assert_settled()


def test_the_vm_sees_an_ordinary_vhost_user_nic(world: VdpaWorld) -> None:
    assert world.plug("a", vdpa_spec(queues=2, numa_node=0)) is None
    reported = binding_of(world)
    xml = etree.fromstring(reported["interface_xml"])
    assert (xml.get("type"), xml.find("source").get("mode")) == ("vhostuser", "server")
    assert xml.find("source").get("path") == reported["socket_path"] == f"/run/vhost/{NPS}/{NPV}"
    assert reported["domain_requirements"] == {
        "shared_memory": True,
        "hugepages": True,
        "numa_node": 0,
        "vfio": False,
        "qemu_user": None,
    }
    assert (
        reported["vif_type"],
        reported["mode"],
        reported["bridge"],
        reported["pci_address"],
        reported["pf"],
    ) == (
        "vhostuser",
        "relay",
        BRIDGE,
        "0000:03:10.0",
        "eth3",
    )


def test_the_filter_is_of_what_the_vm_sends_and_nothing_switches(world: VdpaWorld) -> None:
    addresses = {"allowed_addresses": [{"ip": "10.0.0.5"}]}
    assert world.plug("a", vdpa_spec(port_security=addresses)) is None
    flows = world.switch.ovs.bridges[BRIDGE].flows
    assert NORMAL not in {flow.actions for flow in flows}
    vm, vf = (row(world, name).interface.ofport for name in (NPV, NPR))  # type: ignore[union-attr]
    sent = [f for f in flows if f"in_port={vm}" in f.match.split(",") and f.actions != DROP]
    assert all("dl_src=52:54:00:00:00:01" in f.match and f.actions == output(vf) for f in sent)
    assert any("nw_src=10.0.0.5" in f.match for f in sent)
    assert all("vlan_tci=0x0000/0x1fff" in f.match for f in sent)
    open_spec = vdpa_spec(port_security={"enabled": False})
    assert world.plug("a", open_spec) is None
    flows = world.switch.ovs.bridges[BRIDGE].flows
    [sent] = [f for f in flows if f"in_port={vm}" in f.match.split(",") and f.actions != DROP]
    assert "vlan_tci=0x0000/0x1fff" in sent.match and sent.actions == output(vf)


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("enabled", [False, True])
def test_a_vf_that_gets_all_frames_brings_the_vm_its_own_and_those_of_groups(
    world: VdpaWorld, trusted: bool, enabled: bool
) -> None:
    spec = vdpa_spec(vf={"trusted": trusted}, port_security={"enabled": enabled})
    assert world.plug("a", spec) is None
    vm, vf = (row(world, name).interface.ofport for name in (NPV, NPR))  # type: ignore[union-attr]
    flows = world.switch.ovs.bridges[BRIDGE].flows
    back = [f for f in flows if f"in_port={vf}" in f.match.split(",")]
    assert {flow.actions for flow in back} == {output(vm)}
    # A NIC may leave a tag of priority alone.
    assert all("vlan_tci=0x0000/0x0fff" in flow.match for flow in back)
    to = {word for f in back for word in f.match.split(",") if word.startswith("dl_")}
    own = {f"dl_dst={spec.mac}", "dl_dst=01:00:00:00:00:00/01:00:00:00:00:00"}
    assert to == (set() if trusted and not enabled else own) and len(back) == (len(to) or 1)


#: Whether a VF of a PF with this driver gets all multicast frames without being trusted.
MULTICAST = {
    "igb": True,
    "bnxt_en": True,
    "i40e": False,
    "qede": False,
    "mlx5_core": False,
}


def i40e(directory: Path) -> VdpaWorld:
    """A relay on a NIC that gives multicast to trusted VFs alone, whose VF is not trusted yet."""
    world = VdpaWorld(directory, ModelPf("0000:03:00.0", "eth3", total=1, driver="i40e"))
    assert world.plug("a", vdpa_spec()) is None
    vf = world.vf_of("a")
    vf.attributes = replace(vf.attributes, trusted=False)
    world.restart()
    return world


def let_all_back(world: VdpaWorld) -> None:
    """The flows bring the VM whatever its VF receives."""
    flows = world.switch.ovs.bridges[BRIDGE].flows
    to_group = next(f for f in flows if f"dl_dst={_GROUP}" in f.match)
    flows -= {f for f in flows if f.actions == to_group.actions}
    all_frames = to_group.match.replace(f"dl_dst={_GROUP},", "")
    flows.add(Flow.make(to_group.cookie, to_group.priority, all_frames, to_group.actions))


_GROUP = "01:00:00:00:00:00/01:00:00:00:00:00"


def test_a_live_vf_is_trusted_when_its_flows_keep_others_frames_from_the_vm(tmp_path: Path) -> None:
    world = i40e(tmp_path)
    tight = frozenset(world.switch.ovs.bridges[BRIDGE].flows)
    let_all_back(world)
    seen_at_trust = []

    def look(pf: ModelPf, number: int, group: str, want: VfAttributes) -> int:
        if group == "trust":
            seen_at_trust.append(frozenset(world.switch.ovs.bridges[BRIDGE].flows))
        return 0

    world.model.refuses = look
    assert world.check()
    assert world.vf_of("a").attributes.trusted and world.state("a") is PortState.ACTIVE
    assert seen_at_trust == [tight]
    assert world.reconciler.check(dry_run=True).changes == []
    world.store.close()


def test_a_vf_that_came_back_is_trusted_before_ovs_opens_it_and_after_old_flows_are_gone(
    tmp_path: Path,
) -> None:
    world = i40e(tmp_path)
    let_all_back(world)
    vf = world.vf_of("a")
    vf.driver, vf.override, vf.is_open, vf.dirty = "igbvf", None, False, False
    world.switch.opened.clear()
    seen_at_trust = []

    def look(pf: ModelPf, number: int, group: str, want: VfAttributes) -> int:
        if group == "trust":
            flows = world.switch.ovs.bridges[BRIDGE].flows
            to_vm = [f for f in flows if f.actions not in (NORMAL, DROP)]
            seen_at_trust.append((to_vm, vf.is_open))
        return 0

    world.model.refuses = look
    assert world.check()
    assert vf.attributes.trusted and vf.is_open and world.state("a") is PortState.ACTIVE
    assert seen_at_trust == [([], False)]
    world.assert_relayed()
    world.store.close()


def test_a_live_vf_is_not_trusted_while_its_flows_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = i40e(tmp_path)
    let_all_back(world)
    refused = HostError("OFPBFC_MSG_FAILED", step="openflow")
    with monkeypatch.context() as broken:
        broken.setattr(world.switch, "apply", lambda changes, deadline: Applied({"a": refused}))
        assert world.check()
        assert not world.vf_of("a").attributes.trusted
    assert world.check()
    assert world.vf_of("a").attributes.trusted and world.state("a") is PortState.ACTIVE
    world.store.close()


def test_a_relay_works_on_without_trust_where_the_nic_begins_to_refuse_it(tmp_path: Path) -> None:
    """i40e in MFP mode (``i40e_ndo_set_vf_trust``): EINVAL."""
    world = i40e(tmp_path)
    asked = []

    def refuse(pf: ModelPf, number: int, group: str, want: VfAttributes) -> int:
        asked.append(group)
        return errno.EINVAL if group == "trust" else 0

    world.model.refuses = refuse
    for _ in range(2):
        world.switch.restart()
        assert world.check()
        assert world.state("a") is PortState.DEGRADED and "IPv6" in problem_of(world)
        world.assert_relayed()
        assert world.reconciler.check(dry_run=True).changes == []
    assert asked == ["trust"]
    assert world.plug("a", vdpa_spec()) is None, "its VM may be started again"
    assert world.state("a") is PortState.DEGRADED
    assert world.unplug("a") is None and world.store.records() == []
    world.store.close()


@pytest.mark.parametrize("driver", ["ice", "ixgbe"])
@pytest.mark.parametrize(
    ("vlan_id", "asks", "trusted"),
    [
        (100, False, False),
        (100, True, True),
        (None, False, True),
    ],
)
def test_a_vf_that_may_ignore_its_vlan_is_trusted_on_a_flat_network_or_if_requested(
    tmp_path: Path, driver: str, vlan_id: int | None, asks: bool, trusted: bool
) -> None:
    world = VdpaWorld(tmp_path, ModelPf("0000:03:00.0", "eth3", total=1, driver=driver))
    assert world.plug("a", vdpa_spec(1, vlan_id, vf={"trusted": asks})) is None
    assert world.vf_of("a").attributes.trusted is trusted
    assert world.reconciler.check(dry_run=True).changes == []
    found = world.driver.findings((), world.driver.observe(None, 0.0))
    [reported] = [f for f in found if f.id == "vf-multicast-0000:03:00.0"]
    assert "other VLANs" in reported.found and "vf.trusted" in str(reported.fix)
    world.store.close()


@pytest.mark.parametrize(("driver", "without"), MULTICAST.items())
def test_a_vf_is_trusted_where_the_nic_gives_no_other_multicast(
    tmp_path: Path, driver: str, without: bool
) -> None:
    vf_driver = "mlx5_core" if driver == "mlx5_core" else "igbvf"
    nic = ModelPf("0000:03:00.0", "eth3", total=1, driver=driver, vf_driver=vf_driver)
    world = VdpaWorld(tmp_path, nic)
    assert world.plug("a", vdpa_spec()) is None
    vf = world.vf_of("a")
    assert vf.attributes.trusted is not without
    vf.attributes = replace(vf.attributes, mac="02:66:00:00:00:01", trusted=False)
    assert world.check()
    assert (vf.attributes.mac, vf.attributes.trusted) == (vdpa_spec().mac, not without), (
        "OVS has the VF, and no VM sets its MAC"
    )
    assert world.reconciler.check(dry_run=True).changes == []
    found = world.driver.findings((), world.driver.observe(None, 0.0))
    assert [finding.id for finding in found] == ["ovs-old-actions", "dpdk-probing"]
    assert world.unplug("a") is None
    assert vf.attributes.trusted is False and world.store.records() == []
    world.store.close()


@pytest.mark.parametrize(("driver", "trusted"), [("cxgb4", False), ("i40e", None)])
def test_nics_whose_vfs_may_get_no_multicast_are_reported(
    tmp_path: Path, driver: str, trusted: bool | None
) -> None:
    nic = ModelPf("0000:03:00.0", "eth3", total=1, driver=driver)
    nic.vfs[0] = nic.new_vf(0)
    nic.vfs[0].attributes = replace(nic.vfs[0].attributes, trusted=trusted)
    world = VdpaWorld(tmp_path, nic)
    found = world.driver.findings((), world.driver.observe(None, 0.0))
    [reported] = [f for f in found if f.id == "vf-multicast-0000:03:00.0"]
    assert reported.status == "warn" and driver in reported.found and "IPv6" in reported.found
    assert world.plug("a", vdpa_spec()) is None
    assert not world.vf_of("a").attributes.trusted
    world.store.close()


def test_a_nic_that_trusts_no_vf_is_refused_for_a_relay(tmp_path: Path) -> None:
    """i40e in MFP mode (``i40e_ndo_set_vf_trust``): EINVAL."""
    world = VdpaWorld(tmp_path, ModelPf("0000:03:00.0", "eth3", total=1, driver="i40e"))
    world.model.refuses = lambda pf, n, group, want: errno.EINVAL if group == "trust" else 0
    refused = world.plug("a", vdpa_spec())
    assert isinstance(refused, Unsupported) and "relay" in str(refused.fix)
    assert world.store.records() == []
    world.assert_settled()
    world.store.close()


def test_rates_are_policers_of_ovs_and_not_of_the_vf(world: VdpaWorld) -> None:
    qos = {"ingress_kbps": 50_500, "egress_kbps": 20_500}
    assert world.plug("a", vdpa_spec(qos=qos)) is None
    npv = row(world, NPV)
    assert npv.interface and npv.interface.ingress_policing_rate == 20_500
    assert npv.qos and npv.qos.other_config["cir"] == str(50_500_000 // 8)
    assert world.vf_of("a").attributes.max_mbps == 0
    assert world.unplug("a") is None
    assert world.switch.ovs.qos == {}


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        (
            {"port_security": {"allowed_addresses": [{"ip": "10.0.0.5", "mac": "52:54:00:77:77:77"}]}},
            Unsupported,
            "own MAC only",
        ),
        ({"qos": {"min_egress_kbps": 50_000}}, Unsupported, "min_egress_kbps"),
        ({"vf": {"teaming": True}}, Unsupported, "vf.teaming"),
        ({"vlan_id": None, "vf": {"vlan_qos": 1}}, Unsupported, "vlan_qos"),
        ({"vf": {"vlan_proto": "802.1ad"}}, Unsupported, "takes no tags"),
        ({"vlan_id": None, "vf": {"trunk": True}}, Unsupported, "takes no tags"),
        ({"network": {"physical_network": "net9"}}, InvalidRequest, "net9"),
        ({"network": {"mtu": 9000}}, Conflict, "MTU 1500"),
    ],
)
def test_what_cannot_be_is_refused_and_leaves_no_trace(
    world: VdpaWorld, fields: dict[str, Any], error: type[NetpluginError], words: str
) -> None:
    refused = world.plug("a", vdpa_spec(**fields))
    assert isinstance(refused, error) and words in str(refused)
    world.assert_settled()
    assert world.store.records() == [] and world.model.written == []


def test_flows_that_died_with_vswitchd_are_put_back_and_nothing_else(world: VdpaWorld) -> None:
    for number in (1, 2):
        assert world.plug(f"p{number}", vdpa_spec(number)) is None
    world.model.written.clear()
    world.switch.restart()
    dry = world.reconciler.check(dry_run=True)
    assert sorted(c.change for c in dry.changes) == ["SetBridgeFlows", "SetFilter", "SetFilter"]
    assert world.check()
    assert world.model.written == []
    world.assert_settled()


@pytest.mark.parametrize("what", ["gone", "device", "type", "beside gone", "both gone", "flow"])
def test_what_another_process_breaks_is_repaired(world: VdpaWorld, what: str) -> None:
    assert world.plug("a", vdpa_spec()) is None
    bridge = world.switch.ovs.bridges[BRIDGE]
    npr = bridge.ports[NPR]
    assert npr.interface
    if what in ("gone", "both gone"):
        del bridge.ports[NPV]
    if what in ("beside gone", "both gone"):
        del bridge.ports[NPR]
    if what in ("device", "type"):
        changed: Any = {"options": {"dpdk-devargs": "0000:03:10.3"}, "type": npr.interface.type}
        changed = changed if what == "device" else {"type": "internal"}
        bridge.ports[NPR] = replace(npr, interfaces=(replace(npr.interface, **changed),))
    if what == "flow":
        bridge.flows.add(Flow.make(0x6E70 << 48 | 0xABC, 9, "in_port=3", output(9)))
    world.switch.reconfigure()
    assert world.reconciler.check(dry_run=True).changes != []
    assert world.check()
    world.assert_settled()


# -- whose VF it is ------------------------------------------------------------------------------


def test_ovs_lets_go_of_a_vf_before_it_is_touched(world: VdpaWorld) -> None:
    """The model stops a reset or an unbind of what is open; here is the order all the same."""
    assert world.plug("a", vdpa_spec()) is None
    first = world.driver.plan(
        [Intent("a", None, world.store.get("a").claims)],  # type: ignore[union-attr]
        world.driver.observe(["a"], 0.0),
    )
    assert kinds(first.changes) == ["RemovePort", "DropFlows", "RemovePort VF", "RemoveBridge"]
    assert world.unplug("a") is None
    world.assert_settled()


def test_dpdk_detaches_what_it_took_by_itself(world: VdpaWorld) -> None:
    assert world.plug("a", vdpa_spec()) is None
    address = world.address_of("a")
    world.switch.sticky = {address}
    assert world.unplug("a") is None
    assert world.switch.detached == [address]
    world.assert_settled()


def test_what_dpdk_says_when_it_keeps_a_vf_is_the_error_of_the_port(world: VdpaWorld) -> None:
    assert world.plug("a", vdpa_spec()) is None
    world.switch.sticky = {world.address_of("a")}
    world.switch.refuses_detach = HostError("Device '0000:03:10.1' can not be detached", step="vswitchd")
    refused = world.unplug("a")
    assert isinstance(refused, HostError) and "can not be detached" in refused.detail
    world.switch.refuses_detach = None
    assert world.unplug("a") is None
    world.assert_settled()


def test_only_a_vf_that_dpdk_does_not_have_is_in_use_by_others(
    monkeypatch: pytest.MonkeyPatch, world: VdpaWorld
) -> None:
    printed = "ovs-appctl: Device '0000:03:10.1' not found in DPDK"

    def appctl(*_: Any, **__: Any) -> str:
        raise HostError(printed, step="vswitchd")

    monkeypatch.setattr(switch, "appctl", appctl)
    assert not Switch.detach(world.switch, "0000:03:10.1", 0.0)
    printed = "ovs-appctl: connection refused"
    with pytest.raises(HostError, match="refused"):
        Switch.detach(world.switch, "0000:03:10.1", 0.0)


def test_a_vf_that_stays_open_is_not_touched_and_the_port_waits(world: VdpaWorld) -> None:
    assert world.plug("a", vdpa_spec()) is None
    address = world.address_of("a")
    world.switch.opened.pop(address)  # whoever has it open, it is not vswitchd
    refused = world.unplug("a")
    assert isinstance(refused, Conflict) and "in use" in refused.detail
    assert world.state("a") is PortState.REMOVING and world.switch.ovs.common().rows == {}
    world.model.stop_vm(address)
    assert world.check()
    world.assert_settled()
    assert world.store.records() == []


def test_a_late_delete_leaves_the_vf_alone_that_another_port_has(world: VdpaWorld) -> None:
    assert world.plug("old", vdpa_spec()) is None
    address = world.address_of("old")
    claims = world.store.get("old").claims  # type: ignore[union-attr]
    assert world.unplug("old") is None
    assert world.plug("new", vdpa_spec(2, vf={"pci_address": address})) is None
    world.model.written.clear()
    assert world.unplug("old") is None and world.unplug("old") is None
    seen = world.driver.observe(None, 0.0)
    assert world.driver.plan([Intent("old", None)], seen).changes == ()
    assert world.model.written == [] and world.vf_of("new").is_open
    # And even one that thinks that it still has the VF finds it open.
    assert "old" in world.driver.plan([Intent("old", None, claims)], seen).refused
    world.assert_settled()


def test_seven_vfs_are_given_once(world: VdpaWorld) -> None:
    for number in range(7):
        assert world.plug(f"p{number}", vdpa_spec(number + 1)) is None
    refused = world.plug("p7", vdpa_spec(8))
    assert isinstance(refused, CapacityExhausted)
    assert len({world.address_of(f"p{number}") for number in range(7)}) == 7
    world.assert_settled()


def test_the_vfs_of_one_vm_are_on_different_nics(tmp_path: Path) -> None:
    """A quarantine of a VF that is in use changes nothing of its owner."""
    nics = [ModelPf(f"0000:0{n}:00.0", f"eth{n}", total=3) for n in (3, 4)]
    world = VdpaWorld(tmp_path, *nics)
    others = [f"0000:04:10.{n}" for n in range(2)]
    for number, address in enumerate(others, 2):
        assert world.plug(f"o{number}", vdpa_spec(number, vf={"pci_address": address})) is None
    assert world.plug("a", vdpa_spec(1)) is None and world.address_of("a") == "0000:03:10.0"
    world.store.quarantine({Claim(KIND, "0000:03:10.0"): "it does not take its MAC"})
    second = vdpa_spec(9).model_copy(update={"vm_id": "vm1"})
    assert world.plug("b", second) is None
    assert world.address_of("b") == "0000:04:10.2", "though that NIC has more in use"
    world.store.close()


def test_a_claim_that_changed_hands_tells_of_the_port_that_has_it(world: VdpaWorld) -> None:
    assert world.plug("a", vdpa_spec(1)) is None and world.unplug("a") is None
    assert world.plug("b", vdpa_spec(2)) is None and world.address_of("b") == "0000:03:10.0"
    with world.store.claiming(0) as taken:
        mine = [c for c, port in taken.items() if (c.kind, port) == (KIND, "b")]
    assert [(c.key, c.memory["vm_id"]) for c in mine] == [("0000:03:10.0", "vm2")]


def test_a_vf_that_comes_back_is_opened_again(world: VdpaWorld) -> None:
    """The NIC lost its VFs and has them again: OVS still has the row, for a device that was."""
    assert world.plug("a", vdpa_spec()) is None
    nic = world.model.pfs["0000:03:00.0"]
    nic.make_vfs(0)
    world.switch.opened.clear()
    assert world.check()
    assert world.state("a") is PortState.DEGRADED and "has 0 VFs" in problem_of(world)
    nic.make_vfs(4)
    assert world.check()
    assert world.state("a") is PortState.ACTIVE
    world.assert_settled()


def test_what_dpdk_says_of_a_vf_is_the_error(world: VdpaWorld) -> None:
    world.switch._open = lambda address: False  # type: ignore[method-assign]
    refused = world.plug("a", vdpa_spec())
    assert isinstance(refused, HostError) and "Error attaching device" in refused.detail
    world.assert_settled()
    assert world.store.records() == []


def test_a_lost_store_finds_the_vf_and_the_mode_by_the_rows(world: VdpaWorld, tmp_path: Path) -> None:
    """On VFs whose driver stays nothing but OVS's rows tells that they are in use."""
    spec = vdpa_spec(1, numa_node=1)
    assert world.plug("a", spec) is None
    address = world.address_of("a")
    world.store.close()
    world.path = tmp_path / "new.db"
    world.start()
    assert world.reconciler.check().orphans_kept == ["a"]
    for number in (2, 3):
        assert world.plug(f"p{number}", vdpa_spec(number, numa_node=1)) is None
        assert world.address_of(f"p{number}") != address
    assert isinstance(world.plug("p4", vdpa_spec(4, numa_node=1)), CapacityExhausted)
    world.switch.reported = NATIVE_ROOT
    assert world.plug("a", spec) is None
    assert world.address_of("a") == address and binding_of(world)["mode"] == "relay"
    vf = world.model.vf(address)
    assert (vf.driver, vf.override) == ("mlx5_core", None), "OVS runs with it"
    world.assert_relayed()
    world.switch.reported = RELAY_ROOT
    assert world.check()
    world.assert_settled()
    assert world.unplug("a") is None
    world.assert_settled()


def test_a_lost_store_leaves_native_its_driver(native: VdpaWorld, tmp_path: Path) -> None:
    assert native.plug("a", vdpa_spec()) is None
    native.store.close()
    native.path = tmp_path / "new.db"
    native.start()
    assert native.plug("a", vdpa_spec()) is None
    vf = native.vf_of("a")
    assert (vf.driver, vf.override) == ("mlx5_core", None)


# -- native --------------------------------------------------------------------------------------


def test_native_is_one_port_on_the_networks_bridge(native: VdpaWorld) -> None:
    spec = vdpa_spec(3, 200, queues=4)
    before = asdict(native.model.vf("0000:81:10.0"))
    assert native.plug("a", spec) is None
    npv = row(native, NPV, "br1")
    assert npv.interface and (npv.interface.type, npv.tag) == (NATIVE_TYPE, 200)
    assert npv.interface.options == {
        "vdpa-socket-path": f"/run/vhost/{NPS}/{NPV}",
        "vdpa-accelerator-devargs": "0000:81:10.0",
        "dpdk-devargs": "0000:81:00.0,representor=[0]",
        "vdpa-max-queues": "4",
        "vdpa-sw": "true",
    }
    assert set(native.switch.ovs.bridges) == {"br1"}
    assert {f.actions for f in native.switch.ovs.common().flows["a"]} == {TO_SWITCH, DROP}
    assert native.model.written == [("0000:81:10.0", "mac")], "the VLAN is the bridge's to give"
    assert native.vf_of("a").driver == "mlx5_core"
    assert binding_of(native)["mode"] == "native" and binding_of(native)["bridge"] == "br1"
    assert native.driver.facts()["mode"] == "native"
    assert native.unplug("a") is None
    assert asdict(native.model.vf("0000:81:10.0")) == before
    assert native.switch.ovs.bridges == {}


def test_on_a_bridge_of_the_operators_a_native_port_is_marked_with_its_network(native: VdpaWorld) -> None:
    native.switch.ovs.bridges["br1"] = Bridge(ours=False)
    assert native.plug("a", vdpa_spec(port_security={"enabled": False})) is None
    assert row(native, NPV, "br1").external_ids["netplugin-mapping"] == "net1:br1"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"qos": {"egress_kbps": 50_000}}, "rates"),
        ({"vf": {"trusted": True}}, "switchdev"),
        ({"vf": {"vlan_qos": 3}}, "switchdev"),
    ],
)
def test_what_native_cannot_do_is_refused(native: VdpaWorld, fields: dict[str, Any], words: str) -> None:
    refused = native.plug("a", vdpa_spec(**fields))
    assert isinstance(refused, Unsupported) and words in refused.detail
    assert native.store.records() == [] and native.switch.ovs.bridges == {}


def test_native_needs_a_nic_in_switchdev_mode_and_relay_one_that_is_not(
    world: VdpaWorld, native: VdpaWorld
) -> None:
    world.switch.reported = NATIVE_ROOT
    refused = world.plug("a", vdpa_spec())
    assert isinstance(refused, Conflict) and "not in switchdev" in refused.detail
    native.switch.reported = RELAY_ROOT
    refused = native.plug("a", vdpa_spec())
    assert isinstance(refused, Conflict) and "is in switchdev" in refused.detail


@pytest.mark.parametrize("option", ["auto", "relay", "native"])
@pytest.mark.parametrize("root", [RELAY_ROOT, NATIVE_ROOT])
def test_which_mode_a_new_port_gets(world: VdpaWorld, option: str, root: Any) -> None:
    world.mode, world.switch.reported = option, root
    world.restart()
    has_type = NATIVE_TYPE in root.iface_types
    expected = "native" if option == "native" or (option == "auto" and has_type) else "relay"
    assert world.driver.facts()["mode"] == expected
    state = world.driver.probe()
    assert state.usable == (has_type or option != "native")
    if not state.usable:
        assert NATIVE_TYPE in str(state.reason) and "vendor" in str(state.fix)
        refused = world.plug("a", vdpa_spec())
        assert isinstance(refused, NetpluginError) and refused.code == "backend_unavailable"
        assert world.store.records() == [] and world.switch.ovs.bridges == {}


def test_a_port_keeps_its_mode_whatever_ovs_becomes(native: VdpaWorld) -> None:
    assert native.plug("a", vdpa_spec()) is None
    native.switch.reported = RELAY_ROOT
    assert native.check()
    assert native.state("a") is PortState.DEGRADED
    assert NATIVE_TYPE in problem_of(native) and "stays so" in problem_of(native)
    assert native.switch.ovs.common().vf_ports == {} and binding_of(native)["mode"] == "native"
    assert native.reconciler.check(dry_run=True).changes == []
    native.switch.reported = NATIVE_ROOT
    assert native.check()
    assert native.state("a") is PortState.ACTIVE


def test_a_relay_stays_one_on_an_ovs_that_could_do_native(world: VdpaWorld) -> None:
    assert world.plug("a", vdpa_spec()) is None
    world.switch.reported = NATIVE_ROOT
    assert world.check()
    assert world.plug("a", vdpa_spec(1, 300)) is None
    assert binding_of(world)["mode"] == "relay"
    world.assert_settled()


# -- what an operator should know ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "extra", "status"),
    [
        ("3.1.0", "", "warn"),
        ("3.1.0", "-a 0000:00:00.0", "ok"),
        ("3.1.0", "--allow=0000:00:00.0", "ok"),
        ("4.0.1", "", "ok"),
    ],
)
def test_devices_that_vswitchd_takes_by_itself(
    world: VdpaWorld, version: str, extra: str, status: str
) -> None:
    config = {"dpdk-extra": extra}
    world.switch.reported = replace(RELAY_ROOT, ovs_version=version, other_config=config)
    found = world.driver.findings((), world.driver.observe(None, 0.0))
    assert [f.status for f in found if f.id == "dpdk-probing"] == [status]


def test_an_ovs_without_pci_is_unusable(world: VdpaWorld) -> None:
    world.switch.reported = replace(RELAY_ROOT, other_config={"dpdk-extra": "--no-pci --in-memory"})
    state = world.driver.probe()
    assert not state.usable and state.step == "dpdk-extra" and "restart" in str(state.fix)
    assert "dpdk-extra='--in-memory -a 0000:00:00.0'" in str(state.fix)


def test_a_plug_is_one_dump(world: VdpaWorld) -> None:
    world.model.looks = world.model.looks_again = 0
    assert world.plug("a", vdpa_spec()) is None
    assert (world.model.looks, world.model.looks_again) == (1, 1)


def test_a_driver_that_dpdk_needs_comes_back_when_it_was_taken_away(world: VdpaWorld) -> None:
    assert world.plug("a", vdpa_spec(1, numa_node=1)) is None
    address = world.address_of("a")
    world.model.vf(address).driver = None
    world.switch.restart()
    assert world.reconciler.check(dry_run=True).changes != []
    assert world.check()
    assert world.model.vf(address).driver == "mlx5_core"
    world.assert_settled()
