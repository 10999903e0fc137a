"""Check links: one MTU on every hop, bonds whose hash policy spreads flows, an IOMMU for VFs."""

from __future__ import annotations

from collections.abc import Iterator

from netplugin.api.models import Finding
from netplugin.tuning.checks.scene import Scene
from netplugin.tuning.planning.kernel_arguments import AMD
from netplugin.tuning.read.cpus import ARM
from netplugin.tuning.root import Unknown, known

# -- Check for one MTU on every hop, and for bonds whose hash policy spreads flows. ---------------


_HASHING = ("balance-xor", "802.3ad")


def links(scene: Scene) -> Iterator[Finding]:
    yield from _hops(scene)
    yield from _uplinks(scene)
    yield from _ovs_ports(scene)
    yield from _bonds(scene)


def _hops(scene: Scene) -> Iterator[Finding]:
    """Compare the MTU of each interface with the one below it: NIC below bond, bond below bridge."""
    interfaces = known(scene.facts.network.interfaces, ())
    mtus = {i.name: i.mtu for i in interfaces if not isinstance(i.mtu, Unknown)}
    pairs = {(lower, i.name) for i in interfaces for lower in i.lowers}
    pairs |= {(i.name, i.master) for i in interfaces if i.master}
    for lower, upper in sorted(pairs):
        below, above = mtus.get(lower), mtus.get(upper)
        if below is None or above is None or below == above:
            continue
        # A larger MTU above means fragments or drops; a smaller one may be deliberate (tunnel, VLAN).
        yield Finding(
            id="mtu",
            status="fail" if above > below else "warn",
            found=f"{upper} has MTU {above}, {lower} below it {below}",
            expected="one MTU end to end",
            fix=f"ip link set {lower} mtu {above}" if above > below else f"ip link set {upper} mtu {below}",
        )


def _uplinks(scene: Scene) -> Iterator[Finding]:
    """Check that the plan's NICs carry the largest MTU in use."""
    if scene.plan is None:
        return
    desired = max(scene.plan.intent.mtus)
    names = {name for nic in scene.plan.nics for name in nic.interfaces}
    for interface in known(scene.facts.network.interfaces, ()):
        mtu = known(interface.mtu, None)
        if interface.name in names and mtu is not None and mtu < desired:
            yield Finding(
                id="mtu",
                status="fail",
                found=f"{interface.name} has MTU {mtu}",
                expected=f"{desired}, the largest MTU in use",
                fix=f"ip link set {interface.name} mtu {desired}, or for a port of OVS "
                f"ovs-vsctl set Interface NAME mtu_request={desired}",
            )


def _ovs_ports(scene: Scene) -> Iterator[Finding]:
    if isinstance(scene.live.ovs, Unknown):
        return
    mtus = {port.name: port.mtu for port in scene.live.ovs.ports if port.mtu}
    uplinks = {port.name for port in scene.live.ovs.ports if port.type == "dpdk"}
    least = min((mtus[name] for name in uplinks if name in mtus), default=None)
    for name, mtu in sorted(mtus.items()):
        if least is not None and name not in uplinks and mtu > least:
            yield Finding(
                id="mtu",
                status="fail",
                found=f"port {name} of OVS has MTU {mtu}, its uplink {least}",
                expected="one MTU end to end",
                fix=f"ovs-vsctl set Interface UPLINK mtu_request={mtu}",
            )


def _bonds(scene: Scene) -> Iterator[Finding]:
    for bond in scene.facts.network.bonds:
        mode, policy = known(bond.mode, ""), known(bond.hash_policy, "")
        if mode in _HASHING and policy in ("layer2", "vlan+srcmac"):
            yield _hash(
                bond.name,
                f"{mode} with xmit_hash_policy {policy}",
                f"ip link set {bond.name} type bond xmit_hash_policy layer3+4",
            )
    if isinstance(scene.live.ovs, Unknown):
        return
    modes = {port.port: port.bond_mode for port in scene.live.ovs.ports if port.bond_mode}
    for name, mode in sorted(modes.items()):
        if mode == "balance-slb":
            yield _hash(
                name,
                "balance-slb, which spreads by MAC and VLAN",
                f"ovs-vsctl set Port {name} bond_mode=balance-tcp lacp=active, with LACP on the switch",
            )


def _hash(bond: str, what: str, fix: str) -> Finding:
    return Finding(
        id="bond-hash",
        status="warn",
        found=f"{bond} is {what}: all between two MAC addresses, as of "
        "two routers or tunnels, is on one link",
        expected="a hash that heeds ports: an aggregation is as good as its hash",
        fix=fix,
    )


# -- Check for an IOMMU, which VFs need before they can be passed to a VM or to DPDK. -------------


def vfs(scene: Scene) -> Iterator[Finding]:
    """One IOMMU finding; none if no NIC supports SR-IOV."""
    nics = [nic for nic in known(scene.facts.network.nics, ()) if known(nic.total_vfs, None)]
    groups = scene.facts.iommu.groups
    if not nics or isinstance(groups, Unknown):
        return
    enabled = sum(known(nic.vfs, None) or 0 for nic in nics)
    yield Finding(
        id="iommu",
        status="ok" if groups else "fail" if enabled else "warn",
        found=f"{groups or 'no'} IOMMU groups; {enabled} VFs enabled on "
        f"{', '.join(nic.address for nic in nics)}",
        expected="IOMMU on",
        fix=None if groups else _fix(scene),
    )


def _fix(scene: Scene) -> str:
    """AMD and ARM IOMMUs are enabled by default if the firmware reports them (kernel-parameters.txt)."""
    if known(scene.facts.cpus.arch, "") == ARM:
        return "switch the SMMU on in the firmware"
    if known(scene.facts.cpus.vendor, "") == AMD:
        return "switch the IOMMU (AMD-Vi) on in the firmware; boot without amd_iommu=off"
    return "boot with intel_iommu=on iommu=pt; VT-d must be on in the firmware"
