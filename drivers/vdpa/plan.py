"""Plan the changes from the observed to the desired state: each port in its mode, and OVS for all. Pure.

A port in mode ``vduse`` is planned in ``vduse_plan``, one on a VF here. To a VM: first the VF's attributes
and driver, then the rows, then the flows; a port without flows passes no traffic. Back to the host: the rows
and flows are removed, a read-back confirms that OVS has released the VF (if not, DPDK is asked to detach it),
and a later round restores the VF. Where OVS must open a VF again for another MAC (``relay_mac``), its row is
removed first in the same way, and a later round sets the MAC and adds the row and the flows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from drivers.ovs import findings
from drivers.ovs.model import OvsObservation
from drivers.ovs.placing import MAX_VHOST_SOCKETS, place_port, require_place
from drivers.ovs.plan import has_its_flows, ovs_changes
from drivers.ovs.ports import RelayVfPort, VhostPort, access_vlan
from drivers.ovs.sockets import socket_path
from drivers.ovs.usability import tso_enabled
from drivers.vdpa import vduse_plan
from drivers.vdpa.model import (
    ACCELERATOR,
    BACKEND,
    BRIDGE,
    LAYOUT,
    NATIVE_TYPE,
    Mode,
    Steps,
    VdpaObservation,
    lacks_native,
    mode_of,
    mode_on_host,
)
from drivers.vdpa.multicast import lost_by, needs_trust
from drivers.vdpa.relay_mac import mac_for_now, mac_of, opened_with, opens_again
from drivers.vf.commands import BindVf, SetVf
from drivers.vf.inventory import Inventory, Pf, Setting, Vf
from drivers.vf.memory import Memory, claim_of, vf_of
from drivers.vf.plan import attributes_of, change_at, no_vf, observed_vf, vf_changes
from netplugin.api.errors import NetpluginError
from netplugin.backend import Change, Claim, Intent, ObservedPort, Plan
from netplugin.host.names import RELAY, device_name
from netplugin.host.ovs import OvsSettings
from netplugin.host.ovs_rows import MAC_MARK, OvsPort
from netplugin.host.ovs_underlay import too_narrow
from netplugin.host.vf_messages import VfAttributes
from netplugin.host.vfs import is_vfio


@dataclass(frozen=True)
class DetachVf(Change):
    """Make DPDK detach a VF that no port uses any more.

    When a port is removed, vswitchd detaches a device only if it attached it for that port. It keeps
    devices that DPDK probed at startup (``attached`` in ``netdev_dpdk_destruct``, OVS's
    lib/netdev-dpdk.c).
    """

    described_as = "have DPDK let go of VF {self.address}"

    address: str
    group: str | None


def make_plan(settings: OvsSettings, intents: Sequence[Intent], seen: VdpaObservation) -> Plan:
    """See ``netplugin.backend.Backend.plan``. Each port is planned in its mode, and OVS for all together."""
    steps: dict[str, Steps] = {}
    room = MAX_VHOST_SOCKETS - seen.ovs.vhost_sockets
    for intent in sorted(intents, key=lambda i: i.port_id):
        of_mode = vduse_plan.make_steps if _is_vduse(intent, seen) else _vf_steps
        steps[intent.port_id] = of_mode(settings, intent, seen, room)
        room -= steps[intent.port_id].desired is not None and intent.port_id not in seen.ovs.rows
    desired = {port_id: each.desired for port_id, each in steps.items() if each.desired is not None}
    leaving = {port_id for port_id, each in steps.items() if each.leaves}
    return Plan(
        (
            *(change for each in steps.values() for change in each.before),
            *ovs_changes(settings, LAYOUT, desired, leaving, seen.ovs),
            *(change for each in steps.values() for change in each.after),
        ),
        {port_id: each.refused for port_id, each in steps.items() if each.refused is not None},
        {port_id: each.kept for port_id, each in steps.items() if each.kept is not None},
    )


def _is_vduse(intent: Intent, seen: VdpaObservation) -> bool:
    mode = mode_of(intent) or mode_on_host(intent.port_id, seen)
    # Without a claim and a row: what is left over of a port whose removal was cut off.
    return mode is Mode.VDUSE or (mode is None and vduse_plan.vduse_name(intent.port_id) in seen.vduse)


def _vf_steps(settings: OvsSettings, intent: Intent, seen: VdpaObservation, room: int) -> Steps:
    """What a port on a VF needs, in either mode."""
    port_id, leaves = intent.port_id, intent.spec is None
    desired: VhostPort | None = None
    kept: NetpluginError | None = None
    vfs: list[Change] = []
    try:
        if intent.spec is not None:
            desired, kept = _desired(settings, intent, seen, room)
        elif port_id in seen.ovs.rows or port_id in seen.ovs.vf_ports:
            return Steps(leaves=leaves)  # OVS must release the VF first
        elif detach := _detach(intent, seen):
            return Steps(leaves=leaves, before=(detach,))
        if (
            desired is not None
            and _keeps_other_mac(intent, desired, seen)
            and (detach := _detach(intent, seen))
        ):
            vfs.append(detach)
        vfs += vf_changes(intent, seen.inventory, partial(_want, desired, seen.ovs), for_dpdk=True)
        vfs += _trust(intent, desired, seen)
        vfs += _driver_back(intent, seen.inventory)
    except NetpluginError as error:
        return Steps(leaves=leaves, before=tuple(vfs), refused=error, kept=kept)
    return Steps(desired=desired, leaves=leaves, before=tuple(vfs), kept=kept)


def _detach(intent: Intent, seen: VdpaObservation) -> DetachVf | None:
    """Have DPDK let go of a port's VF if it has the VF open although no row names it."""
    vf = vf_of(intent, seen.inventory)
    if vf is None or not vf.is_open or vf.address in seen.devices:
        return None
    return DetachVf((intent.port_id,), vf.address, vf.iommu_group)


def _keeps_other_mac(intent: Intent, desired: VhostPort, seen: VdpaObservation) -> bool:
    """Whether what has a relay's VF open without a row must close it, so that the VF gets another MAC."""
    vf = vf_of(intent, seen.inventory)
    if vf is None or vf.attributes is None or desired.vf_port is None or intent.port_id in seen.ovs.vf_ports:
        return False
    return vf.attributes.mac != mac_of(intent) and opens_again(seen.inventory.pf_of(vf), vf, desired.spec)


def _driver_back(intent: Intent, inventory: Inventory) -> list[Change]:
    """Bind the original driver again if it was removed from a VF that DPDK uses with its kernel driver."""
    claim, vf = claim_of(intent), vf_of(intent, inventory)
    if intent.spec is None or claim is None or vf is None or vf.is_open:
        return []
    memory = Memory.of(claim)
    if vf.attributes is None or not memory.kept_by_dpdk or vf.driver == memory.original.driver:
        return []
    at, before = change_at(intent.port_id, inventory.pf_of(vf), vf), memory.original
    return [BindVf(*at, before.driver, before.driver_override)]


def _want(desired: VhostPort | None, ovs: OvsObservation, intent: Intent, pf: Pf, vf: Vf) -> VfAttributes:
    """Return the VF's desired attributes. In native mode only the MAC; the representor has the rest.

    A trusted VF may receive other frames than its own, and the relay's flows keep them from the VM. If
    OVS already has the VF open, it is therefore trusted in a later round, once its flows are confirmed.
    """
    assert desired is not None and intent.spec is not None and vf.attributes is not None
    if mode_of(intent) is Mode.NATIVE:
        return replace(vf.attributes, mac=intent.spec.mac)
    want = replace(attributes_of(intent.spec), mac=mac_for_now(intent, vf, desired, ovs))
    if not want.trusted and not needs_trust(pf, vf, intent.spec.network.vlan_id):
        return want
    is_ready = not _is_live(desired, ovs) or (want.trusted and has_its_flows(desired, ovs))
    return replace(want, trusted=is_ready or vf.attributes.trusted)


def _is_live(desired: VhostPort, ovs: OvsObservation) -> bool:
    """Whether OVS may have the VF open, or has flows that lead from it to the VM."""
    return desired.port_id in ovs.vf_ports or bool(ovs.flows.get(desired.port_id))


def _trust(intent: Intent, desired: VhostPort | None, seen: VdpaObservation) -> list[Change]:
    """Trust the VF of a working relay. If the NIC refuses, the relay keeps working without trust."""
    vf = vf_of(intent, seen.inventory)
    if desired is None or mode_of(intent) is Mode.NATIVE or vf is None:
        return []
    have, pf, spec = vf.attributes, seen.inventory.pf_of(vf), desired.spec
    if have is None or have.trusted or spec.vf.trusted or not has_its_flows(desired, seen.ovs):
        return []
    want = replace(have, trusted=True)
    refused = Setting.of("trust", want) in vf.unsupported
    if refused or not needs_trust(pf, vf, spec.network.vlan_id):
        return []
    return [SetVf(*change_at(intent.port_id, pf, vf), pf.name, ("trust",), want, optional=True)]


def _desired(
    settings: OvsSettings, intent: Intent, seen: VdpaObservation, room: int
) -> tuple[VhostPort, NetpluginError | None]:
    """The desired port, and why it stays on its bridge (``place_port``).

    Raises: the error that prevents it.
    """
    claim = claim_of(intent)
    if claim is None:
        raise no_vf()
    socket = socket_path(settings, intent, seen.ovs.rows.get(intent.port_id))
    reopen = _must_reopen(intent, seen)
    if mode_of(intent) is Mode.NATIVE:
        make = partial(_native_port, intent, claim, socket, tso_enabled(seen.ovs.root))
        port, kept = place_port(settings, intent, seen.ovs, room, make)
        return replace(port, reopen=reopen), kept
    relay = _relay_port(intent, claim, socket, seen)
    require_place(settings, relay, seen.ovs, room)
    return replace(relay, reopen=reopen), None


def _relay_port(intent: Intent, claim: Claim, socket: str, seen: VdpaObservation) -> VhostPort:
    port = VhostPort.of(BACKEND, intent, BRIDGE, 0, socket=socket, tso=tso_enabled(seen.ovs.root))
    relay_vf = RelayVfPort(
        backend=BACKEND,
        port_id=intent.port_id,
        name=device_name(RELAY, intent.port_id),
        bridge=BRIDGE,
        device=claim.key,
        mtu=port.mtu,
        queues=port.spec.queues,
        opened_with=_opened_with(intent, seen),
    )
    return replace(port, vf_port=relay_vf)


def _native_port(intent: Intent, claim: Claim, socket: str, tso: bool, bridge: str) -> VhostPort:
    """The options follow the patch "netdev-dpdk: Introduce dpdkvdpa" and vendor guides."""
    port = VhostPort.of(BACKEND, intent, bridge, access_vlan(intent), socket=socket, tso=tso)
    memory = Memory.of(claim)
    options = {
        "vdpa-socket-path": socket,
        ACCELERATOR: claim.key,
        "dpdk-devargs": f"{memory.pf_address},representor=[{memory.number}]",
        "vdpa-max-queues": str(port.spec.queues),
        "vdpa-sw": "true",
    }
    return replace(port, type=NATIVE_TYPE, options=options)


def _opened_with(intent: Intent, seen: VdpaObservation) -> str:
    """Return ``RelayVfPort.opened_with`` of a port; while its VF is not reported, what the row has."""
    vf, vf_port = vf_of(intent, seen.inventory), seen.ovs.vf_ports.get(intent.port_id)
    if vf is not None and vf.attributes is not None:
        return opened_with(intent, seen.inventory.pf_of(vf), vf)
    return vf_port.interface.external_ids.get(MAC_MARK, "") if vf_port and vf_port.interface else ""


def _must_reopen(intent: Intent, seen: VdpaObservation) -> bool:
    """Whether OVS has a port for a VF but not the VF itself open: the VF was away and came back."""
    claim, vf = claim_of(intent), vf_of(intent, seen.inventory)
    vf_port = seen.ovs.vf_ports.get(intent.port_id)
    if claim is None or vf_port is None or vf is None:
        return False
    memory = Memory.of(claim)
    if memory.kept_by_dpdk:
        return vf.driver != memory.original.driver
    works = vf_port.interface is not None and vf_port.interface.works_at is not None
    return not is_vfio(vf.driver) or (works and not vf.is_open)


# -- observed state ----------------------------------------------------------------------------------


def observed_ports(intents: Sequence[Intent], seen: VdpaObservation) -> Mapping[str, ObservedPort]:
    """Return the observed state of each port, from its VF and its rows."""
    found: dict[str, ObservedPort] = {}
    for intent in intents:
        mode = mode_of(intent)
        if intent.spec is None or mode is None:
            continue
        if mode is Mode.VDUSE:
            found[intent.port_id] = vduse_plan.observed(intent, seen)
            continue
        vf = observed_vf(intent, seen.inventory, mode.use) or ObservedPort()
        row, vf_port = (m.get(intent.port_id) for m in (seen.ovs.rows, seen.ovs.vf_ports))
        details = {
            "mode": mode.value,
            "pci_address": vf.details.get("pci_address"),
            "vf": dict(vf.details),
            **(findings.details(row) if row else {}),
        }
        if vf_port is not None and vf_port.interface is not None:
            details["relay"] = {
                "device": vf_port.name,
                "ofport": vf_port.interface.ofport,
                "mtu": vf_port.interface.mtu,
                "link_state": vf_port.interface.link_state,
            }
        fault = vf.fault or _fault(mode, row, vf_port, seen)
        passes = vf.passes and fault == vf.fault
        impaired = vf.impaired
        if mode is Mode.RELAY and (there := vf_of(intent, seen.inventory)) is not None:
            vlan_id = intent.spec.network.vlan_id
            impaired = impaired or lost_by(seen.inventory.pf_of(there), there, vlan_id)
        guest = row.interface.connection if row and row.interface and mode is Mode.RELAY else None
        found[intent.port_id] = ObservedPort(fault, details, impaired=impaired, passes=passes, guest=guest)
    return found


def _fault(mode: Mode, row: OvsPort | None, vf_port: OvsPort | None, seen: VdpaObservation) -> str | None:
    """Return why the rows do not work; None if OVS reports no fault."""
    lost = lacks_native(seen.ovs.root) if mode is Mode.NATIVE else None
    if lost:
        return f"{lost.reason} (the port is in native mode and stays so)"
    if row is None:
        return None
    if broken := findings.of_port(row, seen.ovs):
        return broken
    if mode is Mode.NATIVE:
        return findings.of_uplinks(row, seen.ovs)
    return _of_relay(vf_port, seen.ovs) if vf_port else None


def _of_relay(vf_port: OvsPort, ovs: OvsObservation) -> str | None:
    interface = vf_port.interface
    if interface is None:
        return f"{vf_port.name} has no interface"
    narrow = (
        too_narrow([(interface.name, interface.mtu)], interface.mtu_request or 0) if interface.mtu else None
    )
    return (
        findings.of_interface(interface)
        or findings.of_segments(interface, ovs)
        or (f"{narrow.detail}: its VF takes no more" if narrow else None)
    )
