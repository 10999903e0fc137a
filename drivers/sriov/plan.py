"""From what is wanted of ports and how their VFs are to the changes between them: without a host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from drivers.vf.changes import KIND
from drivers.vf.inventory import Inventory, Pf, Vf
from drivers.vf.ledger import pf_problem
from drivers.vf.memory import Lost, Memory, locate, remembered
from drivers.vf.steps import to_host, to_vm
from netplugin.backend import Change, Claim, Intent, Observation, ObservedPort, Plan
from netplugin.errors import Conflict, FieldError, InvalidRequest, NetpluginError, Unsupported
from netplugin.host.vfs import VfAttributes
from netplugin.models import PortSpec

_KBPS = 1000  # the kernel takes whole Mbit/s


@dataclass(frozen=True)
class Seen(Observation):
    """The whole pool, whichever ports are in question."""

    inventory: Inventory = field(default_factory=Inventory)


def check_spec(spec: PortSpec) -> None:
    """Refuse what no VF can do. Raises: Unsupported, InvalidRequest."""
    security, vf = spec.port_security, spec.vf
    if security.enabled and vf.spoofchk is False:
        message = "port_security.enabled rests on it: turn both off, or none"
        raise InvalidRequest(
            f"vf.spoofchk: {message}", step="validate",
            errors=[FieldError(field="vf.spoofchk", message=message)],
        )  # fmt: skip
    for asked, why, fix in _impossible(spec):
        if asked:
            raise Unsupported(f"backend sriov: {why}", step="validate", fix=fix)


def _impossible(spec: PortSpec) -> list[tuple[bool, str, str]]:
    security, vf, qos = spec.port_security, spec.vf, spec.qos
    rates = (qos.egress_kbps or 0, qos.min_egress_kbps or 0)
    usual = PortSpec.model_fields["rx_queue_size"].default
    return [
        (
            security.enabled and bool(security.allowed_addresses),
            "a NIC checks the source MAC of a VF (spoofchk), never its IP addresses",
            "ask without port_security.allowed_addresses, or use another backend",
        ),
        (
            qos.ingress_kbps is not None,
            "a NIC limits what a VF sends, not what it receives",
            "ask without qos.ingress_kbps",
        ),
        (
            any(rate % _KBPS for rate in rates),
            "a NIC takes rates in whole Mbit/s",
            "give qos rates as multiples of 1000 kbit/s",
        ),
        (
            (spec.rx_queue_size, spec.tx_queue_size) != (usual, usual),
            "the rings of a VF are its driver's in the VM to size",
            "ask without rx_queue_size and tx_queue_size",
        ),
        (
            spec.network.type == "flat" and vf.vlan_qos != 0,
            "a flat network has no VLAN tag that could carry vf.vlan_qos",
            "ask without vf.vlan_qos, or for a VLAN",
        ),
        (
            vf.teaming,
            "vf.teaming needs a second port with the same MAC on another backend, kept in step with "
            "this one through a live migration, which is not available yet",
            "ask without vf.teaming",
        ),
    ]  # fmt: skip


def wanted(spec: PortSpec) -> VfAttributes:
    """What the PF should hold of the port's VF."""
    spoofchk = spec.port_security.enabled if spec.vf.spoofchk is None else spec.vf.spoofchk
    return VfAttributes(
        mac=spec.mac,
        vlan=spec.network.vlan_id or 0,
        vlan_qos=spec.vf.vlan_qos,
        spoofchk=spoofchk,
        trusted=spec.vf.trusted,
        link_state=spec.vf.link_state,
        min_mbps=(spec.qos.min_egress_kbps or 0) // _KBPS,
        max_mbps=(spec.qos.egress_kbps or 0) // _KBPS,
    )


def make_plan(intents: Sequence[Intent], inventory: Inventory) -> Plan:
    """See ``netplugin.backend.Backend.plan``."""
    changes: list[Change] = []
    refused: dict[str, NetpluginError] = {}
    for intent in sorted(intents, key=lambda i: i.port_id):
        try:
            changes += _changes(intent, inventory)
        except NetpluginError as error:
            refused[intent.port_id] = error
    return Plan(tuple(changes), refused)


def _changes(intent: Intent, inventory: Inventory) -> list[Change]:
    claim = claim_of(intent)
    if claim is None:
        if intent.spec is None:
            return []
        raise Conflict("the port has no VF", step="plan", fix="PUT it again")
    vf = locate(inventory, claim)
    if isinstance(vf, Lost):
        if intent.spec is None or not vf.moved:
            return []  # nothing to give back; or it is said as a fault, and may come again
        raise Conflict(vf.reason, step="plan", fix="delete the port and ask for it again")
    pf, memory = inventory.pf_of(vf), remembered(claim)
    if intent.spec is not None:
        want = wanted(intent.spec)
        return to_vm(intent.port_id, pf, vf, want, bind=not memory.keeps_driver)
    if vf.is_open:
        raise Conflict(
            f"VF {vf.address} is in use: a VM has /dev/vfio/{vf.iommu_group} open. The port goes "
            "when the VM has let go of it", step="plan",
            fix=f"detach it from the VM or stop the VM (fuser /dev/vfio/{vf.iommu_group})",
        )  # fmt: skip
    return to_host(intent.port_id, pf, vf, memory)


def claim_of(intent: Intent) -> Claim | None:
    return next((claim for claim in intent.claims if claim.kind == KIND), None)


def observed_ports(intents: Sequence[Intent], inventory: Inventory) -> Mapping[str, ObservedPort]:
    """What there is of each port: a VF carries no mark, its claim tells whose it is."""
    found: dict[str, ObservedPort] = {}
    for intent in intents:
        claim = claim_of(intent)
        if claim is None or intent.spec is None:
            continue
        vf = locate(inventory, claim)
        if isinstance(vf, Lost):
            found[intent.port_id] = ObservedPort(vf.reason, {"pci_address": claim.key})
        else:
            pf = inventory.pf_of(vf)
            problem = pf_problem(pf, intent.spec.network.mtu)
            fault = f"{problem.detail} ({problem.fix})" if problem else None
            found[intent.port_id] = ObservedPort(fault, _details(pf, vf, remembered(claim)))
    return found


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
