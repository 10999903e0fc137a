"""Whether a backend can use this OVS: DPDK, its features, and what its version does wrong."""

from __future__ import annotations

import re

from drivers.ovs import sockets
from netplugin.api.errors import NetpluginError, Unsupported
from netplugin.api.models import Finding
from netplugin.host import ovs_versions
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
    root = ovs.view.root
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


# -- Effects of ``userspace-tso-enable``: which segments OVS drops silently. ----------------------
# With it, VMs send TCP segments of up to 64 KiB and leave segmentation to the NIC. Source:
# Documentation/topics/userspace-tso.rst of each version of OVS.


_TSO = "userspace-tso-enable"


def tso_enabled(root: OvsRoot) -> bool:
    """Whether it is configured; vswitchd applies it at its next start at the latest."""
    return root.has_on(_TSO)


def refuse_tunnels(root: OvsRoot) -> NetpluginError | None:
    """Why VXLAN does not work with it; None if it does."""
    if not tso_enabled(root) or root.version >= ovs_versions.SPLITS_SEGMENTS_INTO_TUNNELS:
        return None
    return Unsupported(
        f"{_TSO} is on, and OVS {root.ovs_version} drops the large segments of VMs on VXLAN "
        "networks (it cannot segment what goes into a tunnel before 3.5)",
        step="userspace-tso",
        fix=f"ovs-vsctl remove Open_vSwitch . other_config {_TSO} and restart ovs-vswitchd; or use OVS 3.5",
    )


def facts(root: OvsRoot) -> dict[str, str | int | bool]:
    """The facts of ``GET /v1/backends`` about OVS."""
    return {
        "ovs_version": root.ovs_version or "unknown",
        "dpdk_version": root.dpdk_version or "none",
        "userspace_tso": tso_enabled(root),
        # Whether the memory of VMs with vhost-user ports may follow after them.
        "vhost_postcopy": root.has_on("vhost-postcopy-support"),
    }


def nic_must_segment(root: OvsRoot) -> bool:
    """Whether an uplink whose NIC cannot segment drops large segments of VMs."""
    return tso_enabled(root) and root.version < ovs_versions.SPLITS_SEGMENTS


_PORT = re.compile(r"^\s*port \d+: (\S+) \((.*)\)$", re.MULTILINE)
_CANNOT = re.compile(r"\btx_(?:tso|tcp_seg)_offload=false\b")


def cannot_segment(dpctl_show: str) -> frozenset[str]:
    """The devices in ``ovs-appctl dpctl/show`` whose NIC cannot segment."""
    return frozenset(name for name, config in _PORT.findall(dpctl_show) if _CANNOT.search(config))


# -- OVS versions that keep datapath flows with old actions. ---------------------------------------


def old_actions_finding(root: OvsRoot) -> Finding:
    """The finding for an affected version (``ovs_versions.keeps_old_actions``)."""
    return Finding(
        id="ovs-old-actions",
        status="warn",
        found=f"OVS {root.ovs_version or 'of an unknown version'} may leave datapath flows that overlap with "
        "old actions when a table changes. After each change of a port's flows all datapath flows of the "
        "host are purged, which costs every VM one translation for each of its flows",
        expected="OVS modifies the datapath flow that it means to",
        fix="update OVS to 2.17.8, 3.0.5, 3.1.3, 3.2 or later",
    )
