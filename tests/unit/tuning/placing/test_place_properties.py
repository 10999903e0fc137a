"""What holds of every place, on plans and for VMs that chance made."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from random import Random

from hypothesis import event, given, settings
from hypothesis import strategies as st
from lxml import etree

from netplugin.api.errors import CapacityExhausted, Conflict, NetpluginError
from netplugin.api.models import Finding
from netplugin.libvirt.domain import parse_domain, written
from netplugin.libvirt.pins import Placement
from netplugin.tuning.placing.capacity import Held, HostCapacity, held
from netplugin.tuning.placing.checks import check
from netplugin.tuning.placing.checks.case import Case, DomainNic
from netplugin.tuning.placing.place import free_cores, free_kb
from netplugin.tuning.placing.render import render_placed
from tests.unit.tuning.placing.strategies import Vm, grounds, several

SCHEMA = etree.RelaxNG(file="/usr/share/libvirt/schemas/domain.rng")
#: A host is read from hundreds of files, so that fewer examples take as long.
SOME = settings(max_examples=settings().max_examples // 2)


@st.composite
def hosts(draw: st.DrawFn) -> tuple[HostCapacity, list[Vm]]:
    ground = draw(grounds())
    return ground, draw(several(ground))


def placed(
    ground: HostCapacity, vms: Iterable[Vm]
) -> tuple[dict[Vm, Placement], dict[Vm, str], dict[Vm, NetpluginError]]:
    """One after the other: their places, their domains, and why the others have none."""
    places: dict[Vm, Placement] = {}
    domains: dict[Vm, str] = {}
    refused: dict[Vm, NetpluginError] = {}
    for vm in vms:
        domain = vm.domain
        try:
            places[vm] = render_placed(domain, vm.bindings, vm.policy, ground, held(places.values()))
            domains[vm] = written(domain)
        except (CapacityExhausted, Conflict) as error:
            event(error.code)
            refused[vm] = error
    return places, domains, refused


@SOME
@given(hosts())
def test_places_are_apart_on_the_plan_s_cpus_and_whole(host: tuple[HostCapacity, list[Vm]]) -> None:
    ground, vms = host
    places, _, _ = placed(ground, vms)
    cores = [core for node in ground.nodes for core in node.cores]
    users: dict[tuple[int, ...], Vm] = {}
    for vm, place in places.items():
        assert sorted(place.pins) == list(range(vm.vcpus))
        assert len(place.cpus) == vm.vcpus
        assert place.cpus <= ground.cpus and not place.cpus & (ground.pmd | ground.housekeeping)
        assert place.emulator and not set(place.emulator) & (ground.cpus | ground.pmd)
        assert len(place.nodes) == len(place.cells), "each cell on a node of its own"
        for cell in place.cells:
            assert {ground.node_of(cpu) for cpu in cell.cpus} == {cell.node}
        for core in cores:
            mine = [vcpu for vcpu, cpu in place.pins.items() if cpu in core]
            if mine:
                assert users.setdefault(core, vm) == vm, "a core is one VM's"
                assert mine == list(range(mine[0], mine[-1] + 1)), "neighbours on siblings"
                # Cores of one width are filled one after the other.
                assert mine[0] % place.threads == 0 and len(mine) >= place.threads
    for node in ground.nodes:
        for size, most in node.memory_kb.items():
            cells = [(p, c) for p in places.values() for c in p.cells if p.page_kb == size]
            assert sum(p.paged_kb(c) for p, c in cells if c.node == node.node) <= most


@SOME
@given(hosts())
def test_a_vm_is_refused_only_where_there_is_no_room(host: tuple[HostCapacity, list[Vm]]) -> None:
    ground, vms = host
    before: list[Placement] = []
    for vm in (vm for vm in vms if len(vm.cells) < 2):
        others = held(before)
        kb = -(-(vm.memory_mb << 10) // ground.page_kb) * ground.page_kb
        room = [
            node
            for node in ground.with_cores
            if sum(map(len, free_cores(node, others))) >= vm.vcpus
            and free_kb(node, others, ground.page_kb) >= kb
        ]
        whole = not (vm.memory_mb << 10) % ground.page_kb
        possible = (
            whole
            and any(len(n.cpus) >= vm.vcpus for n in ground.with_cores)
            and any(n.memory_kb.get(ground.page_kb, 0) >= kb for n in ground.with_cores)
        )
        try:
            before.append(render_placed(vm.domain, vm.bindings, vm.policy, ground, others))
            assert room
        except CapacityExhausted as error:
            assert not room and possible, error
            assert error.fix and "free:" in error.detail
        except Conflict as error:
            assert not possible, error
            assert error.fix


@SOME
@given(hosts(), st.randoms())
def test_a_vm_keeps_its_place(host: tuple[HostCapacity, list[Vm]], chance: Random) -> None:
    """Whoever else comes and goes, and however often it is rendered, from its old XML or the new."""
    ground, vms = host
    places, domains, _ = placed(ground, vms)
    chance.shuffle(vms)
    for vm in (vm for vm in vms if vm in places):
        others = held(place for other, place in places.items() if other != vm)
        for xml in (vm.xml, domains[vm]):
            domain = parse_domain(xml, "render-domain")
            again = render_placed(domain, vm.bindings, vm.policy, ground, others, places[vm])
            assert again == places[vm]
            assert written(domain) == domains[vm]


@SOME
@given(hosts())
def test_what_was_rendered_is_a_domain_and_has_nothing_wrong(
    host: tuple[HostCapacity, list[Vm]],
) -> None:
    ground, vms = host
    places, domains, _ = placed(ground, vms)
    for vm, xml in domains.items():
        SCHEMA.assertValid(etree.fromstring(xml))
        others = held(place for other, place in places.items() if other != vm)
        wrong = [each for each in findings(vm, xml, ground, others, places[vm]) if _bad(each)]
        assert wrong == []


@SOME
@given(hosts(), st.integers(1, 9))
def test_another_size_is_another_place_that_holds_as_well(
    host: tuple[HostCapacity, list[Vm]], vcpus: int
) -> None:
    ground, vms = host
    places, _, _ = placed(ground, vms)
    for vm in [vm for vm in places if not vm.cells]:
        others = held(place for other, place in places.items() if other != vm)
        resized = replace(vm, vcpus=vcpus, topology="")
        try:
            place = render_placed(resized.domain, vm.bindings, vm.policy, ground, others, places[vm])
        except (CapacityExhausted, Conflict):
            continue
        assert len(place.cpus) == vcpus and not place.cpus & others.cpus
        if vcpus <= vm.vcpus:
            assert set(place.nodes) == set(places[vm].nodes), "what still fits is kept"


def findings(
    vm: Vm, xml: str, ground: HostCapacity | None, others: Held, mine: Placement | None
) -> tuple[Finding, ...]:
    nics = tuple(DomainNic("p1", binding) for binding in vm.bindings)
    domain = parse_domain(xml, "check-domain")
    return check(Case(domain, nics, ground, mine, others.cpus))


def _bad(finding: Finding) -> bool:
    return finding.status != "ok"
