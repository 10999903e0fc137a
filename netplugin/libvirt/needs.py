"""Resource needs of a domain, read from its XML (pure): vCPUs and memory by guest NUMA cell."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from netplugin.api.errors import Conflict, Unsupported
from netplugin.libvirt.domain import invalid, number
from netplugin.libvirt.interfaces import Element
from netplugin.libvirt.values import content, parse_cpuset, unsigned

#: libvirt's units (scaledInteger in basictypes.rng): KB is 1000 bytes, K and KiB are 1024.
_UNIT: Final = re.compile(r"(?ai)b|bytes?|([kmgtpe])(i?b)?")
#: Sanity limit above any real host: untrusted numbers must not make the agent loop or allocate.
_MOST_VCPUS: Final = 4096
#: QEMU's most NUMA cells (MAX_NODES in its include/sysemu/numa.h).
_MOST_CELLS: Final = 128
#: Pages of this size are no hugepages.
USUAL_KB: Final = 4


@dataclass(frozen=True)
class GuestCell:
    """A guest NUMA cell. A domain without ``<numa>`` counts as one cell."""

    number: int
    vcpus: tuple[int, ...]
    memory_kb: int


@dataclass(frozen=True)
class Needs:
    """``page_kb`` is the hugepage size that the domain requests, or None for any size."""

    cells: tuple[GuestCell, ...]
    page_kb: int | None
    iothreads: tuple[int, ...]


def read_needs(domain: Element, step: str) -> Needs:
    """Raises: InvalidRequest for invalid XML; Conflict, Unsupported if the domain cannot be placed."""
    return Needs(_cells(domain, vcpus(domain, step), step), _page_kb(domain, step), iothreads(domain))


def vcpus(domain: Element, step: str) -> int:
    """The number of vCPUs; 1, libvirt's default, without ``<vcpu>``. Raises: InvalidRequest."""
    element = domain.find("vcpu")
    if element is None:
        return 1
    count = parse_number(content(element), "<vcpu>", step)
    if not 0 < count <= _MOST_VCPUS:
        raise invalid(f"<vcpu> is {count}, not 1 to {_MOST_VCPUS}", step)
    return count


def memory_kb(domain: Element, step: str) -> int:
    """Memory of the domain, KiB; the sum of its cells without ``<memory>``. Raises: InvalidRequest."""
    element = domain.find("memory")
    if element is not None:
        return size_kb(element, "<memory>", step)
    cells = [size_kb(c, "<cell>", step, "memory") for c in domain.iterfind("cpu/numa/cell")]
    if not cells:
        raise invalid("<memory> is missing", step, "say how much memory the VM has")
    return sum(cells)


def size_kb(element: Element, what: str, step: str, attribute: str | None = None) -> int:
    """Size in KiB, rounded up. The number is in ``attribute`` if given, else in the element's text."""
    count = parse_number(content(element) if attribute is None else element.get(attribute, ""), what, step)
    unit = _UNIT.fullmatch(element.get("unit") or "KiB")
    if unit is None:
        raise invalid(f"{what} has the unit {element.get('unit', '')[:20]!r}", step, "use KiB, MiB or GiB")
    prefix, rest = unit.groups()
    power = " kmgtpe".index(prefix.lower()) if prefix else 0
    size = count * int((1000 if (rest or "").lower() == "b" else 1024) ** power)
    return -(-size // 1024)


def iothreads(domain: Element) -> tuple[int, ...]:
    """IO thread ids: those given, then the lowest free ids for the rest, as libvirt assigns them."""
    given = {number(each.get("id"), 0) for each in domain.iterfind("iothreadids/iothread")} - {0}
    count = min(number(content(domain.find("iothreads")), 0), _MOST_VCPUS)
    free = (each for each in itertools.count(1) if each not in given)
    more = [next(free) for _ in range(count - len(given))]
    return tuple(sorted((*given, *more)))


def cells_of(domain: Element, step: str) -> Iterator[GuestCell]:
    """NUMA cells defined in ``<cpu><numa>``. Raises: InvalidRequest."""
    for place, cell in enumerate(domain.iterfind("cpu/numa/cell")):
        if place == _MOST_CELLS:
            raise invalid(f"has more than {_MOST_CELLS} NUMA cells", step)
        id = parse_number(cell.get("id", str(place)), "a NUMA cell's id", step)
        mine = tuple(sorted(cpuset(cell.get("cpus", ""), f"cpus of NUMA cell {id}", step)))
        yield GuestCell(id, mine, size_kb(cell, f"memory of NUMA cell {id}", step, "memory"))


def _cells(domain: Element, count: int, step: str) -> tuple[GuestCell, ...]:
    cells = tuple(cells_of(domain, step))
    if not cells:
        return (GuestCell(0, tuple(range(count)), memory_kb(domain, step)),)
    if any(not cell.vcpus for cell in cells):
        fix = "give each cell its CPUs, or render the domain without policy.pin and policy.realtime"
        what = "placing a domain with a NUMA cell (<cpu><numa>) that has no CPUs"
        raise Unsupported(what, step=step, fix=fix)
    if sorted(cpu for cell in cells for cpu in cell.vcpus) != list(range(count)):
        what = f"the NUMA cells (<cpu><numa>) do not have each of the {count} vCPUs once"
        raise Conflict(what, step=step, fix=f"share out the CPUs 0-{count - 1} among the cells")
    return cells


def pages(domain: Element, step: str) -> list[tuple[int, frozenset[int] | None]]:
    """Each size of hugepages, KB, with the NUMA cells that it is for; None for those without a size of their
    own, which is also what cell 0 means in a domain without cells (virDomainDefPostParseMemtune).

    Raises: InvalidRequest.
    """
    bare = domain.find("cpu/numa/cell") is None
    found: list[tuple[int, frozenset[int] | None]] = []
    for page in domain.iterfind("memoryBacking/hugepages/page"):
        text = page.get("nodeset")
        cells = None if text is None else cpuset(text, "<page nodeset>", step)
        size = size_kb(page, "<page size>", step, "size")
        if not size:
            raise invalid("<page size> is 0", step, "name the size of pages of the host, or remove <page>")
        found.append((size, None if bare and cells == frozenset((0,)) else cells))
    return found


@dataclass(frozen=True)
class GuestMemory:
    """Memory that QEMU allocates as one: its element, its size as libvirt gives it to QEMU, and its NUMA
    cell, None if a memory device names none. ``page_kb`` is the size of its hugepages, None for the host's
    default size, and 0 if it is in none. ``used_kb`` is what it has at the start, ``nodes`` those of the host
    that a device is bound to, ``block_kb`` what the guest plugs at a time."""

    what: str
    kb: int
    cell: int | None
    page_kb: int | None
    used_kb: int
    nodes: frozenset[int] = frozenset()
    block_kb: int = 0


def memory_of(domain: Element, step: str) -> tuple[GuestMemory, ...]:
    """The memory of each NUMA cell, or of the domain, and of each memory device.

    libvirt rounds cells up to 1 MiB and devices to 2 (qemuDomainAlignMemorySizes). Raises: InvalidRequest.
    """
    sizes = _sizes(domain, step)
    devices = tuple(_devices(domain, sizes, step))
    cells = tuple(cells_of(domain, step))
    if not cells and domain.find("memory") is None:
        return devices  # libvirt refuses it, whatever its memory is in
    found = [(f"<cell id='{cell.number}'>", cell.number, cell.memory_kb) for cell in cells]
    if len(cells) < 2:  # it may be one that only the placement gave the domain
        kb = cells[0].memory_kb if cells else memory_kb(domain, step) - sum(device.kb for device in devices)
        found = [("<memory>", cells[0].number if cells else 0, max(0, kb))]
    parts = ((what, whole(kb, 1024), n, sizes.get(n, sizes[None])) for what, n, kb in found)
    return (*(GuestMemory(*part, used_kb=part[1]) for part in parts), *devices)


def whole(kb: int, unit: int) -> int:
    """``kb`` rounded up to whole units."""
    return -(-kb // unit) * unit


def _sizes(domain: Element, step: str) -> dict[int | None, int | None]:
    """The page size of each NUMA cell that has its own, and of the others (None), as in GuestMemory."""
    if domain.find("memoryBacking/hugepages") is None:
        return {None: 0}
    found: dict[int | None, int | None] = {}
    for size, cells in pages(domain, step):
        for cell in (None,) if cells is None else cells:
            found.setdefault(cell, size if size > USUAL_KB else 0)
    return {None: 0 if found else None} | found


def _devices(domain: Element, sizes: Mapping[int | None, int | None], step: str) -> Iterator[GuestMemory]:
    """Memory devices of the host's RAM; others have a file of their own."""
    for device in domain.iterfind("devices/memory"):
        model, size = device.get("model", ""), device.find("target/size")
        if model not in ("dimm", "virtio-mem") or size is None:
            continue
        node, own = device.find("target/node"), device.find("source/pagesize")
        cell = None if node is None else parse_number(content(node), "<memory> of a device: <node>", step)
        page = sizes.get(cell, sizes[None])
        if own is not None:
            page = kb if (kb := size_kb(own, "<pagesize>", step)) > USUAL_KB else 0
        what, asked = f"<memory model='{model}'>", device.find("target/requested")
        kb = used = whole(size_kb(size, f"<size> of {what}", step), 2048)
        nodes, block = cpuset(content(device.find("source/nodemask")), "<nodemask>", step), None
        if model == "virtio-mem":  # the guest plugs what is requested, and QEMU reserves no more
            used = 0 if asked is None else size_kb(asked, f"<requested> of {what}", step)
            block = device.find("target/block")
        block_kb = 0 if block is None else size_kb(block, f"<block> of {what}", step)
        yield GuestMemory(what, kb, cell, page, used, nodes, block_kb)


def _page_kb(domain: Element, step: str) -> int | None:
    sizes = {size for size, _ in pages(domain, step)}
    if len(sizes) > 1:
        what = f"placing a domain with hugepages of several sizes ({', '.join(map(str, sorted(sizes)))} KB)"
        raise Unsupported(what, step=step, fix="ask for one size in <memoryBacking><hugepages>, or for none")
    return next(iter(sizes), None)


def cpuset(text: str, what: str, step: str) -> frozenset[int]:
    """A set of CPUs, nodes or cells; none if the text is blank. Raises: InvalidRequest."""
    try:
        return parse_cpuset(text)
    except ValueError:
        raise invalid(f"{what} is {text[:40]!r}, not a list like 0-3,8", step) from None


def parse_number(text: str, what: str, step: str, bits: int = 64) -> int:
    """Raises: InvalidRequest."""
    found = unsigned(text)
    if found is None or found >= 1 << bits:
        raise invalid(f"{what} is {text[:20]!r}, not a number", step)
    return found
