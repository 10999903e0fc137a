"""Proposals of queues on PMD threads: properties of all of them, and the cases that have a name."""

from __future__ import annotations

import itertools

from hypothesis import assume, given
from hypothesis import strategies as st

from netplugin.api.pmd_models import AutoLoadBalance, PmdSettings, PmdState, UnpolledQueue
from netplugin.pmd import schedule
from netplugin.pmd.balance import LoadProblem, balanced
from netplugin.pmd.propose import WORTH, propose
from tests.unit.core.pmd_states import SHARED, after, core, queue, state, states


def loads(given_state: PmdState) -> dict[int, int]:
    return {c.cpu: sum(q.usage_percent or 0 for q in c.queues) for c in given_state.cores}


def fullest(given_state: PmdState, node: int) -> int:
    cpus = [c.cpu for c in given_state.cores if c.numa_node == node]
    return max(load for cpu, load in loads(given_state).items() if cpu in cpus)


def mismatches(given_state: PmdState) -> int:
    return sum(bool(q.usage_percent) and q.numa_mismatch for c in given_state.cores for q in c.queues)


# -- properties ----------------------------------------------------------------------------------


@given(states())
def test_a_proposal_is_never_worse_than_now(now: PmdState) -> None:
    proposal = propose(now)
    then = after(now, proposal)
    assert max(loads(then).values()) == proposal.proposed.largest_percent
    assert proposal.proposed.largest_percent <= proposal.now.largest_percent
    assert mismatches(then) == proposal.proposed.numa_mismatches
    assert proposal.proposed.numa_mismatches <= proposal.now.numa_mismatches
    if proposal.moves:
        gains = [fullest(now, node) - fullest(then, node) for node in {c.numa_node for c in now.cores}]
        fewer = proposal.now.numa_mismatches - proposal.proposed.numa_mismatches
        assert max(gains) >= WORTH or fewer


@given(states())
def test_no_queue_is_left_without_a_thread(now: PmdState) -> None:
    """What is set isolates no thread, so that OVS has a place for each queue that is not pinned."""
    proposal = propose(now)
    assume(proposal.affinity)
    then = after(now, proposal)
    assert not any(c.isolated for c in then.cores)
    assert schedule.scheduled(then).keys() == {(q.port, q.queue) for q in proposal.queues}


@given(states())
def test_a_queue_moves_within_its_node_unless_that_has_no_thread(now: PmdState) -> None:
    node = {c.cpu: c.numa_node for c in now.cores}
    for moved in propose(now).queues:
        if moved.proposed_cpu not in (None, moved.cpu) and moved.port_numa_node in node.values():
            assert node[moved.proposed_cpu] == moved.port_numa_node


@given(states())
def test_every_queue_that_carries_load_is_where_the_pinnings_say(now: PmdState) -> None:
    """Or OVS would move those that are not pinned."""
    proposal = propose(now)
    assume(proposal.affinity)
    pins = {(q.port, q.queue): q.pinned_to for c in after(now, proposal).cores for q in c.queues}
    for one in proposal.queues:
        if one.load_percent:
            assert pins[one.port, one.queue] == one.proposed_cpu
        else:
            assert pins[one.port, one.queue] in (None, one.cpu)


@given(states())
def test_proposing_on_the_outcome_proposes_nothing(now: PmdState) -> None:
    again = propose(after(now, propose(now)))
    assert (again.moves, again.affinity, again.settings) == (0, {}, {})


@given(states())
def test_the_same_is_proposed_each_time(now: PmdState) -> None:
    shuffled = now.model_copy(
        update={"cores": tuple(c.model_copy(update={"queues": tuple(reversed(c.queues))}) for c in now.cores)}
    )
    first, second = propose(now), propose(shuffled)
    assert first == propose(now)
    assert (first.affinity, first.proposed, first.moves) == (
        second.affinity,
        second.proposed,
        second.moves,
    )


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=6),
    st.integers(1, 3),
    st.data(),
)
def test_the_fullest_is_within_a_third_of_the_best(sizes: list[int], cpus: int, data: st.DataObject) -> None:
    """Against all placements there are."""
    keys = [("p", number) for number in range(len(sizes))]
    problem = LoadProblem(
        tuple(range(cpus)),
        dict(zip(keys, sizes, strict=True)),
        dict.fromkeys(keys, frozenset(range(cpus))),
    )
    now = {key: data.draw(st.integers(0, cpus - 1)) for key in keys}
    best = min(
        problem.largest(dict(zip(keys, places, strict=True)))
        for places in itertools.product(range(cpus), repeat=len(keys))
    )
    assert 3 * problem.largest(balanced(problem, now)) <= 4 * best


# -- cases ---------------------------------------------------------------------------------------


def test_two_heavy_queues_are_parted() -> None:
    now = state(core(2, queue("a", 0, 60), queue("b", 0, 35), queue("c")), core(3))
    proposal = propose(now)
    assert (proposal.moves, proposal.now.largest_percent, proposal.proposed.largest_percent) == (
        1,
        95,
        60,
    )
    assert proposal.affinity == {"a": {"0": 2}, "b": {"0": 3}}
    assert proposal.settings == {"pmd-rxq-assign": "group", "pmd-rxq-isolate": "false"}
    assert [q.proposed_cpu for q in proposal.queues] == [2, 3, None]
    assert (proposal.now.variance, proposal.proposed.variance) == (2256, 156)
    assert proposal.improvement_percent == 93


def test_queues_are_swapped_where_no_single_move_helps() -> None:
    """Nor does beginning again with the largest, which comes to the same 70 %."""
    now = state(
        core(2, queue("a", 0, 30), queue("b", 0, 20), queue("c", 0, 20)),
        core(3, queue("d", 0, 30), queue("e", 0, 20)),
    )
    assert (propose(now).moves, propose(now).proposed.largest_percent) == (2, 60)


def test_a_small_gain_is_not_worth_it() -> None:
    now = state(core(2, queue("a", 0, 50), queue("b", 0, WORTH - 1)), core(3))
    assert (propose(now).moves, propose(now).affinity) == (0, {})
    now = state(core(2, queue("a", 0, 50), queue("b", 0, WORTH)), core(3))
    assert propose(now).moves == 1


def test_a_queue_goes_home_if_its_node_has_room() -> None:
    away = queue("nic", 0, 30, port_numa_node=1)
    proposal = propose(state(core(2, away), core(18, queue("b", 0, 30), node=1), core(19, node=1)))
    assert proposal.affinity["nic"] == {"0": 19} and proposal.proposed.numa_mismatches == 0
    full = propose(state(core(2, away), core(18, queue("b", 0, 95, port_numa_node=1), node=1)))
    assert full.moves == 0, "it would be too much for the one thread that is near"
    bare = propose(state(core(2, away, queue("b", 0, 30)), core(3)))
    assert bare.moves == 1 and bare.now.numa_mismatches == 1, "its node has no thread"


def test_nothing_is_proposed_on_loads_that_are_not_measured() -> None:
    proposal = propose(state(core(2, queue("a", 0, 60), queue("b", 0, 35), queue("c", 0, None)), core(3)))
    assert (proposal.moves, proposal.affinity, proposal.settings) == (0, {}, {})
    assert [a.id for a in proposal.advice] == ["not-measured"]


def test_queues_that_nobody_polls_are_mended() -> None:
    one = core(2, queue("a", 0, 60, pinned_to=2), isolated=True)
    two = core(3, queue("b", 0, 60, pinned_to=3), isolated=True)
    lost = (UnpolledQueue(port="c", queue=0),)
    proposal = propose(state(one, two, unpolled=lost))
    assert proposal.settings == {"pmd-rxq-assign": "group", "pmd-rxq-isolate": "false"}
    assert (proposal.moves, proposal.affinity) == (0, {})
    assert propose(state(one, two)).settings == {}


def test_pinnings_that_are_in_vain_go() -> None:
    idle = queue("c", 0, 0, pinned_to=77)
    proposal = propose(state(core(2, queue("a", 0, 60), queue("b", 0, 35), idle), core(3)))
    assert proposal.affinity["c"] == {"0": None}


def test_what_no_assignment_can_mend_is_reported() -> None:
    full = state(
        core(2, queue("a", 0, 97), overhead_percent=1),
        core(3, queue("b", 0, 90), overhead_percent=4),
    )
    assert [a.id for a in propose(full).advice] == ["more-queues", "more-queues", "more-cores"]
    assert "a queue 0 alone takes 97 %" in propose(full).advice[0].text
    [more] = [a for a in propose(full).advice if a.id == "more-cores"]
    assert "of NUMA node 0 are above 90 %" in more.text and '{"count": 3}' in more.text
    many = state(core(2, queue("a", 0, 1), queue("a", 1, 1), queue("a", 2, 1)), core(3))
    assert [a.id for a in propose(many).advice] == ["fewer-queues"]
    assert propose(state(core(2, queue("a", 0, 50)), core(3))).advice == ()


def test_a_node_that_nothing_helps_hides_no_other() -> None:
    full = core(2, queue("a", 0, 95, port_numa_node=0))
    other = core(18, *(queue("b", n, 40, port_numa_node=1) for n in range(2)), node=1)
    proposal = propose(state(full, other, core(19, node=1)))
    assert proposal.moves == 1 and proposal.now.largest_percent == proposal.proposed.largest_percent == 95
    assert set(proposal.affinity["b"].values()) == {18, 19}
    assert [a.id for a in proposal.advice] == ["more-queues", "more-cores", "auto-load-balance"]


def test_a_full_node_needs_cores_though_threads_of_another_idle() -> None:
    full, idle = core(2, queue("a", 0, 95, port_numa_node=0)), core(18, node=1)
    for first, second, text in ((full, idle, "NUMA node 0"), (idle, full, "NUMA node 0")):
        [more] = [a.text for a in propose(state(first, second)).advice if a.id == "more-cores"]
        assert text in more and "all 1 PMD threads" in more
    assert [a for a in propose(state(idle, core(19, node=1))).advice if a.id == "more-cores"] == []


def test_queues_that_idle_are_no_reason_for_more() -> None:
    """Of a port whose flows are all on one queue, and of a VM that has enabled one of its queues."""
    full = queue("nic", 0, 95)
    one = propose(state(core(2, full), core(3, queue("nic", 1, 0)))).advice
    assert [a.id for a in one] == ["spread-flows"] and "its queues 1 idle" in one[0].text
    off = queue("nic", 1, 0).model_copy(update={"enabled": False})
    [vm] = [a for a in propose(state(core(2, full), core(3, off))).advice if "alone" in a.text]
    assert vm.id == "more-queues" and "uses 1 of 2 queues: in it, ethtool -L NIC combined 2" in vm.text
    busy = propose(state(core(2, full), core(3, queue("nic", 1, 60)))).advice
    assert [a.id for a in busy] == ["more-queues"] and "options:n_rxq" in busy[0].text


# -- OVS's own balance ---------------------------------------------------------------------------


def test_ovs_own_balance_is_preferred_where_it_does_as_well() -> None:
    full = core(2, queue("a", 0, 60), queue("b", 0, 35))
    view = propose(state(full, core(3))).auto_load_balance
    assert (view.possible, view.acts, view.preferred, view.reason) == (True, True, True, None)
    assert (view.expected.largest_percent, view.improvement_percent) == (60, 93)
    low = state(core(2, queue("a", 0, 40), queue("b", 0, 35)), core(3))
    proposal = propose(low)
    view = proposal.auto_load_balance
    assert (view.acts, view.preferred) == (False, True)
    assert view.reason == "no PMD thread has a load of 95 %"
    assert '{"enabled": true, "load_threshold": 74' in proposal.advice[0].text


def test_why_ovs_own_balance_is_not_possible() -> None:
    a, b = queue("a", 0, 60), queue("b", 0, 38)
    for now, reason in (
        (state(core(2, a, b)), "1 PMD threads that are not isolated"),
        (
            state(core(2, a, b), core(3), settings=PmdSettings(rxq_assign="roundrobin")),
            "roundrobin",
        ),
        (state(core(2, a), core(3, b)), "no PMD thread polls more than one queue"),
        (
            state(core(2, a, queue("n", 0, 5, port_numa_node=7)), core(18, b, node=1)),
            "another NUMA node",
        ),
    ):
        view = propose(now).auto_load_balance
        assert (view.possible, view.acts, view.preferred) == (False, False, False)
        assert reason in str(view.reason)


def test_thresholds_of_ovs_own_balance() -> None:
    settings = PmdSettings(auto_load_balance=AutoLoadBalance(enabled=True, improvement_threshold=95))
    now = state(core(2, queue("a", 0, 60), queue("b", 0, 35)), core(3), settings=settings)
    view = propose(now).auto_load_balance
    assert view.enabled and not view.acts
    assert view.reason == "the variance would improve by 93 %, and 95 % are required"


def test_ovs_own_assignment_is_as_documented() -> None:
    """The examples of Documentation/topics/dpdk/pmd.rst, for ``cycles`` and for ``group``."""
    sizes = {0: 30, 1: 80, 3: 60, 4: 70, 5: 10}
    queues = [queue("p", number, load) for number, load in sizes.items()]
    cores = [core(3, *queues), core(7), core(8)]
    place = schedule.scheduled(state(*cores))
    assert {q: cpu for (_, q), cpu in place.items()} == {1: 3, 4: 7, 5: 7, 3: 8, 0: 8}
    sizes = {0: 10, 1: 80, 3: 50, 4: 70, 5: 10}
    queues = [queue("p", number, load) for number, load in sizes.items()]
    place = schedule.scheduled(state(core(3, *queues), core(7), core(8), settings=SHARED))
    assert {q: cpu for (_, q), cpu in place.items()} == {1: 3, 4: 7, 3: 8, 0: 8, 5: 8}


def test_ovs_leaves_isolated_threads_to_their_pinned_queues() -> None:
    pinned = core(3, queue("a", 0, 10, pinned_to=3), isolated=True)
    place = schedule.scheduled(state(pinned, core(7, queue("b", 0, 90), queue("c", 0, 80))))
    assert place == {("a", 0): 3, ("b", 0): 7, ("c", 0): 7}
    alone = schedule.scheduled(state(core(3, queue("a", 0, 9, pinned_to=3), queue("b"), isolated=True)))
    assert alone == {("a", 0): 3}, "nobody polls the other"
