"""Devices of the host as ports: which can be one, whose they are, and what becomes of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from drivers.dpdkvhostuser.driver import DpdkVhostUser
from drivers.dpdkvhostuser.plan import make_plan
from drivers.linuxbridge.driver import LinuxBridge
from drivers.ovs import findings, service_ports
from drivers.ovs import row_changes as c
from drivers.ovs.flow_changes import DropFlows, SetFilter
from drivers.ovs.model import OvsObservation
from drivers.ovs.plan import port_changes
from drivers.ovs.ports import VhostPort
from drivers.sriov.driver import Sriov
from drivers.vdpa.driver import Vdpa
from netplugin.api.errors import Conflict, InvalidRequest
from netplugin.api.models import PortSpec
from netplugin.backend import Claim, Intent
from netplugin.host.link_values import Link, TapUse
from netplugin.host.ovs_rows import OvsPort
from netplugin.service_devices import fit_device
from tests.unit.drivers.dpdkvhostuser.model import SETTINGS, Model
from tests.unit.drivers.dpdkvhostuser.scenes import converge, plain_spec, service_spec
from tests.unit.drivers.ovs.conftest import BRIDGE, Ports, spec_of, vhost
from tests.unit.ovs import bridge, port, soon

SPEC = service_spec(plain_spec())
VETH = Link(7, "veth5", "veth", address="02:00:00:00:00:05", use=TapUse(persistent=True))
OTHER_MAC = "52:54:00:00:00:09"


def check(spec: PortSpec = SPEC, *links: Link, uplinks: dict[str, str] | None = None) -> None:
    known = {link.name: link for link in links}
    assert fit_device(str(spec.device), spec.network.mtu, uplinks or {}, known.get) in links


def test_veths_taps_and_dummies_are_taken() -> None:
    for kind in ("veth", "tun", "dummy"):
        check(SPEC, replace(VETH, kind=kind))


@pytest.mark.parametrize(
    ("device", "links", "words"),
    [
        ("veth5", [], "there is no device veth5"),
        ("npt5", [Link(1, "npt5", "tun")], "npt5 is a name of netplugin's own"),
        ("eth0", [Link(1, "eth0")], "eth0 is no virtual device"),
        ("br0", [Link(1, "br0", "bridge")], "kind bridge"),
        ("veth5", [replace(VETH, mtu=1499)], "veth5 has MTU 1499, and its network 1500"),
        ("ovs-netdev", [replace(VETH, name="ovs-netdev", kind="tun")], "ovs-netdev is Open vSwitch's own"),
        (
            "veth5",
            [replace(VETH, kind="tun", use=TapUse())],
            "veth5 is the tap of the program that made it",
        ),
        ("veth5", [replace(VETH, kind="tun", address=None)], "veth5 is a tun device, which has no Ethernet"),
        ("wire0", [replace(VETH, name="wire0")], "wire0 is used by an option"),
    ],
)
def test_what_cannot_be_one_is_named_with_a_fix(device: str, links: list[Link], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as refused:
        check(service_spec(plain_spec(), device), *links, uplinks={"wire0": "an option"})
    assert [error.field for error in refused.value.errors] == ["device"] and refused.value.fix


def test_a_device_serves_one_port(ports: Ports) -> None:
    intent = Intent("svc", SPEC)
    mine = Claim("device", "veth5")
    assert service_ports.claim(ports.ovs, intent, {}) == mine
    assert service_ports.claim(ports.ovs, intent, {mine: "svc"}) == mine
    with pytest.raises(Conflict, match="that of port other"):
        service_ports.claim(ports.ovs, intent, {mine: "other"})
    ports.ovs.db.write([bridge(BRIDGE), port(BRIDGE, "veth5")], soon())
    with pytest.raises(Conflict, match=f"a port of bridge {BRIDGE}"):
        service_ports.claim(ports.ovs, intent, {})


def test_an_uplink_of_dpdk_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class View:
        def devices(self, *options: str) -> dict[str, str]:
            return {"net_af_packet1,iface=veth5": "npu1"}

    class Ovs:
        caught_up = View

    with pytest.raises(InvalidRequest, match="DPDK port"):
        service_ports.refuse(Ovs(), SPEC, "veth5")  # type: ignore[arg-type]


def test_software_switches_have_them() -> None:
    backends = (DpdkVhostUser, LinuxBridge, Sriov, Vdpa)
    have = [each.name for each in backends if each.features.service_ports]
    assert have == ["dpdkvhostuser", "linuxbridge"]
    assert [each.name for each in backends if each.features.internal_ports] == ["dpdkvhostuser"]


# -- rows ------------------------------------------------------------------------------------------


def row_of(model: Model, **interface: Any) -> OvsPort:
    row = model.observe().rows["svc"]
    return replace(row, interfaces=tuple(replace(i, **interface) for i in row.interfaces))


def made() -> Model:
    model = Model()
    assert converge(model, [Intent("svc", SPEC)]) == set()
    return model


def test_a_row_is_the_devices_and_changes_nothing_of_it() -> None:
    row = row_of(made())
    assert row.name == "veth5" and row.interface is not None and row.interface.type == ""
    assert row.interface.mtu_request is None and row.interface.needed_mtu == 1500
    assert not row.interface.options and "vm-uuid" not in row.interface.external_ids


def test_the_room_for_sockets_is_not_needed() -> None:
    model = Model()
    seen = replace(model.observe(), vhost_sockets=1024)
    assert make_plan(SETTINGS, [Intent("svc", SPEC)], seen).refused == {}
    assert make_plan(SETTINGS, [Intent("nic", plain_spec())], seen).refused.keys() == {"nic"}


@pytest.mark.parametrize(
    ("opened", "now", "other"), [("7", 7, None), ("7", None, None), (None, 8, None), ("7", 8, 8), ("7", 0, 0)]
)
def test_a_port_is_added_again_for_another_device_of_its_name(
    opened: str | None, now: int | None, other: int | None
) -> None:
    model = made()
    ids = model.observe().rows["svc"].interfaces[0].external_ids
    ids = dict(ids) if opened is None else {**ids, "netplugin-ifindex": opened}
    row = row_of(model, external_ids=ids, ifindex=now)
    assert row.interface is not None and row.interface.other_ifindex == other
    seen = replace(model.observe(), rows={"svc": row})
    changes = [type(change) for change in make_plan(SETTINGS, [Intent("svc", SPEC)], seen).changes]
    assert changes == ([c.RemovePort, DropFlows] if other else [])


def test_the_port_is_marked_with_the_device_that_is_there_when_it_is_added() -> None:
    desired = VhostPort.of("dpdkvhostuser", Intent("svc", SPEC), "br1", 0, socket="", tso=False)
    ids = replace(desired, ifindex=7).interfaces()["veth5"]["external_ids"]
    assert ids["netplugin-ifindex"] == "7"
    assert "netplugin-ifindex" not in desired.interfaces()["veth5"]["external_ids"]
    assert service_ports.index_of("lo") == 1 and service_ports.index_of("no-such-device") == 0


def test_faults_say_what_is_wrong_with_the_device() -> None:
    model = made()
    ids = {**model.observe().rows["svc"].interfaces[0].external_ids, "netplugin-ifindex": "7"}

    def fault(**columns: Any) -> str | None:
        row = row_of(model, **{"external_ids": ids, "ifindex": 7, "mtu": 1500, **columns})
        return findings.of_port(row, OvsObservation({})) or findings.without_link(row)

    assert fault(link_state="up") is None
    assert "not on this host any more" in str(fault(ifindex=0, link_state="down", mtu=None))
    assert "No such device" in str(fault(error="could not open network device veth5 (No such device)"))
    assert "MTU 1400" in str(fault(mtu=1400))
    assert "is down" in str(fault(link_state="down"))


# -- internal ports --------------------------------------------------------------------------------


def internal(device: str = "int0") -> VhostPort:
    spec = spec_of(vm_id="svc", device=device, internal=True)
    return VhostPort.of("dpdkvhostuser", Intent("svc", spec), BRIDGE, 7, socket="", tso=False)


def test_an_internal_port_is_made_and_deleted_with_its_row(ports: Ports) -> None:
    port = internal()
    ports.plug(port, device="int0", internal=True)
    assert ports.switch.get("Interface", "int0", "type") == "internal"
    assert ports.switch.get("Interface", "int0", "mtu_request") == "1400"
    seen = ports.seen()
    assert port_changes({"svc": port}, set(), seen) == []
    assert findings.of_port(seen.rows["svc"], seen) is None, "it needs no device on this host"
    wider = replace(port, spec=spec_of(vm_id="svc", device="int0", internal=True, mac=OTHER_MAC))
    changes = port_changes({"svc": wider}, set(), seen)
    assert [type(change) for change in changes] == [c.SetPort, SetFilter], "not made again"
    assert not ports.apply(*port_changes({}, {"svc"}, seen)).failed
    assert "int0" not in ports.switch.vsctl("list-ports", BRIDGE).split()


def test_an_internal_port_takes_no_name_of_a_device(ports: Ports) -> None:
    ports.plug(vhost("p1"))
    failed = ports.apply(c.AddPort(("svc",), internal("lo"))).failed
    assert isinstance(failed["svc"], Conflict) and "lo" not in ports.switch.vsctl("list-ports", BRIDGE)
    with pytest.raises(InvalidRequest, match="npt5") as refused:
        service_ports.refuse(ports.ovs, internal("npt5").spec, "npt5")
    assert [error.field for error in refused.value.errors] == ["device"]
    service_ports.refuse(ports.ovs, internal().spec, "int0")


@pytest.mark.parametrize(("index", "moved"), [(7, False), (0, True)])
def test_an_internal_port_says_whether_it_was_moved(index: int, moved: bool) -> None:
    model = Model()
    spec = service_spec(plain_spec(), "int0", internal=True)
    assert converge(model, [Intent("svc", spec)]) == set()
    row = row_of(model, ifindex=index)
    assert findings.details(row)["moved"] is moved and findings.of_port(row, OvsObservation({})) is None
    assert "moved" not in findings.details(row_of(made()))
