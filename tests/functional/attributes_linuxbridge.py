"""What a port of the linuxbridge backend has, attribute by attribute, as data for the same tests.

Each is read with the system's own tools and broken as another program with root would break it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from drivers.linuxbridge.filters import STORE_MARK
from drivers.linuxbridge.segments import Segment
from netplugin.host.names import SHAPER, TAP, device_name
from tests.lab.traffic_hosts import Machine, overlay

PORT = "p"
#: The interface behind physnet1; physnet2 has none.
UPLINK = "eth2"
FLAT = {"type": "flat", "physical_network": "physnet2"}
ON_WIRE = {"type": "flat", "physical_network": "physnet1"}
VLAN = {"type": "vlan", "physical_network": "physnet1", "vlan_id": 100}
#: The networks that a host must know, by VNI, and the peers of each.
OVERLAYS = {"blue": 5001, "red": 5002}
PEERS = ("10.9.0.7", "10.9.0.8")
_TAP, _SHAPER = device_name(TAP, PORT), device_name(SHAPER, PORT)


@dataclass(frozen=True)
class Attribute:
    """``spec_fields`` ask for it and ``changed_fields`` for something else (None: it cannot change).

    ``read`` tells what the host has, whatever that is; ``nested``: the machine's own kernel lacks it.
    """

    name: str
    spec_fields: Mapping[str, Any]
    changed_fields: Mapping[str, Any] | None
    read: Callable[[Machine], object]
    break_it: Callable[[Machine], None]
    nested: bool = False


def _command(*words: str) -> Callable[[Machine], None]:
    def run(host: Machine) -> None:
        host.sh(*words)

    return run


def _segment(host: Machine) -> tuple[str, list[str]]:
    """The mark of the bridge that the tap is on, and who else is on it."""
    bridge = host.link(_TAP).get("master", "")
    members = [entry["ifname"] for entry in host.json("ip", "-j", "link", "show", "master", bridge)]
    return host.link(bridge)["ifalias"], sorted(set(members) - {_TAP})


def _of_segment(host: Machine) -> object:
    return _segment(host) if host.link(_TAP).get("master") else None


def _uplink(host: Machine) -> object:
    """The bridge's mark, and what there is to say of the device next to the tap."""
    if not host.link(_TAP).get("master"):
        return None
    mark, members = _segment(host)
    devices = [host.link(name) for name in members]
    keys = ("id", "protocol", "local", "port", "learning", "df")
    return mark, [
        (
            d["mtu"],
            d.get("link"),
            d.get("ifalias"),
            "UP" in d["flags"],
            {k: v for k, v in d["linkinfo"]["info_data"].items() if k in keys},
        )
        for d in devices
    ]


def _peers(host: Machine) -> object:
    device = Segment(network_id="blue").device
    if device not in host.links():
        return None
    found = host.json("bridge", "-j", "fdb", "show", "dev", device)
    return sorted(e["dst"] for e in found if e["mac"] == "00:00:00:00:00:00" and "dst" in e)


def _rate(host: Machine, device: str) -> list[tuple[str, object, object]]:
    """The root qdisc, if it is one that holds a rate."""
    if device not in host.links():
        return []
    found = host.json("tc", "-j", "-d", "qdisc", "show", "dev", device)
    return [
        (q["kind"], q["options"].get("rate"), q["options"].get("burst"))
        for q in found
        if q.get("root") and q["kind"] == "tbf"
    ]


def _received(host: Machine) -> object:
    return _rate(host, _TAP)


def _sent(host: Machine) -> object:
    if _TAP not in host.links():
        return None
    turned = f"Egress Redirect to device {_SHAPER}" in host.sh("tc", "filter", "show", "dev", _TAP, "ingress")
    return turned, _rate(host, _SHAPER)


def _mtus(host: Machine) -> object:
    tap = host.link(_TAP)
    return (tap["mtu"], host.link(tap["master"])["mtu"]) if tap.get("master") else None


def _queues(host: Machine) -> object:
    tap = host.link(_TAP)
    return tap and (tap["linkinfo"]["info_data"]["multi_queue"], "UP" in tap["flags"])


def _filter(host: Machine) -> object:
    tables = host.sh("nft", "list", "tables")
    if "bridge netplugin" not in tables:
        return None
    lines = host.sh("nft", "-s", "list", "table", "bridge", "netplugin").splitlines()
    # Which store wrote it, and how often it has: another each time.
    text = "\n".join(line for line in lines if STORE_MARK not in line)
    return text if _TAP in text else None


_BLUE = Segment(network_id="blue").device
_VLAN_DEVICE = Segment("physnet1", 100).device

ATTRIBUTES = (
    Attribute(
        "flat",
        {"network": ON_WIRE},
        {"network": FLAT},
        _of_segment,
        _command("ip", "link", "set", UPLINK, "nomaster"),
    ),
    Attribute(
        "vlan",
        {"network": VLAN},
        {"network": {**VLAN, "vlan_id": 200}},
        _uplink,
        _command("ip", "link", "delete", _VLAN_DEVICE),
        nested=True,
    ),
    Attribute(
        "vxlan",
        {"network": overlay("blue")},
        {"network": overlay("red")},
        _uplink,
        _command("ip", "link", "delete", _BLUE),
    ),
    Attribute(
        "peers",
        {"network": overlay("blue")},
        {"network": overlay("red")},
        _peers,
        _command("bridge", "fdb", "del", "00:00:00:00:00:00", "dev", _BLUE, "dst", PEERS[0]),
    ),
    Attribute(
        "qos-in",
        {"qos": {"ingress_kbps": 100_000}},
        {"qos": {"ingress_kbps": 50_000}},
        _received,
        _command(
            "tc",
            "qdisc",
            "replace",
            "dev",
            _TAP,
            "root",
            "handle",
            "6e70:",
            "tbf",
            "rate",
            "1gbit",
            "burst",
            "1mb",
            "latency",
            "1ms",
        ),
    ),
    Attribute(
        "qos-out",
        {"qos": {"egress_kbps": 100_000}},
        {"qos": {"egress_kbps": 50_000}},
        _sent,
        _command("ip", "link", "delete", _SHAPER),
    ),
    Attribute(
        "mtu",
        {"network": {**FLAT, "mtu": 1400}},
        {"network": {**FLAT, "mtu": 9000}},
        _mtus,
        _command("ip", "link", "set", _TAP, "mtu", "1000"),
    ),
    Attribute("queues", {"queues": 4}, None, _queues, _command("ip", "link", "delete", _TAP)),
    Attribute(
        "port security",
        {"port_security": {"allowed_addresses": [{"ip": "10.0.0.5"}]}},
        {"port_security": {"enabled": False}},
        _filter,
        _command("nft", "flush", "chain", "bridge", "netplugin", _TAP),
    ),
)
