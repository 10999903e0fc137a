"""Read memory and hugepages of each node, KSM, transparent hugepages and swap."""

from __future__ import annotations

import re

from netplugin.tuning.facts import HugepagePool, MemoryFacts, NodeMemory
from netplugin.tuning.read.cpus import NODE, node_numbers
from netplugin.tuning.root import Fact, Root, Unknown

_SIZE = re.compile(r"hugepages-(\d+)kB")
_MM = "/sys/kernel/mm"
#: The systemd unit that the playbook installs, and the tmpfiles.d file that it applies.
HUGEPAGES_UNIT = "netplugin-hugepages.service"
LASTING = "/etc/tmpfiles.d/netplugin-tuning.conf"
_ENABLED = f"/etc/systemd/system/sysinit.target.wants/{HUGEPAGES_UNIT}"
_LINE = re.compile(rf"^w {NODE}/node(\d+)/hugepages/hugepages-(\d+)kB/nr_hugepages - - - - (\d+)$")


def read_memory(root: Root) -> MemoryFacts:
    nodes = node_numbers(root)
    return MemoryFacts(
        nodes=nodes if isinstance(nodes, Unknown) else _nodes(root, nodes),
        sizes_kb=_sizes(root, f"{_MM}/hugepages"),
        pools=nodes if isinstance(nodes, Unknown) else _pools(root, nodes),
        at_boot=_at_boot(root),
        ksm=root.optional(f"{_MM}/ksm/run", int),
        transparent=root.optional(f"{_MM}/transparent_hugepage/enabled", chosen),
        swaps=root.parsed("/proc/swaps", _swaps),
    )


def chosen(text: str) -> str:
    """The word in brackets of ``always [madvise] never``. Raises: ValueError."""
    found = re.search(r"\[(\S+)\]", text)
    if found is None:
        raise ValueError("nothing is chosen")
    return found[1]


def _nodes(root: Root, nodes: tuple[int, ...]) -> Fact[tuple[NodeMemory, ...]]:
    found = []
    for node in nodes:
        memory = root.parsed(f"{NODE}/node{node}/meminfo", lambda text, n=node: _meminfo(text, n))  # type: ignore[misc]
        if isinstance(memory, Unknown) and memory.missing and nodes == (0,):
            memory = root.parsed("/proc/meminfo", lambda text: _meminfo(text, 0))
        if isinstance(memory, Unknown):
            return memory
        found.append(memory)
    return tuple(found)


def _meminfo(text: str, node: int) -> NodeMemory:
    values = dict(re.findall(r"^(?:Node \d+ )?(MemTotal|MemFree):\s+(\d+) kB$", text, re.MULTILINE))
    if len(values) != 2:
        raise ValueError("no MemTotal and MemFree")
    return NodeMemory(node, int(values["MemTotal"]), int(values["MemFree"]))


def _sizes(root: Root, path: str) -> Fact[tuple[int, ...]]:
    names = root.names(path)
    if isinstance(names, Unknown):
        return () if names.missing else names
    return tuple(sorted(int(match[1]) for name in names if (match := _SIZE.fullmatch(name))))


def _pools(root: Root, nodes: tuple[int, ...]) -> Fact[tuple[HugepagePool, ...]]:
    pools = []
    for node in nodes:
        folder = f"{NODE}/node{node}/hugepages"
        there = root.names(folder)
        if nodes == (0,) and isinstance(there, Unknown) and there.missing:
            folder = f"{_MM}/hugepages"  # a kernel without NUMA has them only here
        sizes = _sizes(root, folder)
        if isinstance(sizes, Unknown):
            return sizes
        for size in sizes:
            at = f"{folder}/hugepages-{size}kB"
            total = root.parsed(f"{at}/nr_hugepages", int)
            free = root.parsed(f"{at}/free_hugepages", int)
            pools.append(HugepagePool(node, size, f"{at}/nr_hugepages", total, free))
    return tuple(pools)


def _at_boot(root: Root) -> Fact[dict[int, dict[int, int]] | None]:
    return None if root.link(_ENABLED) is None else root.optional(LASTING, _written_at_boot)


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
