"""Which calls make the next batch: plugs first, removals beside them, and nothing waits for ever."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.ports.call import Call
from agents.schedule import BatchSizes, next_batch
from agents.store.port_table import Record
from netplugin.api.models import PortSpec
from netplugin.backend import Intent
from tests.unit.agent import SPEC

MAKE_SPEC = PortSpec.model_validate(SPEC)


def put(port_id: str, group: object = None, at: float = 0.0) -> Call:
    return replace(Call(Record(port_id, MAKE_SPEC), at + 30), group=group, queued_at=at)


def delete(port_id: str, group: object = None, at: float = 0.0) -> Call:
    return replace(Call(Intent(port_id, None), at + 30), group=group, queued_at=at)


@st.composite
def queues(draw: st.DrawFn) -> list[Call]:
    """Calls for a few ports, some of them in groups, which name a port once."""
    found: list[Call] = []
    for _ in range(draw(st.integers(0, 12))):
        ports = draw(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4, unique=True))
        group = object() if len(ports) > 1 else None
        found += [(put if draw(st.booleans()) else delete)(port, group) for port in ports]
    return found


def drained(waiting: list[Call], sizes: BatchSizes, now: float = 0.0) -> list[list[Call]]:
    batches = []
    while waiting:
        batches.append(next_batch(waiting, sizes, now))
        taken = {id(op) for op in batches[-1]}
        assert taken, "calls wait and none is carried out"
        waiting = [op for op in waiting if id(op) not in taken]
    return batches


def names(batch: list[Call]) -> list[str]:
    return [f"{'+' if op.kind == 'put' else '-'}{op.port_id}" for op in batch]


@given(queues(), st.integers(1, 5), st.integers(1, 20), st.sampled_from([0.0, 60.0]))
def test_every_call_is_in_one_batch_and_after_those_on_its_port(
    waiting: list[Call], plugs: int, removals: int, now: float
) -> None:
    batches = drained(waiting, BatchSizes(plugs, removals), now)
    carried_out = [op for batch in batches for op in batch]
    assert sorted(map(id, carried_out)) == sorted(map(id, waiting))
    for port in "abcdef":
        own = [id(op) for op in waiting if op.port_id == port]
        assert [id(op) for op in carried_out if op.port_id == port] == own
    for batch in batches:
        assert len({op.port_id for op in batch}) == len(batch)
        for of_kind, room in (("put", plugs), ("delete", removals)):
            kind = [op for op in batch if op.kind == of_kind]
            assert len(kind) <= room or any(op.group for op in kind)
    of = {id(op): number for number, batch in enumerate(batches) for op in batch}
    for op in waiting:
        assert all(of[id(op)] == of[id(other)] for other in waiting if op.group and other.group is op.group)


@given(st.lists(st.sampled_from("abcdefgh"), unique=True), st.integers(1, 5))
def test_calls_on_different_ports_keep_their_order(ports: list[str], size: int) -> None:
    ops: list[Call] = [put(port) for port in ports]
    assert [op for batch in drained(ops, BatchSizes(size, 1)) for op in batch] == ops


def test_plugs_go_before_removals_of_which_some_go_with_them() -> None:
    waiting = [*(delete(f"d{n}") for n in range(5)), put("a"), put("b"), put("c")]
    batches = drained(waiting, BatchSizes(plugs=2, removals=32), now=1.0)
    assert list(map(names, batches)) == [["+a", "+b", "-d0", "-d1"], ["+c", "-d2", "-d3"], ["-d4"]]


def test_one_removal_goes_with_plugs_however_long_it_takes() -> None:
    waiting = [delete("d0"), delete("d1"), put("a")]
    assert names(next_batch(waiting, BatchSizes(64, 4), 0.0)) == ["+a", "-d0"]


def test_a_large_group_of_removals_waits_for_plugs_but_not_without_end() -> None:
    group = object()
    waiting: list[Call] = [*(delete(f"d{n}", group) for n in range(20)), put("a")]
    assert names(next_batch(waiting, BatchSizes(64, 16), now=9.0)) == ["+a"]
    assert len(next_batch(waiting, BatchSizes(64, 16), now=11.0)) == 21


def test_plugs_without_end_hold_up_no_removal() -> None:
    """Thirty plugs for each batch, which is more than fit into one."""
    now, sizes = 0.0, BatchSizes(plugs=8, removals=16)
    waiting: list[Call] = [delete(f"d{n}") for n in range(100)]
    while any(op.kind == "delete" for op in waiting):
        waiting += [put(f"p{now}{n}", at=now) for n in range(30)]
        batch = next_batch(waiting, sizes, now)
        assert any(op.kind == "put" for op in batch), "nor do removals hold up plugs"
        taken = {id(op) for op in batch}
        waiting = [op for op in waiting if id(op) not in taken]
        now += 0.5
    assert now < 30.0, "a call has this long by default"


@pytest.mark.parametrize("make", [put, delete])
def test_the_sizes_follow_the_time_of_their_own_kind(make: Callable[[str], Call]) -> None:
    sizes = BatchSizes.first(64)
    full = [make(f"p{n}") for n in range(sizes.plugs if make is put else sizes.removals)]
    grown, same, less = (sizes.after(full, took_s) for took_s in (0.1, 0.4, 0.6))
    assert same == sizes
    if make is put:
        assert (grown.plugs, less.plugs) == (128, 32) and grown.removals == less.removals == sizes.removals
    else:
        assert (grown.removals, less.removals) == (32, 16) and grown.plugs == less.plugs == sizes.plugs
    assert sizes.after(full[:-1], 0.1) == sizes, "its time says nothing about a larger one"
    assert sizes.after([put("a"), delete("b")], 5.0) == sizes, "nor which of the two took long"
