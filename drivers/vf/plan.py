"""Plan the steps of VFs, to a port's desired state and back, and report the ports' state (pure)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace

from drivers.vf.commands import BindVf, SetVf, UnbindVf
from drivers.vf.inventory import Inventory, Pf, Setting, Vf, libvirt_file
from drivers.vf.ledger import Use, not_reported, pf_problem
from drivers.vf.memory import LostVf, Memory, attributes_before, claim_of, locate, no_mac
from netplugin.api.errors import Conflict, OperationTimeout, TryAgain, Unsupported
from netplugin.api.models import PortSpec
from netplugin.backend import Change, Intent, ObservedPort
from netplugin.host.vf_messages import NO_MAC, VfAttributes, differing
from netplugin.host.vfs import VFIO, is_vfio

# -- Plan the steps from the current state of a VF to the desired one, and back to the original. Pure.
# To a VM: attributes first, because the VF's driver requests its MAC when it binds; then the driver. If
# the NIC refuses an attribute, nothing has been unbound yet. Back to the host: unbind vfio, restore the
# attributes, then bind the driver, which finds its original MAC. The VF is reset between two drivers.
#
# Each step is planned from observed state only, so a crash between steps needs no special handling.


def to_vm(port_id: str, pf: Pf, vf: Vf, want: VfAttributes, *, bind: bool) -> list[Change]:
    """Plan how a reported VF gets these attributes and, if ``bind``, the driver vfio-pci."""
    have = vf.attributes
    assert have is not None
    if pf.link is None or not pf.link.carrier:
        # Drivers compare a rate with the link speed and refuse it without a link (igb_ndo_set_vf_bw,
        # ixgbe_ndo_set_vf_bw, i40e_set_bw_limit, bnxt_set_vf_bw). The rates are set once there is one.
        want = replace(want, min_mbps=have.min_mbps, max_mbps=have.max_mbps)
    at, binds = change_at(port_id, pf, vf), bind and not is_vfio(vf.driver)
    changes: list[Change] = []
    groups = differing(have, want)
    if "mac" in groups and want.mac == no_mac(pf, vf):
        groups = groups[1:]  # a separate change: a VM may have the VF by now
        optional = want.mac == NO_MAC  # if it is refused, ``no_mac`` returns the placeholder
        changes.append(SetVf(*at, pf.name, ("mac",), want, optional, unless_up=binds, unless_with_vm=True))
    if groups:
        changes.append(SetVf(*at, pf.name, groups, want, unless_up=binds))
    if binds:
        changes.append(BindVf(*at, VFIO, VFIO))
    elif bind and vf.driver_override not in (vf.driver, VFIO):
        changes.append(BindVf(*at, vf.driver, vf.driver, rebind=False))
    return changes


def to_host(port_id: str, pf: Pf, vf: Vf, memory: Memory) -> list[Change]:
    """Plan how a reported VF gets back its state from before the claim."""
    assert vf.attributes is not None
    original, want = memory.original, attributes_before(memory, pf, vf)
    at, overridden = change_at(port_id, pf, vf), vf.driver_override != original.driver_override
    # One change per group, because the NIC may not support one of them; none that it has already refused.
    settings = [
        SetVf(*at, pf.name, (group,), want, optional=True)
        for group in differing(vf.attributes, want)
        if Setting.of(group, want) not in vf.unsupported
    ]
    # A VF that we unbound from vfio may not have been reset yet, even if it is to have no driver.
    rebind = not original.has_driver(vf) or (vf.driver is None and overridden)
    # A driver takes a changed MAC only when it binds (igb_ndo_set_vf_mac: "Reload the VF driver").
    rebind = rebind or (vf.driver is not None and any("mac" in s.groups for s in settings))
    changes: list[Change] = []
    if rebind and vf.driver is not None:
        changes.append(UnbindVf(*at, vf.driver))
    changes += settings
    if rebind or overridden:
        changes.append(BindVf(*at, original.driver, original.driver_override, rebind))
    return changes


def change_at(port_id: str, pf: Pf, vf: Vf) -> tuple[tuple[str, ...], str, int, int]:
    """Return the first fields of a ``VfChange``: the port and the place of its VF, which is reported."""
    assert pf.link is not None
    return (port_id,), vf.address, pf.link.index, vf.number


# -- Plan the VF changes of ports and report their observed state. Pure. --------------------------


def attributes_of(spec: PortSpec) -> VfAttributes:
    """Return the attributes that the PF should have for a port's VF, without rates."""
    spoofchk = spec.port_security.enabled if spec.vf.spoofchk is None else spec.vf.spoofchk
    return VfAttributes(
        mac=spec.mac,
        vlan=spec.network.vlan_id or 0,
        vlan_qos=spec.vf.vlan_qos,
        spoofchk=spoofchk,
        trusted=spec.vf.trusted,
        link_state=spec.vf.link_state,
        vlan_stacked=spec.vf.vlan_proto == "802.1ad",
    )


def check_vlan_qos(spec: PortSpec) -> None:
    """Refuse a VLAN priority on a flat network. Raises: Unsupported."""
    if spec.network.type == "flat" and spec.vf.vlan_qos != 0:
        detail = f"backend {spec.backend}: a flat network has no VLAN tag that could carry vf.vlan_qos"
        raise Unsupported(detail, step="validate", fix="ask without vf.vlan_qos, or for a VLAN")


def vf_changes(
    intent: Intent,
    inventory: Inventory,
    desired: Callable[[Intent, Pf, Vf], VfAttributes],
    *,
    for_dpdk: bool = False,
) -> list[Change]:
    """Plan the changes to the VF of a desired port, or of a port that is being removed.

    A desired port whose VF is not reported needs no change; ``observed_vf`` reports the fault. A
    port that is being removed waits until its VF is reported again, because the VF still has the
    settings of the VM.

    Raises: Conflict if the changes are impossible, OperationTimeout if they are impossible for now.
    """
    claim = claim_of(intent)
    if claim is None:
        if intent.spec is None:
            return []
        raise no_vf()
    vf = locate(inventory, claim)
    if isinstance(vf, LostVf):
        if intent.spec is None and vf.away:
            release = f"if it is gone for good: DELETE /v1/vfs/{claim.key}/quarantine"
            raise _waits(vf.reason, f"bring the NIC back; {release}")
        if intent.spec is None or not vf.moved:
            return []  # nothing to restore, or reported as a fault: the VF may come back
        raise Conflict(vf.reason, step="plan", fix="delete the port and ask for it again")
    pf, memory = inventory.pf_of(vf), Memory.of(claim)
    pf.held.require()
    if intent.spec is not None:
        if vf.attributes is None:
            return []
        want = desired(intent, pf, vf)
        if vf.is_open and intent.spec.vf.trusted and not for_dpdk:
            # The guest of a trusted VF may set its own MAC.
            want = replace(want, mac=vf.attributes.mac)
        binds = not (for_dpdk and memory.kept_by_dpdk)
        if (use := vf.host_use if binds else vf.host_hold) is not None:
            raise use.conflict(vf.address, "plan")
        return to_vm(intent.port_id, pf, vf, want, bind=binds)
    if vf.is_open:
        raise in_use(vf.address, vf.iommu_group)
    if vf.saved_by_libvirt:
        raise _libvirt_is_not_done(pf, vf)
    if vf.attributes is None:
        fix = f"see ip link show {pf.name}; if it never lists the VF, reset the NIC or make its VFs again"
        raise _waits(not_reported(pf), fix, TryAgain if vf.is_awaited else OperationTimeout)
    changes = to_host(intent.port_id, pf, vf, memory)
    if changes and vf.host_hold is not None:
        if not memory.has_set(vf.attributes):
            return []  # a VF that was made again and given to others: nothing of the port is on it
        raise vf.host_hold.conflict(vf.address, "plan")
    return changes


def _waits(reason: str, fix: str, kind: type[OperationTimeout] = OperationTimeout) -> OperationTimeout:
    """Build the error for a VF that cannot be released until its NIC reports it again."""
    return kind(
        f"{reason}. The port stays removing, and nobody gets its VF, until that has ended", step="pf", fix=fix
    )


def in_use(address: str, group: str | None) -> Conflict:
    """Build the error for a VF that cannot be released because it is in use."""
    detail = (
        f"VF {address} is in use: something has /dev/vfio/{group} open. The port goes when that is closed"
    )
    fix = f"detach it from the VM or stop the VM (fuser /dev/vfio/{group})"
    return Conflict(detail, step="plan", fix=fix)


def _libvirt_is_not_done(pf: Pf, vf: Vf) -> Conflict:
    """Build the error for a VF whose saved settings libvirt has yet to restore."""
    file = f"/run/libvirt/hostdevmgr/{libvirt_file(pf.name, vf.number)}"
    detail = f"libvirt has MAC and VLAN of VF {vf.address} to write back ({file}). The port goes when it has"
    return Conflict(detail, step="plan", fix="start libvirt; if the file is of no VM any more, remove it")


def no_vf() -> Conflict:
    """Build the error for a port that has no claim."""
    return Conflict("the port has no VF", step="plan", fix="PUT it again")


def observed_vf(intent: Intent, inventory: Inventory, use: Use = Use.VM) -> ObservedPort | None:
    """Return the observed state of a port's VF. The claim identifies it: a VF carries no mark."""
    claim = claim_of(intent)
    if claim is None or intent.spec is None:
        return None
    vf = locate(inventory, claim)
    if isinstance(vf, LostVf):
        return ObservedPort(vf.reason, {"pci_address": claim.key})
    pf = inventory.pf_of(vf)
    problem = pf_problem(pf, intent.spec.network.mtu, use)
    fault = f"{problem.detail} ({problem.fix})" if problem else None
    passes = fault is None and vf.is_awaited
    if fault is None and vf.attributes is None:
        fault = not_reported(pf)
    cable = None if pf.link is None or pf.link.carrier else f"{pf.name} has no carrier"
    details = _details(pf, vf, Memory.of(claim))
    return ObservedPort(fault, details, impaired=cable, passes=passes)


def place(memory: Memory) -> dict[str, object]:
    """Return the location of a VF, for a binding."""
    return {
        "pf": memory.pf_name,
        "pf_pci_address": memory.pf_address,
        "vf_index": memory.number,
        "numa_node": memory.numa_node,
    }


def _details(pf: Pf, vf: Vf, memory: Memory) -> dict[str, object]:
    return {
        "pci_address": vf.address,
        "pf": pf.name,
        "vf_index": vf.number,
        "numa_node": vf.numa_node,
        "driver": vf.driver,
        "in_use": vf.is_open,
        "carrier": pf.link is not None and pf.link.carrier,
        **(asdict(vf.attributes) if vf.attributes else {}),
        "before": asdict(memory.original),
    }
