"""Check that a domain's memory is shareable with vhost-user, in hugepages, and on the node of its CPUs."""

from __future__ import annotations

from collections.abc import Iterator

from netplugin.api.models import Finding
from netplugin.host.cpus import format_list
from netplugin.libvirt.needs import page_sizes
from netplugin.libvirt.pins import is_marked
from netplugin.libvirt.values import parse_cpuset
from netplugin.tuning.placing.capacity import HostCapacity
from netplugin.tuning.placing.checks.case import STEP, Case, graded
from netplugin.tuning.placing.render import home


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
    if case.ground is not None:
        yield from _room(case, case.ground)
        yield from _nodes(case, case.ground)


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


def _memory_nodes(case: Case) -> dict[int, frozenset[int]]:
    """The NUMA nodes of each cell's memory; cells with unbound memory are left out."""
    bound = {}
    for element in case.domain.iterfind("numatune/*"):
        try:
            nodes = parse_cpuset(element.get("nodeset", ""))
        except ValueError:
            continue
        if nodes and element.tag == "memnode":
            bound[element.get("cellid", "")] = nodes
        elif nodes and element.tag == "memory":
            bound[""] = nodes
    every = bound.get("")
    found = {cell.number: bound.get(str(cell.number), every) for cell in case.cells}
    return {number: nodes for number, nodes in found.items() if nodes}


def _room(case: Case, ground: HostCapacity) -> Iterator[Finding]:
    """Compare each cell's memory with the total of its nodes; the use by other VMs is not considered."""
    if case.domain.find("memoryBacking/hugepages") is None:
        return
    sizes = page_sizes(case.domain, STEP) or {ground.page_kb}
    if len(sizes) > 1:
        return
    [page_kb] = sizes
    where = _memory_nodes(case)
    for cell in case.cells:
        nodes = [node for node in ground.nodes if node.node in where.get(cell.number, ())]
        most = sum(node.memory_kb.get(page_kb, 0) for node in nodes or ground.nodes)
        short = f"{cell.memory_kb >> 10} MB, and there are {most >> 10} MB for VMs"
        yield graded(
            "hugepages-room",
            short if cell.memory_kb > most else None,
            f"{cell.memory_kb >> 10} MB",
            f"at most {most >> 10} MB in pages of {page_kb} KB",
            "reserve what netplugin host plan says, or give the VM less",
            "fail",
        )


def _nodes(case: Case, ground: HostCapacity) -> Iterator[Finding]:
    """Check the NUMA locality of memory and NICs; a host with one node needs no check."""
    if len(ground.nodes) < 2:
        return
    bound = _memory_nodes(case)
    vcpu_nodes: set[int] = set()
    for cell in case.cells:
        cpus = [cpu for vcpu in cell.vcpus for cpu in case.pins.get(vcpu, ())]
        homes = frozenset(n for cpu in cpus if (n := ground.node_of(cpu)) is not None)
        if not homes:
            continue
        vcpu_nodes |= homes
        has = bound.get(cell.number)
        found = f"memory on {'any node' if has is None else 'node ' + format_list(has)}"
        expected = f"memory on node {format_list(homes)}, as its CPUs"
        yield graded(
            "memory-node",
            None if has == homes else found,
            found,
            expected,
            "render the domain with policy.pin, or bind it in <numatune>",
        )
    for nic in case.nics:
        node = home(nic.binding)
        if node is None or not vcpu_nodes:
            continue
        wrong = f"port {nic.port_id} is on node {node}, the vCPUs on node {format_list(vcpu_nodes)}"
        yield graded(
            "nic-node",
            None if node in vcpu_nodes else wrong,
            f"port {nic.port_id} is on node {node}",
            "NIC and vCPUs on one node",
            "render the domain with policy.numa_node",
        )
