"""Check that a domain's memory is shareable with vhost-user, in hugepages, and on the node of its CPUs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Final

from netplugin.api.models import Finding
from netplugin.host.cpus import format_list
from netplugin.libvirt.pins import is_marked
from netplugin.tuning.checks.frame import fail, graded, warn
from netplugin.tuning.facts import Cpus
from netplugin.tuning.placing.checks.case import STEP, Case
from netplugin.tuning.placing.faults import KINDS, Fault
from netplugin.tuning.placing.host_memory import bound, rooms
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
        wrong = "the memory is in pages of 4 KB" if none else None
        expected = "hugepages: each page of 4 KB is looked up separately"
        fix = "render the domain with policy.pin, or add <hugepages> to <memoryBacking>"
        say = fail if demanded else warn
        yield graded("hugepages", wrong, "the memory is in hugepages", expected, fix, say)
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
    expected = "memory that OVS can map: a vhost-user NIC passes no frame otherwise"
    fix = "render the domain again: POST /v1/vms/VM:render-domain"
    return graded("memory-shared", wrong, "the memory is shared", expected, fix, fail)


def _host(case: Case) -> Iterator[Finding]:
    """What libvirt or QEMU would refuse to start on this host."""
    for kind in KINDS:
        faults = list(islice(kind.faults(case.domain, case.host, case.ground, STEP), _SHOWN))
        for fault in faults or ([Fault(kind.good, "")] if kind.good else []):
            yield fail(kind.id, fault.found, kind.expected, fault.fix or None)
    fix = "reserve what netplugin host plan says, stop what uses the pages, or give the VM less"
    for room in rooms(case.domain, case.host, case.ground, STEP):
        wrong = room.text if room.needs_kb > room.free_kb else None
        found, expected = (f"{kb >> 10} MB {room.where}" for kb in (room.needs_kb, room.free_kb))
        yield graded("hugepages-room", wrong, found, f"at most {expected}", fix, fail)


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
        fix = "render the domain with policy.pin, or bind it in <numatune>"
        yield warn("memory-node", found, expected, None if has == homes else fix)
    if not vcpu_nodes:
        return
    on = f"the vCPUs on node {format_list(vcpu_nodes)}"
    for what, used, tag in (
        ("QEMU's own threads", case.emulator, "emulatorpin"),
        ("IO threads", case.iothreads, "iothreadpin"),
    ):
        if homes := _homes(used or (), cpus):
            wrong = None if homes & vcpu_nodes else f"{what} are on node {format_list(homes)}, {on}"
            expected = f"CPUs for {what} on the node of the vCPUs"
            fix = f"render the domain with policy.pin, or change <{tag}>"
            yield graded("emulator-node", wrong, f"{what} are near the vCPUs", expected, fix)
    for nic in case.nics:
        if (node := home(nic.binding)) is not None:
            found = f"port {nic.port_id} is on node {node}"
            wrong = None if node in vcpu_nodes else f"{found}, {on}"
            fix = "render the domain with policy.numa_node"
            yield graded("nic-node", wrong, found, "NIC and vCPUs on one node", fix)


def _homes(which: Iterable[int], cpus: Mapping[int, Cpus]) -> frozenset[int]:
    used = frozenset(which)
    return frozenset(node for node, here in cpus.items() if here & used)
