"""Plan the changes from the observed to the desired state of the ports' VFs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from drivers.vf.inventory import Inventory, Pf, Vf
from drivers.vf.memory import no_mac, vf_of
from drivers.vf.plan import attributes_of, check_vlan_qos, observed_vf, vf_changes
from netplugin.api.errors import InvalidRequest, NetpluginError, Unsupported
from netplugin.api.models import PortSpec
from netplugin.backend import Change, Intent, ObservedPort, Plan
from netplugin.host.vf_messages import GROUPS, VfAttributes

_KBPS = 1000  # the kernel takes whole Mbit/s


def check_spec(spec: PortSpec) -> None:
    """Refuse what no VF supports. Raises: Unsupported, InvalidRequest."""
    security, vf, kind = spec.port_security, spec.vf, spec.network.type
    refuse = InvalidRequest.of_field
    check_vlan_qos(spec)
    if security.enabled and vf.spoofchk is False:
        raise refuse("vf.spoofchk", "port_security.enabled rests on it: turn both off, or none")
    if security.enabled and vf.trusted:
        message = (
            "a trusted VM sets its own MAC (which spoofchk then lets pass), and may be promiscuous: "
            "turn port_security.enabled off with it, or ask without it"
        )
        raise refuse("vf.trusted", message)
    if vf.trunk and kind != "flat":
        raise refuse("vf.trunk", "the VM tags its frames itself: ask for a flat network")
    if vf.allowed_vlans and not vf.trunk:
        raise refuse("vf.allowed_vlans", "they are those of a trunk: ask for vf.trunk too")
    if vf.vlan_proto == "802.1ad" and kind != "vlan":
        raise refuse("vf.vlan_proto", "it is the kind of a VLAN's tag: ask for a vlan network")
    for asked, why, fix in _impossible(spec):
        if asked:
            raise Unsupported(f"backend sriov: {why}", step="validate", fix=fix)


def _impossible(spec: PortSpec) -> list[tuple[bool, str, str]]:
    security, qos = spec.port_security, spec.qos
    rates = (qos.egress_kbps or 0, qos.min_egress_kbps or 0)
    usual = PortSpec.model_fields["rx_queue_size"].default
    is_tagged = spec.vf.trunk or spec.vf.vlan_proto == "802.1ad"
    return [
        (
            # include/uapi/linux/if_link.h; MAX_VLAN_LIST_LEN is 1, net/core/rtnetlink.c.
            bool(spec.vf.allowed_vlans),
            "Linux has no request that limits the VLANs of a VF (IFLA_VF_VLAN_LIST takes one VLAN, which "
            "is then the VF's own)",
            "ask without vf.allowed_vlans, and limit the VLANs at the switch",
        ),
        (
            spec.vf.teaming and is_tagged,
            "the virtio NIC of the VF's team takes no tags from the VM and is on a VLAN of 802.1Q",
            "ask without vf.teaming, or without vf.trunk and with vf.vlan_proto 802.1Q",
        ),
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
    ]


def desired_attributes(spec: PortSpec) -> VfAttributes:
    """Return the attributes that the PF should have for the port's VF."""
    return replace(
        attributes_of(spec),
        min_mbps=(spec.qos.min_egress_kbps or 0) // _KBPS,
        max_mbps=(spec.qos.egress_kbps or 0) // _KBPS,
    )


def _want(intent: Intent, pf: Pf, vf: Vf) -> VfAttributes:
    """Return the desired attributes. A teamed VF has its MAC only while a VM has it.

    Otherwise the NIC would deliver the VM's frames to an unused VF while the virtio NIC waits for them
    on the PF ("Live Migration of a VM with SR-IOV VF & virtio-net in STANDBY mode" in the kernel's
    Documentation/networking/net_failover.rst). libvirt writes the MAC before QEMU opens the VF, and
    restores the saved one (zero) after QEMU has closed it (see ``LIBVIRT_STATE``), so the guest's
    driver finds the MAC. This function covers all other cases.
    """
    assert intent.spec is not None
    want = desired_attributes(intent.spec)
    is_away = intent.spec.vf.teaming and not vf.is_with_vm
    return replace(want, mac=no_mac(pf, vf)) if is_away else want


def make_plan(intents: Sequence[Intent], inventory: Inventory) -> Plan:
    """See ``netplugin.backend.Backend.plan``."""
    changes: list[Change] = []
    refused: dict[str, NetpluginError] = {}
    for intent in sorted(intents, key=lambda i: i.port_id):
        try:
            changes += vf_changes(intent, inventory, _want)
        except NetpluginError as error:
            refused[intent.port_id] = error
    return Plan(tuple(changes), refused)


def observed_ports(intents: Sequence[Intent], inventory: Inventory) -> Mapping[str, ObservedPort]:
    """Return the observed state of each port. The claim identifies its VF: a VF carries no mark."""
    found: dict[str, ObservedPort] = {}
    for intent in intents:
        port = observed_vf(intent, inventory)
        if port is not None and intent.spec is not None:
            vf = vf_of(intent, inventory)
            port = replace(port, guest=vf.is_with_vm if vf else None)
            found[intent.port_id] = _with_rates(port, desired_attributes(intent.spec))
    return found


def _with_rates(port: ObservedPort, want: VfAttributes) -> ObservedPort:
    """Add to the impairment that the rates wait for a carrier, if they do (see ``to_vm``)."""
    has = tuple(port.details.get(name) for name in GROUPS["rate"])
    if port.impaired is None or has in ((None, None), (want.min_mbps, want.max_mbps)):
        return port
    return replace(port, impaired=f"{port.impaired}, and the port's rates are set when it has one")
