"""Bonds made by the operator: the state of their links, and whether traffic spreads over the links.

A hash selects the link of a frame (``xmit_hash_policy`` in the kernel's
Documentation/networking/bonding.rst). Frames of VMs have many MAC addresses, so every policy spreads
them. VXLAN between two hosts always has the same MAC addresses (of the hosts, or of a router) and the
same two IP addresses. Only the UDP source port differs, because VXLAN derives it from the inner flow
(RFC 7348, section 5). The policy must therefore include ports: ``layer3+4``, or ``encap3+4``, which
hashes the inner flow where the kernel has the hash (``bond_xmit_hash`` in
drivers/net/bonding/bond_main.c). ``encap2+3`` does not spread tunnels: it decodes only some tunnel types,
not VXLAN, and ignores ports. Neither does ``vlan+srcmac``: the host has one VLAN and one MAC.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from drivers.linuxbridge.seen import SeenBond
from netplugin.models import Finding

_HASHING = ("balance-xor", "802.3ad")
_SPREADS_TUNNELS = ("layer3+4", "encap3+4")


def bond_details(bond: SeenBond) -> dict[str, Any]:
    return {
        "name": bond.name,
        "mode": bond.bond.mode,
        "xmit_hash_policy": bond.bond.hash_policy,
        "lacp_partner": bond.bond.partner or None,
        "members": {m.name: {"link": m.state, "active": m.active} for m in bond.members},
    }


def bond_findings(bond: SeenBond, *, tunnels: bool) -> Iterator[Finding]:
    """Return the findings about one bond. ``tunnels``: VXLAN traffic uses the bond."""
    down = [member for member in bond.members if not member.up]
    if down:
        states = ", ".join(f"{member.name} is {member.state}" for member in down)
        yield Finding(
            id="bond-link-down", status="warn" if len(down) < len(bond.members) else "fail",
            found=f"{bond.name}: {states}", expected=f"all {len(bond.members)} links are up",
            fix=f"look at cables and switch: cat /proc/net/bonding/{bond.name}",
        )  # fmt: skip
    if bond.bond.mode == "802.3ad" and not bond.bond.partner:
        yield Finding(
            id="bond-lacp", status="warn", found=f"{bond.name}: nobody speaks LACP at the other end",
            expected="the switch has its ports in one LACP group", fix="configure the switch",
        )  # fmt: skip
    yield from _hash(bond, tunnels)


def _hash(bond: SeenBond, tunnels: bool) -> Iterator[Finding]:
    mode, policy = bond.bond.mode, bond.bond.hash_policy
    if mode == "active-backup":
        active = ", ".join(member.name for member in bond.members if member.active) or "none"
        yield Finding(
            id="bond-hash", status="ok",
            found=f"{bond.name} is active-backup: one link ({active}) carries all, by choice",
            expected="another link takes over when it fails",
        )  # fmt: skip
    elif tunnels and mode in _HASHING and policy not in _SPREADS_TUNNELS:
        yield Finding(
            id="bond-hash", status="warn",
            found=f"{bond.name} has xmit_hash_policy {policy}: one link carries all VXLAN traffic "
            "between two hosts, as their addresses are always the same",
            expected="xmit_hash_policy layer3+4: the UDP ports of a tunnel differ by flow",
            fix=f"ip link set {bond.name} type bond xmit_hash_policy layer3+4",
        )  # fmt: skip
