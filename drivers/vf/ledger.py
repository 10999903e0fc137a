"""Allocation of VFs to ports and the state of every VF, from the inventory and the claims. Pure.

If the request names a VF, only that VF qualifies. Otherwise the requested NUMA node is a hard
requirement, because a VM on the wrong node is permanently slower without any visible cause. So are the
features that not every NIC has (see ``refusal``). Candidates are then ordered: NICs with a
carrier first, then the NIC with the fewest VFs of the same VM (so that one failed NIC does not
disconnect it), then the NIC with the fewest allocated VFs, then the lowest VF number.

A NIC that is administratively down is refused: it forwards nothing, not even between its VFs. A NIC
that is up without a carrier is used last: the carrier can return by itself, and VFs of one NIC reach
each other without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any

from drivers.vf.commands import KIND
from drivers.vf.inventory import Inventory, Pf, Vf
from drivers.vf.memory import LostVf, Memory, claim_of, holders_of, locate, new_claim
from netplugin.api.errors import (
    BackendUnavailable,
    CapacityExhausted,
    Conflict,
    InvalidRequest,
    NetpluginError,
    Unsupported,
)
from netplugin.api.models import PortSpec, VfInfo, VfState
from netplugin.backend import NOBODY, Claim, Intent
from netplugin.host.nic_models import KEPT_BY_DPDK, MODELS, max_queues, model_of
from netplugin.host.vfs import is_uio, is_vfio

_STEP = "claim"
#: The claim's memory key for the VM of the port.
_VM = "vm_id"


class Use(Enum):
    """Who uses a VF, and how it reaches its network, which is a mode of the whole NIC."""

    #: A VM, through the NIC's embedded switch, by MAC and VLAN.
    VM = "vm"
    #: DPDK, in the same way.
    RELAY = "relay"
    #: DPDK, through a software switch, by the VF's representor.
    REPRESENTED = "represented"

    @property
    def by_dpdk(self) -> bool:
        return self is not Use.VM


def claim_vf(
    inventory: Inventory,
    intent: Intent,
    taken: Mapping[Claim, str],
    use: Use = Use.VM,
    *,
    had: str | None = None,
    notes: Mapping[str, Any] | None = None,
) -> Claim:
    """Return the port's claim on a VF: the existing one, or a new one that saves the VF's state.

    ``had``: the VF that the host's state shows to be this port's, even if no claim exists. ``notes``: extra
    values of the backend to save.

    Raises: Conflict, InvalidRequest, Unsupported, CapacityExhausted, BackendUnavailable.
    """
    spec, claim = intent.spec, claim_of(intent)
    assert spec is not None
    if claim is not None:
        _require_fit(inventory, claim, spec)
        return claim
    of_the_vm = {c.key for c in taken if c.kind == KIND and c.memory.get(_VM) == spec.vm_id}
    vf = choose(inventory, spec, holders_of(taken), use, had=had, of_the_vm=of_the_vm)
    if vf.attributes is None:
        raise _unreported(inventory, vf)
    adopted = vf.address == had or _is_of(vf, spec)
    return new_claim(inventory, vf, spec.mac, adopted=adopted, notes={_VM: spec.vm_id, **(notes or {})})


def _require_fit(inventory: Inventory, claim: Claim, spec: PortSpec) -> None:
    """Check that the claimed VF still fits the spec.

    A port keeps its VF, because its VM has it by PCI address. Queues are not checked: the guest has
    opened them already.
    """
    asked = spec.vf.pci_address
    found = locate(inventory, claim)
    pf = None if isinstance(found, LostVf) else inventory.pf_of(found)
    elsewhere = pf is not None and pf.network != spec.network.physical_network
    if asked not in (None, claim.key) or elsewhere:
        requested = asked or f"one on {spec.network.physical_network}"
        fix = "delete the port, wait until it is gone, and ask for it again"
        raise Conflict(f"the port has VF {claim.key} and asks for {requested}", step=_STEP, fix=fix)
    if pf is not None and (lacking := refusal(pf, spec, queues=False)):
        raise lacking


def refusal(pf: Pf, spec: PortSpec, *, queues: bool) -> Unsupported | None:
    """Return why a VF of this NIC cannot serve the port; None if it can.

    ``queues``: check the port's queue count too. Pass False if the VF's queues are not the port's.
    """
    most, able = max_queues(pf.driver, pf.desired_vfs), model_of(pf.driver).vf
    if queues and spec.queues > most:
        why = f"{spec.queues} are requested, and a VF has {most} at most"
        return _refuse(pf, "queues", why, f"ask for {most} or fewer")
    if spec.vf.vlan_qos and not able.keeps_priority:
        return _refuse(pf, "vf.vlan_qos", "its driver drops it", "ask without vf.vlan_qos")
    if spec.vf.vlan_proto == "802.1ad" and not able.stacks:
        why = "its driver does not report 802.1ad" if able.stacks is None else "its driver has 802.1Q alone"
        return _refuse(pf, "vf.vlan_proto", why, "ask for 802.1Q, or use a NIC of ice")
    if spec.vf.trunk and not able.tags:
        known = ", ".join(sorted(name for name, model in MODELS.items() if model.vf.tags))
        why = "what the NIC does with a VM's tags is not known"
        return _refuse(pf, "vf.trunk", why, f"ask for a VLAN, or use a NIC of {known}")
    return None


def _refuse(pf: Pf, field: str, why: str, fix: str) -> Unsupported:
    message = f"{pf.name} ({pf.driver or 'without a driver'}): {why}"
    return Unsupported.of_field(field, message, step="vf", fix=fix)


def choose(
    inventory: Inventory,
    spec: PortSpec,
    taken: Mapping[str, str],
    use: Use = Use.VM,
    *,
    had: str | None = None,
    of_the_vm: Collection[str] = (),
) -> Vf:
    """Choose the VF for a new port.

    ``taken``: port IDs by the PCI address of their VF. ``had``: the VF the port already has on the host.
    ``of_the_vm``: the VFs that its VM already has.

    Raises: Conflict, InvalidRequest, Unsupported, CapacityExhausted, BackendUnavailable.
    """
    if spec.vf.pci_address is not None:
        return _named(inventory, spec, taken, use, had)
    network = spec.network.physical_network
    pool = [v for v in inventory.vfs.values() if inventory.pf_of(v).network == network]
    where = f"on {network}"
    if spec.numa_node is not None:
        pool = [v for v in pool if _is_on(v, spec.numa_node)]
        where += f" and NUMA node {spec.numa_node}"
    nics = {v.pf: inventory.pf_of(v) for v in pool}
    lacking = {a: refusal(pf, spec, queues=not use.by_dpdk) for a, pf in nics.items()}
    able = [v for v in pool if lacking[v.pf] is None]
    if pool and not able:
        raise next(error for _, error in sorted(lacking.items()) if error is not None)
    if len(able) < len(pool):
        where += " of NICs that can serve the port"
    out = [v for v in able if v.address not in taken]
    free = [v for v in out if v.address == had] or [v for v in out if _is_of(v, spec)]
    free = free or [v for v in out if not unusable(inventory, v, use)]
    if not free:
        raise _exhausted(inventory, spec, able, out, where, use)
    problems = {a: pf_problem(nics[a], spec.network.mtu, use) for a in {v.pf for v in free}}
    fit = [v for v in free if problems[v.pf] is None]
    if not fit:
        raise next(error for _, error in sorted(problems.items()) if error is not None)
    used = Counter(v.pf for v in inventory.vfs.values() if v.address in taken)
    of_vm = Counter(v.pf for v in inventory.vfs.values() if v.address in of_the_vm)

    def order(vf: Vf) -> tuple[bool, int, int, str, int]:
        link = nics[vf.pf].link
        has_carrier = link is not None and link.carrier
        return not has_carrier, of_vm[vf.pf], used[vf.pf], vf.pf, vf.number

    return min(fit, key=order)


def _named(inventory: Inventory, spec: PortSpec, taken: Mapping[str, str], use: Use, had: str | None) -> Vf:
    """Return the VF that the port asks for."""
    address, network = spec.vf.pci_address or "", spec.network.physical_network
    vf = inventory.vfs.get(address)
    if vf is None or inventory.pf_of(vf).network != network:
        message = f"{address} is no VF of {network} on this host"
        raise InvalidRequest.of_field("vf.pci_address", message, step=_STEP, fix="see GET /v1/vfs")
    if address in taken:
        holder = taken[address]
        has_it = "quarantined, or was just given back" if holder == NOBODY else f"port {holder}'s"
        raise Conflict(f"VF {address} is {has_it}", step=_STEP, fix="see GET /v1/vfs")
    if not _is_on(vf, spec.numa_node):
        detail = f"VF {address} is on NUMA node {vf.numa_node}, and node {spec.numa_node} is requested"
        raise Conflict(detail, step=_STEP, fix="ask for the VF or for the node")
    pf = inventory.pf_of(vf)
    if lacking := refusal(pf, spec, queues=not use.by_dpdk):
        raise lacking
    is_its_own = address == had or _is_of(vf, spec)
    if not is_its_own and (reason := unusable(inventory, vf, use)):
        raise Conflict(f"VF {address} cannot be used: {reason}", step=_STEP)
    if problem := pf_problem(pf, spec.network.mtu, use):
        raise problem
    return vf


def _is_on(vf: Vf, node: int | None) -> bool:
    """Whether a VF may serve a VM on this NUMA node. A NIC without a node serves all nodes: firmware
    that does not report locality gives every device -1, NUMA_NO_NODE (include/linux/numa.h)."""
    return node is None or vf.numa_node is None or vf.numa_node == node


def _exhausted(
    inventory: Inventory, spec: PortSpec, pool: list[Vf], out: list[Vf], where: str, use: Use
) -> NetpluginError:
    """Return the error for an exhausted pool, with its usage (``out``: the VFs without a port)."""
    hidden = next((v for v in out if v.attributes is None), None)
    if hidden is not None:
        return pf_problem(inventory.pf_of(hidden), 0, use) or _unreported(inventory, hidden)
    has = f"there are {len(pool)} VFs {where}, {len(pool) - len(out)} of them taken"
    if out:
        has += f", and {out[0].address} cannot be used: {unusable(inventory, out[0], use)}"
    nics = (a for a, pf in inventory.pfs.items() if pf.network == spec.network.physical_network)
    more = [f", or echo N > /sys/bus/pci/devices/{address}/sriov_numvfs" for address in nics]
    fix = "delete ports that are not needed" + "".join(more[:1])
    return CapacityExhausted(f"no VF is free: {has}", step=_STEP, fix=fix)


def _is_of(vf: Vf, spec: PortSpec) -> bool:
    """Whether an unclaimed VF is this port's: it has the port's MAC and is bound to vfio.

    This is the case after the store was lost. The running VM then keeps its VF.
    """
    reported = vf.attributes
    return is_vfio(vf.driver) and reported is not None and reported.mac == spec.mac


def unusable(inventory: Inventory, vf: Vf, use: Use = Use.VM) -> str | None:
    """Return why an unclaimed VF cannot be used so; None if it can.

    A VF is free if it has no driver; if it is bound to vfio and no process has it open; or if its
    network driver has an interface in this network namespace that is down and not enslaved.
    """
    pf = inventory.pf_of(vf)
    if vf.number not in pf.numbers:
        return "[sriov] devices leaves it out"
    if vf.attributes is None and pf.link is not None:
        return not_reported(pf)
    if not (use.by_dpdk and vf.driver in KEPT_BY_DPDK) and (without := _no_vfio(vf)):
        return without
    if vf.saved_by_libvirt:
        return "libvirt has MAC and VLAN of it to write back"
    if vf.is_open:
        return "a process has it open through vfio, and no port has it"
    if is_uio(vf.driver):
        return f"it is bound to {vf.driver}"
    return vf.host_use.how if vf.host_use else None


def _no_vfio(vf: Vf) -> str | None:
    """Return why vfio cannot assign this VF to a process by itself; None if it can."""
    if vf.iommu_group is None:
        return "it has no IOMMU group"
    if vf.group_mates:
        return f"it shares IOMMU group {vf.iommu_group} with {', '.join(vf.group_mates)}"
    return None


def not_reported(pf: Pf) -> str:
    """Return why the settings of a VF can be neither read nor changed."""
    if pf.link is None:
        return f"NIC {pf.address} has no network interface here"
    return f"{pf.name} does not report it, as while it or the NIC is being reset"


def _unreported(inventory: Inventory, vf: Vf) -> BackendUnavailable:
    pf = inventory.pf_of(vf)
    detail = f"VF {vf.address} cannot be used now: {not_reported(pf)}"
    return BackendUnavailable(detail, step=_STEP, fix=f"ask again when ip link show {pf.name} lists it")


def pf_problem(pf: Pf, mtu: int, use: Use = Use.VM) -> NetpluginError | None:
    """Return why a port cannot use a VF of this NIC; None if it can. ``mtu`` is in bytes."""
    if problem := pf.held.problem():
        return problem
    name, step = f"{pf.name} of {pf.network}", "pf"
    if pf.link is None:
        fix = "load its driver, and leave its interface in the agent's network namespace"
        return BackendUnavailable(f"NIC {name} has no network interface here", step=step, fix=fix)
    mode = f"devlink dev eswitch set pci/{pf.address} mode"
    if use is Use.REPRESENTED and not pf.switchdev:
        detail = f"{name} is not in switchdev mode: its VFs have no representors"
        return Conflict(detail, step=step, fix=f"{mode} switchdev")
    if use is not Use.REPRESENTED and pf.switchdev:
        detail = f"{name} is in switchdev mode: its VFs reach their representors only"
        return Conflict(detail, step=step, fix=f"{mode} legacy")
    if not pf.link.up:
        return BackendUnavailable(f"{name} is down", step=step, fix=f"ip link set {pf.name} up")
    if pf.link.mtu < mtu:
        fix = f"ip link set {pf.name} mtu {mtu}, or ask for a smaller network.mtu"
        return Conflict(f"{name} has MTU {pf.link.mtu}, and the network wants {mtu}", step=step, fix=fix)
    return None


def _pf_problem_of_any_use(pf: Pf) -> NetpluginError | None:
    """Like ``pf_problem``, for whichever use the NIC's mode allows."""
    return pf_problem(pf, 0, Use.REPRESENTED if pf.switchdev else Use.VM)


def out_of_order(inventory: Inventory) -> frozenset[str]:
    """Return the PCI addresses of VFs whose NIC has a problem, or does not report them."""
    return frozenset(
        address
        for address, vf in inventory.vfs.items()
        if vf.attributes is None or _pf_problem_of_any_use(inventory.pf_of(vf)) is not None
    )


# -- state of every VF -----------------------------------------------------------------------------


def list_vfs(inventory: Inventory, taken: Mapping[Claim, str], unfit: Mapping[Claim, str]) -> list[VfInfo]:
    """List every VF with its state: available, claimed (by a port), allocated (open in its VM),
    quarantined, stale (claimed but missing), or unusable, with the reason."""
    held = {c.key: (p, c) for c, p in taken.items() if c.kind == KIND and p != NOBODY}
    quarantined = holders_of(unfit)
    listed = []
    for address in sorted({*inventory.vfs, *held}):
        port_id, claim = held.get(address, (None, None))
        if (vf := inventory.vfs.get(address)) is not None:
            state, reason = _state(inventory, vf, claim, quarantined.get(address))
            pf = inventory.pf_of(vf)
            place: dict[str, Any] = {
                "pf": pf.name,
                "vf_index": vf.number,
                "numa_node": vf.numa_node,
                "physical_network": pf.network,
                "driver": vf.driver,
                "max_queues": max_queues(pf.driver, pf.desired_vfs),
                "left_out": vf.number not in pf.numbers,
            }
        else:
            assert claim is not None
            lost, memory = locate(inventory, claim), Memory.of(claim)
            state, reason = "stale", lost.reason if isinstance(lost, LostVf) else None
            place = {"pf": memory.pf_name, "vf_index": memory.number}
        listed.append(VfInfo(pci_address=address, state=state, port_id=port_id, reason=reason, **place))
    return listed


def _state(
    inventory: Inventory, vf: Vf, claim: Claim | None, quarantined: str | None
) -> tuple[VfState, str | None]:
    """Return the state of a VF that there is, with the reason. ``quarantined``: why, if it is."""
    if quarantined is not None:
        return "quarantined", quarantined
    if claim is not None:
        lost = locate(inventory, claim)
        if isinstance(lost, LostVf):
            return "stale", lost.reason
        return "allocated" if vf.is_open else "claimed", None
    pf = inventory.pf_of(vf)
    problem = _pf_problem_of_any_use(pf)
    if reason := unusable(inventory, vf, Use.RELAY) or (problem.detail if problem else None):
        return "unusable", reason
    if pf.switchdev:
        return "available", f"{pf.name} is in switchdev mode, for the native mode of vdpa alone"
    without = _no_vfio(vf)
    return "available", f"{without}: for the backend vdpa alone" if without else None
