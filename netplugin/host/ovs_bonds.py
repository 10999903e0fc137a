"""OVS bonds as reported by ``ovs-appctl bond/show``, and findings about them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from netplugin.api.models import Finding


@dataclass(frozen=True)
class OvsBond:
    """One bond. ``lacp`` is ``off``, ``configured`` or ``negotiated``."""

    name: str
    mode: str
    lacp: str
    #: Each member, and whether it is enabled.
    members: tuple[tuple[str, bool], ...]

    @property
    def down(self) -> tuple[str, ...]:
        return tuple(name for name, enabled in self.members if not enabled)


@dataclass(frozen=True)
class BondUse:
    """The traffic of a bond: number of senders (MAC and VLAN), and whether it carries tunnels."""

    bond: OvsBond
    bridge: str
    senders: int
    tunnels: bool


_TITLE = re.compile(r"^---- (\S+) ----$", re.MULTILINE)
_ATTRIBUTE = re.compile(r"^(bond_mode|lacp_status): (\S+)", re.MULTILINE)
_MEMBER = re.compile(r"^(?:member|slave) (\S+): (enabled|disabled)$", re.MULTILINE)


def parse_bonds(text: str) -> tuple[OvsBond, ...]:
    """Parse the output of ``bond/show`` (OVS 2.17 to 4.0; before 2.16 a member was called slave)."""
    _, *parts = _TITLE.split(text)
    bonds = []
    for name, shown in zip(parts[::2], parts[1::2], strict=True):
        found = dict(_ATTRIBUTE.findall(shown))
        members = tuple((member, state == "enabled") for member, state in _MEMBER.findall(shown))
        bonds.append(OvsBond(name, found.get("bond_mode", ""), found.get("lacp_status", "off"), members))
    return tuple(bonds)


def fault(bond: OvsBond) -> str | None:
    """Why the bond carries no traffic; None if at least one link does."""
    if bond.lacp == "configured":
        return f"bond {bond.name}: the switch does not answer LACP, so no link of it is used"
    if bond.members and len(bond.down) == len(bond.members):
        return f"bond {bond.name}: all its links are down ({', '.join(bond.down)})"
    return None


def findings(uses: Iterable[BondUse]) -> list[Finding]:
    """Findings on each bond: links that are down, LACP, and whether its hash spreads the traffic (pure)."""
    return [finding for use in uses for finding in (*_links(use.bond), _hash(use))]


def _links(bond: OvsBond) -> list[Finding]:
    if bond.lacp == "configured":
        expected = f"LACP of {bond.name} is negotiated with the switch"
        fix = "configure LACP (802.3ad) for these links on the switch, or take lacp out of [ovs] bonds"
        return [Finding(id="bond-lacp", status="fail", found=str(fault(bond)), expected=expected, fix=fix)]
    if not bond.down:
        return []
    dead = fault(bond)
    rest = [name for name, enabled in bond.members if enabled]
    return [
        Finding(
            id="bond-link-down",
            status="fail" if dead else "warn",
            found=dead
            or f"bond {bond.name}: {', '.join(bond.down)} is down; traffic goes on over {', '.join(rest)}",
            expected=f"all {len(bond.members)} links of {bond.name} carry traffic",
            fix="look at the cable, the transceiver and the switch port of the link that is down",
        )
    ]


def _hash(use: BondUse) -> Finding:
    """Whether the traffic can spread over the links with the bond's hash (vswitch.xml, Bonding)."""
    bond, links = use.bond, len(use.bond.members)
    if bond.mode == "active-backup":
        found = f"bond {bond.name} is active-backup: one of its {links} links carries all"
        return Finding(id="bond-hash", status="ok", found=found, expected="one link carries all, by choice")
    expected, weakness = f"the traffic of {bond.name} spreads over its {links} links", None
    if bond.mode == "balance-slb" and use.tunnels:
        weakness = "VXLAN tunnels leave by it: their frames have one source MAC, so one link carries them all"
    elif bond.mode == "balance-slb" and use.senders < links:
        weakness = f"has {use.senders} of them for {links} links"
    if weakness is None:
        found = f"bond {bond.name} is {bond.mode}"
        return Finding(id="bond-hash", status="ok", found=found, expected=expected)
    found = f"bond {bond.name} is balance-slb, which spreads by source MAC and VLAN, and {weakness}"
    fix = "lacp in [ovs] bonds (balance-tcp), with LACP on the switch"
    return Finding(id="bond-hash", status="warn", found=found, expected=expected, fix=fix)
