"""Every attribute that a dpdkvhostuser port has on a host, as data: how it is asked, read and broken.

``read`` tells the truth by ovs-vsctl, ovs-ofctl and ovs-appctl, not by code of ours; ``break_it``
does what another program with root would do. The tests over the table are in test_attributes_ovs.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from drivers.ovs.overlays import OVERLAY, TO_OVERLAY, TO_TUNNELS, TUNNELS, vxlan_name
from drivers.ovs.uplinks import OvsUplink
from netplugin.host.names import VHOST, device_name
from netplugin.host.ovs import OvsSettings
from tests.functional.hosts_ovs import Host, mac

PORT_ID = "p1"
NAME = device_name(VHOST, PORT_ID)
BRIDGE = "br-phys1"
VNI, NETWORK = 5001, "blue"

Fields = Mapping[str, Any]
_VLAN: Fields = {"network": {"type": "vlan", "physical_network": "physnet1", "vlan_id": 100, "mtu": 1500}}
_VXLAN: Fields = {"network": {"type": "vxlan", "network_id": NETWORK}}
_OTHER_VXLAN: Fields = {"network": {"type": "vxlan", "network_id": "red"}}


@dataclass(frozen=True)
class Attribute:
    """An attribute that a spec requests and the host has.

    ``changed_fields`` ask for another value of it (None: it is the same whatever is asked).
    """

    name: str
    spec_fields: Fields
    changed_fields: Fields | None
    read: Callable[[Host], Any] = field(repr=False)
    break_it: Callable[[Host], Any] = field(repr=False)

    def spec(self, changed: bool = False) -> dict[str, Any]:
        fields = self.changed_fields if changed and self.changed_fields else self.spec_fields
        base = {"vm_id": "vm1", "mac": mac(1), "backend": "dpdkvhostuser"}
        return {**base, **_VLAN, **fields}


def _with_network(**fields: Any) -> Fields:
    return {"network": {**_VLAN["network"], **fields}}


def _column(table: str, name: str, column: str) -> Callable[[Host], Any]:
    return lambda host: host.ovs.get(table, name, column)


def _set(table: str, name: str, *columns: str) -> Callable[[Host], Any]:
    return lambda host: host.ovs.vsctl("set", table, name, *columns)


def _flows(bridge: str, words: Callable[[Host], str]) -> Callable[[Host], Any]:
    """The flows of ours that have these words, in a fixed order."""
    return lambda host: [f for f in host.flows(bridge) if words(host) in f and "cookie=0x6e70" in f]


def _ofport(name: str) -> Callable[[Host], str]:
    return lambda host: f"in_port={host.ovs.get('Interface', name, 'ofport')}"


def _policed(host: Host) -> str:
    """What vswitchd says that the VM may receive."""
    return host.ovs.appctl("qos/show", NAME)


def _bond(host: Host) -> str:
    return OvsUplink.of(OvsSettings.read(host.conf), BRIDGE, "physnet1").name  # type: ignore[union-attr]


def _bond_columns(host: Host) -> list[str]:
    columns = [host.ovs.get("Port", _bond(host), name) for name in ("bond_mode", "lacp")]
    members = host.ovs.vsctl("get", "Port", _bond(host), "interfaces").count("-") // 4
    return [*columns, str(members)]


def _learned_is_no_part(host: Host) -> list[str]:
    return [f for f in host.flows(TUNNELS) if "cookie=0x6e70" in f]


def _no_flood(host: Host) -> None:
    host.ovs.ofctl("del-flows", TUNNELS, f"table=20,tun_id={VNI}")


def _other_flood(host: Host) -> None:
    cookie = next(f.split(",")[0] for f in host.flows(TUNNELS, "table=20"))
    tunnel = host.ovs.get("Interface", vxlan_name(4789), "ofport")
    host.ovs.ofctl(
        "add-flow",
        TUNNELS,
        f"table=20,priority=100,{cookie},tun_id={VNI},actions=set_field:10.6.6.6->tun_dst,output:{tunnel}",
    )


def _security(*addresses: str) -> Fields:
    return {"port_security": {"allowed_addresses": [{"ip": address} for address in addresses]}}


def _rates(**rates: int) -> Fields:
    return {"qos": rates}


ATTRIBUTES: tuple[Attribute, ...] = (
    Attribute(
        "tag", _VLAN, _with_network(vlan_id=200), _column("Port", NAME, "tag"), _set("Port", NAME, "tag=7")
    ),
    Attribute(
        "access port", _VLAN, None, _column("Port", NAME, "vlan_mode"), _set("Port", NAME, "vlan_mode=trunk")
    ),
    Attribute(
        "MTU",
        _VLAN,
        _with_network(mtu=1400),
        _column("Interface", NAME, "mtu_request"),
        _set("Interface", NAME, "mtu_request=1300"),
    ),
    Attribute(
        "owner",
        _VLAN,
        None,
        _column("Interface", NAME, "external_ids:vm-uuid"),
        _set("Interface", NAME, "external_ids:vm-uuid=theirs"),
    ),
    Attribute(
        "socket",
        _VLAN,
        None,
        _column("Interface", NAME, "options:vhost-server-path"),
        _set("Interface", NAME, "options:vhost-server-path=/tmp/elsewhere"),
    ),
    Attribute(
        "filter",
        _security("10.0.0.5"),
        _security("10.0.0.6", "2001:db8::6"),
        _flows(BRIDGE, _ofport(NAME)),
        lambda host: host.ovs.ofctl("del-flows", BRIDGE, _ofport(NAME)(host)),
    ),
    Attribute(
        "fails closed",
        _VLAN,
        None,
        lambda host: host.ovs.vsctl("get-fail-mode", BRIDGE).strip(),
        lambda host: host.ovs.vsctl("set-fail-mode", BRIDGE, "standalone"),
    ),
    Attribute(
        "filters fragments",
        _VLAN,
        None,
        lambda host: host.ovs.ofctl("get-frags", BRIDGE).strip(),
        lambda host: host.ovs.ofctl("set-frags", BRIDGE, "normal"),
    ),
    Attribute(
        "sends",
        _rates(egress_kbps=50_000),
        _rates(egress_kbps=70_000),
        _column("Interface", NAME, "ingress_policing_rate"),
        _set("Interface", NAME, "ingress_policing_rate=1"),
    ),
    Attribute(
        "burst",
        _rates(egress_kbps=50_000),
        _rates(egress_kbps=70_000),
        _column("Interface", NAME, "ingress_policing_burst"),
        _set("Interface", NAME, "ingress_policing_burst=1"),
    ),
    Attribute(
        "receives",
        _rates(ingress_kbps=50_000),
        _rates(ingress_kbps=70_000),
        _policed,
        lambda host: host.ovs.vsctl("set", "QoS", host.ovs.get("Port", NAME, "qos"), "other_config:cir=1"),
    ),
    Attribute(
        "receives, taken away",
        _rates(ingress_kbps=50_000),
        None,
        _policed,
        lambda host: host.ovs.vsctl("clear", "Port", NAME, "qos"),
    ),
    Attribute(
        "bond",
        _VLAN,
        None,
        _bond_columns,
        lambda host: host.ovs.vsctl("set", "Port", _bond(host), "bond_mode=balance-slb"),
    ),
    Attribute("bond, gone", _VLAN, None, _bond_columns, lambda host: host.ovs.vsctl("del-port", _bond(host))),
    Attribute("local VLAN", _VXLAN, _OTHER_VXLAN, _column("Port", NAME, "tag"), _set("Port", NAME, "tag=7")),
    Attribute(
        "network of the port",
        _VXLAN,
        _OTHER_VXLAN,
        _column("Port", NAME, "external_ids:netplugin-network"),
        _set("Port", NAME, "external_ids:netplugin-network=theirs"),
    ),
    Attribute("flood of the network", _VXLAN, _OTHER_VXLAN, _learned_is_no_part, _no_flood),
    Attribute("peers of the network", _VXLAN, _OTHER_VXLAN, _learned_is_no_part, _other_flood),
    Attribute(
        "flows of the network",
        _VXLAN,
        None,
        _learned_is_no_part,
        lambda host: host.ovs.ofctl("del-flows", TUNNELS),
    ),
    Attribute(
        "tunnel port",
        _VXLAN,
        None,
        _column("Interface", vxlan_name(4789), "options"),
        _set("Interface", vxlan_name(4789), "options:local_ip=10.6.6.6"),
    ),
    Attribute(
        "patch",
        _VXLAN,
        None,
        _column("Interface", TO_OVERLAY, "options:peer"),
        lambda host: host.ovs.vsctl("del-port", TO_OVERLAY),
    ),
    Attribute(
        "trunk to the tunnels",
        _VXLAN,
        None,
        _column("Port", TO_TUNNELS, "tag"),
        _set("Port", TO_TUNNELS, "tag=9"),
    ),
    Attribute(
        "tunnels fail closed",
        _VXLAN,
        None,
        lambda host: [host.ovs.vsctl("get-fail-mode", b).strip() for b in (OVERLAY, TUNNELS)],
        lambda host: [host.ovs.vsctl("set-fail-mode", b, "standalone") for b in (OVERLAY, TUNNELS)],
    ),
)
