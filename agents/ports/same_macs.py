"""Ports of several VMs that have one MAC on one network: a switch delivers its frames to one of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from agents.store.port_table import Record
from netplugin.api.models import Finding, Network

_NAMED = 5  # MACs in the finding; the others are counted


def findings(records: Iterable[Record]) -> list[Finding]:
    """At most one. Only the ports of this host are known here."""
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    for record in records:
        alike[_segment(record.spec.network), record.spec.mac].append(record.port_id)
    twice = [
        f"{', '.join(sorted(ports))} have {mac} on {segment}"
        for (segment, mac), ports in sorted(alike.items())
        if len(ports) > 1
    ]
    if not twice:
        return []
    more = f", and {len(twice) - _NAMED} other MACs" if len(twice) > _NAMED else ""
    return [
        Finding(
            id="same-mac",
            status="warn",
            found="; ".join(twice[:_NAMED]) + more,
            expected="each MAC is that of one port of a network: frames for it reach only one",
            fix="delete the port whose VM is gone, or give one of them another MAC",
        )
    ]


def _segment(network: Network) -> str:
    if network.network_id is not None:
        return f"network {network.network_id}"
    vlan = "" if network.vlan_id is None else f" VLAN {network.vlan_id}"
    return f"physical network {network.physical_network}{vlan}"
