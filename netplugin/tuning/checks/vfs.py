"""Virtual functions: they need an IOMMU before they can be given to a VM or to DPDK."""

from __future__ import annotations

from collections.abc import Iterator

from netplugin.models import Finding
from netplugin.tuning.checks.scene import Scene
from netplugin.tuning.planning.kernel_arguments import AMD
from netplugin.tuning.root import Unknown, known


def vfs(scene: Scene) -> Iterator[Finding]:
    """Nothing where no NIC can have VFs."""
    nics = [nic for nic in known(scene.facts.network.nics, ()) if known(nic.total_vfs, None)]
    groups = scene.facts.iommu.groups
    if not nics or isinstance(groups, Unknown):
        return
    enabled = sum(known(nic.vfs, None) or 0 for nic in nics)
    argument = "amd_iommu=on" if known(scene.facts.cpus.vendor, "") == AMD else "intel_iommu=on"
    yield Finding(
        id="iommu", status="ok" if groups else "fail" if enabled else "warn",
        found=f"{groups or 'no'} IOMMU groups; {enabled} VFs enabled on "
        f"{', '.join(nic.address for nic in nics)}",
        expected="IOMMU on",
        fix=None
        if groups
        else f"boot with {argument} iommu=pt; VT-d or AMD-Vi must be on in the firmware",
    )  # fmt: skip
