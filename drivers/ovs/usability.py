"""Whether OVS has DPDK and the features that a backend needs."""

from __future__ import annotations

from drivers.ovs import sockets
from netplugin.backend import Usability
from netplugin.host.ovs import OvsHost


def dpdk_usable(ovs: OvsHost, *types: str) -> Usability:
    """Whether OVS runs with DPDK, has these interface types, and a usable socket directory.

    Uses cached state and one look at the directory.
    """
    state = ovs.usable()
    if not state.usable:
        return state
    root = ovs.mirror.root
    built_with = root.dpdk_version not in (None, "none")
    if built_with and not root.dpdk_initialized:
        return Usability(
            False, "OVS runs without DPDK (dpdk_initialized is false)",
            "ovs-vsctl set Open_vSwitch . other_config:dpdk-init=true, restart ovs-vswitchd and "
            "read its log", "dpdk-init",
        )  # fmt: skip
    for kind in types:
        if kind not in root.iface_types:
            return Usability(
                False, f"this OVS has no interface type {kind}: it is built without DPDK",
                "install an OVS with DPDK (Debian: openvswitch-switch-dpdk)", "iface-types",
            )  # fmt: skip
    return sockets.usable(ovs.settings.vhost_socket_dir, ovs.settings.vhost_socket_group)
