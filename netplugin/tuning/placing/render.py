"""Place a domain (pure): refuse conflicts, choose the placement, write it, add the NICs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from netplugin.api.domain_models import DomainPolicy
from netplugin.api.models import Binding
from netplugin.host.cpus import format_list
from netplugin.libvirt.domain import RENDER, complete, conflict, nodes_asked
from netplugin.libvirt.interfaces import Element
from netplugin.libvirt.needs import memory_kb, read_needs, size_kb, vcpus
from netplugin.libvirt.pins import Placement, is_marked, pin_of, pinned, pins, write
from netplugin.tuning.facts import Cpus
from netplugin.tuning.placing.capacity import Held, HostCapacity
from netplugin.tuning.placing.faults import refuse_faults, refuse_undivided
from netplugin.tuning.placing.host_memory import UNKNOWN, HostMemory, bound
from netplugin.tuning.placing.place import place


def refuse_unplaceable(domain: Element, ground: HostCapacity, realtime: bool) -> None:
    """Checks before the placement is chosen. Raises: Conflict, InvalidRequest."""
    vcpu = domain.find("vcpu")
    count = vcpus(domain, RENDER)
    if vcpu is not None and vcpu.get("current", str(count)) != str(count):
        late = "and a vCPU that comes later has no place"
        found = f"<vcpu current='{vcpu.get('current')}'> is not all {count} vCPUs, {late}"
        raise conflict(found, "remove current from <vcpu>, or give it the same number")
    if vcpu is not None and vcpu.get("placement", "static") != "static":
        found = "<vcpu placement='auto'> asks numad for a place, and the policy asks the host's plan"
        raise conflict(found, "remove placement from <vcpu>")
    most = domain.find("maxMemory")
    if most is not None and size_kb(most, "<maxMemory>", RENDER) > memory_kb(domain, RENDER):
        found = "<maxMemory> is more than <memory>, and memory that comes later has no place"
        raise conflict(found, "remove <maxMemory>, and give the VM all of its memory at the start")
    refuse_pmd(domain, ground)
    if realtime:
        _refuse_without_realtime(domain, ground)


def refuse_pmd(domain: Element, ground: HostCapacity) -> None:
    """Refuse pins to PMD CPUs: a thread there makes the PMD thread drop packets. Raises: Conflict.

    Pins in a marked domain are exempt: they may predate the plan, and the next placement replaces them.
    """
    if is_marked(domain):
        return
    for what, _, _, cpus in pinned(domain, RENDER):
        taken = cpus & ground.pmd
        # A thread that may run on all CPUs is not pinned; the scheduler keeps it off isolated ones.
        if taken and not cpus >= ground.pmd | ground.cpus | ground.housekeeping:
            polled = f"CPU {format_list(taken)} is for PMD threads by the host's plan"
            fix = "remove it, and let policy.pin choose"
            raise conflict(f"{what} is CPU {format_list(cpus)}, and {polled}", fix)


def refuse_own_pins(domain: Element, placement: Placement, iothreads: tuple[int, ...]) -> None:
    """Refuse pins that netplugin did not write and that differ from the placement. Raises: Conflict."""
    if is_marked(domain):
        return
    ours = {pin.name: pin.cpus for pin in (pin_of(each, RENDER) for each in pins(placement, iothreads))}
    for what, tag, _, cpus in pinned(domain, RENDER):
        agrees = ours.get(what) == cpus
        if tag == "vcpu":
            agrees = cpus >= placement.cpus | set(placement.emulator)
        if not agrees:
            planned = f"by the host's plan to CPU {format_list(ours.get(what, placement.cpus))}"
            found = f"{what} is CPU {format_list(cpus)}, and the policy pins it {planned}"
            fix = "remove it from the domain, or render the domain without policy.pin and policy.realtime"
            raise conflict(found, fix)


def refuse_stale_mark(domain: Element) -> None:
    """Refuse a domain with placement mark when the policy no longer places it. Raises: Conflict."""
    if is_marked(domain):
        fix = "set policy.pin or policy.realtime again, or give the domain as it was before"
        raise conflict("the domain was placed by netplugin, and its pins are still in it", fix)


def refuse_elsewhere(domain: Element, nodes: Collection[int], host: HostMemory) -> None:
    """Refuse a requested node that the host lacks, and vCPUs that are pinned to other nodes. For QEMU's other
    threads that is a finding of the check. Raises: Conflict."""
    for node in sorted(nodes) if host.cpus else ():
        if node not in host.cpus:
            asked = f"NUMA node {node} is requested by the policy or a port (numa_node)"
            found = f"{asked}, and the host has node {format_list(host.cpus)}"
            raise conflict(found, "name a node that the host has, or none")
        here = host.cpus[node]
        for what, tag, _, cpus in pinned(domain, RENDER):
            if tag in ("vcpu", "vcpupin") and cpus and here and not cpus & here:
                has = f"which the policy or a port requests, has CPU {format_list(here)}"
                found = f"{what} is CPU {format_list(cpus)}, and NUMA node {node}, {has}"
                raise conflict(found, "remove the pin, or ask for its node (numa_node)")


def own_memory(domain: Element) -> dict[int | None, Cpus]:
    """The NUMA nodes that the operator binds memory to, by cell; None for cells without a ``<memnode>``.

    Raises: Conflict, InvalidRequest.
    """
    found = {} if is_marked(domain) else bound(domain, RENDER)
    memory = domain.find("numatune/memory")
    auto = memory is not None and memory.get("placement") == "auto"
    for cell, (mode, _) in found.items():
        if mode != "strict" or (auto and cell is None):
            has = f"<numatune><{_tag(cell)}> has mode='{mode}' or placement='auto'"
            placed = "and a placed VM has its memory on the node of its CPUs"
            raise conflict(f"{has}, {placed}", f"remove <{_tag(cell)}> from <numatune>")
    return {cell: nodes for cell, (_, nodes) in found.items()}


def own_homes(own: Mapping[int | None, Cpus]) -> dict[int, int]:
    """The NUMA node of each cell that the operator binds to one. Raises: Conflict."""
    homes = {cell: min(nodes) for cell, nodes in own.items() if cell is not None and len(nodes) == 1}
    if len(set(homes.values())) < len(homes):
        found = "<numatune><memnode> binds NUMA cells to one node, and a placed VM has a node for each"
        raise conflict(found, "bind them to different nodes, or remove <memnode>")
    return homes


def refuse_own_memory(own: Mapping[int | None, Cpus], placement: Placement) -> None:
    """Refuse memory that the operator binds to other nodes than those of the placement. Raises: Conflict."""
    homes: dict[int | None, set[int]] = {cell.number: {cell.node} for cell in placement.cells}
    for cell, given in own.items():
        nodes = homes.get(cell, set(placement.nodes))
        if given and not nodes <= given:
            planned = f"and the host's plan has it on node {format_list(nodes)}"
            found = f"<numatune><{_tag(cell)}> binds memory to NUMA node {format_list(given)}, {planned}"
            raise conflict(found, f"name those nodes, or remove <{_tag(cell)}>")


def _tag(cell: int | None) -> str:
    return "memory" if cell is None else "memnode"


def _refuse_without_realtime(domain: Element, ground: HostCapacity) -> None:
    if not ground.realtime:
        needed = "policy.realtime needs a host that is planned for it"
        found = f"{needed}: its CPUs isolated, by kernel arguments too"
        fix = "set [host] realtime = true in netplugin.conf, and take the steps of netplugin host plan"
        raise conflict(found, fix)
    current = domain.find("currentMemory")
    if current is not None and domain.find("memory") is not None:
        now, whole = size_kb(current, "<currentMemory>", RENDER), memory_kb(domain, RENDER)
        if now < whole:
            balloon = "which takes a memory balloon, and a real-time VM has none"
            raise conflict(f"<currentMemory> is {now} KB of {whole}, {balloon}", "remove <currentMemory>")


def render_placed(
    domain: Element,
    bindings: Sequence[Binding],
    policy: DomainPolicy,
    ground: HostCapacity,
    others: Held,
    before: Placement | None = None,
    host: HostMemory = UNKNOWN,
) -> Placement:
    """Modify the domain in place and return its placement; ``before`` is its previous one.

    Raises: Conflict, InvalidRequest, Unsupported for the domain's content; CapacityExhausted.
    """
    refuse_unplaceable(domain, ground, policy.realtime)
    needs = read_needs(domain, RENDER)
    refuse_undivided(domain, needs.page_kb or ground.page_kb)
    own = own_memory(domain)
    nodes = nodes_asked(bindings, policy).union(*own.values())
    near = {node for binding in bindings if (node := home(binding)) is not None}
    placement = place(needs, ground, others, nodes, near, before, own_homes(own))
    refuse_own_memory(own, placement)
    refuse_own_pins(domain, placement, needs.iothreads)
    write(domain, placement, needs.iothreads, policy.realtime)
    complete(domain, bindings)
    refuse_faults(domain, host, ground)
    return placement


def home(binding: Binding) -> int | None:
    """The NUMA node of a port's device, as for a VF; else the node that the binding requires, or None."""
    node = (binding.model_extra or {}).get("numa_node")
    return node if isinstance(node, int) else binding.domain_requirements.numa_node
