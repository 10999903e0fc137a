"""NUMA nodes and hugepages of the host, and whether a domain's memory has room there (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from netplugin.api.errors import CapacityExhausted, NetpluginError
from netplugin.host.cpus import format_list
from netplugin.libvirt.domain import RENDER, conflict
from netplugin.libvirt.interfaces import Element
from netplugin.libvirt.needs import cpuset, memory_of, whole
from netplugin.libvirt.values import content, unsigned
from netplugin.tuning.facts import Cpus, Facts, Live
from netplugin.tuning.placing.capacity import HostCapacity
from netplugin.tuning.root import Unknown, known


@dataclass(frozen=True)
class HostMemory:
    """CPUs of each NUMA node, and by node and hugepage size (KB) the memory in such pages and the free part.

    ``default_kb``: the size of a mount without one. What could not be read is empty. ``domains`` are the
    names of running VMs, None if libvirt does not report them.
    """

    cpus: Mapping[int, Cpus] = field(default_factory=dict)
    sizes_kb: frozenset[int] = frozenset()
    default_kb: int | None = None
    total_kb: Mapping[tuple[int, int], int] = field(default_factory=dict)
    free_kb: Mapping[tuple[int, int], int] = field(default_factory=dict)
    domains: frozenset[str] | None = None


#: A host of which nothing was read.
UNKNOWN: Final = HostMemory()


def memory_of_host(facts: Facts, live: Live) -> HostMemory:
    cores = known(facts.cpus.cores, ())
    nodes = [node.node for node in known(facts.memory.nodes, ())]
    pools = known(facts.memory.pools, ())
    domains = live.domains
    silent = isinstance(domains, Unknown) and not domains.missing
    return HostMemory(
        {n: frozenset(cpu for core in cores if core.node == n for cpu in core.cpus) for n in nodes},
        frozenset(known(facts.memory.sizes_kb, ())),
        known(facts.memory.default_kb, None),
        {(pool.node, pool.size_kb): known(pool.total, 0) * pool.size_kb for pool in pools},
        {(pool.node, pool.size_kb): known(pool.free, 0) * pool.size_kb for pool in pools},
        None if silent else frozenset(domain.name for domain in known(domains, ())),
    )


def refuse_without_room(domain: Element, host: HostMemory, ground: HostCapacity | None) -> None:
    """Raises: Conflict if there are too few pages, CapacityExhausted if they are in use; InvalidRequest."""
    for room in rooms(domain, host, ground, RENDER):
        if room.needs_kb > room.free_kb:
            raise room.error


@dataclass(frozen=True)
class Room:
    """What memory bound to ``nodes`` needs in pages of a size, what is free there, and what there is, KB."""

    nodes: frozenset[int]
    page_kb: int
    needs_kb: int
    free_kb: int
    most_kb: int

    @property
    def where(self) -> str:
        return f"on NUMA node {format_list(self.nodes)} in pages of {self.page_kb} KB"

    @property
    def text(self) -> str:
        free = f"{self.free_kb >> 10} MB of {self.most_kb >> 10} are free"
        return f"{self.needs_kb >> 10} MB {self.where}, and {free}"

    @property
    def error(self) -> NetpluginError:
        detail = f"the VM's <memory> needs {self.text}"
        if self.needs_kb > self.most_kb:
            return conflict(detail, "reserve such pages on the node, or give the VM less memory")
        return CapacityExhausted(detail, step=RENDER, fix="stop what uses the pages, or reserve more")


def rooms(domain: Element, host: HostMemory, ground: HostCapacity | None, step: str) -> Iterator[Room]:
    """For each size of pages, and each set of nodes that memory is bound to: the memory bound within it,
    and its pages. A VM that runs has its pages already, so that all count. Raises: InvalidRequest."""
    runs = host.domains is None or content(domain.find("name")) in host.domains
    nodes = frozenset(host.cpus or ((node.node for node in ground.nodes) if ground else ()))
    if not nodes or (host.cpus and not host.total_kb):
        return
    default = default_page_kb(host, ground)
    tuned = {n: nodes if mode == "preferred" else own for n, (mode, own) in bound(domain, step).items()}
    needs: dict[tuple[int, frozenset[int]], int] = {}
    for part in memory_of(domain, step):
        page_kb = default if part.page_kb is None else part.page_kb
        if page_kb:
            bound_to = part.nodes or tuned.get(part.cell, tuned.get(None, nodes))
            key = (page_kb, bound_to & nodes or nodes)
            needs[key] = needs.get(key, 0) + whole(part.used_kb, page_kb)
    for page_kb, within in needs:
        need = sum(kb for (size, where), kb in needs.items() if size == page_kb and where <= within)
        most = sum(_most(host, ground, node, page_kb) for node in within)
        free = most if runs or not host.cpus else sum(host.free_kb.get((n, page_kb), 0) for n in within)
        yield Room(within, page_kb, need, min(free, most), most)


def default_page_kb(host: HostMemory, ground: HostCapacity | None) -> int | None:
    """The size of hugepages that name none, if it is known."""
    return host.default_kb or (ground.page_kb if ground else None)


def _most(host: HostMemory, ground: HostCapacity | None, node: int, page_kb: int) -> int:
    planned = ground.node(node) if ground else None
    if planned is not None:
        return planned.memory_kb.get(page_kb, 0)
    return host.total_kb.get((node, page_kb), 0)


def bound(domain: Element, step: str) -> dict[int | None, tuple[str, frozenset[int]]]:
    """By NUMA cell, None for those without a <memnode>, the mode and the nodes of its memory.

    Raises: InvalidRequest.
    """
    found: dict[int | None, tuple[str, frozenset[int]]] = {}
    for element in domain.iterfind("numatune/*"):
        if element.tag in ("memory", "memnode"):
            cell = unsigned(element.get("cellid", "")) if element.tag == "memnode" else None
            nodes = cpuset(element.get("nodeset", ""), f"<{element.tag} nodeset>", step)
            found.setdefault(cell, (element.get("mode", "strict"), nodes))
    return found
