"""Memory of a domain on a host: page sizes, devices, nodes and free pages, refused and found alike."""

from __future__ import annotations

from dataclasses import replace

import pytest

from netplugin.api.errors import CapacityExhausted, Conflict, InvalidRequest
from netplugin.api.models import Finding
from netplugin.libvirt.domain import keep_memory_on, parse_domain, written
from netplugin.tuning.facts import DomainLive, Live
from netplugin.tuning.placing.capacity import Held
from netplugin.tuning.placing.checks import check
from netplugin.tuning.placing.checks.case import Case
from netplugin.tuning.placing.faults import refuse_faults
from netplugin.tuning.placing.host_memory import HostMemory, memory_of_host, refuse_without_room
from netplugin.tuning.placing.render import refuse_elsewhere, render_placed
from netplugin.tuning.read import read_facts
from netplugin.tuning.root import Unknown
from tests.unit.tuning.machines import MemoryRoot, Tree, load
from tests.unit.tuning.placing.grounds import TWO_NODES
from tests.unit.tuning.placing.strategies import Vm
from tests.unit.tuning.trees import tree

#: 1.3 GB free in pages of 2 MB, none in pages of 1 GB.
ONE = HostMemory(
    {0: frozenset(range(8))},
    frozenset((2048, 1048576)),
    2048,
    {(0, 2048): 4 << 20, (0, 1048576): 0},
    {(0, 2048): 1332 << 10, (0, 1048576): 0},
    frozenset(),
)
TWO = replace(
    ONE,
    cpus={0: frozenset(range(4)), 1: frozenset(range(4, 8))},
    total_kb={(0, 2048): 4 << 20, (1, 2048): 4 << 20},
    free_kb={(0, 2048): 2 << 20, (1, 2048): 1 << 20},
)
MB2, GB1 = "<page size='2' unit='M'{}/>", "<page size='1' unit='G'{}/>"


def xml(memory: str = "512", pages: str = MB2.format(""), extra: str = "", devices: str = "") -> str:
    return (
        f"<domain type='kvm'><name>vm</name><memory unit='MiB'>{memory}</memory>"
        f"<memoryBacking><hugepages>{pages}</hugepages></memoryBacking><vcpu>4</vcpu>{extra}<devices>{devices}</devices></domain>"
    )


def cells(*mb: int) -> str:
    inner = "".join(f"<cell id='{n}' cpus='{n}' memory='{each}' unit='MiB'/>" for n, each in enumerate(mb))
    return f"<cpu><numa>{inner}</numa></cpu>"


def bound(*nodes: str) -> str:
    """<numatune> with the nodes of the domain and those of its cells."""
    inner = "".join(
        f"<memnode cellid='{n}' mode='strict' nodeset='{each}'/>" for n, each in enumerate(nodes[1:])
    )
    return f"<numatune><memory mode='strict' nodeset='{nodes[0]}'/>{inner}</numatune>"


def dimm(mb: int, inner: str = "<node>0</node>", source: str = "") -> str:
    return f"<memory model='dimm'>{source}<target><size unit='MiB'>{mb}</size>{inner}</target></memory>"


def plugged(mb: int, requested: int) -> str:
    more = f"<node>0</node><block unit='KiB'>2048</block><requested unit='MiB'>{requested}</requested>"
    return dimm(mb, more).replace("dimm", "virtio-mem")


LIMIT = "<memtune><hard_limit unit='MiB'>256</hard_limit></memtune>"
VF = "<interface type='hostdev'><source><address type='pci' bus='0x3' slot='0x2' function='0x1'/></source>"
VF = f"{VF}</interface>"
MASK = "<source><nodemask>{}</nodemask></source>"
MOST = "<maxMemory slots='4' unit='GiB'>8</maxMemory>"


def refuse(text: str, host: HostMemory = ONE) -> None:
    domain = parse_domain(text, "render-domain")
    refuse_faults(domain, host, None)
    refuse_without_room(domain, host, None)


def failing(text: str, host: HostMemory = ONE) -> list[Finding]:
    return [f for f in check(Case(parse_domain(text, "t"), (), None, host=host)) if f.status == "fail"]


@pytest.mark.parametrize(
    ("text", "host", "words"),
    [
        (
            xml(pages=GB1.format("")),
            ONE,
            "<memory> has 524288 KB, which is no multiple of its pages of 1048576 KB",
        ),
        (xml("1536", pages=GB1.format("")), ONE, "no multiple of its pages of 1048576"),
        (xml("513"), ONE, "no multiple of its pages of 2048 KB"),
        (xml("513", pages=""), ONE, "no multiple of its pages of 2048 KB"),
        (xml("1"), ONE, "<memory> has 1024 KB"),
        (xml("514", extra=cells(257, 257)), ONE, "<cell id='0'> has 263168 KB"),
        (
            xml("514", extra=cells(256, 258), pages=GB1.format(" nodeset='1'")),
            ONE,
            "<cell id='1'> has 264192",
        ),
        (
            xml(pages="<page size='1024' unit='KiB'/>"),
            ONE,
            "<page size> of 1024 KB: the host has pages of 2048, 104",
        ),
        (xml(pages="<page size='3' unit='M'/>"), ONE, "<page size> of 3072 KB"),
        (xml(pages="<page size='512' unit='MiB'/>"), ONE, "<page size> of 524288 KB"),
        (xml(pages=MB2.format("") + GB1.format("")), ONE, "a second one for all cells"),
        (xml(pages=MB2.format("") * 2), ONE, "a second one"),
        (
            xml(extra=cells(256, 256), pages=MB2.format(" nodeset='0-1'") + GB1.format(" nodeset='1'")),
            ONE,
            "a second one for NUMA cell 1",
        ),
        (xml(pages=MB2.format(" nodeset='1'")), ONE, "is for NUMA cell 1, which the domain does not have"),
        (xml(extra=cells(512), pages=MB2.format(" nodeset='0,3'")), ONE, "is for NUMA cell 3"),
        *(
            (xml().replace("</hugepages>", f"</hugepages>{part}"), ONE, part[:-2])
            for part in ("<allocation mode='ondemand'/>", "<source type='anonymous'/>")
        ),
        (xml("8192", extra=cells(256, 256)), ONE, "<memory> has 8388608 KB, and the NUMA cells have 524288"),
        (xml(extra=cells(256, 256).replace("id='1'", "id='0'")), ONE, "<cpu><numa> has cells 0, 0"),
        (xml(extra=cells(256, 256).replace("id='1'", "id='2'")), ONE, "<cpu><numa> has cells 0, 2"),
        (xml("512", extra=cells(512, 512)), ONE, "<memory> has 524288 KB"),
        (xml(extra=MOST), ONE, "<maxMemory> needs a NUMA cell"),
        (xml(extra=MOST.replace("GiB", "MiB") + cells(512)), ONE, "<maxMemory> is below the 524288 KB"),
        (xml(extra=MOST.replace(" slots='4'", "") + cells(512)), ONE, "<maxMemory> has no slots"),
        (xml(extra=MOST.replace("'4'", "'0'") + cells(512)), ONE, "<maxMemory> has no slots"),
        (xml("8192", extra=MOST + cells(8192)), ONE, "<maxMemory> is the 8388608 KB of the VM"),
        (xml("768", extra=cells(512), devices=dimm(256)), ONE, "<memory model='dimm'> needs <maxMemory>"),
        (xml("768", devices=dimm(256, "")), ONE, "<memory model='dimm'> needs a NUMA cell"),
        (
            xml("768", extra=MOST + cells(512), devices=dimm(256, "<node>5</node>")),
            ONE,
            "<node> of <memory model",
        ),
        (
            xml(
                "768",
                extra=MOST + cells(512),
                devices=dimm(256, source="<source><pagesize unit='G'>1</pagesize></source>"),
            ),
            ONE,
            "<memory model='dimm'> has 262144 KB",
        ),
        (
            xml(extra=bound("5")),
            ONE,
            "<numatune><memory> binds memory to NUMA node 5, and the host has node 0",
        ),
        (xml(extra=bound("0,7")), ONE, "to NUMA node 7"),
        (
            xml("768", extra=MOST + cells(512), devices=dimm(256, source=MASK.format("0-1"))),
            ONE,
            "<nodemask> of a memory device has NUMA node 1",
        ),
        (xml(extra=bound("")), ONE, "<numatune><memory> names no NUMA node"),
        (xml(extra=bound("0,^0")), ONE, "<numatune><memory> names no NUMA node"),
        (xml(extra="<numatune><memory mode='strict'/></numatune>"), ONE, "names no NUMA node"),
        (xml(extra=bound("0", "0")), ONE, "<memnode cellid='0'> has no NUMA cell"),
        (xml(extra=cells(512) + bound("0", "0", "0")), ONE, "<memnode cellid='1'> has no NUMA cell"),
        (
            xml(extra=cells(256, 256) + bound("0", "0", "0").replace("'1'", "'0'")),
            ONE,
            "<memnode cellid='0'>",
        ),
        (
            xml(extra=cells(512) + "<numatune><memnode cellid='0' mode='strict'/></numatune>"),
            ONE,
            "or no nodeset",
        ),
        (xml(extra=cells(512) + bound("0", "5")), ONE, "<numatune><memnode> binds memory to NUMA node 5"),
        (
            xml(extra=cells(*[128] * 4).replace("cpus='3'", "cpus='3-5'")),
            ONE,
            "<cell id='3'> has vCPU 4-5, which",
        ),
        (
            xml(extra=cells(256, 256).replace("cpus='1'", "cpus='0-1'")),
            ONE,
            "<cell id='1'> has vCPU 0, which another",
        ),
        (xml(extra=LIMIT, devices=VF), ONE, "<hard_limit> has 262144 KB, and the VM locks its 524288 KB"),
        (
            xml(extra=LIMIT).replace("</hugepages>", "</hugepages><locked/>"),
            ONE,
            "<hard_limit> has 262144 KB",
        ),
        (xml("0"), ONE, "<memory> has 0 KB"),
        (xml(extra=cells(512, 0)), ONE, "<cell id='1'> has 0 KB"),
        (xml(extra=MOST + cells(512), devices=dimm(0)), ONE, "<memory model='dimm'> has 0 KB"),
        (
            xml("1024", extra=MOST.replace("'4'", "'1'") + cells(512), devices=dimm(256) * 2),
            ONE,
            "has 1 slots",
        ),
        *(
            (xml(extra=f"<cputune>{pin}</cputune>"), ONE, words)
            for pin, words in (
                ("<vcpupin vcpu='0' cpuset='8-9'/>", "<vcpupin> 0 has CPU 8-9, and the host has 0-7"),
                ("<vcpupin vcpu='0' cpuset='1,^1'/>", "<vcpupin> 0 has CPU none"),
                ("<emulatorpin cpuset='64'/>", "<emulatorpin> has CPU 64"),
                ("<iothreadpin iothread='1' cpuset='64'/>", "<iothreadpin> 1 has CPU 64"),
            )
        ),
        (xml().replace("<vcpu>", "<vcpu cpuset='64'>"), ONE, "<vcpu cpuset> has CPU 64"),
        (
            xml(
                "3072",
                extra=MOST + cells(1024),
                pages=GB1.format(" nodeset='0'"),
                devices=plugged(2048, 1024),
            ),
            ONE,
            "<block> of <memory model='virtio-mem'> has 2048 KB, and its pages have 1048576",
        ),
    ],
)
def test_what_qemu_or_libvirt_cannot_start_is_refused_and_found(
    text: str, host: HostMemory, words: str
) -> None:
    with pytest.raises(Conflict) as refused:
        refuse(text, host)
    assert words in refused.value.detail and refused.value.fix
    assert any(words in finding.found and finding.fix for finding in failing(text, host))


@pytest.mark.parametrize(
    "text",
    [
        xml(),
        xml(pages=""),
        xml().replace("<memory unit='MiB'>512", "<memory unit='KiB'>523776"),  # libvirt: 512 MiB
        xml("513", pages="<page size='4' unit='KiB'/>"),
        xml(pages=MB2.format(" nodeset='0'")),
        xml(pages=GB1.format("") + MB2.format(" nodeset='0'"), extra=cells(512)),
        xml("513", pages=MB2.format(" nodeset='0'"), extra=cells(512, 1)),
        xml(extra=cells(256, 256) + bound("0", "0", "0")),
        xml(
            extra=cells(256, 256)
            .replace("id='0'", "id='2'")
            .replace("id='1'", "id='0'")
            .replace("id='2'", "id='1'")
        ),
        xml("768", extra=MOST + cells(512), devices=dimm(256)),
        xml("512", extra=MOST + cells(512), devices=dimm(256)),
        xml(extra=MOST + cells(512)),
        xml(extra="<numatune><memory placement='auto'/></numatune>"),
        xml(extra="<numatune><memory/></numatune>").replace("<vcpu>", "<vcpu placement='auto'>"),
        xml("768", extra=MOST + cells(512), devices=dimm(256, source=MASK.format("0"))),
        xml(
            "1024",
            extra=MOST + cells(512),
            devices="<memory model='nvdimm'><target><size unit='MiB'>512</size></target></memory>",
        ),
        xml().replace("</hugepages>", "</hugepages><allocation mode='immediate'/><source type='memfd'/>"),
        xml(extra="<!-- a --><x:memory xmlns:x='urn:x'>1</x:memory>" + cells(512)),
        xml(devices="<memory model='nvdimm'><source><path>/x</path></source></memory>"),
        xml("8704", extra=MOST.replace(">8", ">9") + cells(512), devices=plugged(8192, 512)),
        xml(extra="<cputune><vcpupin vcpu='0' cpuset='7-9'/><vcpupin vcpu='9' cpuset='64'/></cputune>"),
        xml(extra=cells(256, 256)),
        xml(extra=LIMIT),
        xml(extra=LIMIT.replace("256", "768"), devices=VF),
    ],
)
def test_what_starts_is_not_refused(text: str) -> None:
    refuse(text)
    assert [f.id for f in failing(text)] == []


def test_elements_that_are_there_twice_are_read_as_libvirt_reads_them() -> None:
    twice = xml().replace("</hugepages>", f"</hugepages><hugepages>{GB1.format('')}</hugepages>")
    with pytest.raises(Conflict, match="a second one"):
        refuse(twice)
    with pytest.raises(InvalidRequest, match="more than 128 NUMA cells"):
        refuse(xml(extra=cells(*[4] * 129)))
    for wrong in ("<page size='0'/>", "<page/>", MB2.format(" nodeset='x'")):
        with pytest.raises(InvalidRequest):
            refuse(xml(pages=wrong))


@pytest.mark.parametrize(
    ("text", "host", "error", "words"),
    [
        (
            xml("65536"),
            ONE,
            Conflict,
            "65536 MB on NUMA node 0 in pages of 2048 KB, and 1332 MB of 4096 are free",
        ),
        (xml("2048"), ONE, CapacityExhausted, "2048 MB on NUMA node 0 in pages of 2048 KB, and 1332 MB"),
        (
            xml("1024", pages=GB1.format("")),
            ONE,
            Conflict,
            "1024 MB on NUMA node 0 in pages of 1048576 KB, and 0 MB",
        ),
        (xml("1536", extra=bound("1")), TWO, CapacityExhausted, "1536 MB on NUMA node 1"),
        (
            xml("1536", extra=cells(768, 768) + bound("0-1", "1", "1")),
            TWO,
            CapacityExhausted,
            "on NUMA node 1",
        ),
        (
            xml("4096", extra=cells(2048, 2048) + bound("0-1", "0", "0-1")),
            TWO,
            CapacityExhausted,
            "4096 MB on NUMA no",
        ),
        *(
            (
                xml("1536", extra=MOST + cells(512) + bound(node), devices=device),
                TWO,
                CapacityExhausted,
                words,
            )
            for node, device, words in (
                ("1", dimm(1024), "1536 MB on NUMA node 1"),
                ("0-1", dimm(1026, source=MASK.format("1")), "1026 MB on NUMA node 1"),
                ("1", plugged(2048, 1024), "1536 MB on NUMA node 1"),
            )
        ),
    ],
)
def test_pages_that_are_not_free_are_refused_by_node(
    text: str, host: HostMemory, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match="needs") as refused:
        refuse(text, host)
    assert words in str(refused.value)
    assert [(f.id, words in f.found) for f in failing(text, host)] == [("hugepages-room", True)]


@pytest.mark.parametrize(
    "text",
    [
        xml("1536", extra=cells(768, 768) + bound("0-1", "0", "1")),
        xml("3072"),
        xml("1536", extra=bound("0")),
        xml("3072", extra=bound("1").replace("strict", "preferred")),
        xml("3072", extra=cells(3072) + bound("0", "1").replace("'0' mode='strict'", "'0' mode='preferred'")),
    ],
)
def test_pages_that_are_free_somewhere_it_may_be_are_enough(text: str) -> None:
    refuse(text, TWO)
    assert failing(text, TWO) == []


def test_a_vm_that_runs_has_its_pages() -> None:
    """As one of which libvirt does not say whether it runs may have."""
    for domains in (frozenset(("vm",)), None):
        refuse(xml("2048"), replace(ONE, domains=domains))
        with pytest.raises(Conflict):
            refuse(xml("8192"), replace(ONE, domains=domains))
    refuse(xml("2048"), HostMemory())


def test_a_placed_vm_has_whole_pages_too() -> None:
    for vm, words in (
        (Vm(1, memory_mb=512), "<memory> has 524288 KB"),
        (Vm(1, vcpus=4, cells=(2, 2), memory_mb=1536), "<cell id='0'> has 1572864 KB"),
        (
            Vm(1, extra="<memoryBacking><hugepages><page size='1024'/></hugepages></memoryBacking>"),
            "<page size> is 1024 KB, and the host has hugepages of 2048, 1048576 KB",
        ),
        (
            Vm(1, extra="<maxMemory slots='2' unit='GiB'>4</maxMemory>"),
            "memory that comes later has no place",
        ),
    ):
        with pytest.raises(Conflict) as refused:
            render_placed(vm.domain, vm.bindings, vm.policy, TWO_NODES, Held())
        assert words in refused.value.detail and refused.value.fix
    small = Vm(
        1, memory_mb=512, extra=f"<memoryBacking><hugepages>{MB2.format('')}</hugepages></memoryBacking>"
    )
    assert render_placed(small.domain, small.bindings, small.policy, TWO_NODES, Held()).page_kb == 2048


def tuned(inner: str, *cells: int) -> Vm:
    return Vm(1, vcpus=2 * max(1, len(cells)), cells=cells, extra=f"<numatune>{inner}</numatune>")


def memnodes(*nodes: str) -> str:
    return "".join(f"<memnode cellid='{n}' mode='strict' nodeset='{each}'/>" for n, each in enumerate(nodes))


@pytest.mark.parametrize("nodes", [("0", "1"), ("1", "0"), ("0-1", "0"), ("1", "0-1")])
def test_a_placed_vm_has_its_cells_where_the_operator_binds_them(nodes: tuple[str, str]) -> None:
    vm = tuned(memnodes(*nodes), 2, 2)
    placement = render_placed(vm.domain, vm.bindings, vm.policy, TWO_NODES, Held())
    homes = {cell.number: cell.node for cell in placement.cells}
    assert all(homes[number] == int(each) for number, each in enumerate(nodes) if each in "01")


@pytest.mark.parametrize(
    ("vm", "words"),
    [
        (tuned(memnodes("0", "0"), 2, 2), "binds NUMA cells to one node"),
        (tuned("<memory mode='strict' nodeset='0'/>", 2, 2), "<memory> binds memory to NUMA node 0, and"),
    ],
)
def test_memory_that_is_bound_against_the_placement_is_refused(vm: Vm, words: str) -> None:
    with pytest.raises(Conflict) as refused:
        render_placed(vm.domain, vm.bindings, vm.policy, TWO_NODES, Held())
    assert words in refused.value.detail and refused.value.fix


# -- nodes ---------------------------------------------------------------------------------------


def on(node: int, inner: str = "", extra: str = "") -> str:
    numatune = f"<numatune>{inner}</numatune>" if inner else ""
    domain = parse_domain(f"<domain><memory>1</memory>{numatune}{extra}<devices/></domain>", "render-domain")
    refuse_elsewhere(domain, {node}, TWO)
    keep_memory_on(domain, {node})
    return written(domain)


@pytest.mark.parametrize("mode", ["strict", "preferred", "interleave", "restrictive"])
def test_a_node_that_agrees_keeps_its_mode(mode: str) -> None:
    own = f'<memory mode="{mode}" nodeset="1"/>'
    assert own in on(1, own)
    cell = f'<memnode cellid="0" mode="{mode}" nodeset="1"/>'
    assert cell in (made := on(1, cell)) and '<memory mode="strict" nodeset="1"/>' in made


@pytest.mark.parametrize(
    "inner",
    [
        "<memory mode='strict' nodeset='0'/>",
        "<memory mode='preferred' nodeset='0-1'/>",
        "<memory placement='auto'/>",
        "<memory nodeset='1'/><memnode cellid='0' nodeset='0'/>",
        "<!-- x --><memnode cellid='0' nodeset='0'/>",
    ],
)
def test_memory_on_another_node_than_is_requested_is_named(inner: str) -> None:
    with pytest.raises(Conflict, match="<numatune><mem") as refused:
        on(1, inner)
    assert "numa_node" in str(refused.value.fix)


@pytest.mark.parametrize("node", [2, 5, 7])
def test_a_node_that_the_host_lacks_is_refused_by_those_it_has(node: int) -> None:
    with pytest.raises(Conflict, match=f"NUMA node {node} is requested .* the host has node 0-1"):
        on(node)


@pytest.mark.parametrize(
    ("pins", "what"),
    [
        (
            "<cputune><vcpupin vcpu='0' cpuset='5'/><vcpupin vcpu='1' cpuset='2'/></cputune>",
            "<vcpupin> 1 is CPU 2",
        ),
        ("<cputune><emulatorpin cpuset='0-1'/></cputune>", None),
        ("<cputune><iothreadpin iothread='1' cpuset='3'/></cputune>", None),
        ("<vcpu cpuset='1'>1</vcpu>", "<vcpu cpuset> is CPU 1"),
        ("<cputune><vcpupin vcpu='0' cpuset='4-7'/><emulatorpin cpuset='0-7'/></cputune>", None),
    ],
)
def test_pins_on_another_node_than_is_requested_are_named(pins: str, what: str | None) -> None:
    if what is None:
        assert 'nodeset="1"' in on(1, extra=pins)
        return
    with pytest.raises(Conflict) as refused:
        on(1, extra=pins)
    assert what in refused.value.detail and "NUMA node 1" in refused.value.detail


def test_threads_and_memory_on_different_nodes_are_found_without_a_plan() -> None:
    pins = "<cputune><vcpupin vcpu='0' cpuset='5'/><emulatorpin cpuset='0'/></cputune>"
    text = xml(extra=pins + bound("0"))
    found = {
        f.id: f.found for f in check(Case(parse_domain(text, "t"), (), None, host=TWO)) if f.status == "warn"
    }
    assert found["memory-node"] == "memory on node 0"
    assert found["emulator-node"] == "QEMU's own threads are on node 0, the vCPUs on node 1"
    threads = text.replace("<emulatorpin", "<iothreadpin iothread='1'")
    found = {f.id: f.found for f in check(Case(parse_domain(threads, "t"), (), None, host=TWO))}
    assert found["emulator-node"] == "IO threads are on node 0, the vCPUs on node 1"
    good = xml(extra=pins.replace("cpuset='0'", "cpuset='4'") + bound("1"))
    found = {
        f.id: f.found for f in check(Case(parse_domain(good, "t"), (), None, host=TWO)) if f.status != "ok"
    }
    assert not found.keys() & {"memory-node", "emulator-node"}


@pytest.mark.parametrize(
    ("pin", "reported"),
    [
        ("", []),
        ("<emulatorpin cpuset='4'/>", ["QEMU's own threads are near the vCPUs"]),
        ("<iothreadpin iothread='1' cpuset='4'/>", ["IO threads are near the vCPUs"]),
    ],
)
def test_threads_that_are_not_pinned_are_not_called_near(pin: str, reported: list[str]) -> None:
    domain = parse_domain(xml(extra=f"<cputune><vcpupin vcpu='0' cpuset='5'/>{pin}</cputune>"), "t")
    found = check(Case(domain, (), None, host=TWO))
    assert [each.found for each in found if each.id == "emulator-node"] == reported


# -- what is read --------------------------------------------------------------------------------


def test_what_is_read_of_the_host() -> None:
    made = tree(load("published"))
    folder = "/sys/devices/system/node/node1/hugepages/hugepages-1048576kB"
    files = made.files | {f"{folder}/nr_hugepages": "8", f"{folder}/free_hugepages": "3"}
    facts = read_facts(MemoryRoot(Tree(files, made.links)))
    vm = DomainLive("vm", (), frozenset(), frozenset())
    host = memory_of_host(facts, Live(domains=(vm,)))
    assert host.cpus.keys() == {0, 1} and 32 in host.cpus[0] | host.cpus[1]
    assert 1048576 in host.sizes_kb and host.domains == {"vm"}
    assert (host.total_kb[1, 1048576], host.free_kb[1, 1048576]) == (8 << 20, 3 << 20)
    assert memory_of_host(facts, Live()).domains == frozenset()
    # The size of a mount without one is what the kernel says, as 512 MB on ARM with pages of 64 KB.
    for line, size in {"default_hugepagesz=2M default_hugepagesz=1G": 2048, "ro": 524288}.items():
        files |= {"/proc/cmdline": line, "/proc/meminfo": f"MemFree: 1 kB\nHugepagesize:  {size} kB\n"}
        assert memory_of_host(read_facts(MemoryRoot(Tree(files, made.links))), Live()).default_kb == size
    silent = Unknown("qemu:///system", "did not answer")
    assert memory_of_host(facts, Live(domains=silent)).domains is None
