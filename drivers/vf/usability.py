"""Whether this host can give VFs to VMs, and findings about its NICs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from drivers.vf.abilities import TAGS
from drivers.vf.inventory import Inventory, ambiguous, find_pfs, names_in
from drivers.vf.ledger import Use, pf_problem
from drivers.vf.memory import KEPT_BY_DPDK, vf_of
from drivers.vf.options import PoolDevice
from netplugin.api.models import Finding
from netplugin.backend import Intent
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
        return Usability(
            False,
            "there is no IOMMU, or the kernel does not use it",
            "turn on VT-d or AMD-Vi in the firmware; with VT-d, boot with intel_iommu=on",
            "iommu",
        )
    if not (sys / "bus/pci/drivers" / VFIO).exists():
        reason = f"the driver {VFIO} is not loaded"
        fix = f"modprobe {VFIO}, and name it in /etc/modules-load.d"
        return Usability(False, reason, fix, "vfio")
    return Usability(True)


def pool_findings(inventory: Inventory, use: Use = Use.VM) -> list[Finding]:
    """Return a finding for each NIC that has a problem, while other NICs may work."""
    found = [
        Finding(
            id=f"vf-no-nic-{device.name}",
            status="warn",
            found=f"no NIC with SR-IOV for {device.name} ({device.by.value})",
            expected=f"a NIC of {device.network}",
            fix="correct [sriov] devices",
        )
        for device in inventory.missing
    ]
    for pf in inventory.pfs.values():
        problem = pf_problem(pf, 0, use)
        if problem is not None:
            found.append(
                Finding(
                    id=f"vf-nic-{pf.address}",
                    status="warn",
                    found=problem.detail,
                    expected="a NIC that frames can take",
                    fix=problem.fix,
                )
            )
        if not any(vf.pf == pf.address for vf in inventory.vfs.values()):
            found.append(
                Finding(
                    id=f"vf-none-{pf.address}",
                    status="warn",
                    found=f"{pf.name} has no VFs",
                    expected=f"up to {pf.total_vfs}",
                    fix=f"echo N > /sys/bus/pci/devices/{pf.address}/sriov_numvfs",
                )
            )
    return found


# -- Findings for VFs on flat networks, whose guests may use VLAN tags of their own. Pure. --------
# A port on a flat network has no VLAN to restrict its VF to. The behaviour depends on the PF driver
# (``TAGS``); no driver lets the hypervisor forbid guest tags on a VF with VLAN 0. A trunk (``vf.trunk``)
# allows them on purpose and needs no finding.


_UNKNOWN = "does with the tags that such a VM sends what its firmware decides: unknown"


def tag_findings(intents: Sequence[Intent], inventory: Inventory) -> list[Finding]:
    """Return one finding per NIC that has ports of flat networks."""
    flat: dict[str, list[str]] = {}
    for intent in intents:
        spec, vf = intent.spec, vf_of(intent, inventory)
        if vf and spec and spec.network.type == "flat" and not spec.vf.trunk:
            flat.setdefault(vf.pf, []).append(intent.port_id)
    return [_finding(inventory, address, ports) for address, ports in sorted(flat.items())]


def _finding(inventory: Inventory, address: str, ports: Sequence[str]) -> Finding:
    pf = inventory.pfs[address]
    says = TAGS.get(pf.driver or "", _UNKNOWN)
    return Finding(
        id=f"vf-flat-{address}",
        status="warn",
        found=f"{pf.name} has ports of flat networks ({', '.join(sorted(ports))}), and its driver "
        f"{pf.driver or 'unknown'} {says}",
        expected="VMs on VFs are in one VLAN that the NIC holds them to",
        fix="ask for these ports with a VLAN, or with the backend vdpa in relay mode, which takes "
        "no tags from a VM; a switch port that takes untagged frames alone keeps them off the wire",
    )
