"""Changes of ports, made on a real Open vSwitch and looked at with its own tools."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drivers.ovs import apply
from drivers.ovs import flow_changes as f
from drivers.ovs import row_changes as c
from drivers.ovs.filters import miss_flows, port_cookie, port_flows
from drivers.ovs.overlays import TunnelPort
from drivers.ovs.ports import VHOST_TYPE, Policer, RelayVfPort
from drivers.ovs.uplinks import OvsUplink
from netplugin.api.errors import TryAgain
from netplugin.api.models import PortSpec
from netplugin.host.flow import Flow
from netplugin.host.names import device_name
from netplugin.host.ovs_sockets import OvsSockets
from netplugin.host.ovs_versions import keeps_old_actions
from netplugin.host.vswitchd import appctl
from tests.lab.processes import wait_for
from tests.unit.drivers.dpdkvhostuser import columns
from tests.unit.drivers.dpdkvhostuser.scenes import overlay
from tests.unit.drivers.ovs.conftest import BRIDGE, Ports, filter_of, spec_of, vhost
from tests.unit.ovs import PATIENCE_S, bridge, port, soon

#: What a bridge of ours does with frames that no other flow admits, and with those that are admitted.
BASE = {
    "cookie=0x6e70000000000000, priority=40000 actions=drop",
    "cookie=0x6e70000000000000, table=1, priority=40100 actions=NORMAL",
}

#: Time enough for a busy machine to begin: with none at all, nothing is begun.
SHORT_S = 1.0
# The revalidators of a busy machine delete a datapath flow that idles, or has few packets
# (ovs-vswitchd.conf.db(5), max-idle and min-revalidate-pps): here only a purge may.
KEEP_DATAPATH_FLOWS = ("other_config:max-idle=600000", "other_config:min-revalidate-pps=0")
MAC = "52:54:00:00:00:01"
# An untagged frame of the port's MAC to 52:54:00:00:00:02.
FRAME = "525400000002" + "525400000001" + "0800" + "45000014000000004011000000000000" + "00" * 30


def _columns(ports: Ports, table: str, name: str, *columns: str) -> list[object]:
    shown = ports.switch.vsctl("-f", "json", f"--columns={','.join(columns)}", "list", table, name)
    return [_plain(value) for value in json.loads(shown)["data"][0]]


def _plain(value: object) -> object:
    match value:
        case ["map", pairs]:
            return dict(pairs)
        case ["set", items]:
            return items
    return value


def test_a_port_has_its_rows_in_one_transaction(ports: Ports) -> None:
    made = vhost("p1")
    before = ports.ovs.view.root.next_cfg
    ports.plug(made)
    assert ports.ovs.view.root.next_cfg == before + 1
    assert _columns(ports, "Bridge", BRIDGE, "datapath_type", "fail_mode", "external_ids") == [
        "netdev",
        "secure",
        {"netplugin-bridge": "net1"},
    ]
    assert _columns(ports, "Port", made.name, "tag", "vlan_mode", "external_ids") == [
        7,
        "access",
        {"netplugin-port": "p1", "netplugin-backend": "dpdkvhostuser"},
    ]
    assert _columns(ports, "Interface", made.name, "type", "mtu", "error", "external_ids") == [
        "dummy",
        1400,
        [],
        {
            "iface-id": "p1",
            "attached-mac": "52:54:00:00:00:01",
            "vm-id": "vm",
            "vm-uuid": "vm",
            "netplugin-port": "p1",
            "netplugin-queues": "1",
        },
    ]
    row = ports.ovs.view.port(made.name)
    assert row and not made.differs(row) and not made.must_be_remade(row), "nothing is left to do"


UPLINK = OvsUplink("npu-bond", BRIDGE, "net1", ("0000:03:00.0", "0000:03:00.1"), "lacp", 1500)
VM = vhost("p9")
KINDS: list[Any] = [
    replace(VM, type=VHOST_TYPE, socket="/s", options={"vhost-server-path": "/s"}),
    replace(VM, tag=0, sends=Policer(1000, 800), overlay=overlay(1), stamp="s 1"),
    UPLINK,
    replace(UPLINK, name=device_name("npu", "0000:03:00.0"), devices=UPLINK.devices[:1], bond=None),
    RelayVfPort("vdpa", "p9", "npr-p9", BRIDGE, "0000:03:10.0", 1500, 4),
    replace(TunnelPort.patch("np-to-tunnels"), bridge=BRIDGE),
    replace(TunnelPort.vxlan(4789, columns.LOCAL_IP), bridge=BRIDGE),
]


@pytest.mark.parametrize("desired", KINDS)
def test_every_kind_of_port_has_the_columns_that_ovs_needs(ports: Ports, desired: Any) -> None:
    """Whether OVS can make its device or not: the rows are there."""
    ports.ovs.db.write([bridge(BRIDGE)], soon())
    assert ports.apply(c.AddPort(("p9",), desired)).failed == {}
    row = ports.ovs.view.port(desired.name)
    assert row and columns.wrong(row, columns.of_port(desired)) == []
    assert not desired.differs(row)


def _filter_of(ofport: int, spec: PortSpec) -> frozenset[Flow]:
    return port_flows("p1", ofport, spec) | miss_flows("p1", ofport, spec).keys()


def test_the_flows_of_a_port_are_its_filter(ports: Ports) -> None:
    made = vhost("p1")
    ports.plug(made)
    ofport = int(ports.switch.get("Interface", made.name, "ofport"))
    cookie = f"cookie={port_cookie('p1'):#x}"
    own = ports.flows() - BASE
    assert {line.split(",")[0] for line in own} == {cookie}
    assert all(f"in_port={ofport}" in line for line in own)
    assert ports.seen("p1").flows["p1"] == _filter_of(ofport, spec_of())
    security = {"enabled": False}
    assert ports.apply(filter_of(made, port_security=security)).failed == {}
    assert ports.seen("p1").flows["p1"] == _filter_of(ofport, spec_of(port_security=security))
    assert len(ports.flows() - BASE) == 4 + 1, "those of the filter have gone, and the rest is counted"


def test_a_port_changes_in_place_and_keeps_what_others_wrote(ports: Ports) -> None:
    made = vhost("p1")
    ports.plug(made)
    ports.switch.vsctl("set", "Port", made.name, "external_ids:theirs=1")
    network = made.spec.network.model_copy(update={"mtu": 2000})
    desired = replace(made, tag=9, spec=made.spec.model_copy(update={"network": network}))
    assert ports.apply(c.SetPort(("p1",), desired)).failed == {}
    assert _columns(ports, "Port", made.name, "tag", "external_ids") == [
        9,
        {"netplugin-port": "p1", "netplugin-backend": "dpdkvhostuser", "theirs": "1"},
    ]
    assert _columns(ports, "Interface", made.name, "mtu") == [2000], "it was waited for"


def test_the_error_of_one_port_is_that_of_no_other(ports: Ports) -> None:
    good, bad = vhost("good"), vhost("bad", tag=5000)
    applied = ports.apply(
        c.CreateBridge(("good", "bad"), BRIDGE, "net1"),
        c.AddPort(("bad",), bad),
        c.AddPort(("good",), good),
        filter_of(bad),
        filter_of(good),
    )
    assert set(applied.failed) == {"bad"}
    assert (applied.failed["bad"].code, applied.failed["bad"].port_id) == ("host_error", "bad")
    seen = ports.seen()
    assert set(seen.rows) == {"good"} and seen.flows["good"]


def test_a_bridge_that_others_make_meanwhile_stays_theirs(ports: Ports) -> None:
    """A plan that saw no bridge must not give our NIC to theirs, nor remove theirs for an older one."""
    ports.switch.vsctl("add-br", BRIDGE)
    wait_for(lambda: ports.ovs.view.bridge(BRIDGE) is not None, PATIENCE_S, "the bridge is known")
    uplink = OvsUplink("up", BRIDGE, "net1", ("net_null0",), None, 1500)
    applied = ports.apply(
        c.CreateBridge(("p1",), BRIDGE, "net1"),
        c.AddPort(("p1",), uplink),
        c.AddPort(("p1",), vhost("p1")),
    )
    refused = applied.failed["p1"]
    assert isinstance(refused, TryAgain) and BRIDGE in refused.detail, "the call is planned again"
    assert ports.switch.vsctl("list-ports", BRIDGE) == ""
    assert ports.apply(c.RemoveBridge(("p1",), BRIDGE)).failed == {}
    assert ports.switch.vsctl("list-br").split() == [BRIDGE]


def test_without_vswitchd_every_port_of_the_transaction_fails(ports: Ports) -> None:
    ports.plug(vhost("old"))
    ports.switch.pause_vswitchd()
    try:
        begin = time.monotonic()
        new = vhost("new")
        changes = [c.AddPort(("new",), new), filter_of(new), c.RemovePort(("old",), BRIDGE, "x", "y")]
        applied = ports.applier.apply(changes, begin + SHORT_S)
        assert {port_id: error.code for port_id, error in applied.failed.items()} == {
            "new": "timeout",
            "old": "timeout",
        }
        assert time.monotonic() - begin < PATIENCE_S / 2
    finally:
        ports.switch.resume_vswitchd()


def test_a_rate_that_vswitchd_does_not_take_is_an_error(ports: Ports) -> None:
    limited = vhost("p1", qos={"ingress_kbps": 8000})
    ports.plug(vhost("p0"))
    applied = ports.apply(c.AddPort(("p1",), limited))
    assert applied.failed["p1"].step == "qos", "dummies take no policer"
    row = ports.ovs.view.port(limited.name)
    assert row and row.qos and row.qos.other_config["cir"] == "1000000", "bytes/s"
    assert ports.apply(c.SetQos(("p1",), replace(limited, receives=None))).failed == {}
    assert ports.switch.vsctl("list", "QoS") == ""
    ports.apply(c.SetQos(("p1",), limited))
    [qos] = ports.seen("p1").qos
    assert qos.owner == ("dpdkvhostuser", "p1")
    assert ports.apply(c.RemovePort(("p1",), BRIDGE, limited.name, "dpdkvhostuser")).failed == {}
    assert ports.switch.vsctl("list", "QoS") == "", "a QoS row does not go with its port by itself"
    assert set(ports.seen().rows) == {"p0"}


@pytest.mark.parametrize("first_ours", [False, True])
def test_a_qos_row_of_others_survives_the_port(ports: Ports, first_ours: bool) -> None:
    made = vhost("p1")
    ports.plug(made)
    theirs = ["--", "--id=@q", "create", "QoS", "type=egress-policer"]
    ports.switch.vsctl("set", "Port", made.name, "qos=@q", *theirs)
    wait_for(lambda: ports.seen("p1").rows["p1"].qos, PATIENCE_S, "the row of others")
    if first_ours:
        assert ports.apply(c.SetQos(("p1",), replace(made, receives=Policer(8000, 6400)))).failed
        row = ports.seen("p1").rows["p1"]
        assert row.qos and row.qos.owner, "ours is in its place"
    assert ports.apply(c.RemovePort(("p1",), BRIDGE, made.name, "dpdkvhostuser")).failed == {}
    (left,) = json.loads(ports.switch.vsctl("-f", "json", "--columns=type,external_ids", "list", "QoS"))[
        "data"
    ]
    assert left == ["egress-policer", ["map", []]]


def test_what_is_removed_leaves_nothing_of_ours(ports: Ports, tmp_path: Path) -> None:
    made, other = vhost("p1"), vhost("p2")
    ports.plug(made, other)
    socket = tmp_path / "socket"
    socket.touch()
    remove = c.RemovePort(("p1",), BRIDGE, made.name, "dpdkvhostuser")
    assert ports.apply(remove, f.DropFlows(("p1",), BRIDGE, (port_cookie("p1"),))).failed == {}
    assert {line.split(",")[0] for line in ports.flows() - BASE} == {f"cookie={port_cookie('p2'):#x}"}
    assert ports.apply(remove).failed == {}, "to remove what is gone is no error"
    remove = c.RemovePort(("p2",), BRIDGE, other.name, "dpdkvhostuser")
    dropped = f.DropFlows(("p2",), BRIDGE, (port_cookie("p2"),))
    assert ports.apply(remove, c.RemoveBridge(("p2",), BRIDGE), dropped).failed == {}
    assert ports.switch.vsctl("list-br") == ""


def test_the_fail_mode_is_repaired(ports: Ports) -> None:
    ports.plug(vhost("p1"))
    ports.switch.vsctl("set-fail-mode", BRIDGE, "standalone")
    wait_for(lambda: ports.seen("p1").bridges[BRIDGE].fail_mode == "standalone", PATIENCE_S, "the drift")
    assert ports.apply(c.SecureBridge(("p1",), BRIDGE)).failed == {}
    assert _columns(ports, "Bridge", BRIDGE, "fail_mode") == ["secure"]
    assert ports.seen("p1").bridges[BRIDGE].fail_mode == "secure"


def test_the_base_flows_admit_service_ports_alone(ports: Ports) -> None:
    ports.plug(vhost("p1"))
    ports.ovs.db.write([port(BRIDGE, "service"), port(BRIDGE, "stranger")], soon())
    assert ports.apply(f.SetBridgeFlows(("p1",), BRIDGE)).failed == {}
    admitted = ports.switch.get("Interface", "service", "ofport")
    own = {line for line in ports.flows() if line.startswith("cookie=0x6e70000000000000,")}
    assert own == {*BASE, f"cookie=0x6e70000000000000, priority=40100,in_port={admitted} actions=NORMAL"}
    found = ports.seen().bridges[BRIDGE]
    assert found.flows == found.desired_flows and found.matches_fragments


@pytest.mark.parametrize("version, purged", [("3.1.4", False), ("3.2.0", False), ("3.1.2", True), ("", True)])
@pytest.mark.parametrize("change", ["filter", "tag"])
def test_datapath_flows_are_purged_where_ovs_may_keep_old_actions(
    ports: Ports, version: str, purged: bool, change: str
) -> None:
    made = vhost("p1")
    ports.plug(made)
    ports.switch.vsctl("set", "Open_vSwitch", ".", *KEEP_DATAPATH_FLOWS)
    setting = ["set", "Open_vSwitch", ".", f"ovs_version={version}"]
    ports.switch.vsctl(*(setting if version else ["clear", "Open_vSwitch", ".", "ovs_version"]))
    wait_for(lambda: (ports.ovs.view.root.ovs_version or "") == version, PATIENCE_S, "the version")
    ports.switch.appctl("netdev-dummy/receive", made.name, FRAME)
    wait_for(lambda: "in_port" in ports.switch.appctl("dpif/dump-flows", BRIDGE), PATIENCE_S, "a frame")
    again = c.SetPort(("p1",), made)
    assert ports.apply(again).failed == {}
    assert "in_port" in ports.switch.appctl("dpif/dump-flows", BRIDGE), "in the VLAN that it was in"
    retag = c.SetPort(("p1",), replace(made, tag=made.tag + 1))
    assert ports.apply(retag if change == "tag" else filter_of(made)).failed == {}
    gone = "in_port" not in ports.switch.appctl("dpif/dump-flows", BRIDGE)
    assert gone == (purged or change == "tag"), "flows of a VLAN that was left are purged on every OVS"
    assert keeps_old_actions(ports.seen("p1").root.version) == purged and not ports.ovs.purge_failed


def test_what_is_learned_before_the_purge_is_forgotten(ports: Ports, monkeypatch: pytest.MonkeyPatch) -> None:
    """A revalidator that is at work may learn the MAC again, in the VLAN that its port has left."""
    made = vhost("p1")
    ports.plug(made)

    def purge(sockets: OvsSockets, *command: str, deadline: float) -> str:
        if command == ("revalidator/purge",):
            ports.switch.appctl("netdev-dummy/receive", made.name, FRAME)
            wait_for(lambda: MAC in ports.switch.appctl("fdb/show", BRIDGE), PATIENCE_S, "it is learned")
        return appctl(sockets, *command, deadline=deadline)

    monkeypatch.setattr(apply, "appctl", purge)
    assert ports.apply(c.SetPort(("p1",), made)).failed == {}
    assert ports.apply(c.SetPort(("p1",), replace(made, tag=made.tag + 1))).failed == {}
    assert MAC not in ports.switch.appctl("fdb/show", BRIDGE)


def test_a_flow_that_a_purge_passed_over_is_purged(ports: Ports, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first purge finds all flows locked by another thread, as it does now and then for some."""
    made = vhost("p1")
    ports.plug(made)
    ports.switch.vsctl("set", "Open_vSwitch", ".", *KEEP_DATAPATH_FLOWS)
    ports.switch.vsctl("clear", "Open_vSwitch", ".", "ovs_version")
    wait_for(lambda: not ports.ovs.view.root.ovs_version, PATIENCE_S, "the version is unknown")
    ports.switch.appctl("netdev-dummy/receive", made.name, FRAME)
    wait_for(lambda: "in_port" in ports.switch.appctl("dpif/dump-flows", BRIDGE), PATIENCE_S, "a frame")
    purges: list[bool] = []

    def purge(sockets: OvsSockets, *command: str, deadline: float) -> str:
        if command == ("revalidator/purge",):
            purges.append(True)
            if len(purges) == 1:
                return ""
        return appctl(sockets, *command, deadline=deadline)

    monkeypatch.setattr(apply, "appctl", purge)
    assert ports.apply(filter_of(made)).failed == {}
    assert "in_port" not in ports.switch.appctl("dpif/dump-flows", BRIDGE)


def test_a_purge_that_fails_is_due(ports: Ports) -> None:
    made = vhost("p1")
    ports.plug(made)
    ports.switch.vsctl("clear", "Open_vSwitch", ".", "ovs_version")
    wait_for(lambda: ports.ovs.view.root.ovs_version is None, PATIENCE_S, "the version")
    ports.switch.pause_vswitchd()
    try:
        applied = ports.applier.apply([f.PurgeDatapath(("p1",))], time.monotonic() + SHORT_S)
        assert applied.failed["p1"].code == "timeout"
        assert ports.ovs.purge_failed
    finally:
        ports.switch.resume_vswitchd()
    assert ports.apply(f.PurgeDatapath(("p1",))).failed == {}
    assert not ports.ovs.purge_failed


def test_flows_of_a_bridge_that_is_gone_are_no_error(ports: Ports) -> None:
    made = vhost("p1")
    ports.plug(made)
    ports.switch.vsctl("del-br", BRIDGE)
    wait_for(lambda: ports.ovs.view.bridge(BRIDGE) is None, PATIENCE_S, "the bridge is gone")
    assert ports.apply(filter_of(made)).failed == {}
    ports.ovs.db.write([bridge(BRIDGE)], soon())
    assert ports.flows() == set()


def _next_cfg(ports: Ports) -> int:
    return ports.ovs.view.root.next_cfg


def test_many_ports_come_and_go_in_transactions_of_a_few(ports: Ports) -> None:
    """While vswitchd carries one out it does nothing else."""
    made = [vhost(f"p{n:03}") for n in range(200)]
    before = _next_cfg(ports)
    ports.plug(*made)
    assert _next_cfg(ports) - before >= 2
    assert all(port(ports.switch, vm.name) for vm in made[:: len(made) - 1])
    before = _next_cfg(ports)
    ids = tuple(vm.port_id for vm in made)
    gone = [c.RemovePort((vm.port_id,), BRIDGE, vm.name, "dpdkvhostuser") for vm in made]
    applied = ports.apply(*gone, c.RemoveBridge(ids, BRIDGE))
    assert applied.failed == {} and _next_cfg(ports) - before >= 2
    assert ports.switch.vsctl("list-br") == "" and ports.ovs.view.port(made[0].name) is None


def test_ports_that_there_was_no_time_for_are_not_touched(ports: Ports) -> None:
    """vswitchd stops in the middle of a removal: those that are not gone are as they were."""
    made = [vhost(f"p{n:02}") for n in range(40)]
    ports.plug(*made)
    gone = [c.RemovePort((vm.port_id,), BRIDGE, vm.name, "dpdkvhostuser") for vm in made]
    before = _next_cfg(ports)
    ports.switch.pause_vswitchd()
    try:
        applied = ports.applier.apply(gone, time.monotonic() + 3 * SHORT_S)
    finally:
        ports.switch.resume_vswitchd()
    assert {error.code for error in applied.failed.values()} == {"timeout"}
    assert set(applied.failed) == {vm.port_id for vm in made}
    assert _next_cfg(ports) == before + 1, "none is begun after one that is not carried out"
    left = [vm for vm in made if ports.ovs.view.port(vm.name)]
    assert 0 < len(left) < len(made)
    again = ports.apply(*gone)
    assert again.failed == {} and not any(ports.ovs.view.port(vm.name) for vm in made)


def test_a_refused_port_of_many_fails_alone(ports: Ports) -> None:
    made = [vhost(f"p{n:03}") for n in range(100)]
    bad = vhost("bad", tag=5000)
    adds = [c.AddPort((vm.port_id,), vm) for vm in (*made[:90], bad, *made[90:])]
    ids = tuple(vm.port_id for vm in (*made, bad))
    applied = ports.apply(c.CreateBridge(ids, BRIDGE, "net1"), *adds)
    assert set(applied.failed) == {"bad"} and applied.failed["bad"].code == "host_error"
    assert all(ports.ovs.view.port(vm.name) for vm in made)
