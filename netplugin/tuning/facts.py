"""Facts of a host, and what OVS and libvirt run now, as values; an ``Unknown`` where one cannot be read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeAlias

from netplugin.api.pmd_models import PmdCore, UnpolledQueue
from netplugin.tuning.command_line import CommandLine
from netplugin.tuning.root import Fact, Unknown

Cpus: TypeAlias = frozenset[int]

#: Kinds of cores, best for PMD threads and vCPUs first. ``NODELESS``: no NUMA node lists its CPUs; OVS starts
#: no PMD thread there (discover_numa_and_core in OVS's lib/ovs-numa.c).
PERFORMANCE, EFFICIENCY, NODELESS = "performance", "efficiency", "no node"


@dataclass(frozen=True)
class Core:
    """A physical core: its online CPUs (SMT siblings), NUMA node, package and kind."""

    node: int
    package: int
    cpus: Cpus
    kind: str = PERFORMANCE

    @property
    def first(self) -> int:
        return min(self.cpus)


@dataclass(frozen=True)
class Cache:
    """One cache and the CPUs that share it."""

    level: int
    kind: str
    size_kb: int
    cpus: Cpus


@dataclass(frozen=True)
class CpuFacts:
    """``smt`` is None if the kernel has no SMT control, ``nohz_full`` if it was built without it.
    ``offline`` has CPUs that could be plugged in, too. ``arch`` is ``x86_64`` or ``aarch64``. On ARM,
    ``vendor`` and ``model`` are the implementer and part numbers. ``distances`` are the firmware's NUMA
    distances from node to node; 10 is local. ``isolated`` are all CPUs that the scheduler does not balance,
    None if the kernel reports none; ``partitioned`` those of them that are isolated by a cgroup's cpuset
    partition and not since boot: they end with that cgroup."""

    arch: Fact[str]
    vendor: Fact[str]
    model: Fact[str]
    online: Fact[Cpus]
    offline: Fact[Cpus]
    present: Fact[Cpus | None]
    cores: Fact[tuple[Core, ...]]
    distances: Fact[Mapping[int, Mapping[int, int]]]
    caches: Fact[tuple[Cache, ...]]
    smt: Fact[bool | None]
    isolated: Fact[Cpus | None]
    partitioned: Fact[Cpus]
    nohz_full: Fact[Cpus | None]


@dataclass(frozen=True)
class Policy:
    """A cpufreq policy: CPUs that share one frequency."""

    name: str
    cpus: Fact[Cpus]
    driver: Fact[str]
    governor: Fact[str]


@dataclass(frozen=True)
class PowerFacts:
    """``turbo`` is None if it has no switch, ``idle_driver`` if there is none. ``intel_pstate`` and
    ``amd_pstate`` are the driver's mode (``active``, ``passive``), None on a CPU of another vendor."""

    policies: Fact[tuple[Policy, ...]]
    turbo: Fact[bool | None]
    intel_pstate: Fact[str | None]
    amd_pstate: Fact[str | None]
    idle_driver: Fact[str | None]
    idle_states: Fact[tuple[str, ...]]


@dataclass(frozen=True)
class NodeMemory:
    node: int
    total_kb: int
    free_kb: int


@dataclass(frozen=True)
class HugepagePool:
    """Hugepages of one size on one node, in pages; ``path`` is the sysfs file that sets the number."""

    node: int
    size_kb: int
    path: str
    total: Fact[int]
    free: Fact[int]


@dataclass(frozen=True)
class MemoryFacts:
    """``nodes`` may have no memory (``total_kb`` 0) or no CPUs (CXL, HBM). ``sizes_kb`` are the supported
    hugepage sizes, ``default_kb`` that of a mount without one, None without hugepages; ``at_boot`` maps size
    and node to the pages that netplugin's systemd unit reserves at boot, None without that unit."""

    nodes: Fact[tuple[NodeMemory, ...]]
    sizes_kb: Fact[tuple[int, ...]]
    default_kb: Fact[int | None]
    pools: Fact[tuple[HugepagePool, ...]]
    at_boot: Fact[Mapping[int, Mapping[int, int]] | None]
    ksm: Fact[int | None]
    transparent: Fact[str | None]
    swaps: Fact[tuple[str, ...]]


@dataclass(frozen=True)
class KernelThread:
    """A kernel thread that may have to preempt a busy CPU; priority 0 is not real time. ``policy`` is a
    number from sched(7): 0 is SCHED_OTHER, 1 is SCHED_FIFO."""

    name: str
    pid: int
    priority: int
    policy: int


@dataclass(frozen=True)
class Tuned:
    """``isolated_cores`` maps a profile to that variable's text; ``profile`` is None if none is active."""

    profile: str | None
    isolated_cores: Mapping[str, str]


@dataclass(frozen=True)
class KernelFacts:
    """``sysctls`` has None for one that the kernel lacks; ``tuned`` is None if it is not installed.
    ``boot_loader`` started the machine: ``systemd-boot``, ``grub``, or ``grub-entries`` if grub reads entries
    from files; None if it is not known. ``service_cpus`` is systemd's ``CPUAffinity``, None if not set;
    ``halt_poll_ns`` is KVM's parameter, None if the module is not loaded."""

    release: Fact[str]
    arguments: Fact[CommandLine]
    boot_loader: Fact[str | None]
    realtime: Fact[bool]
    sysctls: Mapping[str, Fact[str | None]]
    tuned: Fact[Tuned | None]
    threads: Fact[tuple[KernelThread, ...]]
    service_cpus: Fact[Cpus | None]
    halt_poll_ns: Fact[int | None]


@dataclass(frozen=True)
class Irq:
    """An interrupt, its affinity and its effective affinity (None: the kernel does not report it)."""

    number: int
    names: tuple[str, ...]
    affinity: Fact[Cpus]
    effective: Fact[Cpus | None]


@dataclass(frozen=True)
class IrqbalanceFacts:
    """Settings of irqbalance in ``path``; ``banned`` is None if not set. irqbalance also avoids the CPUs that
    the kernel was booted with as isolated (irqbalance(1))."""

    path: str
    banned: Cpus | None


@dataclass(frozen=True)
class InterruptFacts:
    """``irqbalance`` is None if it is not installed."""

    default_affinity: Fact[Cpus | None]
    irqs: Fact[tuple[Irq, ...]]
    workqueues: Fact[Cpus | None]
    writeback: Fact[Cpus | None]
    irqbalance: Fact[IrqbalanceFacts | None]


@dataclass(frozen=True)
class IommuFacts:
    """``groups`` is 0 if the IOMMU is off; ``types`` are the group types (``identity`` is passthrough)."""

    groups: Fact[int]
    types: tuple[str, ...]


@dataclass(frozen=True)
class HostNic:
    """A PCI network device that is not a VF of this host; ``node`` is None if the firmware reports none.
    ``default_route``: whether one leads through its interfaces, or through a bond, bridge or VLAN on them.
    ``vf_drivers``: that of each of its VFs, empty for none."""

    address: str
    node: Fact[int | None]
    driver: str | None
    device: str
    interfaces: tuple[str, ...]
    total_vfs: Fact[int | None]
    vfs: Fact[int | None]
    default_route: Fact[bool] = False
    vf_drivers: tuple[str, ...] = ()


@dataclass(frozen=True)
class InterfaceFacts:
    """``speed_mbps`` is in Mbit/s, None without link; ``master`` is its bond or bridge, ``lowers`` the
    members of a bond or bridge, or the parent of a VLAN. ``kind`` is None for a NIC, ``link`` the index of
    the device below it or at its other end, or its own; ``state`` is ``down``, ``up``, or ``unknown`` for a
    device that has no carrier."""

    name: str
    mtu: Fact[int]
    speed_mbps: int | None
    rx_queues: int
    tx_queues: int
    master: str | None
    lowers: tuple[str, ...]
    kind: str | None = None
    index: int | None = None
    link: int | None = None
    state: str | None = None


@dataclass(frozen=True)
class KernelBond:
    name: str
    mode: Fact[str]
    hash_policy: Fact[str]
    members: Fact[tuple[str, ...]]


@dataclass(frozen=True)
class NetworkFacts:
    nics: Fact[tuple[HostNic, ...]]
    interfaces: Fact[tuple[InterfaceFacts, ...]]
    bonds: tuple[KernelBond, ...]


@dataclass(frozen=True)
class Limit:
    """Limits of a cgroup; None is no limit. ``hugepages`` maps a page size to a limit in bytes."""

    group: str
    cpus: Fact[Cpus | None]
    memory_bytes: Fact[int | None]
    hugepages: Mapping[str, Fact[int]]


@dataclass(frozen=True)
class Facts:
    cpus: CpuFacts
    power: PowerFacts
    memory: MemoryFacts
    kernel: KernelFacts
    interrupts: InterruptFacts
    iommu: IommuFacts
    network: NetworkFacts
    limits: tuple[Limit, ...]

    def unknown(self) -> tuple[Unknown, ...]:
        """All unknown facts, without duplicates."""
        return tuple(dict.fromkeys(_unknown(self)))


def _unknown(value: Any) -> Iterator[Unknown]:
    if isinstance(value, Unknown):
        yield value
    elif is_dataclass(value):
        for field in fields(value):
            yield from _unknown(getattr(value, field.name))
    elif isinstance(value, tuple | Mapping):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _unknown(inner)


@dataclass(frozen=True)
class OvsPortLive:
    """An OVS interface that is a device, a patch to another bridge or a tunnel's end; a ``port`` with several
    interfaces is a bond. ``type`` is OVS's, or ``representor`` for that of a VM's VF on DPDK. ``peer`` is the
    other end of a patch, ``header`` the bytes that a tunnel adds at least, ``link`` whether there is one;
    None if that does not apply or is not known."""

    name: str
    port: str
    type: str
    mtu: int | None
    bond_mode: str | None = None
    bridge: str | None = None
    peer: str | None = None
    header: int | None = None
    link: bool | None = None


@dataclass(frozen=True)
class OvsLive:
    """``pmds`` is empty if no port needs polling, or if vswitchd is ``silent``: the database answers, but
    vswitchd, which reports the threads, does not."""

    version: str | None
    dpdk_version: str | None
    dpdk_initialized: bool
    other_config: Mapping[str, str]
    ports: tuple[OvsPortLive, ...] = ()
    pmds: tuple[PmdCore, ...] = ()
    unpolled: tuple[UnpolledQueue, ...] = ()
    silent: Unknown | None = None


@dataclass(frozen=True)
class DomainLive:
    """A running VM: the effective CPU affinity of each vCPU thread, each IO thread and QEMU's other threads.
    ``memory_nodes`` is empty if its memory is not bound to nodes."""

    name: str
    vcpus: tuple[Cpus, ...]
    emulator: Cpus
    memory_nodes: frozenset[int]
    iothreads: tuple[Cpus, ...] = ()

    @property
    def pinned(self) -> Cpus:
        """CPUs of the vCPUs that are pinned to a single CPU."""
        return frozenset(cpu for cpus in self.vcpus if len(cpus) == 1 for cpu in cpus)


_OVS_NOT_ASKED = Unknown("ovs-vswitchd", "was not asked", missing=True)
_LIBVIRT_NOT_ASKED = Unknown("libvirtd", "was not asked", missing=True)


@dataclass(frozen=True)
class Live:
    """``versions`` has the keys ``qemu`` and ``libvirt``. An ``Unknown`` with ``missing`` means that the
    daemon does not run here or was not queried."""

    ovs: Fact[OvsLive] = _OVS_NOT_ASKED
    domains: Fact[tuple[DomainLive, ...]] = _LIBVIRT_NOT_ASKED
    versions: Mapping[str, str] = field(default_factory=dict)

    def unanswered(self) -> tuple[Unknown, ...]:
        """Daemons that run but did not answer."""
        silent = None if isinstance(self.ovs, Unknown) else self.ovs.silent
        asked = (self.ovs, self.domains, silent)
        return tuple(fact for fact in asked if isinstance(fact, Unknown) and not fact.missing)
