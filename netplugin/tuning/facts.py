"""What a machine is, as values: each is a value or an ``Unknown`` that says why there is none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeAlias

from netplugin.tuning.command_line import CommandLine
from netplugin.tuning.root import Fact, Unknown

Cpus: TypeAlias = frozenset[int]


@dataclass(frozen=True)
class Core:
    """A whole core: its CPUs that are on line (SMT siblings) and where it is."""

    node: int
    package: int
    cpus: Cpus

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
    """``smt`` is None where the kernel has no such switch; ``nohz_full`` where it was built without.

    ``arch`` is ``x86_64`` or ``aarch64``. On ARM ``vendor`` and ``model`` are the numbers of implementer
    and part. ``distances`` are those of the firmware, from node to node: 10 is a node itself.
    """

    arch: Fact[str]
    vendor: Fact[str]
    model: Fact[str]
    online: Fact[Cpus]
    offline: Fact[Cpus]
    cores: Fact[tuple[Core, ...]]
    distances: Fact[Mapping[int, Mapping[int, int]]]
    caches: Fact[tuple[Cache, ...]]
    smt: Fact[bool | None]
    isolated: Fact[Cpus | None]
    nohz_full: Fact[Cpus | None]


@dataclass(frozen=True)
class Policy:
    """CPUs that change their frequency together."""

    name: str
    cpus: Fact[Cpus]
    driver: Fact[str]
    governor: Fact[str]


@dataclass(frozen=True)
class PowerFacts:
    """``turbo`` is None where nothing can switch it; ``idle_driver`` where there is none. The drivers of
    P-states say their mode (``active``, ``passive``), None where the CPU is another vendor's."""

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
    """The hugepages of one size on one node, in pages; ``path`` is the file that sets how many."""

    node: int
    size_kb: int
    path: str
    total: Fact[int]
    free: Fact[int]


@dataclass(frozen=True)
class MemoryFacts:
    """``sizes_kb`` are the sizes of hugepages that the CPU and the kernel have; ``at_boot`` the pages by
    size and node that our own unit reserves at each boot, None without it."""

    nodes: Fact[tuple[NodeMemory, ...]]
    sizes_kb: Fact[tuple[int, ...]]
    pools: Fact[tuple[HugepagePool, ...]]
    at_boot: Fact[Mapping[int, Mapping[int, int]] | None]
    ksm: Fact[int | None]
    transparent: Fact[str | None]
    swaps: Fact[tuple[str, ...]]


@dataclass(frozen=True)
class KernelThread:
    """A thread of the kernel that may have to preempt a busy CPU; priority 0 is not real time.

    ``policy`` is a number of sched(7): 0 is SCHED_OTHER, 1 is SCHED_FIFO.
    """

    name: str
    pid: int
    priority: int
    policy: int


@dataclass(frozen=True)
class Tuned:
    """``isolated_cores`` of each profile's file of variables, as text; profile None: none chosen."""

    profile: str | None
    isolated_cores: Mapping[str, str]


@dataclass(frozen=True)
class KernelFacts:
    """``sysctls`` has None where the kernel lacks one; ``tuned`` is None where it is not installed.

    ``service_cpus`` are those of systemd's ``CPUAffinity``, None where nothing sets it; ``halt_poll_ns``
    is KVM's, None where it is not loaded.
    """

    release: Fact[str]
    arguments: Fact[CommandLine]
    realtime: Fact[bool]
    sysctls: Mapping[str, Fact[str | None]]
    tuned: Fact[Tuned | None]
    threads: Fact[tuple[KernelThread, ...]]
    service_cpus: Fact[Cpus | None]
    halt_poll_ns: Fact[int | None]

    def sysctl(self, name: str) -> Fact[str | None]:
        return self.sysctls.get(name)


@dataclass(frozen=True)
class Irq:
    """An interrupt: the CPUs it may go to, and the one it goes to (None: the kernel does not say)."""

    number: int
    names: tuple[str, ...]
    affinity: Fact[Cpus]
    effective: Fact[Cpus | None]


@dataclass(frozen=True)
class Irqbalance:
    """The settings of irqbalance in ``path``: the CPUs that it is to leave alone, None where it is not told.

    It leaves the isolated ones alone by itself, as the kernel was booted with (irqbalance(1)).
    """

    path: str
    banned: Cpus | None


@dataclass(frozen=True)
class InterruptFacts:
    """``irqbalance`` is None where it is not installed."""

    default_affinity: Fact[Cpus | None]
    irqs: Fact[tuple[Irq, ...]]
    workqueues: Fact[Cpus | None]
    writeback: Fact[Cpus | None]
    irqbalance: Fact[Irqbalance | None]


@dataclass(frozen=True)
class IommuFacts:
    """``groups`` is 0 where the IOMMU is off; ``types`` are those of the groups (``identity``: pt)."""

    groups: Fact[int]
    types: tuple[str, ...]


@dataclass(frozen=True)
class Nic:
    """A network device on PCI that is no VF. ``node`` is None where the firmware does not say."""

    address: str
    node: Fact[int | None]
    driver: str | None
    device: str
    interfaces: tuple[str, ...]
    total_vfs: Fact[int | None]
    vfs: Fact[int | None]


@dataclass(frozen=True)
class Interface:
    """``speed_mbps`` is None where there is no link; ``master`` is its bond or bridge."""

    name: str
    mtu: Fact[int]
    speed_mbps: int | None
    rx_queues: int
    tx_queues: int
    master: str | None
    #: What it stands on: the members of a bond or bridge, the parent of a VLAN.
    lowers: tuple[str, ...]


@dataclass(frozen=True)
class KernelBond:
    name: str
    mode: Fact[str]
    hash_policy: Fact[str]
    members: Fact[tuple[str, ...]]


@dataclass(frozen=True)
class NetworkFacts:
    nics: Fact[tuple[Nic, ...]]
    interfaces: Fact[tuple[Interface, ...]]
    bonds: tuple[KernelBond, ...]


@dataclass(frozen=True)
class Limit:
    """A control group that has less than the machine; None is no limit. ``hugepages`` by size, bytes."""

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
        """Everything that could not be read, each once."""
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
