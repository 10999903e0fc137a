"""Findings of the vdpa backend about the host: DPDK device probing, bridges, multicast, and the pool."""

from __future__ import annotations

from dataclasses import replace

from drivers.ovs.findings import of_bridges, of_underlay
from drivers.ovs.model import OvsObservation
from drivers.vdpa.model import BRIDGE, Mode, VdpaObservation
from drivers.vdpa.multicast import multicast_findings
from drivers.vf.usability import pool_findings
from netplugin.api.models import Finding
from netplugin.host.ovs_rows import OvsRoot
from netplugin.host.ovs_versions import (
    disables_pci,
    dpdk_words,
    probes_all_devices,
    setting_dpdk_extra,
    with_pci,
)
from netplugin.host.usability import Usability


def no_pci(root: OvsRoot) -> Usability | None:
    """Return why OVS cannot use a VF if ``dpdk-extra`` disables PCI; None if it does not."""
    if not disables_pci(root.other_config):
        return None
    return Usability(
        False,
        "OVS runs with dpdk-extra --no-pci, and so without any NIC",
        f"{_set_extra(root)}, restart ovs-vswitchd",
        "dpdk-extra",
    )


def findings(seen: VdpaObservation, mode: Mode, local_ip: str | None) -> list[Finding]:
    """Return the findings; ``seen`` must cover the whole host. Pure."""
    found = [*pool_findings(seen.inventory, mode.use), *of_bridges(_own(seen.ovs))]
    found += of_underlay(seen.ovs, local_ip if mode is Mode.VDUSE else None)
    if mode is Mode.NATIVE:
        return found
    return [*found, _probing(seen.ovs.root), *multicast_findings(seen.inventory)]


def _own(seen: OvsObservation) -> OvsObservation:
    """Keep only the backend's own bridge: another backend reports on the bridges of networks."""
    own = {name: bridge for name, bridge in seen.bridges.items() if name == BRIDGE}
    return replace(seen, bridges=own)


def _probing(root: OvsRoot) -> Finding:
    """Report whether vswitchd probes every vfio device at its start, including the VFs of VMs."""
    expected = "at its start vswitchd takes no device but those of its ports"
    if not probes_all_devices(root.version, root.other_config):
        return Finding(
            id="dpdk-probing",
            status="ok",
            found=f"dpdk-extra is {' '.join(dpdk_words(root.other_config)) or 'empty'}",
            expected=expected,
        )
    return Finding(
        id="dpdk-probing",
        status="warn",
        expected=expected,
        found="dpdk-extra lists no device: at its start vswitchd takes every one that is bound to "
        "vfio-pci and not in use, and with them the VFs of VMs that are not started yet",
        fix=f"{_set_extra(root)} (-a: an address that no device has), and restart ovs-vswitchd",
    )


def _set_extra(root: OvsRoot) -> str:
    return setting_dpdk_extra(with_pci(root.other_config))
