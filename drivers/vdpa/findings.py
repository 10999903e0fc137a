"""Findings of the vdpa backend about the host: DPDK device probing, bridges, multicast, and the pool."""

from __future__ import annotations

from dataclasses import replace

from drivers.ovs.findings import of_bridges
from drivers.ovs.model import OvsObservation
from drivers.vdpa.model import BRIDGE, Mode, VdpaObservation
from drivers.vdpa.multicast import multicast_findings
from drivers.vf.usability import pool_findings
from netplugin.api.models import Finding
from netplugin.host.ovs_rows import OvsRoot
from netplugin.host.ovs_versions import probes_all_devices
from netplugin.host.usability import Usability

_NO_DEVICE = "-a 0000:00:00.0"


def no_pci(root: OvsRoot) -> Usability | None:
    """Return why OVS cannot use a VF if ``dpdk-extra`` disables PCI; None if it does not."""
    if "--no-pci" not in _words(root):
        return None
    return Usability(
        False,
        "OVS runs with dpdk-extra --no-pci, and so without any NIC",
        f'ovs-vsctl set Open_vSwitch . other_config:dpdk-extra="{_NO_DEVICE}", restart ovs-vswitchd',
        "dpdk-extra",
    )


def findings(seen: VdpaObservation, mode: Mode) -> list[Finding]:
    """Return the findings; ``seen`` must cover the whole host. Pure."""
    found = [*pool_findings(seen.inventory, mode.use), *of_bridges(_own(seen.ovs))]
    if mode is Mode.NATIVE:
        return found
    return [*found, _probing(seen.word.root), *multicast_findings(seen.inventory)]


def _own(seen: OvsObservation) -> OvsObservation:
    """Keep only the backend's own bridge: another backend reports on the bridges of networks."""
    own = {name: bridge for name, bridge in seen.bridges.items() if name == BRIDGE}
    return replace(seen, bridges=own)


def _probing(root: OvsRoot) -> Finding:
    """Report whether vswitchd probes every vfio device at its start, including the VFs of VMs."""
    expected = "at its start vswitchd takes no device but those of its ports"
    words = _words(root)
    listed = any(word in ("-a", "--allow", "-w", "--no-pci") for word in words)
    if listed or not probes_all_devices(root.version):
        return Finding(
            id="dpdk-probing",
            status="ok",
            found=f"dpdk-extra is {' '.join(words) or 'empty'}",
            expected=expected,
        )
    return Finding(
        id="dpdk-probing",
        status="warn",
        expected=expected,
        found="dpdk-extra lists no device: at its start vswitchd takes every one that is bound to "
        "vfio-pci and not in use, and with them the VFs of VMs that are not started yet",
        fix=f'ovs-vsctl set Open_vSwitch . other_config:dpdk-extra="{_NO_DEVICE}" (which is no '
        "device), and restart ovs-vswitchd",
    )


def _words(root: OvsRoot) -> list[str]:
    return root.other_config.get("dpdk-extra", "").split()
