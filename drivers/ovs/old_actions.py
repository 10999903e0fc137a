"""Workaround for OVS versions that keep datapath flows with old actions.

OVS keeps overlapping megaflows as long as their actions agree, and modifies each when an OpenFlow
table changes. Before "dpif-netdev: Fix dpif_netdev_flow_put" (2.17.8, 3.0.5, 3.1.3, 3.2.0), the
userspace datapath looks up the megaflow to modify with a packet that matches it, and may find an
overlapping one. The other keeps its old actions as long as it has traffic: a frame that a filter
should drop still passes, or a VM stays disconnected. ``revalidator/purge`` deletes all megaflows;
the next frame of each is translated again with the current tables.
"""

from __future__ import annotations

from collections.abc import Collection

from drivers.ovs.steps import FlowChange, FlowEdit
from netplugin.host.ovs import OvsHost
from netplugin.host.ovs_rows import OvsRoot
from netplugin.host.vswitchd import appctl
from netplugin.models import Finding

#: The first fixed release of each series; all releases from 3.2 on are fixed.
_MENDED = {(2, 17): 8, (3, 0): 5, (3, 1): 3}
_ALL_MENDED = (3, 2)


def kept(root: OvsRoot) -> bool:
    """Whether this OVS is affected. An unknown version counts as affected."""
    major, minor, release = root.version
    if (major, minor) >= _ALL_MENDED:
        return False
    return release < _MENDED.get((major, minor), release + 1)


def version_with(root: OvsRoot) -> str:
    """The version for the finding if OVS is affected; otherwise empty."""
    return (root.ovs_version or "of an unknown version") if kept(root) else ""


def may_be_used(change: FlowChange, edit: FlowEdit, idle: Collection[str]) -> bool:
    """Whether frames may have used flows that the edit deletes.

    The ports ``idle`` have sent no frames yet, or no longer exist.
    """
    of_others = not change.ports or not set(change.ports) <= set(idle)
    return bool(edit.gone) or (bool(edit.cookies) and of_others)


def purge(ovs: OvsHost, deadline: float) -> None:
    """Delete all datapath flows. Raises: BackendUnavailable, HostError, OperationTimeout."""
    appctl(ovs.settings.rundir, "revalidator/purge", deadline=deadline)


def finding(ovs_version: str) -> Finding:
    """The finding for an affected version."""
    return Finding(
        id="ovs-old-actions",
        status="warn",
        found=f"OVS {ovs_version} may leave datapath flows that overlap with old actions when a table "
        "changes. After each change of a port's flows all datapath flows of the host are purged, which "
        "costs every VM one translation for each of its flows",
        expected="OVS modifies the datapath flow that it means to",
        fix="update OVS to 2.17.8, 3.0.5, 3.1.3, 3.2 or later",
    )
