"""Check that a domain's memory is shareable with vhost-user, in hugepages, and on the node of its CPUs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Final

from netplugin.api.models import Finding
from netplugin.host.cpus import format_list
from netplugin.libvirt.pins import is_marked
from netplugin.tuning.facts import Cpus
from netplugin.tuning.placing.checks.case import STEP, Case, graded
from netplugin.tuning.placing.host_memory import bound, node_faults, page_faults, rooms
from netplugin.tuning.placing.render import home

#: How many faults of a kind are named: a domain may have thousands.
_SHOWN: Final = 16


def memory(case: Case) -> Iterator[Finding]:
    needs = [nic.binding.domain_requirements for nic in case.nics]
    if any(need.shared_memory for need in needs):
        yield _shared(case)
    demanded = any(need.hugepages for need in needs) or is_marked(case.domain)
    if demanded or (case.ground is not None and case.pins):
        none = case.domain.find("memoryBacking/hugepages") is None
        yield graded(
            "hugepages",
            "the memory is in pages of 4 KB" if none else None,
            "the memory is in hugepages",
            "hugepages: each page of 4 KB is looked up separately",
            "render the domain with policy.pin, or add <hugepages> to <memoryBacking>",
            "fail" if demanded else "warn",
        )
    yield from _host(case)
    yield from _nodes(case)


def _shared(case: Case) -> Finding:
    access = case.domain.find("memoryBacking/access")
    source = case.domain.find("memoryBacking/source")
    found = [cell.get("memAccess") for cell in case.domain.iterfind("cpu/numa/cell")]
    default = "private" if access is None else access.get("mode", "private")
    modes = {mode or default for mode in found} or {default}
    wrong = None
    if modes != {"shared"}:
        wrong = "the memory is private to QEMU"
    elif case.domain.find("memoryBacking/hugepages") is None and (
        source is None or source.get("type") == "anonymous"
    ):
        wrong = "the memory is anonymous, which nobody can share"
    return graded(
        "memory-shared",
        wrong,
        "the memory is shared",
        "memory that OVS can map: a vhost-user NIC passes no frame otherwise",
        "render the domain again: POST /v1/vms/VM:render-domain",
        "fail",
    )


def _host(case: Case) -> Iterator[Finding]:
    """What libvirt or QEMU would refuse to start on this host."""
    for id, faults, found, expected in (
        ("memory-node", node_faults(case.domain, case.host, STEP), None, "nodes that the host has"),
        (
            "memory-pages",
            page_faults(case.domain, case.host, case.ground, STEP),
            "the memory is whole pages",
            "pages that the host has, and memory that is a multiple of its pages",
        ),
    ):
        wrong = list(islice(faults, _SHOWN))
        for fault in wrong:
            yield graded(id, fault.found, "", expected, fault.fix, "fail")
        if found and not wrong:
            yield graded(id, None, found, expected, "")
    for room in rooms(case.domain, case.host, case.ground, STEP):
        yield graded(
            "hugepages-room",
            room.text if room.needs_kb > room.free_kb else None,
            f"{room.needs_kb >> 10} MB {room.where}",
            f"at most {room.free_kb >> 10} MB {room.where}",
            "reserve what netplugin host plan says, stop what uses the pages, or give the VM less",
            "fail",
        )


def _nodes(case: Case) -> Iterator[Finding]:
    """Check the NUMA locality of memory, threads and NICs; a host with one node needs no check."""
    cpus = {n: each for n, each in case.host.cpus.items() if each}
    if not cpus and case.ground is not None:
        cpus = {node.node: node.cpus | node.emulator for node in case.ground.nodes}
    if len(cpus) < 2:
        return
    memory = bound(case.domain, STEP)
    vcpu_nodes: set[int] = set()
    for cell in case.cells:
        homes = _homes((cpu for vcpu in cell.vcpus for cpu in case.pins.get(vcpu, ())), cpus)
        if not homes:
            continue
        vcpu_nodes |= homes
        _, has = memory.get(cell.number, memory.get(None, ("", frozenset())))
        found = f"memory on {'any node' if not has else 'node ' + format_list(has)}"
        expected = f"memory on node {format_list(homes)}, as its CPUs"
        yield graded(
            "memory-node",
            None if has == homes else found,
            found,
            expected,
            "render the domain with policy.pin, or bind it in <numatune>",
        )
    if not vcpu_nodes:
        return
    emulator = _homes(case.emulator or (), cpus)
    wrong = (
        f"QEMU's own threads are on node {format_list(emulator)}, the vCPUs on node {format_list(vcpu_nodes)}"
    )
    yield graded(
        "emulator-node",
        wrong if emulator and not emulator & vcpu_nodes else None,
        "QEMU's own threads are near the vCPUs",
        "CPUs for QEMU's own threads on the node of the vCPUs",
        "render the domain with policy.pin, or change <emulatorpin>",
    )
    for nic in case.nics:
        node = home(nic.binding)
        if node is None:
            continue
        wrong = f"port {nic.port_id} is on node {node}, the vCPUs on node {format_list(vcpu_nodes)}"
        yield graded(
            "nic-node",
            None if node in vcpu_nodes else wrong,
            f"port {nic.port_id} is on node {node}",
            "NIC and vCPUs on one node",
            "render the domain with policy.numa_node",
        )


def _homes(which: Iterable[int], cpus: Mapping[int, Cpus]) -> frozenset[int]:
    used = frozenset(which)
    return frozenset(node for node, here in cpus.items() if here & used)
