"""Read CPU facts: online state, cores, caches, isolation, power management, affinity of interrupts."""

from __future__ import annotations

import re

from netplugin.host.cpus import from_kernel, parse_list
from netplugin.tuning import facts
from netplugin.tuning.facts import EFFICIENCY, NODELESS, PERFORMANCE, Cache, Core, Cpus, Irq, Policy
from netplugin.tuning.root import Fact, Root, Unknown, known, sure, whole

CPU = "/sys/devices/system/cpu"
NODE = "/sys/devices/system/node"
CGROUP = "/sys/fs/cgroup"
#: CPUs of the performance cores, in the perf PMU of an x86 CPU that has two kinds of cores
#: (intel_hybrid_get_attr_cpus in arch/x86/events/intel/core.c). All others are efficiency cores.
_FAST = "/sys/devices/cpu_core/cpus"
_NODE = re.compile(r"node(\d+)")
#: Fields of /proc/cpuinfo on x86 and on ARM (c_show in arch/arm64/kernel/cpuinfo.c).
_VENDOR = r"vendor_id|CPU implementer"
_MODEL = r"model name|CPU part"
X86, ARM = "x86_64", "aarch64"


def cpu_list(text: str) -> Cpus:
    """Parse a sysfs CPU list; a kernel without the feature prints ``(null)``. Raises: ValueError."""
    return frozenset() if text == "(null)" else frozenset(parse_list(text))


def read_cpus(root: Root) -> facts.CpuFacts:
    online = root.parsed(f"{CPU}/online", cpu_list)
    booted = root.optional(f"{CPU}/isolated", cpu_list)
    partitions = _partitions(root)
    since_boot = known(booted, None) or frozenset()
    partitioned = partitions if isinstance(partitions, Unknown) else partitions - since_boot
    return facts.CpuFacts(
        arch=root.parsed("/proc/cpuinfo", _arch),
        vendor=root.parsed("/proc/cpuinfo", lambda text: _cpuinfo(text, _VENDOR)),
        model=root.parsed("/proc/cpuinfo", lambda text: _cpuinfo(text, _MODEL)),
        online=online,
        offline=root.parsed(f"{CPU}/offline", cpu_list),
        present=root.optional(f"{CPU}/present", cpu_list),
        cores=_cores(root, online),
        distances=_distances(root),
        caches=_caches(root, online),
        smt=root.optional(f"{CPU}/smt/active", lambda text: bool(int(text))),
        isolated=since_boot | partitioned if isinstance(partitioned, frozenset) and partitioned else booted,
        partitioned=partitioned,
        nohz_full=root.optional(f"{CPU}/nohz_full", cpu_list),
    )


@whole
def _partitions(root: Root, group: str = CGROUP) -> Cpus:
    """CPUs isolated by cpuset partitions (Documentation/admin-guide/cgroup-v2.rst). ``cpuset.cpus.isolated``
    of the root cgroup has them since Linux 6.8 (commit 877c737db935). Before that, a partition's parent is a
    partition; one that is invalid has a reason after its type and isolates nothing."""
    if (
        group == CGROUP
        and (listed := sure(root.optional(f"{group}/cpuset.cpus.isolated", cpu_list))) is not None
    ):
        return listed
    found: Cpus = frozenset()
    for at in (f"{group}/{name}" for name in sure(root.names(group), ())):
        kind = sure(root.optional(f"{at}/cpuset.cpus.partition", str))
        if kind == "isolated":
            found |= sure(root.parsed(f"{at}/cpuset.cpus.effective", cpu_list))
        if kind in ("root", "isolated"):
            found |= sure(_partitions(root, at))
    return found


@whole
def node_numbers(root: Root) -> tuple[int, ...]:
    """Numbers of the NUMA nodes that are online, which may be sparse; only node 0 without NUMA."""
    names = sure(root.names(NODE), ("node0",))
    there = frozenset(int(match[1]) for name in names if (match := _NODE.fullmatch(name)))
    online = known(root.optional(f"{NODE}/online", cpu_list), None)
    return tuple(sorted(there & (there if online is None else online)))


def _arch(text: str) -> str:
    if re.search(r"^vendor_id\s*:", text, re.MULTILINE):
        return X86
    _cpuinfo(text, "CPU implementer")
    return ARM


def _cpuinfo(text: str, field: str) -> str:
    """Value of the first matching field. Raises: ValueError."""
    found = re.search(rf"^(?:{field})\s*: (.+)$", text, re.MULTILINE)
    if found is None:
        raise ValueError(f"no {field}")
    return found[1].strip()


@whole
def _distances(root: Root) -> dict[int, dict[int, int]]:
    """NUMA distances; empty without NUMA. Each file has a number per online node, in order."""
    numbers, found = sure(node_numbers(root)), {}
    for node in numbers:
        row = sure(root.optional(f"{NODE}/node{node}/distance", lambda text: tuple(map(int, text.split()))))
        if row is not None and len(row) == len(numbers):
            found[node] = dict(zip(numbers, row, strict=True))
    return found


@whole
def _cores(root: Root, online: Fact[Cpus]) -> Fact[tuple[Core, ...]]:
    """Siblings on different nodes count as cores of their own, because OVS and libvirt go by node."""
    home, slow = sure(_nodes_of_cpus(root, sure(online))), sure(_slow(root, sure(online)))
    first = min(home.values(), default=0)
    cores: dict[Cpus, Core] = {}
    for cpu in sorted(sure(online)):
        at = f"{CPU}/cpu{cpu}/topology"
        siblings = sure(root.parsed(f"{at}/thread_siblings_list", cpu_list))
        package = sure(root.parsed(f"{at}/physical_package_id", int))
        # A sibling may have gone offline between two reads.
        cpus = frozenset(c for c in siblings & sure(online) if home.get(c) == home.get(cpu)) | {cpu}
        if any(cpus != other and cpus & other for other in cores):
            return Unknown(f"{at}/thread_siblings_list", "contradicts that of its siblings")
        kind = NODELESS if cpu not in home else EFFICIENCY if cpu in slow else PERFORMANCE
        cores.setdefault(cpus, Core(home.get(cpu, first), package, cpus, kind))
    return tuple(cores.values())


@whole
def _slow(root: Root, online: Cpus) -> Cpus:
    """CPUs of efficiency cores. By ``cpu_capacity`` (ARM) they have less than three quarters of the fastest
    CPU's: those of one kind may differ a little in frequency."""
    if (fast := sure(root.optional(_FAST, cpu_list))) is not None:
        return online - fast
    capacities: dict[int, int] = {}
    for cpu in sorted(online):
        capacity = sure(root.optional(f"{CPU}/cpu{cpu}/cpu_capacity", int))
        if capacity is None:  # a kernel has it for all CPUs or for none
            return frozenset()
        capacities[cpu] = capacity
    most = max(capacities.values(), default=0)
    return frozenset(cpu for cpu, capacity in capacities.items() if 4 * capacity < 3 * most)


@whole
def _nodes_of_cpus(root: Root, online: Cpus) -> dict[int, int]:
    home: dict[int, int] = {}
    numbers = sure(node_numbers(root))
    for node in numbers:
        cpus = root.parsed(f"{NODE}/node{node}/cpulist", cpu_list)
        home |= dict.fromkeys(sure(cpus, online if numbers == (0,) else None), node)
    return home


@whole
def _caches(root: Root, online: Fact[Cpus]) -> tuple[Cache, ...]:
    found: dict[Cache, None] = {}
    for cpu in sorted(sure(online)):
        names = sure(root.names(f"{CPU}/cpu{cpu}/cache"), ())  # a VM may report none
        for at in (f"{CPU}/cpu{cpu}/cache/{name}" for name in names if name.startswith("index")):
            # ARM's firmware need not say it (cache_default_attrs_is_visible in drivers/base/cacheinfo.c).
            cache = Cache(
                level=sure(root.parsed(f"{at}/level", int)),
                kind=sure(root.text(f"{at}/type")),
                size_kb=sure(root.optional(f"{at}/size", lambda text: int(text.removesuffix("K")))) or 0,
                cpus=sure(root.parsed(f"{at}/shared_cpu_list", cpu_list)),
            )
            found[cache] = None
    return tuple(found)


def read_power(root: Root) -> facts.PowerFacts:
    return facts.PowerFacts(
        policies=_policies(root),
        turbo=_turbo(root),
        intel_pstate=root.optional(f"{CPU}/intel_pstate/status", str),
        amd_pstate=root.optional(f"{CPU}/amd_pstate/status", str),
        idle_driver=root.optional(f"{CPU}/cpuidle/current_driver", str),
        idle_states=_idle_states(root),
    )


@whole
def _policies(root: Root) -> tuple[Policy, ...]:
    """Without those whose CPUs are all off line: reading or writing them is EBUSY, and older kernels list no
    CPUs (policy_is_inactive in drivers/cpufreq/cpufreq.c). A policy has the number of one of its CPUs."""
    policies = []
    online = known(root.parsed(f"{CPU}/online", cpu_list), None)
    for name in sorted(sure(root.names(f"{CPU}/cpufreq"), ()), key=lambda name: (len(name), name)):
        if re.fullmatch(r"policy[0-9]+", name):
            at = f"{CPU}/cpufreq/{name}"
            cpus = root.parsed(f"{at}/affected_cpus", lambda text: cpu_list(",".join(text.split())))
            driver, governor = root.text(f"{at}/scaling_driver"), root.text(f"{at}/scaling_governor")
            if known(cpus, None) or online is None or int(name.removeprefix("policy")) in online:
                policies.append(Policy(name, cpus, driver, governor))
    return tuple(policies)


def _turbo(root: Root) -> Fact[bool | None]:
    pstate = root.optional(f"{CPU}/intel_pstate/status", str)
    # Without a driver, reading no_turbo is EAGAIN (show_no_turbo in drivers/cpufreq/intel_pstate.c).
    off = None if pstate == "off" else root.optional(f"{CPU}/intel_pstate/no_turbo", int)
    if off is None:
        return root.optional(f"{CPU}/cpufreq/boost", lambda text: bool(int(text)))
    return off if isinstance(off, Unknown) else not off


@whole
def _idle_states(root: Root) -> tuple[str, ...]:
    at = f"{CPU}/cpu0/cpuidle"
    return tuple(sure(root.text(f"{at}/{state}/name")) for state in sure(root.names(at), ()))


DEFAULT_AFFINITY = "/proc/irq/default_smp_affinity"
WORKQUEUES = "/sys/devices/virtual/workqueue/cpumask"
WRITEBACK = "/sys/devices/virtual/workqueue/writeback/cpumask"
#: Environment file on Debian and on Red Hat.
IRQBALANCE = ("/etc/default/irqbalance", "/etc/sysconfig/irqbalance")
#: Files in an IRQ's directory; the other entries are directories of the devices that use it.
_FILE = re.compile("affinity_hint|(effective|smp)_affinity(_list)?|node|spurious")


def irq_path(number: int) -> str:
    return f"/proc/irq/{number}/smp_affinity_list"


def read_interrupts(root: Root) -> facts.InterruptFacts:
    return facts.InterruptFacts(
        default_affinity=root.optional(DEFAULT_AFFINITY, from_kernel),
        irqs=_irqs(root),
        workqueues=root.optional(WORKQUEUES, from_kernel),
        writeback=root.optional(WRITEBACK, from_kernel),
        irqbalance=_irqbalance(root),
    )


@whole
def _irqbalance(root: Root) -> facts.IrqbalanceFacts | None:
    for path in IRQBALANCE:
        if sure(root.optional(path, str)) is not None:
            return facts.IrqbalanceFacts(path, sure(root.parsed(path, banned_cpus)))
    return None


def banned_cpus(text: str) -> Cpus | None:
    """CPUs that the environment file bans from irqbalance. Raises: ValueError. The older variable, a mask,
    overrides the list (setup_banned_cpus in irqbalance's cputree.c)."""
    if (mask := masked_cpus(text)) is not None:
        return mask
    found = _banned("CPULIST", text)
    return cpu_list(found) if found else None


def masked_cpus(text: str) -> Cpus | None:
    """CPUs in the older variable, a mask; None if not set. Raises: ValueError."""
    found = _banned("CPUS", text)
    return from_kernel(found) if found else None


def _banned(name: str, text: str) -> str:
    """Last value of the variable; empty if not set."""
    values = re.findall(rf"^\s*IRQBALANCE_BANNED_{name}=(.*)$", text, re.MULTILINE)
    return values[-1].strip().strip("\"'") if values else ""


@whole
def _irqs(root: Root) -> tuple[Irq, ...]:
    numbers = filter(str.isdecimal, sure(root.names("/proc/irq"), ()))
    return tuple(_irq(root, int(n)) for n in sorted(numbers, key=int))


def _irq(root: Root, number: int) -> Irq:
    return Irq(
        number=number,
        names=tuple(n for n in known(root.names(f"/proc/irq/{number}"), ()) if not _FILE.fullmatch(n)),
        affinity=root.parsed(irq_path(number), cpu_list),
        effective=root.optional(f"/proc/irq/{number}/effective_affinity_list", cpu_list),
    )
