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
    cpus, power, memory, kernel = read_cpus(root), read_power(root), read_memory(root), read_kernel(root)
    interrupts, iommu, network = read_interrupts(root), read_iommu(root), read_network(root)
    return Facts(cpus, power, memory, kernel, interrupts, iommu, network, read_limits(root))
