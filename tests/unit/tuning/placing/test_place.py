"""Places that are known: which node, which CPUs, and what is refused in which words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from netplugin.api.errors import (
    CapacityExhausted,
    Conflict,
    InvalidRequest,
    NetpluginError,
    Unsupported,
)
from netplugin.libvirt.domain import parse_domain
from netplugin.libvirt.needs import read_needs
from netplugin.libvirt.pins import Placement
from netplugin.tuning.facts import DomainLive
from netplugin.tuning.placing.capacity import Held, HostCapacity, NodeGround, held, pinned_by_others
from netplugin.tuning.placing.render import render_placed
from tests.unit.tuning.placing.grounds import SMALL, TWO_NODES
from tests.unit.tuning.placing.strategies import Vm, with_memory


def place(
    vm: Vm,
    ground: HostCapacity = TWO_NODES,
    others: Held | None = None,
    before: Placement | None = None,
) -> Placement:
    return render_placed(vm.domain, vm.bindings, vm.policy, ground, others or Held(), before)


def taken(*cpus: int) -> Held:
    return Held(frozenset(cpus))


@pytest.mark.parametrize(
    ("vm", "cpus", "threads"),
    [
        (Vm(1, vcpus=4), (2, 12, 3, 13), 2),
        (Vm(1, vcpus=3), (2, 12, 3), 1),
        (Vm(1, vcpus=1), (2,), 1),
        (Vm(1, vcpus=2, numa_node=1), (22, 32), 2),
        (Vm(1, vcpus=4, cells=(2, 2)), (2, 12, 22, 32), 2),
        (Vm(1, vcpus=4, cells=(1, 3)), (2, 22, 32, 23), 1),
    ],
)
def test_whole_cores_of_the_nic_s_node_first(vm: Vm, cpus: tuple[int, ...], threads: int) -> None:
    placed = place(vm)
    assert tuple(placed.pins.values()) == cpus
    assert placed.threads == threads
    assert set(placed.emulator) == (
        {6, 16} if placed.nodes == (0,) else {26, 36} if placed.nodes == (1,) else {6, 16, 26, 36}
    )


def test_a_node_that_is_full_is_passed_over_and_half_a_core_is_nobody_s() -> None:
    assert place(Vm(1, vcpus=4), others=taken(12, 3, 4)).nodes == (1,)
    assert place(Vm(1, vcpus=2), others=taken(12, 3, 4)).pins == {0: 5, 1: 15}
    assert place(Vm(1, memory_mb=8192), others=Held(memory_kb={(0, 1048576): 9 << 20})).nodes == (1,)


def test_the_node_that_a_function_is_on_is_better() -> None:
    vm = Vm(1, vcpus=2, vhost=False)
    [binding] = vm.bindings
    near = [binding.model_copy(update={"numa_node": 1})]
    near[0].model_extra["numa_node"] = 1  # type: ignore[index]
    assert render_placed(vm.domain, near, vm.policy, TWO_NODES, Held()).nodes == (1,)
    full = taken(22, 23, 24, 25)
    assert render_placed(vm.domain, near, vm.policy, TWO_NODES, full).nodes == (0,)


def test_the_fullest_node_that_has_room_is_taken_among_equals() -> None:
    away = replace(TWO_NODES, nodes=tuple(replace(node, away=0) for node in TWO_NODES.nodes))
    assert place(Vm(1), away, taken(22)).nodes == (1,)


def test_a_plan_that_changed_is_a_new_choice_and_the_same_plan_none() -> None:
    first = place(Vm(1, vcpus=2))
    without = replace(TWO_NODES.nodes[0], cores=TWO_NODES.nodes[0].cores[1:])
    changed = replace(TWO_NODES, nodes=(without, TWO_NODES.nodes[1]), pmd=frozenset((1, 2, 11, 12)))
    assert first.pins == {0: 2, 1: 12}
    assert place(Vm(1, vcpus=2), changed, before=first).pins == {0: 3, 1: 13}
    moved = place(Vm(1, vcpus=2), others=taken(2))
    assert moved.pins == {0: 3, 1: 13}
    assert place(Vm(1, vcpus=2), before=moved) == moved, "CPU 2 is free again, and nobody moves"
    assert place(Vm(1, vcpus=2), others=taken(3), before=moved).pins == {0: 2, 1: 12}
    assert place(Vm(1, vcpus=2, numa_node=1), before=moved).nodes == (1,)
    assert place(Vm(1, vcpus=4), before=moved).cpus >= set(moved.pins.values()) - {3, 13}


def test_cores_alike_that_leave_no_sibling_idle_are_taken() -> None:
    """With a sibling off line here and there."""
    odd = NodeGround(0, ((1, 11), (2, 12), (3,), (4,), (5,)), frozenset((0,)), {})
    ground = with_memory(replace(SMALL, nodes=(odd,)), 1024)
    for vcpus, cpus, threads in (
        (1, (3,), 1),
        (2, (1, 11), 2),
        (3, (3, 4, 5), 1),
        (4, (1, 11, 2, 12), 2),
        (5, (1, 11, 2, 12, 3), 1),
        (7, (1, 11, 2, 12, 3, 4, 5), 1),
    ):
        placed = place(Vm(1, vcpus=vcpus, memory_mb=64), ground)
        assert (tuple(placed.pins.values()), placed.threads) == (cpus, threads)


def test_a_vm_has_cores_of_as_few_l3_caches_as_will_do() -> None:
    cores = ((1, 11), (2, 12), (3, 13), (4, 14), (5, 15))
    l3 = (frozenset((1, 2, 11, 12)), frozenset((3, 4, 5, 13, 14, 15)))
    node = NodeGround(0, cores, frozenset((0,)), {}, l3=l3)
    ground = with_memory(replace(SMALL, nodes=(node,)), 1024)
    for vcpus, cpus in (
        (4, (1, 11, 2, 12)),
        (6, (3, 13, 4, 14, 5, 15)),
        (8, (3, 13, 4, 14, 5, 15, 1, 11)),
    ):
        placed = place(Vm(1, vcpus=vcpus, memory_mb=64), ground)
        assert tuple(placed.pins.values()) == cpus
    # The second VM of two cores goes where a whole group is free.
    placed = place(Vm(1, vcpus=4, memory_mb=64), ground, others=taken(1))
    assert tuple(placed.pins.values()) == (3, 13, 4, 14)


def test_a_vm_that_the_nic_s_node_has_no_room_for_is_on_the_next_node() -> None:
    """And not on the fullest one, which is on the other socket."""
    first, second = TWO_NODES.nodes
    other = replace(second, node=2, cores=((32, 42),), away=2)
    ground = with_memory(replace(TWO_NODES, nodes=(first, second, other)), 16384)
    assert place(Vm(1, vcpus=2), ground, others=taken(2, 3, 4, 5)).nodes == (1,)


def test_operators_nodes_are_obeyed() -> None:
    own = "<numatune><memory mode='strict' nodeset='1'/></numatune>"
    assert place(Vm(1, extra=own)).nodes == (1,)
    assert place(Vm(1, vcpus=4, cells=(2, 2), numa_node=1)).nodes == (0, 1)


def test_operators_page_size_is_kept() -> None:
    own = "<memoryBacking><hugepages><page size='2' unit='M'/></hugepages></memoryBacking>"
    assert place(Vm(1, extra=own)).page_kb == 2048


@pytest.mark.parametrize(
    ("vm", "kind", "word"),
    [
        (Vm(1, vcpus=9), Conflict, "the VM has 9 vCPUs, and NUMA node 0 has 8"),
        (Vm(1, vcpus=11, cells=(2, 9)), Conflict, "its NUMA cell 1 has 9 vCPUs"),
        (Vm(1, vcpus=6, cells=(2, 2, 2)), Conflict, "3 NUMA cells"),
        (Vm(1, memory_mb=20480), Conflict, "20480 MB of memory, and NUMA node 0 has 16384 MB"),
        (Vm(1, numa_node=7), Conflict, "NUMA node 7"),
        (Vm(1, extra="<numatune><memory nodeset='0-1'/></numatune>"), Conflict, "NUMA nodes 0, 1"),
        (Vm(1, extra="<numatune><memory mode='interleave' nodeset='0'/></numatune>"), Conflict, "interleave"),
        (Vm(1, extra="<numatune><memory placement='auto'/></numatune>"), Conflict, "auto"),
        (Vm(1, extra="<numatune><memory nodeset='x'/></numatune>"), InvalidRequest, "<memory nodeset>"),
        (Vm(1, extra="<cputune><vcpupin vcpu='0' cpuset='1'/></cputune>"), Conflict, "PMD"),
        (Vm(1, extra="<cputune><emulatorpin cpuset='0,11'/></cputune>"), Conflict, "PMD"),
        (Vm(1, extra="<cputune><vcpupin vcpu='0' cpuset='4'/></cputune>"), Conflict, "<vcpupin> 0 is CPU 4"),
        (Vm(1, extra="<cputune><emulatorpin cpuset='0'/></cputune>"), Conflict, "<emulatorpin>"),
        (Vm(1, extra="<cputune><vcpupin vcpu='0' cpuset='-'/></cputune>"), InvalidRequest, "cpuset"),
        (
            Vm(1, realtime=True, extra="<currentMemory unit='MiB'>256</currentMemory>"),
            Conflict,
            "balloon",
        ),
        (
            Vm(1, extra="<memoryBacking><access mode='private'/></memoryBacking>"),
            Conflict,
            "private",
        ),
        (
            Vm(
                1,
                extra="<memoryBacking><hugepages><page size='2' unit='MiB'/><page size='1' unit='GiB'/>"
                "</hugepages></memoryBacking>",
            ),
            Unsupported,
            "several sizes",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_words(vm: Vm, kind: type[NetpluginError], word: str) -> None:
    with pytest.raises(kind) as refused:
        place(vm)
    assert word in refused.value.detail
    assert refused.value.fix or refused.value.errors


@pytest.mark.parametrize(
    ("before", "after", "word"),
    [
        ("<vcpu>", "<vcpu current='1'>", "current='1'"),
        ("<vcpu>", "<vcpu placement='auto'>", "numad"),
        ("<vcpu>", "<vcpu cpuset='3'>", "<vcpu cpuset>"),
        ("<vcpu>2", "<vcpu>x", "<vcpu> is 'x'"),
        ("<vcpu>2", "<vcpu>0", "<vcpu> is 0"),
        ("<memory unit='MiB'>1024</memory>", "", "<memory> is missing"),
        ("unit='MiB'", "unit='MiX'", "the unit 'MiX'"),
        (
            "<devices/>",
            "<cpu><numa><cell cpus='0' memory='1'/></numa></cpu>",
            "each of the 2 vCPUs",
        ),
        ("<devices/>", "<cpu><numa><cell memory='1'/></numa></cpu>", "has no CPUs"),
        (
            "<devices/>",
            "<cpu><numa><cell cpus='z' memory='1'/></numa></cpu>",
            "cpus of NUMA cell 0",
        ),
    ],
)
def test_what_the_domain_says_is_named(before: str, after: str, word: str) -> None:
    vm = Vm(1)
    domain = vm.domain
    assert before in vm.xml
    domain = parse_domain(vm.xml.replace(before, after), "render-domain")
    with pytest.raises((Conflict, InvalidRequest, Unsupported)) as refused:
        render_placed(domain, vm.bindings, vm.policy, TWO_NODES, Held())
    assert word in refused.value.detail


def test_pins_that_are_the_placement_are_no_contradiction() -> None:
    own = "<cputune><vcpupin vcpu='0' cpuset='2'/><emulatorpin cpuset='6,16'/><shares>7</shares></cputune>"
    vm = Vm(1, extra=own)
    domain = vm.domain
    render_placed(domain, vm.bindings, vm.policy, TWO_NODES, Held())
    assert domain.findtext("cputune/shares") == "7"
    assert len(domain.findall("cputune/vcpupin")) == 2


def test_no_cpus_left_says_what_is_free_where() -> None:
    others = Held(frozenset((2, 3, 4, 22, 23, 24)), {(0, 1048576): 10 << 20})
    with pytest.raises(CapacityExhausted) as refused:
        place(Vm(1, vcpus=4), others=others)
    assert refused.value.status == 507
    assert "node 0 has 2 of 8 CPUs and 6144 of 16384 MB" in refused.value.detail
    assert "node 1 has 2 of 8 CPUs and 16384 of 16384 MB" in refused.value.detail
    assert "delete the ports" in str(refused.value.fix)
    with pytest.raises(CapacityExhausted):
        place(Vm(1, memory_mb=6144), with_memory(SMALL, 8192), Held(memory_kb={(0, 2048): 4 << 20}))


def test_real_time_needs_a_host_that_is_planned_for_it() -> None:
    with pytest.raises(Conflict) as refused:
        place(Vm(1, realtime=True), SMALL)
    assert "[host] realtime = true" in str(refused.value.fix)


def test_a_plan_without_cores_for_vms_reports_it() -> None:
    bare = replace(SMALL, nodes=tuple(replace(node, cores=()) for node in SMALL.nodes))
    with pytest.raises(Conflict) as refused:
        place(Vm(1), bare)
    assert "[host] vm_cores" in str(refused.value.fix)


def test_what_other_domains_are_pinned_to_is_theirs() -> None:
    every = frozenset(range(4))
    domains = (
        DomainLive("floats", (every,), every, frozenset()),
        DomainLive("pinned", (frozenset((1,)), every), every, frozenset()),
        DomainLive("vm-1", (frozenset((2,)),), every, frozenset()),
    )
    assert pinned_by_others(domains, every, "vm-1") == {1}
    assert pinned_by_others((), every, "vm-1") == frozenset()
    others = held((), pinned_by_others(domains, every, "vm-1"))
    assert place(Vm(1, vcpus=2), SMALL, others).pins == {0: 2, 1: 3}


@pytest.mark.parametrize(
    ("xml", "ids"),
    [
        ("<iothreads>2</iothreads>", (1, 2)),
        ("<iothreads>3</iothreads><iothreadids><iothread id='2'/></iothreadids>", (1, 2, 3)),
        ("<iothreadids><iothread id='5'/><iothread id='9'/></iothreadids>", (5, 9)),
        ("", ()),
    ],
)
def test_io_threads_have_the_ids_that_libvirt_gives(xml: str, ids: tuple[int, ...]) -> None:
    assert read_needs(Vm(1, extra=xml).domain, "t").iothreads == ids


@pytest.mark.parametrize(
    ("memory", "kb"),
    [
        ("<memory>512</memory>", 512),
        ("<memory unit='GiB'>2</memory>", 2 << 20),
        ("<memory unit='bytes'>1025</memory>", 2),
        ("<memory unit='MB'>1</memory>", 977),
        ("<memory unit='m'>1</memory>", 1024),
        ("<memory unit='mib'>1</memory>", 1024),
    ],
)
def test_memory_is_read_in_libvirt_s_units(memory: str, kb: int) -> None:
    domain = parse_domain(f"<domain>{memory}</domain>", "t")
    assert read_needs(domain, "t").cells[0].memory_kb == kb
