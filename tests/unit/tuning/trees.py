"""From a machine's description to the files of its /proc, /sys and /etc, in the forms of the kernel.

``python -m tests.unit.tuning.trees NAME FOLDER`` writes them, for ``netplugin host ... --root FOLDER``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from netplugin.host.cpus import format_list, parse_list, to_kernel
from tests.unit.tuning.machines import Machine, Tree, load

_CPU = "/sys/devices/system/cpu"


def tree(machine: Machine) -> Tree:
    made = Tree()
    for part in (_cpus, _power, _memory, _kernel, _interrupts, _limits):
        made.files |= {path: f"{text}\n" for path, text in part(machine)}
    _network(machine, made)
    return made


def siblings(machine: Machine, cpu: int) -> frozenset[int]:
    """As Linux numbers them: first a thread of each core of the machine, then the others'."""
    for core in machine.cores:
        if cpu in parse_list(core):
            return frozenset(parse_list(core)) & machine.online
    cores = len(machine.present) // machine.threads
    return frozenset(range(cpu % cores, len(machine.present), cores)) & machine.online


def _cpus(machine: Machine) -> Iterator[tuple[str, str]]:
    yield f"{_CPU}/online", format_list(machine.online)
    yield f"{_CPU}/offline", machine.offline
    yield f"{_CPU}/present", format_list(machine.present)
    yield f"{_CPU}/isolated", machine.isolated
    yield f"{_CPU}/nohz_full", "(null)"
    if machine.threads > 1:
        yield f"{_CPU}/smt/active", "1"
        yield f"{_CPU}/smt/control", "on"
    names = ("CPU implementer", "CPU part") if machine.arm else ("vendor_id", "model name")
    info = (
        f"processor\t: {cpu}\n{names[0]}\t: {machine.vendor}\n{names[1]}\t: {machine.model}\n"
        for cpu in sorted(machine.online)
    )
    yield "/proc/cpuinfo", "\n".join(info)
    for pmu, cpus in machine.pmus.items():
        yield f"/sys/devices/{pmu}/cpus", cpus
    packages = {cpu: node.get("package", 0) for node in machine.nodes for cpu in parse_list(node["cpus"])}
    cores = sorted({min(siblings(machine, cpu)) for cpu in machine.online})
    for cpu in sorted(machine.online):
        both = siblings(machine, cpu)
        if machine.capacities:
            yield f"{_CPU}/cpu{cpu}/cpu_capacity", str(machine.capacities.get(min(both), 1024))
        yield f"{_CPU}/cpu{cpu}/topology/thread_siblings_list", format_list(both)
        yield f"{_CPU}/cpu{cpu}/topology/core_id", str(min(both))
        yield f"{_CPU}/cpu{cpu}/topology/physical_package_id", str(packages[cpu])
        for index, (level, kind, size, shared) in enumerate(machine.caches):
            at = f"{_CPU}/cpu{cpu}/cache/index{index}"
            first = cores.index(min(both)) // shared * shared
            users = [c for core in cores[first : first + shared] for c in siblings(machine, core)]
            yield f"{at}/level", str(level)
            yield f"{at}/type", kind
            yield f"{at}/size", size
            yield f"{at}/shared_cpu_list", format_list(users)


def _power(machine: Machine) -> Iterator[tuple[str, str]]:
    if machine.cpufreq:
        for cpu in sorted(machine.online):
            at = f"{_CPU}/cpufreq/policy{cpu}"
            yield f"{at}/affected_cpus", str(cpu)
            yield f"{at}/scaling_driver", machine.cpufreq["driver"]
            yield f"{at}/scaling_governor", machine.cpufreq["governor"]
    if machine.intel_pstate is not None:
        yield f"{_CPU}/intel_pstate/status", machine.intel_pstate
        yield f"{_CPU}/intel_pstate/no_turbo", str(machine.no_turbo)
    if machine.amd_pstate is not None:
        yield f"{_CPU}/amd_pstate/status", machine.amd_pstate
    if machine.boost is not None:
        yield f"{_CPU}/cpufreq/boost", str(machine.boost)
    if machine.idle:
        yield f"{_CPU}/cpuidle/current_driver", machine.idle["driver"]
        for number, name in enumerate(machine.idle["states"]):
            yield f"{_CPU}/cpu0/cpuidle/state{number}/name", name


def _memory(machine: Machine) -> Iterator[tuple[str, str]]:
    folder = "/sys/devices/system/node"
    numbers = machine.numbers
    with_cpus = (set(parse_list(node["cpus"])) & machine.online for node in machine.nodes)
    yield f"{folder}/online", format_list(numbers)
    yield f"{folder}/has_cpu", format_list(n for n, cpus in zip(numbers, with_cpus, strict=True) if cpus)
    yield (
        f"{folder}/has_memory",
        format_list(n for n, node in zip(numbers, machine.nodes, strict=True) if node["memory_kb"]),
    )
    for position, node in enumerate(machine.nodes):
        at = f"{folder}/node{numbers[position]}"
        cpus = set(parse_list(node["cpus"])) & machine.online
        total = node["memory_kb"]
        yield f"{at}/cpulist", format_list(cpus)
        rows = machine.distances or [
            [10 if a == b else 20 for b in range(len(machine.nodes))] for a in range(len(machine.nodes))
        ]
        yield f"{at}/distance", " ".join(map(str, rows[position]))
        yield f"{at}/cpumap", to_kernel(cpus)
        yield (
            f"{at}/meminfo",
            f"Node {numbers[position]} MemTotal:       {total} kB\n"
            f"Node {numbers[position]} MemFree:        {total // 2} kB",
        )
        for size, pages in node["hugepages"].items():
            yield f"{at}/hugepages/hugepages-{size}kB/nr_hugepages", str(pages)
            yield f"{at}/hugepages/hugepages-{size}kB/free_hugepages", str(pages)
            yield f"{at}/hugepages/hugepages-{size}kB/surplus_hugepages", "0"
            yield f"/sys/kernel/mm/hugepages/hugepages-{size}kB/nr_overcommit_hugepages", "0"
    default = 1048576 if "default_hugepagesz=1G" in machine.cmdline else 2048
    yield "/proc/meminfo", f"HugePages_Total:       0\nHugepagesize:    {default} kB"
    yield "/sys/kernel/mm/ksm/run", "0"
    yield "/sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never"
    rows = [f"{name:40}partition\t1048572\t\t0\t\t-2" for name in machine.swaps]
    yield "/proc/swaps", "\n".join(["Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority", *rows])


def _kernel(machine: Machine) -> Iterator[tuple[str, str]]:
    sysctls = {
        "kernel.nmi_watchdog": 0,
        "kernel.numa_balancing": 0,
        "kernel.sched_rt_runtime_us": 950000,
        "kernel.soft_watchdog": 1,
        "kernel.timer_migration": 1,
        "vm.stat_interval": 1,
    } | machine.sysctls
    yield "/proc/sys/kernel/osrelease", machine.release
    yield "/proc/version", machine.version
    yield "/proc/cmdline", machine.cmdline
    for name, value in sysctls.items():
        yield "/proc/sys/" + name.replace(".", "/"), str(value)
    for cpu in sorted(machine.online):
        # Of proc(5): 37 fields from state on to the CPU and rt_priority, policy and what follows.
        fields = "S 2 0 0 0 -1 69238848 0 0 0 0 0 0 0 0 20 0 1 0 10 0 0 18446744073709551615"
        rest = f"0 0 0 0 0 0 0 2147483647 0 1 0 0 17 {cpu} 0 0 0 0 0 0 0 0 0 0 0 0 0"
        for number, name in enumerate(machine.kernel_threads):
            pid = 14 + cpu + 1000 * number
            yield f"/proc/{pid}/stat", f"{pid} ({name}/{cpu}) {fields} {rest}"
    yield "/proc/1/stat", "1 (init (odd) name) S 0 1 1 0 -1 4194560 0 0 0 0"
    for path, text in (machine.system_conf | machine.irqbalance).items():
        yield path, text
    if machine.halt_poll_ns is not None:
        yield "/sys/module/kvm/parameters/halt_poll_ns", str(machine.halt_poll_ns)
    if machine.tuned:
        yield "/etc/tuned/active_profile", machine.tuned["profile"]
        for profile, text in machine.tuned["variables"].items():
            yield f"/etc/tuned/{profile}-variables.conf", text


def _interrupts(machine: Machine) -> Iterator[tuple[str, str]]:
    everywhere = to_kernel(machine.present)
    yield "/proc/irq/default_smp_affinity", everywhere
    yield "/sys/devices/virtual/workqueue/cpumask", everywhere
    yield "/sys/devices/virtual/workqueue/writeback/cpumask", everywhere
    for number, (name, affinity, effective) in machine.irqs.items():
        at = f"/proc/irq/{number}"
        yield f"{at}/smp_affinity_list", affinity
        yield f"{at}/smp_affinity", to_kernel(parse_list(affinity))
        yield f"{at}/effective_affinity_list", effective
        yield f"{at}/spurious", "count 0\nunhandled 0\nlast_unhandled 0 ms"
        yield f"{at}/{name}/.keep", ""


def _limits(machine: Machine) -> Iterator[tuple[str, str]]:
    yield "/proc/self/cgroup", "0::/user.slice/user-0.slice/session-1.scope"
    for group, values in machine.limits.items():
        for name, value in values.items():
            yield f"/sys/fs/cgroup{group}/{name}", value
    for path, value in machine.cgroups.items():
        yield f"/sys/fs/cgroup/{path}", value


def _network(machine: Machine, made: Tree) -> None:
    for number in range(machine.iommu_groups):
        made.files[f"/sys/kernel/iommu_groups/{number}/type"] = f"{machine.iommu_type}\n"
    made.files["/sys/bus/pci/devices/.keep"] = ""
    head = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT"
    near = "eno9\t0050A8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0"
    ways = [f"{name}\t00000000\t0150A8C0\t0003\t0\t0\t0\t00000000\t0\t0\t0" for name in machine.routes]
    none, metric = "0" * 32, "00000400 00000001 00000000"
    made.files["/proc/net/route"] = "\n".join([head, *ways, near]) + "\n"
    ways = [f"{none} 00 {none} 00 fe80{none[4:]} {metric} 00000003 {name:>8}" for name in machine.routes6]
    nowhere = f"{none} 00 {none} 00 {none} ffffffff 00000001 00000000 00200200       lo"
    made.files["/proc/net/ipv6_route"] = "\n".join([*ways, nowhere]) + "\n"
    made.files["/sys/class/net/lo/mtu"] = "65536\n"
    for nic in machine.nics:
        _nic(nic, made)
    for name, bond in machine.bonds.items():
        at = f"/sys/devices/virtual/net/{name}"
        members = [nic["interface"] for nic in machine.nics if nic.get("master") == name]
        made.links[f"/sys/class/net/{name}"] = f"../../devices/virtual/net/{name}"
        made.files |= {
            f"{at}/mtu": f"{bond['mtu']}\n",
            f"{at}/speed": "50000\n",
            f"{at}/bonding/mode": f"{bond['mode']}\n",
            f"{at}/bonding/xmit_hash_policy": f"{bond['policy']}\n",
            f"{at}/bonding/slaves": " ".join(members) + "\n",
        }
        for member in members:
            made.links[f"{at}/lower_{member}"] = f"../../../../class/net/{member}"


def _nic(nic: dict[str, Any], made: Tree) -> None:
    address = nic["address"]
    device = f"/sys/devices/pci{address[:7]}/{address}"
    made.links[f"/sys/bus/pci/devices/{address}"] = f"../../..{device.removeprefix('/sys')}"
    made.files |= {
        f"{device}/class": "0x020000\n",
        f"{device}/numa_node": f"{nic['node']}\n",
        f"{device}/uevent": f"DRIVER={nic['driver']}\nPCI_CLASS=20000\nPCI_ID={nic['id']}\n"
        f"PCI_SLOT_NAME={address}\n",
    }
    if "total_vfs" in nic:
        made.files[f"{device}/sriov_totalvfs"] = f"{nic['total_vfs']}\n"
        made.files[f"{device}/sriov_numvfs"] = f"{nic['vfs']}\n"
    for vf in range(nic.get("vfs", 0)):
        name = f"{address[:-1]}{8 + vf + 64 * int(address[-1])}"
        at = f"{device.rpartition('/')[0]}/{name}"
        made.files[f"{at}/class"] = "0x020000\n"
        made.links |= {f"{at}/physfn": f"../{address}", f"{device}/virtfn{vf}": f"../{name}"}
        made.links[f"/sys/bus/pci/devices/{name}"] = f"../../..{at.removeprefix('/sys')}"
        for driver in filter(None, nic.get("vf_drivers", [])[vf : vf + 1]):
            made.links[f"{at}/driver"] = f"../../../bus/pci/drivers/{driver}"
    if "interface" not in nic:
        return
    at = "/".join(filter(None, (device, nic.get("virtio"), "net", nic["interface"])))
    made.links[f"/sys/class/net/{nic['interface']}"] = f"../..{at.removeprefix('/sys')}"
    made.files |= {f"{at}/mtu": f"{nic['mtu']}\n", f"{at}/speed": f"{nic['speed']}\n"}
    for queue in range(nic["queues"]):
        made.files[f"{at}/queues/rx-{queue}/rps_cpus"] = "0\n"
        made.files[f"{at}/queues/tx-{queue}/xps_cpus"] = "0\n"
    if "master" in nic:
        made.links[f"{at}/master"] = f"../../../../virtual/net/{nic['master']}"


if __name__ == "__main__":
    tree(load(sys.argv[1])).write(Path(sys.argv[2]))
