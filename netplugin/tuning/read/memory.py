"""Read memory and hugepages of each node, KSM, transparent hugepages, swap and cgroup limits."""

from __future__ import annotations

import re
from functools import partial

from netplugin.tuning.facts import HugepagePool, Limit, MemoryFacts, NodeMemory
from netplugin.tuning.read.cpus import CGROUP, NODE, cpu_list, node_numbers
from netplugin.tuning.root import Root, Unknown, sure, whole

_SIZE = re.compile(r"hugepages-(\d+)kB")
_MM = "/sys/kernel/mm"
#: The systemd unit that the playbook installs, and the tmpfiles.d file that it applies.
HUGEPAGES_UNIT = "netplugin-hugepages.service"
LASTING = "/etc/tmpfiles.d/netplugin-tuning.conf"
_ENABLED = f"/etc/systemd/system/sysinit.target.wants/{HUGEPAGES_UNIT}"
_LINE = re.compile(rf"^w {NODE}/node(\d+)/hugepages/hugepages-(\d+)kB/nr_hugepages - - - - (\d+)$")


def read_memory(root: Root) -> MemoryFacts:
    return MemoryFacts(
        nodes=_nodes(root),
        sizes_kb=_sizes(root, f"{_MM}/hugepages"),
        default_kb=root.optional("/proc/meminfo", _default),
        pools=_pools(root),
        at_boot=None if root.link(_ENABLED) is None else root.optional(LASTING, _written_at_boot),
        ksm=root.optional(f"{_MM}/ksm/run", int),
        transparent=root.optional(f"{_MM}/transparent_hugepage/enabled", chosen),
        swaps=root.optional("/proc/swaps", _swaps) or (),  # a kernel without CONFIG_SWAP has no such file
    )


def chosen(text: str) -> str:
    """The word in brackets of ``always [madvise] never``. Raises: ValueError."""
    found = re.search(r"\[(\S+)\]", text)
    if found is None:
        raise ValueError("nothing is chosen")
    return found[1]


@whole
def _nodes(root: Root) -> tuple[NodeMemory, ...]:
    found, nodes = [], sure(node_numbers(root))
    for node in nodes:
        memory = root.parsed(f"{NODE}/node{node}/meminfo", partial(_meminfo, node))
        if isinstance(memory, Unknown) and memory.missing and nodes == (0,):
            memory = root.parsed("/proc/meminfo", partial(_meminfo, 0))
        found.append(sure(memory))
    return tuple(found)


def _meminfo(node: int, text: str) -> NodeMemory:
    values = dict(re.findall(r"^(?:Node \d+ )?(MemTotal|MemFree):\s+(\d+) kB$", text, re.MULTILINE))
    if len(values) != 2:
        raise ValueError("no MemTotal and MemFree")
    return NodeMemory(node, int(values["MemTotal"]), int(values["MemFree"]))


def _default(text: str) -> int | None:
    """As libvirt reads it (virFileGetDefaultHugepageSize); None without hugepages."""
    found = re.search(r"^Hugepagesize:\s+(\d+) kB$", text, re.MULTILINE)
    return int(found[1]) if found else None


@whole
def _sizes(root: Root, path: str) -> tuple[int, ...]:
    names = sure(root.names(path), ())
    return tuple(sorted(int(match[1]) for name in names if (match := _SIZE.fullmatch(name))))


@whole
def _pools(root: Root) -> tuple[HugepagePool, ...]:
    pools, nodes = [], sure(node_numbers(root))
    for node in nodes:
        folder = f"{NODE}/node{node}/hugepages"
        there = root.names(folder)
        if nodes == (0,) and isinstance(there, Unknown) and there.missing:
            folder = f"{_MM}/hugepages"  # a kernel without NUMA has them only here
        for size in sure(_sizes(root, folder)):
            at = f"{folder}/hugepages-{size}kB"
            total = root.parsed(f"{at}/nr_hugepages", int)
            free = root.parsed(f"{at}/free_hugepages", int)
            pools.append(HugepagePool(node, size, f"{at}/nr_hugepages", total, free))
    return tuple(pools)


def _written_at_boot(text: str) -> dict[int, dict[int, int]]:
    found: dict[int, dict[int, int]] = {}
    for line in text.splitlines():
        if match := _LINE.match(line):
            node, size, pages = map(int, match.groups())
            found.setdefault(size, {})[node] = pages
    return found


def _swaps(text: str) -> tuple[str, ...]:
    head, *rows = text.splitlines()
    if not head.startswith("Filename"):
        raise ValueError("no head")
    return tuple(row.split()[0] for row in rows)


#: Hugepage sizes as the cgroup hugetlb controller names them (mem_fmt in mm/hugetlb_cgroup.c), KB.
LIMITED_KB = {"64KB": 64, "2MB": 2048, "16MB": 16384, "32MB": 32768, "512MB": 524288, "1GB": 1048576}
#: Slices of daemons such as vswitchd, and of libvirt's VMs.
_SLICES = ("/system.slice", "/machine.slice")


def read_limits(root: Root) -> tuple[Limit, ...]:
    """Limits of the process's own cgroup and its parents, then of the slices (cgroup v2 and v1)."""
    own = root.parsed("/proc/self/cgroup", _groups)
    version_2, cpuset, memory = (None,) * 3 if isinstance(own, Unknown) else own
    limits = []
    for group in dict.fromkeys((*_upwards(version_2 or "/"), *_SLICES)):
        at = f"{CGROUP}{group}".rstrip("/")
        cpus = root.optional(f"{at}/cpuset.cpus.effective", cpu_list)
        memory_bytes = root.optional(f"{at}/memory.max", _bytes)
        pages = {size: root.optional(f"{at}/hugetlb.{size}.max", _bytes) for size in LIMITED_KB}
        hugepages = {size: limit for size, limit in pages.items() if limit is not None}
        limits.append(Limit(group, cpus, memory_bytes, hugepages))
    if cpuset and cpuset != "/":
        at = f"{CGROUP}/cpuset{cpuset}/cpuset.effective_cpus"
        limits.append(Limit(cpuset, root.optional(at, cpu_list), None, {}))
    if memory and memory != "/":
        at = f"{CGROUP}/memory{memory}/memory.limit_in_bytes"
        limits.append(Limit(memory, None, root.optional(at, _bytes), {}))
    return tuple(
        each for each in limits if (each.cpus, each.memory_bytes, each.hugepages) != (None, None, {})
    )


def _groups(text: str) -> tuple[str | None, str | None, str | None]:
    """cgroups of the process: v2, and v1's cpuset and memory controllers."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        found |= dict.fromkeys(controllers.split(","), path)
    return found.get(""), found.get("cpuset"), found.get("memory")


def _upwards(group: str) -> list[str]:
    parts = [part for part in group.split("/") if part and part != ".."]
    return ["/" + "/".join(parts[:count]) for count in range(len(parts), -1, -1)]


def _bytes(text: str) -> int | None:
    """Parse a limit; ``max``, and in v1 a number near 2^63, mean no limit (None)."""
    return None if text == "max" or int(text) >= 1 << 62 else int(text)
