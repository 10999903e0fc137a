"""The OVS rows that a port of the vdpa backend desires, in either mode, derived from the intent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from drivers.ovs.layout import Layout
from drivers.ovs.mapping import bridge_of, unmapped
from drivers.ovs.plan_ports import Wanted
from drivers.ovs.ports import BesidePort, VhostPort
from drivers.ovs.seen import SeenBridge
from drivers.ovs.sockets import socket_path
from drivers.vdpa.modes import NATIVE_TYPE, Mode, mode_of
from drivers.vf.memory import remembered
from drivers.vf.ports import claim_of
from netplugin.backend import Intent
from netplugin.host.names import RELAY, VHOST, device_name
from netplugin.host.ovs import OvsSettings
from netplugin.host.ovs_rows import OvsPort

BACKEND = "vdpa"
#: The bridge of all relays. Each flow names its input and output port and none switches by MAC, so
#: relays on one bridge are isolated from each other. A bridge per relay would cost a tap and a set of
#: datapath tables each.
BRIDGE = "np-relay"
LAYOUT = Layout(
    BACKEND, {BRIDGE: "vdpa:relay"}, base={BRIDGE: frozenset()}, prefixes=(VHOST, RELAY)
)
#: The options that name the VF of a row.
_ACCELERATOR = "vdpa-accelerator-devargs"
DEVICE_OPTIONS = ("dpdk-devargs", _ACCELERATOR)


def wanted(
    settings: OvsSettings,
    intent: Intent,
    row: OvsPort | None,
    bridges: Mapping[str, SeenBridge],
    *,
    tso: bool,
) -> Wanted:
    """Return the rows of a port that has a VF. ``tso``: its VM may send segments of up to 64 KiB.

    ``row``: its existing row, on one of ``bridges``.

    Raises: BackendUnavailable if a new port's network is not mapped to a bridge.
    """
    claim, mode = claim_of(intent), mode_of(intent)
    assert intent.spec is not None and claim is not None and mode is not None
    if mode is Mode.NATIVE:
        return _native(settings, intent, row, bridges, claim.key, tso)
    socket = socket_path(settings, intent, row)
    port = VhostPort.of(BACKEND, intent, BRIDGE, 0, socket=socket, tso=tso)
    return Wanted(port, intent.spec, _relayed_to(intent, claim.key))


def _relayed_to(intent: Intent, address: str) -> BesidePort:
    assert intent.spec is not None
    return BesidePort(
        backend=BACKEND,
        port_id=intent.port_id,
        name=device_name(RELAY, intent.port_id),
        bridge=BRIDGE,
        device=address,
        mtu=intent.spec.network.mtu,
        queues=intent.spec.queues,
    )


def _native(
    settings: OvsSettings,
    intent: Intent,
    row: OvsPort | None,
    bridges: Mapping[str, SeenBridge],
    address: str,
    tso: bool,
) -> Wanted:
    """Build a native port. Options follow the patch "netdev-dpdk: Introduce dpdkvdpa" and vendor guides."""
    claim = claim_of(intent)
    assert intent.spec is not None and claim is not None
    network, memory = intent.spec.network, remembered(claim)
    bridge = bridge_of(settings, intent.spec, row, bridges)
    if not bridge:
        raise unmapped(intent.spec)
    socket, tag = socket_path(settings, intent, row), network.vlan_id or 0
    port = VhostPort.of(BACKEND, intent, bridge, tag, socket=socket, tso=tso)
    options = {
        "vdpa-socket-path": port.socket,
        _ACCELERATOR: address,
        "dpdk-devargs": f"{memory.pf_address},representor=[{memory.number}]",
        "vdpa-max-queues": str(intent.spec.queues),
        "vdpa-sw": "true",
    }
    return Wanted(replace(port, type=NATIVE_TYPE, options=options), intent.spec)


def vf_on_host(row: OvsPort | None, beside: OvsPort | None) -> str | None:
    """Return the PCI address of the VF that a port's rows name."""
    interface = beside.interface if beside else row.interface if row else None
    if interface is None:
        return None
    return interface.options.get(_ACCELERATOR) or interface.options.get("dpdk-devargs")
