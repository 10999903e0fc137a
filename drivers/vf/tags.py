"""Findings for VFs on flat networks, whose guests may use VLAN tags of their own. Pure.

A port on a flat network has no VLAN to restrict its VF to. The behaviour depends on the PF driver
(``TAGS``); no driver lets the hypervisor forbid guest tags on a VF with VLAN 0. A trunk (``vf.trunk``)
allows them on purpose and needs no finding.
"""

from __future__ import annotations

from collections.abc import Sequence

from drivers.vf.abilities import TAGS
from drivers.vf.inventory import Inventory
from drivers.vf.memory import Lost, locate
from drivers.vf.ports import claim_of
from netplugin.backend import Intent
from netplugin.models import Finding

_UNKNOWN = "does with the tags that such a VM sends what its firmware decides: unknown"


def tag_findings(intents: Sequence[Intent], inventory: Inventory) -> list[Finding]:
    """Return one finding per NIC that has ports of flat networks."""
    flat: dict[str, list[str]] = {}
    for intent in intents:
        claim = claim_of(intent)
        if claim is None or intent.spec is None or intent.spec.network.type != "flat":
            continue
        if intent.spec.vf.trunk:
            continue
        vf = locate(inventory, claim)
        if not isinstance(vf, Lost):
            flat.setdefault(vf.pf, []).append(intent.port_id)
    return [_finding(inventory, address, ports) for address, ports in sorted(flat.items())]


def _finding(inventory: Inventory, address: str, ports: Sequence[str]) -> Finding:
    pf = inventory.pfs[address]
    says = TAGS.get(pf.driver or "", _UNKNOWN)
    return Finding(
        id=f"vf-flat-{address}", status="warn",
        found=f"{pf.name} has ports of flat networks ({', '.join(sorted(ports))}), and its driver "
        f"{pf.driver or 'unknown'} {says}",
        expected="VMs on VFs are in one VLAN that the NIC holds them to",
        fix="ask for these ports with a VLAN, or with the backend vdpa in relay mode, which takes "
        "no tags from a VM; a switch port that takes untagged frames alone keeps them off the wire",
    )  # fmt: skip
