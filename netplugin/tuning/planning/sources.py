"""Where the rules of a plan come from: the documents that ``netplugin host plan --explain`` names."""

from __future__ import annotations

from typing import Final

KERNEL_PARAMETERS: Final = "Linux Documentation/admin-guide/kernel-parameters.txt"
SYSCTL_KERNEL: Final = "Linux Documentation/admin-guide/sysctl/kernel.rst"
KERNEL_THREADS: Final = "Linux Documentation/admin-guide/kernel-per-CPU-kthreads.rst"
HUGETLB: Final = "Linux Documentation/admin-guide/mm/hugetlbpage.rst"
IRQ_AFFINITY: Final = "Linux Documentation/core-api/irq/irq-affinity.rst"
WORKQUEUE: Final = "Linux Documentation/core-api/workqueue.rst"
CPUFREQ: Final = "Linux Documentation/admin-guide/pm/cpufreq.rst"
INTEL_IDLE: Final = "Linux Documentation/admin-guide/pm/intel_idle.rst"
HALT_POLLING: Final = "Linux Documentation/virt/kvm/halt-polling.rst"
KSM: Final = "Linux Documentation/admin-guide/mm/ksm.rst"
THP: Final = "Linux Documentation/admin-guide/mm/transhuge.rst"
SRIOV: Final = "Linux Documentation/PCI/pci-iov-howto.rst"

OVS_CONFIG: Final = "ovs-vswitchd.conf.db(5)"
OVS_MEMORY: Final = "OVS Documentation/topics/dpdk/memory.rst"
OVS_PMD: Final = "OVS Documentation/topics/dpdk/pmd.rst"
OVS_SCHEDULING: Final = "OVS lib/dpif-netdev.c, sched_numa_list_schedule"

TUNED_PARTITIONING: Final = "tuned, profile cpu-partitioning"
TUNED_REALTIME: Final = "tuned, profile realtime"
TUNED_HOST: Final = "tuned, profile realtime-virtual-host"
TUNED_LATENCY: Final = "tuned, profile network-latency"

IRQBALANCE: Final = "irqbalance(1)"
SYSTEMD: Final = "systemd-system.conf(5)"
#: What no document says and is the project's own choice.
OWN: Final = "this project's choice, not from a document"

#: Of the CPU map: what is given to whom, and where.
PARTITION: Final = {
    "whole cores": "Linux Documentation/admin-guide/cputopology.rst (thread_siblings); "
    "Red Hat OpenStack Platform, NFV planning and configuration guide",
    "PMD cores by node": OVS_SCHEDULING,
    "VM cores by NUMA distance": "ACPI specification, SLIT; /sys/devices/system/node/node*/distance",
    "cores by L3 cache": "SUSE Best Practices, Optimizing Linux for AMD EPYC; "
    "/sys/devices/system/cpu/cpu*/cache/index3/shared_cpu_list",
    "housekeeping and emulator cores": "libvirt formatdomain, CPU Tuning (emulatorpin); how many: "
    + OWN,
}
PAGES: Final = f"{OVS_MEMORY}; a tenth of each node for Linux, at least 512 MB: {OWN}"
