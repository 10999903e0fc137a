"""Rules of one NIC: what DPDK needs to use it, and memory on its node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from netplugin.api.models import Finding
from netplugin.host.cpus import format_list
from netplugin.host.nic_models import Binding, dpdk_fault, model_of
from netplugin.host.vfs import in_user_space, is_uio
from netplugin.tuning.checks.frame import fail, warn
from netplugin.tuning.checks.scopes import Nic
from netplugin.tuning.read.network import PCI
from netplugin.tuning.root import known


def model(one: Nic) -> Iterator[Finding]:
    """A VM may have a whole NIC: one that is not for DPDK, if it is known which are."""
    nic = one.nic
    model, bound = model_of(nic.driver, nic.device), in_user_space(nic.driver)
    where = f"{nic.address} ({nic.device}) has {nic.driver or 'no driver'}"
    expected = "NICs of the plan that DPDK has a driver for, on the kernel driver that it needs"
    if (fault := dpdk_fault(nic.address, nic.driver, nic.device)) and (one.planned or bound):
        found, fix = fault
        yield (warn if one.named and not one.planned else fail)("nic-model", found, expected, fix)
    elif one.planned and not bound and model.binding is Binding.UNKNOWN:
        found = f"{where}, and whether DPDK has a driver for such a NIC is not known here"
        yield warn("nic-model", found, expected, "see https://doc.dpdk.org/guides/nics, or name another NIC")
    elif one.planned and model.needs:
        yield warn("nic-model", f"{where}; DPDK needs {model.needs}", expected, None)


def vfs(one: Nic) -> Iterator[Finding]:
    """VFs that are enabled, by driver. Those with a driver of the kernel, or none, the agent binds itself to
    vfio-pci. No VM gets those on uio or pci-stub, and uio_pci_generic needs INTx, which VFs do not have."""
    drivers = Counter(one.nic.vf_drivers)
    wrong = [name for name in sorted(drivers) if is_uio(name) or name == "pci-stub"]
    if drivers:
        parts = (f"{n} with {name or 'no driver'}" for name, n in sorted(drivers.items()))
        found = f"{drivers.total()} VFs of {one.nic.address}: {', '.join(parts)}"
        fix = f"bind those of {' and '.join(wrong)} to vfio-pci: driverctl set-override ADDRESS vfio-pci"
        yield warn(
            "vf-drivers", found, "VFs for VMs on vfio-pci, or free to be bound to it", fix if wrong else None
        )


def memory(one: Nic) -> Iterator[Finding]:
    """DPDK has no memory on the NIC's node, and OVS takes a port's buffers from no other node: see
    ``netplugin.tuning.planning.hugepages``. It takes the node from the file ``numa_node``, which root may
    write (numa_node_store in drivers/pci/pci-sysfs.c)."""
    node = known(one.nic.node, None)
    if one.planned and one.served and node is not None and node not in one.served:
        lacks = "no CPUs or too little memory for DPDK, or a number that DPDK does not have"
        found = f"{one.nic.address} is on NUMA node {node}, which has {lacks}: OVS opens no port there"
        expected = f"NICs of OVS on a node with CPUs and memory, such as {format_list(one.served)}"
        write = f"echo {one.served[0]} > {PCI}/{one.nic.address}/numa_node before OVS starts, at each boot"
        yield warn("nic-memory", found, expected, f"move it or memory to another slot, or {write}")
