"""Datapath flows that an older OVS leaves with their old actions when tables change.

OVS keeps megaflows that overlap as long as their actions agree, and when a table changes it modifies
each. Until "dpif-netdev: Fix dpif_netdev_flow_put" (2.17.8, 3.0.5, 3.1.3, 3.2.0) the userspace
datapath looks for the one to modify by a packet that it matches, finds one that overlaps, and the
other keeps what it did for as long as it has traffic: a frame that a filter should stop now goes on,
or a VM stays cut off. ``revalidator/purge`` takes all megaflows away; the next frame of each is
translated anew, by the tables as they are.
"""

from __future__ import annotations

from collections.abc import Collection

from drivers.ovs.steps import FlowChange, FlowEdit
from netplugin.host.ovs import OvsHost
from netplugin.host.ovs_rows import OvsRoot
from netplugin.host.vswitchd import appctl
from netplugin.models import Finding

#: The first release of a series that modifies the right one; from 3.2 on all do.
_MENDED = {(2, 17): 8, (3, 0): 5, (3, 1): 3}
_ALL_MENDED = (3, 2)


def kept(root: OvsRoot) -> bool:
    """Whether this OVS may keep them; an unknown version is taken as one that does."""
    major, minor, release = root.version
    if (major, minor) >= _ALL_MENDED:
        return False
    return release < _MENDED.get((major, minor), release + 1)


def version_with(root: OvsRoot) -> str:
    """The version, for the finding, if ``kept``; empty if not."""
    return (root.ovs_version or "of an unknown version") if kept(root) else ""


def may_be_used(change: FlowChange, edit: FlowEdit, idle: Collection[str]) -> bool:
    """Whether frames may have gone by what an edit takes away, where the ports ``idle`` have sent
    none yet or are no more."""
    of_others = not change.ports or not set(change.ports) <= set(idle)
    return bool(edit.gone) or (bool(edit.cookies) and of_others)


def purge(ovs: OvsHost, deadline: float) -> None:
    """Raises: BackendUnavailable, HostError, OperationTimeout."""
    appctl(ovs.settings.rundir, "revalidator/purge", deadline=deadline)


def finding(ovs_version: str) -> Finding:
    """What it means for an operator that ``kept`` is so."""
    return Finding(
        id="ovs-old-actions",
        status="warn",
        found=f"OVS {ovs_version} may leave datapath flows that overlap with old actions when a table "
        "changes. After each change of a port's flows all datapath flows of the host are purged, which "
        "costs every VM one translation for each of its flows",
        expected="OVS modifies the datapath flow that it means to",
        fix="update OVS to 2.17.8, 3.0.5, 3.1.3, 3.2 or later",
    )
