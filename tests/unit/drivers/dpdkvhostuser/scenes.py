"""Requests and hosts for hypothesis: ports of every kind, drift of every kind, and foreign objects."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from drivers.dpdkvhostuser.plan import make_plan as plan
from drivers.ovs.overlays import TunnelPort
from drivers.ovs.ports import RelayVfPort
from drivers.ovs.row_changes import RemovePort
from drivers.ovs.uplinks import OvsUplink
from netplugin.api.models import NetworkSpec, PortSpec, Qos
from netplugin.backend import Intent, Overlay
from netplugin.host.flow import Flow
from netplugin.host.flow_actions import DROP
from netplugin.host.names import UPLINK, VHOST, device_name
from netplugin.host.ovs_rows import OvsPort
from tests.unit.drivers.dpdkvhostuser.columns import LOCAL_IP
from tests.unit.drivers.dpdkvhostuser.model import Bridge, Model

IDS = [f"port-{n}" for n in range(6)]
ADDRESSES: list[list[dict[str, str]]] = [
    [],
    [{"ip": "10.0.0.5"}],
    [{"ip": "10.0.0.0/28"}, {"ip": "2001:db8::5"}],
    [{"ip": "10.0.0.7", "mac": "52:54:00:77:77:77"}],
]


def overlay(number: int, peers: tuple[str, ...] = ("10.9.0.2",), udp_port: int = 4789) -> Overlay:
    spec = NetworkSpec(type="vxlan", vni=5000 + number, peers=peers, udp_port=udp_port)
    return Overlay(f"net-{number}", spec, number)


@st.composite
def overlays(draw: st.DrawFn) -> dict[str, Overlay]:
    """Three networks, two of which may share a UDP port."""
    hosts = st.sets(st.sampled_from(["10.9.0.2", "10.9.0.3", LOCAL_IP])).map(sorted).map(tuple)
    networks = [overlay(n, draw(hosts), draw(st.sampled_from([4789, 4789 + n]))) for n in (1, 2, 3)]
    return {network.network_id: network for network in networks}


@st.composite
def intents_on(draw: st.DrawFn, networks: dict[str, Overlay]) -> list[Intent]:
    desired = draw(st.dictionaries(st.sampled_from(IDS), st.one_of(st.none(), specs())))
    # One of the ids is always a service port's.
    if (spec := desired.get(IDS[-1])) is not None:
        desired[IDS[-1]] = service_spec(spec, internal=draw(st.booleans()))
    return [
        Intent(i, spec, overlay=networks[str(spec.overlay_id)] if spec and spec.overlay_id else None)
        for i, spec in desired.items()
    ]


@st.composite
def specs(draw: st.DrawFn) -> PortSpec:
    mtu = draw(st.sampled_from([1450, 9000]))
    network: dict[str, Any] = {"mtu": mtu}
    kind = draw(st.sampled_from(["flat", "vlan", "vxlan"]))
    if kind == "vxlan":
        network |= {"type": kind, "network_id": f"net-{draw(st.integers(1, 3))}"}
    else:
        network |= {
            "type": kind,
            "physical_network": draw(st.sampled_from(["net1", "net2", "net3"])),
        }
    if kind == "vlan":
        network["vlan_id"] = draw(st.sampled_from([1, 100, 4094]))
    rates = st.sampled_from([None, 1000, 100_000])
    return PortSpec.model_validate(
        {
            "vm_id": "vm",
            "mac": draw(st.sampled_from(["52:54:00:00:00:01", "52:54:00:00:00:02"])),
            "backend": "dpdkvhostuser",
            "network": network,
            "queues": draw(st.sampled_from([1, 4])),
            "qos": {"ingress_kbps": draw(rates), "egress_kbps": draw(rates)},
            "port_security": {
                "enabled": draw(st.booleans()),
                "roles": draw(st.sampled_from([[], ["router"], ["dhcp_server", "router"]])),
                "allowed_addresses": draw(st.sampled_from(ADDRESSES)),
            },
        }
    )


def service_spec(spec: PortSpec, device: str = "veth5", *, internal: bool = False) -> PortSpec:
    """The spec of a service port on the same network, with the same filter."""
    service = {"vm_id": "svc", "device": device, "internal": internal, "queues": 1, "qos": Qos()}
    return spec.model_copy(update=service)


@st.composite
def scenes(draw: st.DrawFn) -> tuple[Model, list[Intent]]:
    """A host with ports of ours, foreign bridges, ports and flows, and drift of every kind; requests.

    What is requested may be on networks whose peers have changed since.
    """
    model = Model()
    if draw(st.booleans()):
        fail_mode = draw(st.sampled_from([None, "secure"]))
        model.bridges["br2"] = Bridge(ours=False, fail_mode=fail_mode)
    networks = draw(overlays())
    converge(model, draw(intents_on(networks)))
    model.bridges["theirs"] = Bridge(ours=False, fail_mode=None)
    model.add_port("theirs", "eth9")
    model.add_qos("egress-policer", {"cir": "7"}, {})
    if draw(st.booleans()) and not model.observe([IDS[0]]).rows:
        model.add_port("theirs", device_name(VHOST, IDS[0]))
    # Drawn from a seed: hundreds of draws of its own would take hypothesis seconds for an example.
    dice = random.Random(draw(st.integers(0, 2**32)))
    for name, bridge in sorted(model.bridges.items()):
        bridge.flows.add(Flow.make(0x1234, 7, "in_port=77", DROP))
        if dice.random() < 0.5:
            model.add_port(name, f"foreign-{name}", {"tag": 5})
        if bridge.ours and dice.random() < 0.1:
            del model.bridges[name]
        elif bridge.ours:
            _drift(dice, model, bridge)
    changed = {
        i: replace(network, spec=network.spec.model_copy(update={"peers": ("10.9.0.4",)}))
        for i, network in networks.items()
        if draw(st.booleans())
    }
    return model, draw(intents_on(networks | changed))


#: How another program breaks a port of ours, each a function of its row.
BREAKS = {
    "tag": lambda row: replace(row, tag=None),
    "mode": lambda row: replace(row, vlan_mode="trunk"),
    "port ids": lambda row: replace(row, external_ids=_without(row.external_ids)),
    "mtu": lambda row: _of_interface(row, mtu_request=68),
    "path": lambda row: _of_interface(row, options={}),
    "type": lambda row: _of_interface(row, type="internal"),
    "ids": lambda row: _of_interface(row, external_ids={}),
    "rate": lambda row: _of_interface(row, ingress_policing_rate=7),
    "burst": lambda row: _of_interface(row, ingress_policing_burst=7),
    "bond": lambda row: replace(row, bond_mode="balance-slb", lacp="passive"),
    "members": lambda row: replace(row, interfaces=row.interfaces[:1]),
    "no qos": lambda row: replace(row, qos=None),
}


def _without(ids: Any) -> dict[str, str]:
    """What is left when somebody takes away the ids but those that name its owner."""
    kept = ("netplugin-port", "netplugin-backend", "netplugin-uplink", "netplugin-tunnel")
    return {key: value for key, value in ids.items() if key in kept}


def _of_interface(row: OvsPort, **columns: Any) -> OvsPort:
    return replace(row, interfaces=tuple(replace(i, **columns) for i in row.interfaces))


def _drift(dice: random.Random, model: Model, bridge: Bridge) -> None:
    if dice.random() < 0.3:
        bridge.fail_mode = None
    if dice.random() < 0.3:
        bridge.matches_fragments = False
    if dice.random() < 0.3:
        bridge.flows.add(Flow.make((0x6E70 << 48) | 0xABC, 9, "in_port=3"))
    for flow in sorted(bridge.flows, key=str):
        if dice.random() < 0.1 and flow.cookie != 0x1234:
            bridge.flows.remove(flow)
            bridge.flows.add(replace(flow, actions="drop"))
    for name, row in sorted(bridge.ports.items()):
        what = dice.choice(["none", "none", "gone", "foreign qos", "qos", *BREAKS])
        if name.startswith("foreign"):
            continue
        if what == "gone":
            del bridge.ports[name]
        elif what == "foreign qos":
            bridge.ports[name] = replace(row, qos=model.add_qos("linux-htb", {}, {}))
        elif what == "qos" and row.qos:
            model.qos[row.qos.uuid] = replace(row.qos, other_config={"cir": "1"})
            bridge.ports[name] = replace(row, qos=model.qos[row.qos.uuid])
        elif what in BREAKS:
            bridge.ports[name] = BREAKS[what](row)


def converge(model: Model, desired: list[Intent], rounds: int = 3) -> set[str]:
    """The loop of the agent, on the model; the answer is the ports that were refused."""
    refused: set[str] = set()
    for _ in range(rounds):
        found = plan(model.settings, desired, model.observe())
        refused |= set(found.refused)
        model.apply(found.changes)
    return refused


def plain_spec(qos: dict[str, int] | None = None, **network: Any) -> PortSpec:
    if network.get("type") != "vxlan":
        network = {"type": "flat", "physical_network": "net1", **network}
    return PortSpec.model_validate(
        {
            "vm_id": "vm",
            "mac": "52:54:00:00:00:01",
            "backend": "dpdkvhostuser",
            "network": network,
            "qos": qos or {},
        }
    )


def on_network(network: Overlay, port_id: str, **fields: Any) -> Intent:
    spec = plain_spec(type="vxlan", network_id=network.network_id, mtu=network.spec.mtu, **fields)
    return Intent(port_id, spec, overlay=network)


def kinds(changes: Any) -> list[str]:
    """The kinds of the changes; with the kind of port, if that is not the port of a VM."""
    return [" ".join(filter(None, (type(change).__name__, _kind_of_port(change)))) for change in changes]


def _kind_of_port(change: Any) -> str:
    if isinstance(change, RemovePort) and not change.backend:
        return "uplink" if change.name.startswith(UPLINK) else "VF" if change.device else "tunnel"
    kinds = {OvsUplink: "uplink", RelayVfPort: "VF", TunnelPort: "tunnel"}
    return kinds.get(type(getattr(change, "port", None)), "")
