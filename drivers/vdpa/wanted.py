"""The rows that a port of the vdpa backend has in OVS, in either mode, from what was asked alone."""

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
#: The one bridge of all relays. It has no flow that switches: a port's flows name the port they lead
#: to, so that one bridge keeps relays as far apart as one for each would, which would cost a tap and
#: a datapath's worth of tables for each.
BRIDGE = "np-relay"
LAYOUT = Layout(
    BACKEND, {BRIDGE: "vdpa:relay"}, base={BRIDGE: frozenset()}, prefixes=(VHOST, RELAY)
)
#: Where a row names the VF that it is for.
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
    """The rows of a port that has a VF. ``tso``: its VM may send segments of 64 KiB.

    ``row`` is what there is of it, on one of ``bridges``.

    Raises: BackendUnavailable for such a port that is not there.
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
    """Options as in the patch "netdev-dpdk: Introduce dpdkvdpa" and the vendors' guides to it."""
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
    """The address of the VF that a port's rows name."""
    interface = beside.interface if beside else row.interface if row else None
    if interface is None:
        return None
    return interface.options.get(_ACCELERATOR) or interface.options.get("dpdk-devargs")
