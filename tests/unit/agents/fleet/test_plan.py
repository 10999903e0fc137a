"""What a host does with its range of etcd: each adversary as values; no mutilated copy removes anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.fleet.plan import Held, Plan, Reading, Step, plan_read, plan_watched
from agents.store.fleet import Known, Memory
from netplugin.api.errors import Conflict, InvalidRequest
from netplugin.api.models import PortSpec
from netplugin.fleet.names import Kind, Ref
from netplugin.fleet.reports import Written
from netplugin.fleet.values import Acceptance, Desired
from tests.unit.agent import SPEC

HERE, OTHER = "c0ffee", "bad"
MEMORY = Memory(HERE, 1000)


def ref(name: str) -> Ref:
    return Ref(Kind.PORT, name)


def put(generation: int, **spec: Any) -> Desired[PortSpec]:
    return Desired[PortSpec](generation=generation, spec=PortSpec.model_validate({**SPEC, **spec}))


def removal(generation: int, **more: bool) -> Desired[PortSpec]:
    return Desired[PortSpec](generation=generation, deleted=True, **more)


def carried_out(generation: int, **spec: Any) -> Known:
    return Known(generation, put(generation, **spec).digest, "tag")


def item(desired: Any, revision: int = 900) -> Written:
    error = desired if isinstance(desired, InvalidRequest) else None
    return Written("h1", ref("any"), revision, None if error else desired, error)


def read(
    items: Mapping[Ref, Written],
    *acceptances: tuple[Acceptance, int],
    cluster: str = HERE,
    revision: int = 1000,
) -> Reading:
    return Reading(cluster, revision, items, acceptances)


def accept(
    number: int, revision: int, *, cluster: str = HERE, replaces: str = HERE, at: int = 0
) -> tuple[Acceptance, int]:
    made = Acceptance(number=number, cluster=cluster, replaces=replaces, revision=revision)
    return made, at or revision + 1


def removed(plan: Plan) -> set[str]:
    """What is really removed from the host."""
    return {step.ref.id for step in plan.steps if step.spec is None and step.owned}


def made(plan: Plan) -> set[str]:
    return {step.ref.id for step in plan.steps if step.spec is not None}


MANY = {ref(f"p{n:02}"): carried_out(10) for n in range(60)}
WHOLE = {each: item(put(10)) for each in MANY}


def test_a_first_reading_makes_what_it_names() -> None:
    plan = plan_read(Memory(), {}, read({ref("a"): item(put(3))}))
    assert plan.memory == Memory(HERE, 1000)
    after = Known(3, put(3).digest)
    assert plan.steps == (Step(ref("a"), 900, after, put(3).spec, owned=False),)


def test_what_is_carried_out_already_is_left() -> None:
    plan = plan_read(MEMORY, MANY, read(WHOLE))
    assert plan.steps == () and plan.faults == {} and plan.gone == frozenset()


def test_a_newer_version_with_more_fields_takes_a_value_for_the_same() -> None:
    value = put(10)
    assert value.spec is not None
    defaults = PortSpec.model_validate(value.spec.model_dump())  # as if the writer had named them all
    plan = plan_read(
        MEMORY, MANY, read(WHOLE | {ref("p01"): item(Desired[PortSpec](generation=10, spec=defaults))})
    )
    assert plan.steps == () and plan.faults == {}


def test_a_higher_generation_changes_and_removes() -> None:
    items = {**WHOLE, ref("p01"): item(put(11, queues=2)), ref("p02"): item(removal(12))}
    plan = plan_read(MEMORY, MANY, read(items))
    assert made(plan) == {"p01"} and removed(plan) == {"p02"}


def test_an_older_generation_and_a_second_writer_change_nothing() -> None:
    items = {
        ref("p01"): item(put(9, queues=2)),
        ref("p02"): item(put(10, queues=2)),
        ref("p03"): item(removal(10)),
    }
    plan = plan_read(MEMORY, MANY, read({**WHOLE, **items}))
    assert plan.steps == ()
    assert {each.id: "older" in str(error) for each, error in plan.faults.items()} == {
        "p01": True,
        "p02": False,
        "p03": False,
    }


def test_nonsense_for_one_port_is_the_fault_of_that_one() -> None:
    nonsense = InvalidRequest("spec.mac: must be a MAC address", step="validate")
    plan = plan_read(MEMORY, MANY, read({**WHOLE, ref("p01"): item(nonsense), ref("new"): item(put(1))}))
    assert plan.faults == {ref("p01"): nonsense} and made(plan) == {"new"}


@pytest.mark.parametrize("left", [0, 1, 30])
def test_keys_that_have_gone_leave_their_ports(left: int) -> None:
    """An empty prefix, a wrong one, half of a restored copy."""
    plan = plan_read(MEMORY, MANY, read(dict(list(WHOLE.items())[:left])))
    assert plan.steps == () and plan.faults == {} and plan.gone == frozenset()


def test_a_key_that_goes_while_it_is_watched_leaves_its_port() -> None:
    plan = plan_watched(MEMORY, MANY, {}, frozenset({ref("p01"), ref("unknown")}), 1001)
    assert plan.steps == () and plan.gone == frozenset() and plan.memory.revision == 1001


def test_a_removal_whose_key_goes_is_forgotten() -> None:
    known = {ref("a"): Known(5, "")}
    assert plan_watched(MEMORY, known, {}, frozenset(known), 1001).gone == {ref("a")}
    assert plan_read(MEMORY, known, read({})).gone == {ref("a")}


def test_what_the_fleet_has_not_made_is_not_removed_by_it() -> None:
    plan = plan_read(MEMORY, {}, read({ref("local"): item(removal(5))}))
    assert removed(plan) == set() and plan.steps[0].known == Known(5, "")


# -- another etcd, or an older copy ------------------------------------------------------------------


@pytest.mark.parametrize(("cluster", "revision"), [(HERE, 999), (OTHER, 5), (OTHER, 5000)])
@pytest.mark.parametrize("items", [{}, WHOLE, {each: item(removal(99)) for each in MANY}])
def test_a_step_back_and_another_cluster_are_refused(
    cluster: str, revision: int, items: dict[Ref, Written]
) -> None:
    with pytest.raises(Conflict, match="nothing of it is carried out"):
        plan_read(MEMORY, MANY, read(items, cluster=cluster, revision=revision))


def test_an_older_copy_that_has_grown_is_still_one() -> None:
    """Found by the host's own summary, which it wrote at revision 900, and kept in mind from then on."""
    memory = replace(MEMORY, reported=900)
    grown = replace(read({each: item(removal(99)) for each in MANY}, revision=5000), reported=400)
    assert grown.is_older_than(memory)
    with pytest.raises(Conflict, match="older copy"):
        plan_read(memory, MANY, grown)
    with pytest.raises(Conflict, match="older copy"):
        plan_read(replace(memory, went_back=True), MANY, replace(grown, reported=4000))
    for reported in (0, 900, 901):  # deleted by hand, as it was, written before a crash
        assert plan_read(memory, MANY, replace(read(WHOLE), reported=reported)).steps == ()
    word = accept(1, 4999)
    after = plan_read(replace(memory, went_back=True), MANY, replace(grown, acceptances=(word,))).memory
    assert not after.went_back and after.reported == 0


def test_an_operator_accepts_a_step_back() -> None:
    items = {**WHOLE, ref("p01"): item(put(9, queues=2))}
    plan = plan_read(MEMORY, MANY, read(items, accept(1, 700), revision=701))
    assert plan.forget_generations and plan.memory == Memory(HERE, 701, 1, 700)
    # What etcd has counts, whatever came after it before.
    assert made(plan) == {each.id for each in MANY} and not plan.faults


def test_an_operator_accepts_another_cluster_for_the_hosts_of_the_one_before() -> None:
    word = accept(1, 5, cluster=OTHER, replaces=HERE)
    assert plan_read(MEMORY, MANY, read(WHOLE, word, cluster=OTHER, revision=6)).memory.cluster == OTHER
    for elsewhere in (
        accept(1, 5, cluster=OTHER, replaces=OTHER),  # its own restore, for its own hosts
        accept(1, 5, cluster=HERE, replaces=HERE),  # copied from there
    ):
        with pytest.raises(Conflict):
            plan_read(MEMORY, MANY, read(WHOLE, elsewhere, cluster=OTHER, revision=6))


def test_an_acceptance_that_a_backup_brings_back_has_no_effect() -> None:
    word = accept(4, 400)
    spent = plan_read(MEMORY, MANY, read(WHOLE, word)).memory
    assert spent.accepted == 4
    with pytest.raises(Conflict):
        plan_read(spent, MANY, read(WHOLE, word, revision=800))
    with pytest.raises(Conflict):
        plan_read(spent, MANY, read(WHOLE, accept(3, 800), revision=800))
    assert plan_read(spent, MANY, read(WHOLE, accept(5, 800), revision=801)).memory.accepted == 5
    assert plan_read(Memory(), {}, read({}, word)).memory.accepted == 4  # a new host has seen it too


def test_a_host_that_is_renamed_removes_nothing_of_the_one_that_had_the_name() -> None:
    memory = replace(MEMORY, host="h1", reported=900, accepted=1, accepted_revision=950)
    items = {**WHOLE, ref("p01"): item(removal(11)), ref("p02"): item(removal(12, drained=True))}
    there = replace(read(items, accept(2, 1000)), host="h2", reported=300)
    plan = plan_read(memory, MANY, there)
    assert plan.steps == () and set(plan.faults) == {ref("p01"), ref("p02")} == set(plan.known)
    assert plan.memory.host == "h2" and plan.memory.reported == 0
    known = {**MANY, **plan.known}
    assert plan_read(plan.memory, known, there).steps == ()  # nor later
    again = {ref("p01"): item(removal(20), 1001)}  # unless it is written again
    assert removed(plan_watched(plan.memory, known, again, frozenset(), 1001)) == {"p01"}


# -- the brake ---------------------------------------------------------------------------------------


def with_removals(number: int, **more: bool) -> dict[Ref, Written]:
    return WHOLE | {each: item(removal(11, **more)) for each in list(MANY)[:number]}


@pytest.mark.parametrize(("number", "expected"), [(1, 1), (6, 6), (7, 0), (60, 0)])
def test_many_removals_that_are_read_wait(number: int, expected: int) -> None:
    plan = plan_read(MEMORY, MANY, read(with_removals(number)))
    assert len(removed(plan)) == expected
    held = [error for error in plan.faults.values() if isinstance(error, Held)]
    assert len(held) == number - expected == len(plan.faults)


def test_few_ports_may_all_go() -> None:
    known = dict(list(MANY.items())[:5])
    assert len(removed(plan_read(MEMORY, known, read({each: item(removal(11)) for each in known})))) == 5


def test_removals_that_are_watched_and_a_drain_pass() -> None:
    watched = {each: item(removal(11), 1001) for each in MANY}
    assert len(removed(plan_watched(MEMORY, MANY, watched, frozenset(), 1060))) == 60
    assert len(removed(plan_read(MEMORY, MANY, read(with_removals(60, drained=True))))) == 60


def test_an_acceptance_lets_those_pass_that_the_operator_has_seen() -> None:
    items = with_removals(60)
    plan = plan_read(MEMORY, MANY, read(items, accept(1, 900), revision=1001))
    assert len(removed(plan)) == 60 and not plan.forget_generations
    # It holds after a restart in between, and not for those that came later.
    again = plan_read(plan.memory, MANY, read(items, accept(1, 900), revision=1001))
    assert len(removed(again)) == 60
    later = items | {each: item(removal(12), 950) for each in list(MANY)[:10]}
    assert len(removed(plan_read(MEMORY, MANY, read(later, accept(1, 900), revision=1001)))) == 50
    # An operator who types a revision of the future accepts up to now.
    assert plan_read(MEMORY, MANY, read(items, accept(1, 10**9, at=901))).memory.accepted_revision == 901


# -- properties --------------------------------------------------------------------------------------

#: What etcd may have of a port that the host carried out in generation 10: any value that was ever written.
OLD = st.one_of(
    st.none(),
    st.builds(lambda g: item(put(g, queues=g)), st.integers(1, 9)),
    st.builds(lambda g: item(removal(g)), st.integers(1, 9)),
    st.just(item(put(10))),
    st.just(item(InvalidRequest("cut off", step="validate"))),
)
COPY = st.fixed_dictionaries(dict.fromkeys(MANY, OLD)).map(
    lambda copy: {each: found for each, found in copy.items() if found is not None}
)


@given(COPY, st.integers(0, 5000), st.sampled_from([HERE, OTHER]), st.booleans())
def test_no_mutilated_copy_removes_anything(
    copy: dict[Ref, Written], revision: int, cluster: str, with_old_word: bool
) -> None:
    memory = replace(MEMORY, accepted=2)
    words = [accept(2, 5000, cluster=cluster), accept(1, 5000, cluster=cluster)] if with_old_word else []
    try:
        plan = plan_read(memory, MANY, read(copy, *words, cluster=cluster, revision=revision))
    except Conflict:
        assert (cluster, revision >= memory.revision) != (HERE, True)
        return
    assert removed(plan) == set() and made(plan) == set()
    assert plan.gone == frozenset()


VALUES = st.builds(lambda g, q: put(g, queues=q), st.integers(1, 4), st.integers(1, 3)) | st.builds(
    removal, st.integers(1, 4)
)


@given(st.lists(st.tuples(st.sampled_from("ab"), VALUES), max_size=12), st.integers(0, 12))
def test_a_host_that_was_away_ends_as_one_that_watched(
    history: list[tuple[str, Desired[PortSpec]]], away_from: int
) -> None:
    """One writer, whose generations grow: what was missed comes by the next reading."""
    newest: dict[str, Desired[PortSpec]] = {}
    grown = []
    for name, desired in history:
        before = newest.get(name)
        newest[name] = desired.model_copy(update={"generation": before.generation + 1 if before else 1})
        grown.append((name, newest[name]))

    def carry_out(known: dict[Ref, Known], plan: Plan) -> dict[Ref, Known]:
        return known | {step.ref: step.known for step in plan.steps}

    watched: dict[Ref, Known] = {}
    away: dict[Ref, Known] = {}
    for number, (name, desired) in enumerate(grown):
        change = {ref(name): item(desired, number)}
        watched = carry_out(watched, plan_watched(MEMORY, watched, change, frozenset(), number))
        if number < away_from:
            away = carry_out(away, plan_watched(MEMORY, away, change, frozenset(), number))
    whole = read({ref(name): item(desired) for name, desired in newest.items()})
    plan = plan_read(MEMORY, away, whole)
    assert not plan.faults
    assert carry_out(away, plan) == watched
    assert plan_read(MEMORY, watched, whole).steps == ()
