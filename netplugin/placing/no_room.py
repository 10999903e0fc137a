"""Errors for a VM that does not fit (pure): the host can never hold it, or other VMs use the room."""

from __future__ import annotations

from collections.abc import Collection

from netplugin.domain_xml import RENDER
from netplugin.errors import CapacityExhausted, Conflict, NetpluginError
from netplugin.placing.arrange import free_cores, free_kb, whole_pages
from netplugin.placing.ground import Ground, Held
from netplugin.placing.needs import Cell, Needs


def require_possible(needs: Needs, ground: Ground, nodes: Collection[int], page_kb: int) -> None:
    """Raises: Conflict if the VM would not fit on an empty host either: the domain or plan must change."""
    have = {node.node: node for node in ground.with_cores}
    if not have:
        raise Conflict(
            "the host's plan has no cores for VMs",
            step=RENDER,
            fix="set [host] vm_cores in netplugin.conf",
        )
    missing = sorted(set(nodes) - set(have))
    if missing:
        raise Conflict(
            f"NUMA node {missing[0]} is asked for, and the host's plan has no cores for VMs there",
            step=RENDER, fix=f"ask for node {_list(have)}, or for none",
        )  # fmt: skip
    if len(needs.cells) > len(have) or len(set(nodes)) > len(needs.cells):
        raise _wrong_number(needs, have, nodes)
    where = set(nodes) if nodes and len(needs.cells) == 1 else set(have)
    sizes = {number: len(have[number].cpus) for number in sorted(where)}
    widest = max(sizes, key=lambda number: (sizes[number], -number))
    for cell in needs.cells:
        if len(cell.vcpus) > sizes[widest]:
            raise Conflict(
                f"{_of(cell, needs)} {len(cell.vcpus)} vCPUs, and NUMA node {widest} has "
                f"{sizes[widest]} CPUs for VMs", step=RENDER, fix="give it fewer vCPUs, the plan more "
                "[host] vm_cores, or the domain NUMA cells (<cpu><numa>), each for a node of its own",
            )  # fmt: skip
        memory = {number: have[number].memory_kb.get(page_kb, 0) for number in sizes}
        if whole_pages(cell.memory_kb, page_kb) > max(memory.values()):
            raise Conflict(
                f"{_of(cell, needs)} {cell.memory_kb >> 10} MB of memory, and "
                + "; ".join(f"NUMA node {n} has {kb >> 10} MB" for n, kb in memory.items())
                + f" for VMs in pages of {page_kb} KB", step=RENDER,
                fix="set [host] vm_memory_mb, and reserve what netplugin host plan says, "
                "or give the VM less memory",
            )  # fmt: skip


def _wrong_number(needs: Needs, have: Collection[int], nodes: Collection[int]) -> NetpluginError:
    if len(needs.cells) > len(have):
        return Conflict(
            f"the domain has {len(needs.cells)} NUMA cells (<cpu><numa>), and the host's plan has cores "
            f"for VMs on NUMA node {_list(have)} alone", step=RENDER,
            fix="give the domain fewer cells, or the plan more [host] vm_cores",
        )  # fmt: skip
    return Conflict(
        f"NUMA nodes {_list(nodes)} are asked for by the NICs and the policy, and the domain has "
        f"{len(needs.cells)} NUMA cell", step=RENDER,
        fix="ask for one node, or give the domain a NUMA cell (<cpu><numa>) for each",
    )  # fmt: skip


def exhausted(
    needs: Needs, ground: Ground, others: Held, nodes: Collection[int], page_kb: int
) -> CapacityExhausted:
    free = "; ".join(
        f"node {node.node} has {sum(map(len, free_cores(node, others)))} of {len(node.cpus)} CPUs and "
        f"{free_kb(node, others, page_kb) >> 10} of {node.memory_kb.get(page_kb, 0) >> 10} MB"
        for node in ground.with_cores
    )
    wants = " and ".join(
        f"{len(cell.vcpus)} vCPUs with {cell.memory_kb >> 10} MB" for cell in needs.cells
    )
    where = (
        f"node {_list(nodes)}" if nodes else "one node" if len(needs.cells) == 1 else "a node each"
    )
    return CapacityExhausted(
        f"no room for {wants} on {where}; in whole cores and in pages of {page_kb} KB are free: {free}",
        step=RENDER, fix="delete the ports of a placed VM that is gone, stop what libvirt runs on these "
        "CPUs, or plan more [host] vm_cores",
    )  # fmt: skip


def _of(cell: Cell, needs: Needs) -> str:
    return "the VM has" if len(needs.cells) == 1 else f"its NUMA cell {cell.number} has"


def _list(numbers: Collection[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
