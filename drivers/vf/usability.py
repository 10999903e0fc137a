"""Whether this host can give VFs to VMs, and findings about its NICs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from drivers.vf.inventory import Inventory, Pf, ambiguous, find_pfs, names_in
from drivers.vf.ledger import Use, pf_problem
from drivers.vf.memory import vf_of
from drivers.vf.options import PoolDevice
from netplugin.api.models import Finding
from netplugin.backend import Intent
from netplugin.host.nic_models import KEPT_BY_DPDK, model_of
from netplugin.host.usability import Usability
from netplugin.host.vfs import VFIO, read_link, read_text

# -- Check whether this host can give VFs to VMs, and report problems of single NICs. -------------


def usability(sys: Path, devices: Sequence[PoolDevice], *, for_dpdk: bool = False) -> Usability:
    """Check that there are VFs, an IOMMU, and vfio-pci.

    ``for_dpdk``: DPDK uses the VFs of some NICs through their kernel driver (see ``KEPT_BY_DPDK``), and
    needs neither IOMMU nor vfio-pci for those.
    """
    if not devices:
        return Usability(False, "no NIC is configured", "set [sriov] devices, like physnet1:eth1", "devices")
    found, missing = find_pfs(sys, devices)
    for address, several in sorted(ambiguous(found).items()):
        reason = f"NIC {address} is the uplink of several networks: {', '.join(several)}"
        return Usability(False, reason, "name each NIC once in [sriov] devices", "devices")
    if not found:
        reason = f"no NIC with SR-IOV is found for {', '.join(d.name for d in missing)}"
        return Usability(False, reason, "correct [sriov] devices; see lspci -D", "devices")
    numbers = {a: read_text(sys / "bus/pci/devices" / a / "sriov_numvfs") for a in found}
    if all(number in ("", "0") for number in numbers.values()):
        address = min(found)
        fix = f"echo N > /sys/bus/pci/devices/{address}/sriov_numvfs"
        return Usability(False, f"NIC {address} has no VFs (sriov_numvfs is 0)", fix, "vfs")
    drivers = {read_link(sys / "bus/pci/devices" / address / "driver") for address in found}
    return Usability(True) if for_dpdk and drivers & KEPT_BY_DPDK else _vfio(sys)


def _vfio(sys: Path) -> Usability:
    if not names_in(sys / "kernel/iommu_groups"):
        fix = "turn on VT-d or AMD-Vi in the firmware; with VT-d, boot with intel_iommu=on"
        return Usability(False, "there is no IOMMU, or the kernel does not use it", fix, "iommu")
    if not (sys / "bus/pci/drivers" / VFIO).exists():
        reason = f"the driver {VFIO} is not loaded"
        fix = f"modprobe {VFIO}, and name it in /etc/modules-load.d"
        return Usability(False, reason, fix, "vfio")
    return Usability(True)


def pool_findings(inventory: Inventory, use: Use = Use.VM) -> list[Finding]:
    """Return a finding for each NIC that has a problem, while other NICs may work."""
    found = []
    for device in inventory.missing:
        lacks, expected = (
            f"no NIC with SR-IOV for {device.name} ({device.by.value})",
            f"a NIC of {device.network}",
        )
        found.append(_warning(f"no-nic-{device.name}", lacks, expected, "correct [sriov] devices"))
    for address, pf in inventory.pfs.items():
        if (problem := pf_problem(pf, 0, use)) is not None:
            found.append(
                _warning(f"nic-{address}", problem.detail, "a NIC that frames can take", problem.fix)
            )
        if not any(vf.pf == address for vf in inventory.vfs.values()):
            fix = f"echo N > /sys/bus/pci/devices/{address}/sriov_numvfs"
            found.append(_warning(f"none-{address}", f"{pf.name} has no VFs", f"up to {pf.total_vfs}", fix))
    return found


def _warning(name: str, found: str, expected: str, fix: str | None) -> Finding:
    return Finding(id=f"vf-{name}", status="warn", found=found, expected=expected, fix=fix)


# -- Findings for VFs on flat networks, whose guests may use VLAN tags of their own. Pure. --------
# A port on a flat network has no VLAN to restrict its VF to. The behaviour depends on the PF driver
# (``VfModel.tags``); no driver lets the hypervisor forbid guest tags on a VF with VLAN 0. A trunk
# (``vf.trunk``) allows them on purpose and needs no finding.


_UNKNOWN = "does with the tags that such a VM sends what its firmware decides: unknown"


def tag_findings(intents: Sequence[Intent], inventory: Inventory) -> list[Finding]:
    """Return one finding per NIC that has ports of flat networks."""
    flat: dict[str, list[str]] = {}
    for intent in intents:
        spec, vf = intent.spec, vf_of(intent, inventory)
        if vf and spec and spec.network.type == "flat" and not spec.vf.trunk:
            flat.setdefault(vf.pf, []).append(intent.port_id)
    return [_tags(inventory.pfs[address], ports) for address, ports in sorted(flat.items())]


def _tags(pf: Pf, ports: Sequence[str]) -> Finding:
    return _warning(
        f"flat-{pf.address}",
        f"{pf.name} has ports of flat networks ({', '.join(sorted(ports))}), and its driver "
        f"{pf.driver or 'unknown'} {model_of(pf.driver).vf.tags or _UNKNOWN}",
        "VMs on VFs are in one VLAN that the NIC holds them to",
        "ask for these ports with a VLAN, or with the backend vdpa in relay mode, which takes "
        "no tags from a VM; a switch port that takes untagged frames alone keeps them off the wire",
    )
