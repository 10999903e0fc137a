"""Findings of the dpdkvhostuser backend about the host (``Backend.findings``)."""

from __future__ import annotations

from drivers.dpdkvhostuser.seen import Seen
from drivers.dpdkvhostuser.wanted import OVERLAY
from drivers.ovs.findings import of_bridges
from drivers.ovs.ports import QUEUES_MARK
from netplugin.host import ovs_bonds
from netplugin.host.ovs_underlay import problem
from netplugin.models import Finding


def findings(seen: Seen, local_ip: str | None) -> list[Finding]:
    """Return the findings; ``seen`` must cover the whole host. Pure."""
    found = ovs_bonds.findings(seen.bonds)
    found += of_bridges(seen)
    found += _queues(seen)
    if local_ip is not None or any(row.bridge == OVERLAY for row in seen.rows.values()):
        found.append(_underlay(seen))
    return found


def _queues(seen: Seen) -> list[Finding]:
    """Report ports with more queues than there are PMD threads: their queues then share threads."""
    asked = {
        row.name: int(row.interface.external_ids.get(QUEUES_MARK, "1"))
        for row in seen.rows.values()
        if row.interface and row.interface.external_ids.get(QUEUES_MARK, "1").isdigit()
    }
    many = sorted(name for name, queues in asked.items() if queues > seen.pmd_threads)
    if not many:
        return []
    some = ", ".join(many[:5]) + (" and others" if len(many) > 5 else "")
    most = max(asked[name] for name in many)
    return [
        Finding(
            id="pmd-queues", status="warn",
            found=f"{len(many)} ports have up to {most} queues, and there are {seen.pmd_threads} PMD "
            f"threads: {some}",
            expected=f"{most} PMD threads, so that each queue of a port may have its own",
            fix=f"netplugin pmd set --count {most}, or fewer queues",
        )
    ]  # fmt: skip


def _underlay(seen: Seen) -> Finding:
    underlay = seen.tunnels.underlay
    mtus = [
        (row.interface and row.interface.mtu_request) or 0
        for row in seen.rows.values()
        if row.bridge == OVERLAY
    ]
    error = problem(underlay, max(mtus, default=None))
    expected = "[ovs] local_ip is on a netdev bridge that is up, with room for VXLAN on every hop"
    if error is None and underlay is not None:
        hops = ", ".join(f"{name} {mtu}" for name, mtu in underlay.hops)
        found = f"{underlay.local_ip} is on {underlay.device} (MTU: {hops})"
        return Finding(id="underlay", status="ok", found=found, expected=expected)
    found = error.detail if error else "the tunnels' address was not looked for"
    return Finding(
        id="underlay",
        status="fail",
        found=found,
        expected=expected,
        fix=error.fix if error else None,
    )
