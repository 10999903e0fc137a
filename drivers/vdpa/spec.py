"""Checks of a port request against the limits of software vDPA, before anything is stored."""

from __future__ import annotations

from collections.abc import Mapping

from drivers.vdpa.modes import Mode
from netplugin.backend import unknown_network
from netplugin.errors import Unsupported
from netplugin.models import PortSpec, Qos, VfOptions


def check_mode(spec: PortSpec, mode: Mode, bridge_mappings: Mapping[str, str]) -> None:
    """Refuse what a port in this mode does not support. Raises: Unsupported, InvalidRequest."""
    refusals = _of_native(spec) if mode is Mode.NATIVE else _of_relay(spec)
    for asked, why, fix in refusals:
        if asked:
            raise Unsupported(f"backend vdpa in {mode} mode: {why}", step="validate", fix=fix)
    name = str(spec.network.physical_network)
    if mode is Mode.NATIVE and name not in bridge_mappings:
        raise unknown_network(name, "[ovs] bridge_mappings", bridge_mappings)


def _of_relay(spec: PortSpec) -> list[tuple[bool, str, str]]:
    others = [a.mac for a in spec.port_security.allowed_addresses if a.mac not in (None, spec.mac)]
    return [
        (
            bool(others),
            "its VF takes frames for the port's own MAC only",
            "ask without a mac in port_security.allowed_addresses",
        ),
        (
            spec.vf.trunk or bool(spec.vf.allowed_vlans) or spec.vf.vlan_proto != "802.1Q",
            "OVS takes no tags from its VM",
            "ask without vf.trunk, vf.allowed_vlans and vf.vlan_proto, or with the backend sriov",
        ),
    ]


def _of_native(spec: PortSpec) -> list[tuple[bool, str, str]]:
    """In switchdev mode, settings belong to the VF's representor, and OVS can make only some of them."""
    plain = VfOptions(pci_address=spec.vf.pci_address)
    return [
        (
            spec.qos != Qos(),
            "rates are not available: no OVS that has the type could be tried",
            "ask without qos, or set [vdpa] mode = relay",
        ),
        (
            spec.vf != plain,
            "a NIC in switchdev mode leaves a VF's VLAN, trust, spoof check and link state to OVS",
            "ask with nothing but pci_address in vf",
        ),
    ]
