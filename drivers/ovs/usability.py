"""Whether a backend can use this OVS: DPDK, its features, and the effects of TSO by version."""

from __future__ import annotations

import re

from drivers.ovs import sockets
from netplugin.api.errors import NetpluginError, Unsupported
from netplugin.host.ovs import OvsHost
from netplugin.host.ovs_rows import OvsRoot
from netplugin.host.usability import Usability

# -- Whether OVS has DPDK and the features that a backend needs. ----------------------------------


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
            False,
            "OVS runs without DPDK (dpdk_initialized is false)",
            "ovs-vsctl set Open_vSwitch . other_config:dpdk-init=true, restart ovs-vswitchd and read its log",
            "dpdk-init",
        )
    for kind in types:
        if kind not in root.iface_types:
            return Usability(
                False,
                f"this OVS has no interface type {kind}: it is built without DPDK",
                "install an OVS with DPDK (Debian: openvswitch-switch-dpdk)",
                "iface-types",
            )
    return sockets.usable(ovs.settings.vhost_socket_dir, ovs.settings.vhost_socket_group)


# -- Effects of ``userspace-tso-enable``: which segments OVS drops silently, by version. ----------
# With it, VMs send TCP segments of up to 64 KiB and leave segmentation to the NIC. Sources: OVS's
# NEWS and Documentation/topics/userspace-tso.rst of each version.


_OPTION = "userspace-tso-enable"
#: OVS before 3.3 cannot segment in software, so a port without the offload drops (NEWS, v3.3.0).
_SOFTWARE_FALLBACK = (3, 3)
#: The same for tunnelled frames (NEWS, v3.5.0). Before 3.3 no tunnel accepted such a segment.
_TUNNEL_FALLBACK = (3, 5)


def enabled(root: OvsRoot) -> bool:
    """Whether it is configured; vswitchd applies it at its next start at the latest."""
    return root.other_config.get(_OPTION, "").lower() == "true"


def refuse_tunnels(root: OvsRoot) -> NetpluginError | None:
    """Why VXLAN does not work with it; None if it does."""
    if not enabled(root) or root.version >= _TUNNEL_FALLBACK:
        return None
    return Unsupported(
        f"{_OPTION} is on, and OVS {root.ovs_version} drops the large segments of VMs on VXLAN "
        "networks (it cannot segment what goes into a tunnel before 3.5)",
        step="userspace-tso",
        fix=f"ovs-vsctl remove Open_vSwitch . other_config {_OPTION} and restart ovs-vswitchd; or "
        "use OVS 3.5",
    )


def nic_must_segment(root: OvsRoot) -> bool:
    """Whether an uplink whose NIC cannot segment drops large segments of VMs."""
    return enabled(root) and root.version < _SOFTWARE_FALLBACK


_PORT = re.compile(r"^\s*port \d+: (\S+) \((.*)\)$", re.MULTILINE)
_CANNOT = re.compile(r"\btx_(?:tso|tcp_seg)_offload=false\b")


def cannot_segment(dpctl_show: str) -> frozenset[str]:
    """The devices in ``ovs-appctl dpctl/show`` whose NIC cannot segment."""
    return frozenset(name for name, config in _PORT.findall(dpctl_show) if _CANNOT.search(config))
