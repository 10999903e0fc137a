"""Findings on our bridges and on unmanaged ports (pure)."""

from __future__ import annotations

from collections.abc import Iterable

from drivers.ovs import old_actions
from drivers.ovs.seen import SeenBridge, SeenOvs
from netplugin.host.ovs_rows import OvsPort
from netplugin.models import Finding


def of_bridges(seen: SeenOvs) -> list[Finding]:
    """All findings; ``seen`` must cover the whole host."""
    bridges = [seen.bridges[name] for name in sorted(seen.bridges)]
    found = [_service(port) for bridge in bridges for port in _sorted(bridge.services)]
    if seen.keeps_old_actions and bridges:
        found.append(old_actions.finding(seen.keeps_old_actions))
    found += _unmanaged([port for bridge in bridges for port in _sorted(bridge.unmanaged)])
    return found + [_fragments(b) for b in bridges if not b.ours and b.matches_fragments is False]


def _sorted(ports: Iterable[OvsPort]) -> list[OvsPort]:
    return sorted(ports, key=lambda port: port.name)


def _service(port: OvsPort) -> Finding:
    """A port of ``[ovs] service_ports`` has no filter; without a tag it is on all networks."""
    where = f"{port.name} on {port.bridge} stands in [ovs] service_ports and has no filter"
    expected = "a service port is an access port of the one network that it serves"
    if port.tag is not None and port.vlan_mode in (None, "access"):
        return Finding(
            id=f"service-port-{port.name}", status="ok", expected=expected,
            found=f"{where}: VLAN {port.tag}",
        )  # fmt: skip
    return Finding(
        id=f"service-port-{port.name}", status="warn", expected=expected,
        found=f"{where}, and is a trunk: it sends to every network of the bridge and hears them",
        fix=f"ovs-vsctl set Port {port.name} tag=<its VLAN> vlan_mode=access",
    )  # fmt: skip


def _unmanaged(ports: list[OvsPort]) -> list[Finding]:
    if not ports:
        return []
    names = ", ".join(f"{port.name} on {port.bridge}" for port in ports[:5])
    more = f" and {len(ports) - 5} others" if len(ports) > 5 else ""
    return [
        Finding(
            id="unmanaged-ports", status="warn",
            found=f"not made by netplugin, or without its mark any more: {names}{more}",
            expected="all ports of netplugin's bridges are netplugin's or in [ovs] service_ports; the "
            "bridge takes no frame from any other",
            fix="remove the port (ovs-vsctl del-port), or name it in [ovs] service_ports and restart "
            "the agent",
        )
    ]  # fmt: skip


def _fragments(bridge: SeenBridge) -> Finding:
    return Finding(
        id=f"fragments-{bridge.name}", status="warn",
        found=f"{bridge.name} is not netplugin's, and its flows do not see the ports of fragments: a VM "
        "may send answers of a DHCP server, or router advertisements, in fragments",
        expected="the filters of VMs see the ports of first fragments",
        fix=f"ovs-ofctl set-frags {bridge.name} nx-match, after each start of vswitchd",
    )  # fmt: skip
