"""Transactions of a bounded number of ports: all changes in their order, and sizes that follow the time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from drivers.ovs import row_changes as c
from drivers.ovs.pace import Pace
from tests.unit.drivers.ovs.conftest import BACKEND, BRIDGE, vhost

VM = vhost("p1")


def add(port_id: str) -> c.RowChange:
    return c.AddPort((port_id,), VM)


def remove(port_id: str) -> c.RowChange:
    return c.RemovePort((port_id,), BRIDGE, "dev", BACKEND)


def light(port_id: str) -> c.RowChange:
    return c.SetPort((port_id,), VM)


@st.composite
def plans(draw: st.DrawFn) -> list[c.RowChange]:
    """As plans are: each port's changes together, and what is for all ports before and after."""
    ids = tuple(f"p{n}" for n in range(draw(st.integers(0, 20))))
    kinds = st.lists(st.sampled_from([add, remove, light]), min_size=1, max_size=3)
    own = [make(port_id) for port_id in ids for make in draw(kinds)]
    return [c.CreateBridge(ids, BRIDGE, "net1"), *own, c.RemoveBridge(ids, BRIDGE)]


@given(plans(), st.integers(1, 40))
def test_parts_have_all_changes_in_order_and_no_port_twice(changes: list[c.RowChange], most: int) -> None:
    parts = Pace(most).parts(changes)
    assert [change for part in parts for change in part] == changes
    assert all(parts)
    where: dict[str, int] = {}
    for number, part in enumerate(parts):
        own = [change for change in part if len(change.ports) == 1]
        assert all(where.setdefault(change.ports[0], number) == number for change in own)
        heavy = [change for change in own if not isinstance(change, c.SetPort)]
        filled = sum(1 if isinstance(change, c.AddPort) else 8 for change in heavy)
        assert filled <= most or len({change.ports for change in heavy}) == 1


def test_what_adds_and_removes_nothing_is_one_transaction() -> None:
    changes = [light(f"p{n}") for n in range(1000)]
    assert Pace(1).parts(changes) == [changes]
    assert Pace().parts([]) == []


def test_the_pace_follows_the_time() -> None:
    pace = Pace(64)
    adds, removals = [add(f"p{n}") for n in range(64)], [remove(f"p{n}") for n in range(8)]
    assert pace.after(adds, 0.05) == pace.after(removals, 0.05) == Pace(128)
    assert pace.after(adds, 0.3) == pace.after(removals, 0.3) == Pace(32)
    assert pace.after(adds, 0.2) == pace, "within the bound"
    assert pace.after(adds[:4], 0.05) == pace, "few ports tell nothing of more"
    assert pace.after([light("p1")], 5.0) == pace


def test_a_slow_host_does_not_end_with_a_transaction_for_each_port() -> None:
    """Each transaction looks at all ports: with one port each, a host would only get slower."""
    pace = Pace()
    for _ in range(20):
        pace = pace.after([add("p1"), remove("p2")], 10.0)
    assert len(pace.parts([add(f"p{n}") for n in range(160)])) <= 10
    assert len(pace.parts([remove(f"p{n}") for n in range(160)])) <= 40
    for _ in range(20):
        pace = pace.after([add(f"p{n}") for n in range(256)], 0.01)
    assert len(pace.parts([add(f"p{n}") for n in range(512)])) == 2, "nor has one all ports"
