"""Steps of a plan: target, current and desired value, effect, reason and source; errors of planning."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Final, TypeVar

from netplugin.api.errors import HostError, InvalidRequest
from netplugin.api.problem import FieldError
from netplugin.tuning.root import Fact, Unknown

T = TypeVar("T")


class Effect(StrEnum):
    """What is needed for the new value to take effect."""

    LIVE = "live"
    OVS_RESTART = "ovs-restart"
    REBOOT = "reboot"


class Group(StrEnum):
    """Subject of a step; the check reports one finding per group."""

    HUGEPAGES = "hugepages"
    OVS = "ovs"
    INTERRUPTS = "interrupts"
    WORKQUEUES = "workqueues"
    POWER = "power"
    WATCHDOG = "watchdog"
    MEMORY = "memory"
    SCHEDULING = "scheduling"
    TUNED = "tuned"
    VFS = "vfs"
    KERNEL_ARGUMENTS = "kernel-arguments"


class Target:
    """What a step sets. ``kind`` names it in JSON, after its fields; ``text`` shows these to people."""

    kind: ClassVar[str]
    text: ClassVar[str]

    def __str__(self) -> str:
        return self.text.format(**vars(self))


@dataclass(frozen=True)
class File(Target):
    """A file of /proc or /sys. ``lasting``: its name and meaning survive a reboot."""

    kind, text = "file", "{path}"
    path: str
    lasting: bool = True


@dataclass(frozen=True)
class Sysctl(Target):
    kind, text = "sysctl", "sysctl {name}"
    name: str


@dataclass(frozen=True)
class KernelArgument(Target):
    kind, text = "kernel-argument", "kernel argument {name}"
    name: str


@dataclass(frozen=True)
class OtherConfig(Target):
    """A key of ``other_config`` in the Open_vSwitch table."""

    kind, text = "ovs-other-config", "other_config:{key}"
    key: str


@dataclass(frozen=True)
class TunedProfile(Target):
    """The active profile of tuned."""

    kind, text = "tuned-profile", "tuned profile"


@dataclass(frozen=True)
class TunedVariable(Target):
    kind, text = "tuned-variable", "{name} of tuned's {profile}"
    profile: str
    name: str


@dataclass(frozen=True)
class ThreadPriority(Target):
    """The SCHED_FIFO priority of all kernel threads with this name; 0 is SCHED_OTHER."""

    kind, text = "thread-priority", "priority of {threads}"
    threads: str


@dataclass(frozen=True)
class Swap(Target):
    """The active swap areas."""

    kind, text = "swap", "swap"


@dataclass(frozen=True)
class BannedCpus(Target):
    """CPUs banned from irqbalance (``IRQBALANCE_BANNED_CPULIST``); ``path`` is its environment file."""

    kind, text = "irqbalance-banned-cpus", "IRQBALANCE_BANNED_CPULIST in {path}"
    path: str


@dataclass(frozen=True)
class ServiceCpus(Target):
    """CPUs of services: ``CPUAffinity`` of systemd's manager."""

    kind, text = "service-cpus", "CPUAffinity of systemd"


@dataclass(frozen=True)
class BootPages(Target):
    """Hugepages of one size that a systemd unit reserves on each node at boot, before OVS starts."""

    kind, text = "boot-pages", "pages of {size_kb} KB by netplugin-hugepages.service"
    size_kb: int


@dataclass(frozen=True)
class VfCount(Target):
    """Number of VFs of the PF at this PCI address."""

    kind, text = "vf-count", "virtual functions of {address}"
    address: str


@dataclass(frozen=True)
class Step:
    """``now`` and ``desired`` are plan values; None: not set. ``source`` is the document with the rule, or
    states that it is the project's choice."""

    group: Group
    target: Target
    now: Fact[str | None]
    desired: str | None
    effect: Effect
    why: str
    source: str

    @property
    def done(self) -> bool:
        return not isinstance(self.now, Unknown) and self.now == self.desired


def impossible(field: str, message: str, fix: str, step: str = "plan") -> InvalidRequest:
    """The error for an intent field that requests more than there is."""
    errors = [FieldError(field=field, message=message)]
    return InvalidRequest(f"{field}: {message}", step=step, fix=fix, errors=errors)


def needed(fact: Fact[T]) -> T:
    """Return a required fact. Raises: HostError naming the file that cannot be read."""
    if isinstance(fact, Unknown):
        fix = "run it as root, on the host itself and not in a container"
        raise HostError(f"no plan without {fact.path}: {fact.reason}", step="plan", fix=fix)
    return fact


#: Remark on a source whose text was not available.
NOT_READ: Final = "not read for this rule"


class Source(str):
    """Name of a document, as ``plan --explain`` shows it. ``read`` is the version that the rules were checked
    against, a repository at a commit or tag; None if it was not available, which the name then states."""

    read: str | None

    def __new__(cls, name: str, read: str | None) -> Source:
        made = super().__new__(cls, name if read else f"{name} ({NOT_READ})")
        made.read = read
        return made


def _linux(what: str, commit: str) -> Source:
    return Source(f"Linux {what}", f"torvalds/linux at {commit}")


#: Commits on the branch master of these projects.
_OVS: Final = "openvswitch/ovs at d6a632a9b16e"
_TUNED: Final = "redhat-performance/tuned at 2bfa4423586b"
_IRQBALANCE: Final = "Irqbalance/irqbalance at cd9212f453db"

KERNEL_PARAMETERS: Final = _linux("Documentation/admin-guide/kernel-parameters.txt", "000d388ed3bb")
#: Documents ``mce`` and ``idle`` on x86.
BOOT_OPTIONS: Final = _linux("Documentation/arch/x86/x86_64/boot-options.rst", "0604aa87b098")
MANAGED_IRQ: Final = _linux("5.6, commit 11ea68f553e2", "11ea68f553e2")
NODE_PAGES: Final = _linux("5.16, commit b5389086ad7b", "b5389086ad7b")
AMD_PSTATE: Final = _linux("6.1, commit 202e683df37c", "202e683df37c")
SYSCTL_KERNEL: Final = _linux("Documentation/admin-guide/sysctl/kernel.rst", "01478b833176")
KERNEL_THREADS: Final = _linux("Documentation/admin-guide/kernel-per-CPU-kthreads.rst", "215bd64ada73")
HUGETLB: Final = _linux("Documentation/admin-guide/mm/hugetlbpage.rst", "00cba6b60fed")
IRQ_AFFINITY: Final = _linux("Documentation/core-api/irq/irq-affinity.rst", "313267e59070")
GOVERNOR: Final = _linux("drivers/cpufreq/cpufreq_performance.c", "04084978003c")
INTEL_IDLE: Final = _linux("Documentation/admin-guide/pm/intel_idle.rst", "0ea5c948cb64")
HALT_POLLING: Final = _linux("Documentation/virt/kvm/halt-polling.rst", "2555693dd85c")
KSM: Final = _linux("Documentation/admin-guide/mm/ksm.rst", "0b656310bfc3")
THP: Final = _linux("Documentation/admin-guide/mm/transhuge.rst", "00f58104202c")
SRIOV: Final = _linux("Documentation/PCI/pci-iov-howto.rst", "2cc2c3cb54de")
ASPM: Final = _linux("drivers/pci/pcie/Kconfig, PCIEASPM_PERFORMANCE", "0c49cd295d42")
TOPOLOGY: Final = _linux("Documentation/admin-guide/cputopology.rst (thread_siblings)", "05a463ec1bd4")
DISTANCES: Final = _linux("Documentation/ABI/stable/sysfs-devices-node (distance)", "05909cd9a0c8")

OVS_CONFIG: Final = Source("ovs-vswitchd.conf.db(5)", _OVS)
OVS_DPDK: Final = Source("OVS lib/dpdk.c, dpdk_init__", _OVS)
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
LIBVIRT: Final = Source("libvirt formatdomain, CPU Tuning (emulatorpin)", "libvirt/libvirt at 00901cb4e497")
NFV_GUIDE: Final = Source(
    "Red Hat OpenStack Platform 17.1, Configuring network functions virtualization, OVS-DPDK parameters",
    "docs.redhat.com, in its translations",
)
EPYC_GUIDE: Final = Source("SUSE Best Practices, Optimizing Linux for AMD EPYC", None)
#: For rules that are the project's choice and in no document.
OWN: Final = "this project's choice, not from a document"

#: Sources of the CPU partition.
PARTITION: Final = {
    "whole cores": f"{TOPOLOGY}; {NFV_GUIDE}",
    "PMD cores by node": f"{OVS_SCHEDULING}; {NFV_GUIDE}",
    "VM cores by NUMA distance": DISTANCES,
    "cores by L3 cache": f"{EPYC_GUIDE}; /sys/devices/system/cpu/cpu*/cache/index3/shared_cpu_list",
    "housekeeping and emulator cores": f"{LIBVIRT}; how many: {OWN}",
}
PAGES: Final = f"{OVS_MEMORY}; a tenth of each node for Linux, at least 512 MB: {OWN}"


def of_argument(name: str) -> Source:
    """The document that describes a kernel argument."""
    return BOOT_OPTIONS if name in ("mce", "idle") else KERNEL_PARAMETERS
