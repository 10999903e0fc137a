"""What the linuxbridge backend reports: state and faults of each port, and findings about the host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drivers.linuxbridge import obstacles
from drivers.linuxbridge.model import BridgeObservation, ObservedBond
from drivers.linuxbridge.segments import Segment, service_of, stamp_of
from drivers.linuxbridge.uplink_path import in_the_way, small_mtu, uplink_path_of, uplink_problem
from netplugin.api.errors import some
from netplugin.api.models import Finding
from netplugin.backend import ObservedPort
from netplugin.host.link_values import Bridge, Link
from netplugin.host.names import DERIVED, SHAPER, TAP, device_name
from netplugin.host.tc import Queueing

# -- Bonds made by the operator: the state of their links, and whether traffic spreads over the links.
# A hash selects the link of a frame (``xmit_hash_policy`` in the kernel's
# Documentation/networking/bonding.rst). Frames of VMs have many MAC addresses, so every policy spreads
# them. VXLAN between two hosts always has the same MAC addresses (of the hosts, or of a router) and the
# same two IP addresses. Only the UDP source port differs, because VXLAN derives it from the inner flow
# (RFC 7348, section 5). The policy must therefore include ports: ``layer3+4``, or ``encap3+4``, which
# hashes the inner flow where the kernel has the hash (``bond_xmit_hash`` in
# drivers/net/bonding/bond_main.c). ``encap2+3`` does not spread tunnels: it decodes only some tunnel types,
# not VXLAN, and ignores ports. Neither does ``vlan+srcmac``: the host has one VLAN and one MAC.


_HASHING = ("balance-xor", "802.3ad")
_SPREADS_TUNNELS = ("layer3+4", "encap3+4")


def bond_details(bond: ObservedBond) -> dict[str, Any]:
    return {
        "name": bond.name,
        "mode": bond.bond.mode,
        "xmit_hash_policy": bond.bond.hash_policy,
        "lacp_partner": bond.bond.partner or None,
        "members": {m.name: {"link": m.state, "active": m.active} for m in bond.members},
    }


def bond_findings(bond: ObservedBond, *, tunnels: bool) -> Iterator[Finding]:
    """Return the findings about one bond. ``tunnels``: VXLAN traffic uses the bond."""
    down = [member for member in bond.members if not member.up]
    if down:
        states = ", ".join(f"{member.name} is {member.state}" for member in down)
        yield Finding(
            id="bond-link-down",
            status="warn" if len(down) < len(bond.members) else "fail",
            found=f"{bond.name}: {states}",
            expected=f"all {len(bond.members)} links are up",
            fix=f"look at cables and switch: cat /proc/net/bonding/{bond.name}",
        )
    if bond.bond.mode == "802.3ad" and not bond.bond.partner:
        yield Finding(
            id="bond-lacp",
            status="warn",
            found=f"{bond.name}: nobody speaks LACP at the other end",
            expected="the switch has its ports in one LACP group",
            fix="configure the switch",
        )
    yield from _hash(bond, tunnels)


def _hash(bond: ObservedBond, tunnels: bool) -> Iterator[Finding]:
    mode, policy = bond.bond.mode, bond.bond.hash_policy
    if mode == "active-backup":
        active = ", ".join(member.name for member in bond.members if member.active) or "none"
        yield Finding(
            id="bond-hash",
            status="ok",
            found=f"{bond.name} is active-backup: one link ({active}) carries all, by choice",
            expected="another link takes over when it fails",
        )
    elif tunnels and mode in _HASHING and policy not in _SPREADS_TUNNELS:
        yield Finding(
            id="bond-hash",
            status="warn",
            found=f"{bond.name} has xmit_hash_policy {policy}: one link carries all VXLAN traffic "
            "between two hosts, as their addresses are always the same",
            expected="xmit_hash_policy layer3+4: the UDP ports of a tunnel differ by flow",
            fix=f"ip link set {bond.name} type bond xmit_hash_policy layer3+4",
        )


# -- The observed state and faults of each port, and findings about the host. ---------------------


def observed_port(seen: BridgeObservation, port_id: str) -> ObservedPort:
    """Return the observed state of one port; the fault says why its frames cannot pass."""
    link = seen.taps.get(port_id)
    if link is None:
        return _without_device(seen, port_id)
    bridge = seen.bridges.get(link.master or "")
    details: dict[str, Any] = {
        "device": link.name,
        "bridge": (bridge.given if bridge else "") or link.master,
        "mtu": link.mtu,
        "link_state": "up" if link.up else "down",
        "carrier": link.carrier,
        "multi_queue": link.multi_queue,
        "ingress_kbps": _kbps(seen, link.name),
        "egress_kbps": _kbps(seen, device_name(SHAPER, port_id)),
    }
    mark = service_of(link)
    mtu, fault = mark.mtu if mark else link.mtu, None
    if bridge is not None and bridge.segment is not None:
        details |= _uplink_details(bridge.segment, mtu, seen)
        fault = _fault(bridge.segment, link, mtu, seen)
    impaired = (_without_link(link) if mark else None) or _cut(seen, port_id)
    return ObservedPort(fault, details, stamp_of(link), impaired)


def _fault(segment: Segment, link: Link, mtu: int, seen: BridgeObservation) -> str | None:
    """Return why no frames pass between a port's device and its network; ``mtu``: that of the network."""
    if link.mtu < mtu:
        return f"{link.name} has MTU {link.mtu}, and its network {mtu} (ip link set {link.name} mtu {mtu})"
    if problem := uplink_problem(segment, mtu, seen) or in_the_way(segment, None, seen):
        return f"{problem.detail} ({problem.fix})"
    made = seen.uplinks.get(segment.device)
    if made is not None and made.up and made.master == link.master:
        return None
    has_none = uplink_path_of(segment, mtu, seen) is None or not segment.device
    return None if has_none else f"{segment.device} of {segment} is not there, or not up"


def _without_device(seen: BridgeObservation, port_id: str) -> ObservedPort:
    gone = [n for n, d in seen.services.items() if d.port_id == port_id and d.link is None]
    name = gone[0] if gone else device_name(TAP, port_id)
    fault = f"device {name} is not on this host any more" if gone else None
    return ObservedPort(fault, details={"device": name, "link_state": None})


def _without_link(link: Link) -> str | None:
    """Return why a service port's device carries no frames; None if it does."""
    if not link.up:
        return f"{link.name} is down (ip link set {link.name} up)"
    return None if link.carrier else f"the other end of {link.name} is down, or no process has it open"


def _cut(seen: BridgeObservation, port_id: str) -> str | None:
    """Return the packet filter of another program that drops the port's frames; None if there is none."""
    return next((f"{each} ({each.fix})" for each in seen.obstacles.get(port_id, ()) if each.sure), None)


def _kbps(seen: BridgeObservation, device: str) -> int | None:
    rate = seen.queueing.get(device, Queueing()).root
    return rate.kbps if rate else None


def _uplink_details(segment: Segment, mtu: int, seen: BridgeObservation) -> dict[str, Any]:
    path = uplink_path_of(segment, mtu, seen)
    details: dict[str, Any] = {}
    made = seen.uplinks.get(segment.device)
    if made is not None:
        details |= {"device": made.name, "mtu": made.mtu, "link_state": "up" if made.up else "down"}
    if segment.device in seen.peers:
        details["peers"] = sorted(seen.peers[segment.device])
    if path is not None and path.interface is not None:
        link, bond = path.interface.link, path.interface.bond
        details["interface"] = {
            "name": link.name,
            "mtu": link.mtu,
            "link_state": "up" if link.up else "down",
            "carrier": link.carrier,
        }
        if bond is not None:
            details["bond"] = bond_details(bond)
    return {"uplink": details} if details else {}


def host_findings(seen: BridgeObservation) -> list[Finding]:
    """Return the findings about the host; ``seen`` must cover the whole host."""
    found = [*_vhost_net(seen), *_limitless(seen), *_tap_users(seen), *_flushing(seen), *_mtus(seen)]
    all_obstacles = [each for of_port in seen.obstacles.values() for each in of_port]
    found += obstacles.findings(seen.foreign_filters, all_obstacles)
    found += [*_programs(seen), *_managers(seen)]
    tunnels = seen.underlay.bond if seen.underlay else None
    of_interfaces = [each.bond for each in (*seen.interfaces.values(), seen.underlay) if each and each.bond]
    for name, bond in sorted({bond.name: bond for bond in of_interfaces}.items()):
        found += bond_findings(bond, tunnels=tunnels is not None and tunnels.name == name)
    return found


def _programs(seen: BridgeObservation) -> Iterator[Finding]:
    for name, what in sorted(seen.programs.items()):
        yield Finding(
            id=f"foreign-program-{name}",
            status="warn",
            found=f"{name}, an uplink, has {what} of another program, which can drop frames of VMs",
            expected="uplinks have no programs that the agent cannot judge",
            fix=f"if it is not meant for VMs: ip link set {name} xdp off; tc qdisc del dev {name} clsact",
        )


def _managers(seen: BridgeObservation) -> Iterator[Finding]:
    fixes = {
        "systemd-networkd": "in a file below /etc/systemd/network that comes first: [Match] Name={} "
        "and [Link] Unmanaged=yes; then networkctl reload",
        "NetworkManager": "in a file below /etc/NetworkManager/conf.d: [keyfile] unmanaged-devices="
        "interface-name:{}; then nmcli general reload",
    }
    for manager, names in sorted(seen.managers.items()):
        yield Finding(
            id=f"managed-by-{manager}",
            status="warn",
            found=f"{manager} configures {some(sorted(names))}: it can give them addresses, take them "
            "off their bridges or down",
            expected="the agent alone configures the devices that it makes",
            fix=fixes[manager].format(f"{DERIVED}*" if names[0].startswith(DERIVED) else names[0]),
        )


def _vhost_net(seen: BridgeObservation) -> Iterator[Finding]:
    if not seen.vhost_net:
        yield Finding(
            id="vhost-net",
            status="warn",
            found="/dev/vhost-net is missing: QEMU itself copies each frame of a tap",
            expected="vhost_net carries the frames of taps in the kernel",
            fix="modprobe vhost_net",
        )


def _limitless(seen: BridgeObservation) -> Iterator[Finding]:
    options = [bridge.link.data for bridge in seen.bridges.values()]
    if any(isinstance(each, Bridge) and each.fdb_max_learned is None for each in options):
        yield Finding(
            id="mac-table",
            status="warn",
            found="the kernel has no limit for the MACs that a bridge learns: a port without port "
            "security, or the wire, can fill the host's memory with them",
            expected="a kernel with that limit (fdb_max_learned), which came with Linux 6.8",
            fix="install such a kernel, or leave port_security enabled on all ports",
        )


def _tap_users(seen: BridgeObservation) -> Iterator[Finding]:
    """Report taps that others than root may open, which is set right only while no process has them open."""
    taps = [link for link in seen.taps.values() if service_of(link) is None and not link.use.is_for_root]
    if taps:
        names = some(sorted(link.name for link in taps))
        yield Finding(
            id="tap-users",
            status="warn",
            found=f"users of the host other than root may open {names}: the process that has "
            "them open has changed it",
            expected="root alone may open the tap of a VM",
            fix="stop these VMs and start them again: the agent sets it right in between",
        )


def _flushing(seen: BridgeObservation) -> Iterator[Finding]:
    if seen.flushing:
        yield Finding(
            id="firewall-flush",
            status="warn",
            found=f"nftables.service is enabled, and {seen.flushing} flushes the rules of others: "
            "until the agent puts its own back, VXLAN networks accept frames of any sender, and a VM "
            "may use each of its addresses with each of its MACs",
            expected="a firewall that replaces its own tables",
            fix=f"in {seen.flushing}, delete the tables that it makes instead of `flush ruleset`",
        )


def _mtus(seen: BridgeObservation) -> Iterator[Finding]:
    """Report interfaces of the operator whose MTU is too small for their segments."""
    for _, bridge in sorted(seen.bridges.items()):
        segment = bridge.segment
        path = uplink_path_of(segment, bridge.link.mtu, seen) if segment else None
        if path is not None and (small := small_mtu(path)):
            yield Finding(
                id="mtu",
                status="fail",
                found=f"{path.name}, the uplink of {segment}, has {small}",
                expected=f"{path.name} has MTU {path.mtu} at least",
                fix=f"ip link set {path.name} mtu {path.mtu}",
            )


# -- Detect a host firewall service that flushes all nftables rules, and so the agent's, when it starts.


_FILES = ("nftables.conf", "sysconfig/nftables.conf")  # Debian; Fedora and RHEL
_FLUSH = "flush ruleset"


def flushing_file(etc: Path = Path("/etc")) -> str:
    """Return the configuration file of an enabled firewall service that flushes; empty if none."""
    if not any(etc.glob("systemd/system/*.wants/nftables.service")):
        return ""
    for name in _FILES:
        try:
            lines = (etc / name).read_text(errors="replace").splitlines()
        except OSError:
            continue
        if any(line.split("#")[0].strip(" ;\t") == _FLUSH for line in lines):
            return str(etc / name)
    return ""
