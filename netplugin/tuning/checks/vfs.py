"""Check for an IOMMU, which VFs need before they can be passed to a VM or to DPDK."""

from __future__ import annotations

from collections.abc import Iterator

from netplugin.models import Finding
from netplugin.tuning.checks.scene import Scene
from netplugin.tuning.planning.kernel_arguments import AMD
from netplugin.tuning.read.cpus import ARM
from netplugin.tuning.root import Unknown, known


def vfs(scene: Scene) -> Iterator[Finding]:
    """One IOMMU finding; none if no NIC supports SR-IOV."""
    nics = [nic for nic in known(scene.facts.network.nics, ()) if known(nic.total_vfs, None)]
    groups = scene.facts.iommu.groups
    if not nics or isinstance(groups, Unknown):
        return
    enabled = sum(known(nic.vfs, None) or 0 for nic in nics)
    yield Finding(
        id="iommu",
        status="ok" if groups else "fail" if enabled else "warn",
        found=f"{groups or 'no'} IOMMU groups; {enabled} VFs enabled on "
        f"{', '.join(nic.address for nic in nics)}",
        expected="IOMMU on",
        fix=None if groups else _fix(scene),
    )


def _fix(scene: Scene) -> str:
    """AMD and ARM IOMMUs are enabled by default if the firmware reports them (kernel-parameters.txt)."""
    if known(scene.facts.cpus.arch, "") == ARM:
        return "switch the SMMU on in the firmware"
    if known(scene.facts.cpus.vendor, "") == AMD:
        return "switch the IOMMU (AMD-Vi) on in the firmware; boot without amd_iommu=off"
    return "boot with intel_iommu=on iommu=pt; VT-d must be on in the firmware"
