"""What is wrong with the ports of a host, as findings for operators."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from agents.store.port_table import Record
from netplugin.api.errors import NetpluginError, some
from netplugin.api.models import Finding, Network, PortState

_NAMED = 20  # ports listed by name; the others are counted


def not_working(backend: str, records: Iterable[Record]) -> list[Finding]:
    """Findings about failed and degraded ports, one per state and cause."""
    alike: dict[tuple[str, str, str, str | None], list[Record]] = defaultdict(list)
    for record in records:
        error = record.error
        if error is not None and record.state in (PortState.FAILED, PortState.DEGRADED):
            alike[record.state.value, error.code, error.step, error.fix].append(record)
    findings = []
    for (state, code, step, fix), ports in sorted(alike.items(), key=lambda item: item[0][:3]):
        named = some([record.port_id for record in ports])
        why = ports[0].error.detail if ports[0].error else ""
        findings.append(
            Finding(
                id=f"{backend}-ports-{state}",
                status="fail",
                found=f"{len(ports)} ports are {state} ({named}), {code} at {step}: {why}",
                expected="every port is active",
                fix=fix,
            )
        )
    return findings


def of_network(name: str, fault: NetpluginError) -> Finding:
    """The finding about a physical network that is not as it should be."""
    return Finding(
        id=f"physical-network-{name}",
        status="fail",
        found=fault.detail,
        expected=f"the bridge and the uplink of physical network {name} are there and work",
        fix=fault.fix,
    )


def orphan_sentences(kept: Mapping[str, str]) -> list[str]:
    """One sentence per reason why the host has ports without a record, with the ports."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for port_id, why in sorted(kept.items()):
        by_reason[why].append(port_id)
    return [
        f"{len(ports)} ports are on the host and not in the store ({why}): {some(ports, _NAMED)}"
        for why, ports in sorted(by_reason.items())
    ]


def of_orphans(backend: str, kept: Mapping[str, str]) -> list[Finding]:
    """Findings about the orphans that stay on the host."""
    return [
        Finding(
            id=f"ports-not-in-store-{backend}",
            status="warn",
            found=sentence,
            expected="a record of every port with our mark",
            fix='PUT the ports again; then remove what is left: POST /v1/reconcile {"remove_orphans": true}',
        )
        for sentence in orphan_sentences(kept)
    ]


def same_macs(records: Iterable[Record]) -> list[Finding]:
    """Ports that have one MAC on one network: a switch delivers its frames to one of them.

    At most one finding. Only the ports of this host are known here.
    """
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    for record in records:
        alike[_segment(record.spec.network), record.spec.mac].append(record.port_id)
    twice = [
        f"{some(sorted(ports))} have {mac} on {segment}"
        for (segment, mac), ports in sorted(alike.items())
        if len(ports) > 1
    ]
    if not twice:
        return []
    return [
        Finding(
            id="same-mac",
            status="warn",
            found=some(twice, between="; "),
            expected="each MAC is that of one port of a network: frames for it reach only one",
            fix="delete the port whose VM is gone, or give one of them another MAC",
        )
    ]


def _segment(network: Network) -> str:
    if network.network_id is not None:
        return f"network {network.network_id}"
    vlan = "" if network.vlan_id is None else f" VLAN {network.vlan_id}"
    return f"physical network {network.physical_network}{vlan}"
