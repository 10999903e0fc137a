"""Ports that have one MAC on one network: a switch delivers its frames to one of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from agents.store.port_table import Record
from netplugin.api.models import Finding, Network

_NAMED = 5  # MACs in the finding, and ports of each


def findings(records: Iterable[Record]) -> list[Finding]:
    """At most one. Only the ports of this host are known here."""
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    for record in records:
        alike[_segment(record.spec.network), record.spec.mac].append(record.port_id)
    twice = [
        f"{_some(sorted(ports), ', ')} have {mac} on {segment}"
        for (segment, mac), ports in sorted(alike.items())
        if len(ports) > 1
    ]
    if not twice:
        return []
    return [
        Finding(
            id="same-mac",
            status="warn",
            found=_some(twice, "; "),
            expected="each MAC is that of one port of a network: frames for it reach only one",
            fix="delete the port whose VM is gone, or give one of them another MAC",
        )
    ]


def _some(words: Sequence[str], between: str) -> str:
    return between.join(words[:_NAMED]) + (" and others" if len(words) > _NAMED else "")


def _segment(network: Network) -> str:
    if network.network_id is not None:
        return f"network {network.network_id}"
    vlan = "" if network.vlan_id is None else f" VLAN {network.vlan_id}"
    return f"physical network {network.physical_network}{vlan}"
