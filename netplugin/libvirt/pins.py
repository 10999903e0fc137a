"""The placement of a domain: CPU sets, pins, memory and topology in its XML, and the mark on it (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from lxml import etree

from netplugin.api.fields import Value
from netplugin.host.cpus import format_list
from netplugin.libvirt.domain import child, number
from netplugin.libvirt.interfaces import Element
from netplugin.libvirt.needs import cpuset, whole
from netplugin.libvirt.values import replace_content, unsigned

NAMESPACE: Final = "urn:netplugin:placed"
_TAG: Final = f"{{{NAMESPACE}}}placed"


def is_marked(domain: Element) -> bool:
    return domain.find(f"metadata/{_TAG}") is not None


def is_marked_realtime(domain: Element) -> bool:
    mark = domain.find(f"metadata/{_TAG}")
    return mark is not None and mark.get("realtime") == "yes"


def mark(domain: Element, realtime: bool) -> None:
    """Set the mark in ``<metadata>``, where libvirt keeps one element per foreign namespace."""
    found = domain.find(f"metadata/{_TAG}")
    if found is None:
        found = etree.SubElement(child(domain, "metadata"), _TAG, nsmap={"netplugin": NAMESPACE})
    found.set("realtime", "yes" if realtime else "no")


class PlacedCell(Value):
    """A guest NUMA cell on a host node: ``vcpus[i]`` runs on ``cpus[i]``."""

    number: int
    node: int
    vcpus: tuple[int, ...]
    cpus: tuple[int, ...]
    memory_kb: int


class Placement(Value):
    """``threads`` is the guest's threads per core: 2 if vCPUs 2k and 2k+1 run on siblings of one core.

    ``emulator`` are the CPUs of QEMU's emulator and IO threads; ``emulator_alone`` is true if none of
    these is a housekeeping CPU. ``page_kb`` is the hugepage size.
    """

    cells: tuple[PlacedCell, ...]
    threads: int
    emulator: tuple[int, ...]
    emulator_alone: bool
    page_kb: int

    @property
    def cpus(self) -> frozenset[int]:
        return frozenset(cpu for cell in self.cells for cpu in cell.cpus)

    @property
    def nodes(self) -> tuple[int, ...]:
        return tuple(sorted({cell.node for cell in self.cells}))

    @property
    def pins(self) -> dict[int, int]:
        """vCPU number to CPU."""
        pairs = (pair for cell in self.cells for pair in zip(cell.vcpus, cell.cpus, strict=True))
        return dict(sorted(pairs))

    def paged_kb(self, cell: PlacedCell) -> int:
        """Memory of a cell, rounded up to whole hugepages, KB."""
        return whole(cell.memory_kb, self.page_kb)


# Sources: libvirt's formatdomain ("CPU Tuning", "NUMA Node Tuning", "Memory Backing", "CPU model and
# topology", "Time keeping"), and for real time the guides of real-time KVM (tuned's realtime-virtual-host).


#: SCHED_FIFO priority of vCPUs, below the host's ksoftirqd (2) and rcuc (4), which a vCPU must not starve.
PRIORITY: Final = 1
_PINS: Final = ("vcpupin", "emulatorpin", "iothreadpin")
_SCHEDULERS: Final = ("vcpusched", "emulatorsched")
_X86: Final = ("x86_64", "i686")
#: CPU feature: the TSC rate is constant on all CPUs and power states. QEMU does not migrate VMs with it.
INVARIANT_TSC: Final = "invtsc"
#: Timers of a real-time guest: native TSC, which is read without a VM exit, and no kvmclock.
TIMERS: Final[Mapping[str, tuple[str, str]]] = {"kvmclock": ("present", "no"), "tsc": ("mode", "native")}


def write(domain: Element, placement: Placement, iothreads: tuple[int, ...], realtime: bool) -> None:
    """Modify the domain in place. Idempotent."""
    vcpu = child(domain, "vcpu")
    replace_content(vcpu, str(len(placement.pins)))
    vcpu.set("placement", "static")
    _tune_cpus(domain, placement, iothreads, realtime)
    _tune_numa(domain, placement)
    _back_memory(domain, placement, realtime)
    _model(domain, placement)
    if realtime:
        _be_realtime(domain)
    mark(domain, realtime)


def pins(placement: Placement, iothreads: tuple[int, ...]) -> list[Element]:
    """The pin elements of ``<cputune>`` for a placement."""
    emulator = format_list(placement.emulator)
    made = [etree.Element("vcpupin", vcpu=str(vcpu), cpuset=str(cpu)) for vcpu, cpu in placement.pins.items()]
    made.append(etree.Element("emulatorpin", cpuset=emulator))
    made += [etree.Element("iothreadpin", iothread=str(n), cpuset=emulator) for n in iothreads]
    return made


class Pin(NamedTuple):
    """An element that pins threads to CPUs: its name in errors, its tag, and the vCPU or IO thread that it is
    for, None if it names none."""

    name: str
    tag: str
    number: int | None
    cpus: frozenset[int]


def pinned(domain: Element, step: str) -> Iterator[Pin]:
    """Yield each CPU pin of the domain. Raises: InvalidRequest."""
    vcpu = domain.find("vcpu")
    if vcpu is not None and (cpus := vcpu.get("cpuset")):
        yield Pin("<vcpu cpuset>", "vcpu", None, cpuset(cpus, "<vcpu cpuset>", step))
    yield from (pin_of(each, step) for each in domain.iterfind("cputune/*") if each.tag in _PINS)


def pin_of(element: Element, step: str) -> Pin:
    """Raises: InvalidRequest."""
    name, text = f"<{element.tag}>", element.get("vcpu", element.get("iothread"))
    number = None if text is None else unsigned(text)
    if text is not None:
        name += f" {text[:20] if number is None else number}"
    return Pin(name, element.tag, number, cpuset(element.get("cpuset", ""), f"{name} cpuset", step))


def _tune_cpus(domain: Element, placement: Placement, iothreads: tuple[int, ...], realtime: bool) -> None:
    cputune = child(domain, "cputune")
    for old in [each for each in cputune if each.tag in (*_PINS, *_SCHEDULERS)]:
        cputune.remove(old)
    made = pins(placement, iothreads)
    if realtime:
        fifo = etree.Element("vcpusched", vcpus=format_list(placement.pins))
        made.append(fifo)
        if placement.emulator_alone:  # on housekeeping CPUs, FIFO would preempt everything else
            made.append(etree.Element("emulatorsched"))
        for each in made[made.index(fifo) :]:
            each.set("scheduler", "fifo")
            each.set("priority", str(PRIORITY))
    cputune[0:0] = made


def _tune_numa(domain: Element, placement: Placement) -> None:
    numatune = child(domain, "numatune")
    del numatune[:]
    etree.SubElement(numatune, "memory", mode="strict", nodeset=format_list(placement.nodes))
    for cell in placement.cells:
        etree.SubElement(numatune, "memnode", cellid=str(cell.number), mode="strict", nodeset=str(cell.node))


def _back_memory(domain: Element, placement: Placement, realtime: bool) -> None:
    """Set hugepages; ``nodeset`` of ``<page>`` lists guest NUMA cells, not host nodes."""
    backing = child(domain, "memoryBacking")
    hugepages = backing.find("hugepages")
    if hugepages is None:
        hugepages = etree.Element("hugepages")
        backing.insert(0, hugepages)
    del hugepages[:]
    cells = format_list(cell.number for cell in placement.cells)
    etree.SubElement(hugepages, "page", size=str(placement.page_kb), unit="KiB", nodeset=cells)
    if realtime and backing.find("locked") is None:
        backing.insert(1, etree.Element("locked"))


def _model(domain: Element, placement: Placement) -> None:
    """Keep the operator's CPU model, else use host-passthrough, or ``maximum`` without KVM."""
    cpu = child(domain, "cpu")
    if cpu.get("mode") is None and cpu.find("model") is None:
        if is_kvm(domain):
            cpu.set("mode", "host-passthrough")
            cpu.set("check", "none")
        else:
            cpu.set("mode", "maximum")
    _topology(cpu, placement)
    if cpu.find("numa") is None:
        numa = etree.SubElement(cpu, "numa")
        for cell in placement.cells:
            made = etree.SubElement(numa, "cell", id=str(cell.number), cpus=format_list(cell.vcpus))
            made.set("memory", str(cell.memory_kb))
            made.set("unit", "KiB")


def _topology(cpu: Element, placement: Placement) -> None:
    """Keep the operator's sockets and dies if they divide the cores, else use one socket per cell."""
    count, threads = len(placement.pins), placement.threads
    topology = cpu.find("topology")
    if topology is None:
        topology = etree.Element("topology")
        model = cpu.find("model")
        cpu.insert(0 if model is None else list(cpu).index(model) + 1, topology)
    cores = count // threads
    sockets, dies = (number(topology.get(name), 1) for name in ("sockets", "dies"))
    if not sockets * dies or cores % (sockets * dies) or topology.get("sockets") is None:
        sockets, dies = len(placement.cells), 1
        if cores % sockets:
            sockets = 1
    names, each = ("sockets", "dies", "cores", "threads"), cores // (sockets * dies)
    for name, value in zip(names, (sockets, dies, each, threads), strict=True):
        topology.set(name, str(value))


def _be_realtime(domain: Element) -> None:
    """Remove the balloon; on x86 KVM also kvmclock and the PMU, and require an invariant TSC."""
    balloon = _within(child(domain, "devices"), "memballoon")
    if balloon.get("model") != "none":
        balloon.clear()
        balloon.set("model", "none")
    if is_kvm(domain) and is_x86(domain):
        _within(child(domain, "features"), "pmu").set("state", "off")
        _set_timers(domain)
        _require_invariant_tsc(child(domain, "cpu"))


def _within(parent: Element, tag: str) -> Element:
    """The child of this name, added as the last if there is none."""
    found = parent.find(tag)
    return etree.SubElement(parent, tag) if found is None else found


def _require_invariant_tsc(cpu: Element) -> None:
    """Expose the invariant TSC; without it, the guest kernel falls back to a slower clock.

    libvirt hides it with ``host-passthrough`` unless ``migratable`` is off (formatdomain, "CPU model and
    topology"; since 6.5.0).
    """
    if cpu.get("mode") == "host-passthrough":
        cpu.set("migratable", "off")
    feature = cpu.find(f"feature[@name='{INVARIANT_TSC}']")
    if feature is None:
        feature = etree.Element("feature", name=INVARIANT_TSC)
        numa = cpu.find("numa")
        cpu.insert(len(cpu) if numa is None else list(cpu).index(numa), feature)
    feature.set("policy", "require")


def _set_timers(domain: Element) -> None:
    clock = child(domain, "clock")
    if clock.get("offset") is None:
        clock.set("offset", "utc")
    for name, (attribute, value) in TIMERS.items():
        timer = clock.find(f"timer[@name='{name}']")
        if timer is None:
            timer = etree.SubElement(clock, "timer", name=name)
        timer.set(attribute, value)


def is_kvm(domain: Element) -> bool:
    return domain.get("type") == "kvm"


def is_x86(domain: Element) -> bool:
    """True for an x86 domain; without ``arch``, libvirt uses the host's, and plans are for x86 hosts."""
    kind = domain.find("os/type")
    return kind is None or kind.get("arch", _X86[0]) in _X86
