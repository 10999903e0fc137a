"""Where the rules of a plan come from: the documents that ``netplugin host plan --explain`` names."""

from __future__ import annotations

from typing import Final

#: What a plan says of a document whose text could not be had.
NOT_READ: Final = "not read for this rule"


class Source(str):
    """A document by its name, as a plan shows it. ``read`` is the text that the rules were held against: a
    repository at a commit or tag; None where it could not be had, which the name then says."""

    read: str | None

    def __new__(cls, name: str, read: str | None) -> Source:
        made = super().__new__(cls, name if read else f"{name} ({NOT_READ})")
        made.read = read
        return made


_LINUX: Final = "torvalds/linux"
#: The branch master of these, at this commit.
_OVS: Final = "openvswitch/ovs at d6a632a9b16e"
_TUNED: Final = "redhat-performance/tuned at 2bfa4423586b"
_IRQBALANCE: Final = "Irqbalance/irqbalance at cd9212f453db"

KERNEL_PARAMETERS: Final = Source(
    "Linux Documentation/admin-guide/kernel-parameters.txt", f"{_LINUX} at 000d388ed3bb"
)
#: ``mce`` and ``idle`` of x86.
BOOT_OPTIONS: Final = Source(
    "Linux Documentation/arch/x86/x86_64/boot-options.rst", f"{_LINUX} at 0604aa87b098"
)
MANAGED_IRQ: Final = Source("Linux 5.6, commit 11ea68f553e2", f"{_LINUX} at 11ea68f553e2")
NODE_PAGES: Final = Source("Linux 5.16, commit b5389086ad7b", f"{_LINUX} at b5389086ad7b")
AMD_PSTATE: Final = Source("Linux 6.1, commit 202e683df37c", f"{_LINUX} at 202e683df37c")
SYSCTL_KERNEL: Final = Source(
    "Linux Documentation/admin-guide/sysctl/kernel.rst", f"{_LINUX} at 01478b833176"
)
KERNEL_THREADS: Final = Source(
    "Linux Documentation/admin-guide/kernel-per-CPU-kthreads.rst", f"{_LINUX} at 215bd64ada73"
)
HUGETLB: Final = Source(
    "Linux Documentation/admin-guide/mm/hugetlbpage.rst", f"{_LINUX} at 00cba6b60fed"
)
IRQ_AFFINITY: Final = Source(
    "Linux Documentation/core-api/irq/irq-affinity.rst", f"{_LINUX} at 313267e59070"
)
GOVERNOR: Final = Source("Linux drivers/cpufreq/cpufreq_performance.c", f"{_LINUX} at 04084978003c")
INTEL_IDLE: Final = Source(
    "Linux Documentation/admin-guide/pm/intel_idle.rst", f"{_LINUX} at 0ea5c948cb64"
)
HALT_POLLING: Final = Source(
    "Linux Documentation/virt/kvm/halt-polling.rst", f"{_LINUX} at 2555693dd85c"
)
KSM: Final = Source("Linux Documentation/admin-guide/mm/ksm.rst", f"{_LINUX} at 0b656310bfc3")
THP: Final = Source("Linux Documentation/admin-guide/mm/transhuge.rst", f"{_LINUX} at 00f58104202c")
SRIOV: Final = Source("Linux Documentation/PCI/pci-iov-howto.rst", f"{_LINUX} at 2cc2c3cb54de")
ASPM: Final = Source(
    "Linux drivers/pci/pcie/Kconfig, PCIEASPM_PERFORMANCE", f"{_LINUX} at 0c49cd295d42"
)
TOPOLOGY: Final = Source(
    "Linux Documentation/admin-guide/cputopology.rst (thread_siblings)", f"{_LINUX} at 05a463ec1bd4"
)
DISTANCES: Final = Source(
    "Linux Documentation/ABI/stable/sysfs-devices-node (distance)", f"{_LINUX} at 05909cd9a0c8"
)

OVS_CONFIG: Final = Source("ovs-vswitchd.conf.db(5)", _OVS)
OVS_MEMORY: Final = Source("OVS Documentation/topics/dpdk/memory.rst", _OVS)
OVS_PMD: Final = Source("OVS Documentation/topics/dpdk/pmd.rst", _OVS)
OVS_SCHEDULING: Final = Source("OVS lib/dpif-netdev.c, sched_numa_list_schedule", _OVS)

TUNED_PARTITIONING: Final = Source("tuned, profile cpu-partitioning", _TUNED)
TUNED_REALTIME: Final = Source("tuned, profile realtime", _TUNED)
TUNED_HOST: Final = Source("tuned, profile realtime-virtual-host", _TUNED)
TUNED_GUEST: Final = Source("tuned, profile realtime-virtual-guest", _TUNED)
TUNED_LATENCY: Final = Source("tuned, profile network-latency", _TUNED)
TUNED_POWER: Final = Source("tuned, profile latency-performance", _TUNED)

IRQBALANCE: Final = Source("irqbalance(1)", _IRQBALANCE)
SYSTEMD: Final = Source("systemd-system.conf(5)", "systemd/systemd at 0031430a9c6b")
LIBVIRT: Final = Source(
    "libvirt formatdomain, CPU Tuning (emulatorpin)", "libvirt/libvirt at 00901cb4e497"
)
NFV_GUIDE: Final = Source(
    "Red Hat OpenStack Platform 17.1, Configuring network functions virtualization, OVS-DPDK parameters",
    "docs.redhat.com, in its translations",
)
EPYC_GUIDE: Final = Source("SUSE Best Practices, Optimizing Linux for AMD EPYC", None)
#: What no document says and is the project's own choice.
OWN: Final = "this project's choice, not from a document"

#: Of the CPU map: what is given to whom, and where.
PARTITION: Final = {
    "whole cores": f"{TOPOLOGY}; {NFV_GUIDE}",
    "PMD cores by node": f"{OVS_SCHEDULING}; {NFV_GUIDE}",
    "VM cores by NUMA distance": DISTANCES,
    "cores by L3 cache": f"{EPYC_GUIDE}; /sys/devices/system/cpu/cpu*/cache/index3/shared_cpu_list",
    "housekeeping and emulator cores": f"{LIBVIRT}; how many: {OWN}",
}
PAGES: Final = f"{OVS_MEMORY}; a tenth of each node for Linux, at least 512 MB: {OWN}"


def of_argument(name: str) -> Source:
    """The document that has a kernel argument."""
    return BOOT_OPTIONS if name in ("mce", "idle") else KERNEL_PARAMETERS
