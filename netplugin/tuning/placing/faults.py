"""What libvirt or QEMU would refuse of a domain on this host: its pages, NUMA nodes and CPUs (pure)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Final, NamedTuple

from netplugin.host.cpus import format_list
from netplugin.libvirt.domain import RENDER, conflict, function, nics
from netplugin.libvirt.interfaces import Element
from netplugin.libvirt.needs import USUAL_KB, cells_of, cpuset, memory_of, pages, size_kb, vcpus, whole
from netplugin.libvirt.pins import pinned
from netplugin.libvirt.values import content, unsigned
from netplugin.tuning.placing.capacity import HostCapacity
from netplugin.tuning.placing.host_memory import HostMemory, default_page_kb


class Fault(NamedTuple):
    """What is wrong with a domain, and how to repair it."""

    found: str
    fix: str


def refuse_faults(domain: Element, host: HostMemory, ground: HostCapacity | None) -> None:
    """Raises: Conflict naming the element of a domain that libvirt or QEMU would refuse; InvalidRequest."""
    for fault in (fault for kind in KINDS for fault in kind.faults(domain, host, ground, RENDER)):
        raise conflict(fault.found, fault.fix)


def _of_cpus(domain: Element, host: HostMemory, _: HostCapacity | None, step: str) -> Iterator[Fault]:
    """vCPUs that cells have and the domain does not, or twice; pins to no CPU of the host. Sources:
    virDomainNumaDefValidate in libvirt's src/conf/numa_conf.c, qemuProcessSetupPid in its qemu_process.c."""
    count, there = vcpus(domain, step), frozenset().union(*host.cpus.values())
    taken, lacks = set[int](), f"the domain does not: it has {count}"
    for cell in cells_of(domain, step):
        more = {vcpu for vcpu in cell.vcpus if vcpu >= count}
        for wrong, has in ((taken & {*cell.vcpus}, "another has"), (more, lacks)):
            if wrong:
                found = f"<cell id='{cell.number}'> has vCPU {format_list(wrong)}, which {has}"
                yield Fault(found, "let each cell have its own of the vCPUs")
        taken |= {*cell.vcpus}
    for what, tag, number, cpus in pinned(domain, step):
        ignored = tag == "vcpupin" and number is not None and number >= count  # by libvirt
        if not ignored and (not cpus or (there and not cpus & there)):
            found = f"{what} has CPU {format_list(cpus) or 'none'}, and the host has {format_list(there)}"
            yield Fault(found, "name CPUs of the host that are on line, or remove it")


def _of_pages(domain: Element, host: HostMemory, ground: HostCapacity | None, step: str) -> Iterator[Fault]:
    """Faults of page sizes and of memory devices. Raises: InvalidRequest."""
    yield from _page_elements(domain, host, step)
    yield from _backing(domain)
    yield from _sums(domain, step)
    yield from _divisions(domain, default_page_kb(host, ground), host.sizes_kb, step)


def refuse_undivided(domain: Element, page_kb: int) -> None:
    """Raises: Conflict if pages of this size do not divide the memory of a VM that is to be placed."""
    for fault in _divisions(domain, page_kb, (), RENDER, placed=True):
        raise conflict(fault.found, fault.fix)


def _divisions(
    domain: Element, default_kb: int | None, sizes_kb: Collection[int], step: str, placed: bool = False
) -> Iterator[Fault]:
    for part in memory_of(domain, step):
        page_kb = default_kb if part.page_kb is None or (placed and not part.page_kb) else part.page_kb
        if page_kb and part.block_kb % page_kb:  # virtio_mem_device_realize in QEMU
            found = f"<block> of {part.what} has {part.block_kb} KB, and its pages have {page_kb}"
            yield Fault(found, "give it blocks of a multiple of that")
        if page_kb and part.kb % page_kb:
            dividing = [size for size in sorted(sizes_kb) if part.kb % size == 0]
            named = f", or a <page> of {_listed(dividing)} KB, which divides it" if dividing else ""
            found = f"{part.what} has {part.kb} KB, which is no multiple of its pages of {page_kb} KB"
            yield Fault(found, f"give it {whole(part.kb, page_kb)} KB{named}")


def _of_nodes(domain: Element, host: HostMemory, _: HostCapacity | None, step: str) -> Iterator[Fault]:
    """Nodes in <numatune> that the host does not have. Raises: InvalidRequest."""
    vcpu = domain.find("vcpu")
    for element in domain.iterfind("numatune/*"):
        named = element.tag in ("memory", "memnode") and element.get("nodeset") is not None
        nodes = cpuset(element.get("nodeset", "") if named else "", f"<{element.tag} nodeset>", step)
        numad = "auto" in (element.get("placement"), "static" if vcpu is None else vcpu.get("placement"))
        if not nodes and (named or (element.tag == "memory" and not numad)):
            yield Fault(f"<numatune><{element.tag}> names no NUMA node", "name it as nodeset, or remove it")
        yield from _missing(f"<numatune><{element.tag}> binds memory to", nodes, host, "the element")
    for mask in domain.iterfind("devices/memory/source/nodemask"):
        nodes = cpuset(content(mask), "<nodemask>", step)
        yield from _missing("<nodemask> of a memory device has", nodes, host, "<nodemask>")
    yield from _memnodes(domain, step)


def _missing(what: str, nodes: frozenset[int], host: HostMemory, name: str) -> Iterator[Fault]:
    if host.cpus and (missing := nodes - host.cpus.keys()):
        has = f"and the host has node {format_list(host.cpus)}"
        fix = f"name a node that the host has, or remove {name}"
        yield Fault(f"{what} NUMA node {format_list(missing)}, {has}", fix)


def _memnodes(domain: Element, step: str) -> Iterator[Fault]:
    """Source: virDomainNumatuneNodeParseXML in libvirt's src/conf/numa_conf.c."""
    free = {cell.number for cell in cells_of(domain, step)}
    for element in domain.iterfind("numatune/memnode"):
        cell = unsigned(element.get("cellid", ""))
        if cell not in free or element.get("nodeset") is None:
            yield Fault(
                f"<numatune><memnode cellid='{element.get('cellid', '')[:20]}'> has no NUMA cell of its own "
                "in the domain, or no nodeset",
                "give each <memnode> a cellid of its own, of <cpu><numa>, and a nodeset; or remove it",
            )
        free.discard(-1 if cell is None else cell)


def _listed(sizes: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(sizes)))


def _page_elements(domain: Element, host: HostMemory, step: str) -> Iterator[Fault]:
    """Source: virDomainDefMemtuneValidate in libvirt's src/conf/domain_validate.c."""
    there = {cell.number for cell in cells_of(domain, step)}
    taken: set[int | None] = set()
    for size, cells in pages(domain, step):
        what = f"<page size> of {size} KB"
        if host.sizes_kb and size not in host.sizes_kb and size > USUAL_KB:
            yield Fault(f"{what}: the host has pages of {_listed(host.sizes_kb)} KB", "name one of these")
        for cell in (None,) if cells is None else sorted(cells):
            if cell is not None and cell not in there:
                fix = "let its nodeset name cells of <cpu><numa>: they are no nodes of the host"
                yield Fault(f"{what} is for NUMA cell {cell}, which the domain does not have", fix)
            elif cell in taken:
                of = "all cells without one" if cell is None else f"NUMA cell {cell}"
                yield Fault(f"{what} is a second one for {of}", "let each cell have one <page>")
            taken.add(cell)


def _backing(domain: Element) -> Iterator[Fault]:
    """Source: qemuValidateDomainDefMemory in libvirt's src/qemu/qemu_validate.c."""
    backing = domain.find("memoryBacking")
    if backing is None or backing.find("hugepages") is None:
        return
    for tag, name, value in (("allocation", "mode", "ondemand"), ("source", "type", "anonymous")):
        part = backing.find(tag)
        if part is not None and part.get(name) == value:
            yield Fault(
                f"<memoryBacking> has <{tag} {name}='{value}'>, which libvirt refuses with <hugepages>",
                f"remove <{tag}> from <memoryBacking>",
            )


def _sums(domain: Element, step: str) -> Iterator[Fault]:
    parts = memory_of(domain, step)
    numbers = [cell.number for cell in cells_of(domain, step)]
    cells = set(numbers)
    for part in (part for part in parts if not part.kb):
        yield Fault(f"{part.what} has 0 KB", "give it memory, or remove it")
    if sorted(numbers) != list(range(len(numbers))):
        listed, fix = ", ".join(map(str, numbers)), "number them from 0, each number once"
        yield Fault(f"<cpu><numa> has cells {listed}", fix)
    devices = [part for part in parts if part.what.startswith("<memory model")]
    has, memory, most = sum(part.kb for part in parts), domain.find("memory"), domain.find("maxMemory")
    if cells and memory is not None:
        stated = whole(size_kb(memory, "<memory>", step), 1024)
        least = has - sum(part.kb for part in devices)
        # libvirt counts devices that are no RAM too (virDomainDefGetMemoryTotal), and rounds each to 2 MiB.
        sizes = [size_kb(each, "<size>", step) for each in domain.iterfind("devices/memory/target/size")]
        if not least - 1024 * len(cells) <= stated <= least + sum(whole(size, 2048) for size in sizes):
            fix = "let <memory> be their sum: libvirt gives the VM what the cells have"
            yield Fault(f"<memory> has {stated} KB, and the NUMA cells have {least} KB together", fix)
    hard, locks = domain.find("memtune/hard_limit"), domain.find("memoryBacking/locked") is not None
    locks |= any(function(nic) or nic.get("type") == "vdpa" for nic in nics(domain))
    if hard is not None and locks and (kb := size_kb(hard, "<hard_limit>", step)) < has:
        # It is the RLIMIT_MEMLOCK of QEMU: qemuDomainGetMemLockLimitBytes in libvirt's qemu_domain.c.
        fix = "raise it above that, or remove it: libvirt derives one"
        yield Fault(f"<hard_limit> has {kb} KB, and the VM locks its {has} KB for VFs or <locked>", fix)
    if (most is not None or devices) and not cells:
        what = devices[0].what if most is None else "<maxMemory>"
        yield Fault(f"{what} needs a NUMA cell, and there is none", "add <cpu><numa>, or remove it")
    if devices and most is None:
        yield Fault(f"{devices[0].what} needs <maxMemory>", "add <maxMemory slots='...'>")
    slots = unsigned(most.get("slots", "")) if most is not None else None
    if most is not None and (not slots or slots < len(domain.findall("devices/memory[@model='dimm']"))):
        yield Fault(f"<maxMemory> has {slots or 'no'} slots", "let it have one for each device that may come")
    if most is not None and (limit := whole(size_kb(most, "<maxMemory>", step), 1024)) < has:
        yield Fault(f"<maxMemory> is below the {has} KB of the VM", "raise it")
    elif most is not None and limit == has and not devices:  # machine_set_mem in QEMU
        yield Fault(f"<maxMemory> is the {has} KB of the VM, which QEMU does not take", "raise or remove it")
    for device in devices:
        if cells and device.cell not in cells:
            fix = "name a cell of <cpu><numa>"
            yield Fault(f"<node> of {device.what} is no NUMA cell of the domain", fix)


class Kind(NamedTuple):
    """Faults of one kind, and their finding: its id, what is expected, and its text where there is no fault;
    without a text there is no finding then, because another check has that id."""

    faults: Callable[[Element, HostMemory, HostCapacity | None, str], Iterator[Fault]]
    id: str
    expected: str
    good: str = ""


KINDS: Final = (
    Kind(_of_nodes, "memory-node", "nodes that the host has"),
    Kind(_of_pages, "memory-pages", "pages of the host that divide the memory", "the memory is whole pages"),
    Kind(_of_cpus, "vcpu-there", "vCPUs of the VM in its cells, pins to CPUs of the host", "all are there"),
)
