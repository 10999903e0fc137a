"""Read the facts of a host below one root directory, one module per subject."""

from __future__ import annotations

from netplugin.tuning.facts import Facts
from netplugin.tuning.read.cpus import read_cpus, read_interrupts, read_power
from netplugin.tuning.read.kernel import read_kernel
from netplugin.tuning.read.memory import read_limits, read_memory
from netplugin.tuning.read.network import read_iommu, read_network
from netplugin.tuning.root import Root


def read_facts(root: Root) -> Facts:
    """Read all facts. Raises nothing."""
    return Facts(
        cpus=read_cpus(root),
        power=read_power(root),
        memory=read_memory(root),
        kernel=read_kernel(root),
        interrupts=read_interrupts(root),
        iommu=read_iommu(root),
        network=read_network(root),
        limits=read_limits(root),
    )
