"""A crash between any two steps of giving a VF away and taking it back, and any order of anything.

What must hold: no VF is two ports', none is lost, one that nobody has is as it was before anybody
had it, and nothing is ever taken from a VM that runs.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    invariant,
    precondition,
    rule,
)

from agents.ports.call import Call
from netplugin.api.errors import CapacityExhausted, Conflict, OperationTimeout
from netplugin.api.models import PortSpec, PortState
from netplugin.host.vfs import is_vfio
from tests.unit.agents.test_reconciler_crash import LONG, answer, may_be
from tests.unit.drivers.sriov.crash_points import crash_at_every_step
from tests.unit.drivers.sriov.world import CrashMachine, World, crash_settings, make_spec


@contextmanager
def world_at() -> Iterator[World]:
    with tempfile.TemporaryDirectory() as directory:
        world = World(Path(directory))
        yield world
        world.store.close()


def heal(world: World) -> None:
    model = world.model
    model.unsupported, model.broken, model.forgetful, model.unbindable = set(), set(), set(), set()


# -- at every step of every kind of call ---------------------------------------------------------

OLD, NEW = make_spec(1, 100), make_spec(1, 200, qos={"egress_kbps": 7000})
ELSEWHERE = make_spec(2, 100, numa_node=1)


def nothing(world: World) -> None:
    """There is nothing before."""


def plugged(world: World) -> None:
    assert world.plug("a", OLD) is None


def on_mlx5(world: World) -> None:
    assert world.plug("a", ELSEWHERE) is None


def refused(world: World) -> None:
    world.model.unsupported = {"rate"}


def broken(world: World) -> None:
    world.model.broken = {"0000:03:10.0"}


def forgetful(world: World) -> None:
    world.model.forgetful = {"0000:03:10.0"}


Prepare = Callable[[World], None]
CASES: Mapping[str, tuple[Prepare, Mapping[str, PortSpec | None]]] = {
    "a first PUT": (nothing, {"a": NEW}),
    "a first PUT on mlx5_core": (nothing, {"a": ELSEWHERE}),
    "a change": (plugged, {"a": NEW}),
    "a DELETE": (plugged, {"a": None}),
    "a DELETE on mlx5_core": (on_mlx5, {"a": None}),
    "a batch": (plugged, {"a": None, "b": make_spec(2), "c": make_spec(3)}),
    "a PUT that the NIC does not support": (refused, {"a": NEW}),
    "a PUT on a VF that refuses": (broken, {"a": NEW}),
    "a PUT on a VF that forgets": (forgetful, {"a": NEW}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_crash_at_every_step(name: str) -> None:
    assert crash_at_every_step(world_at, *CASES[name], heal) > 6, "so many steps there are at least"


def away(world: World) -> None:
    for pf in world.model.pfs.values():
        pf.away = True


@pytest.mark.parametrize(
    ("prepare", "fail", "later"),
    [
        (nothing, away, NEW),
        (nothing, away, make_spec(1, 300)),
        (plugged, refused, make_spec(1, 300, qos={"egress_kbps": 9000})),
    ],
    ids=["plugged again", "changed", "changed twice"],
)
def test_a_port_that_was_answered_outlives_a_crash_and_a_failed_call(
    prepare: Prepare, fail: Prepare, later: PortSpec
) -> None:
    """The agent ends before it has stored that the port works, and the next call fails."""
    for crash_at in range(60):
        with world_at() as world:
            prepare(world)
            op = world.put("a", NEW)
            assert not world.serve(op, crash_at=crash_at), "it is answered before the last step"
            if answer(op) == "ok":
                world.restart()
                fail(world)
                assert world.plug("a", later) is not None
                heal(world)
                for pf in world.model.pfs.values():
                    pf.away = False
                assert world.check()
                assert [(r.spec, r.state) for r in world.store.records()] == [(NEW, PortState.ACTIVE)]
                return
    raise AssertionError("it is answered within so many steps")


# -- any order of anything -----------------------------------------------------------------------

#: Errors of a DELETE after which the port goes later.
_WAITS = (Conflict, OperationTimeout)
PORTS = [f"p{n}" for n in range(9)]
_PORT = st.sampled_from(PORTS)
_VARIANT = st.fixed_dictionaries(
    {},
    optional={
        "vlan_id": st.sampled_from([None, 100, 200]),
        "numa_node": st.sampled_from([None, None, 0, 1]),
        "qos": st.sampled_from([{"egress_kbps": 5000}, {"min_egress_kbps": 6000}]),
        "port_security": st.fixed_dictionaries({"enabled": st.booleans()}),
        "vf": st.fixed_dictionaries(
            {},
            optional={
                "trusted": st.just(True),
                "link_state": st.sampled_from(["auto", "disable"]),
                "pci_address": st.sampled_from(["0000:03:10.1", "0000:04:10.0"]),
            },
        ),
    },
)
_ASKED = st.dictionaries(_PORT, st.none() | _VARIANT, min_size=1, max_size=4)
_CRASH = st.none() | st.integers(0, 40)
_SEED = st.integers(0, 1 << 16)


class Machine(CrashMachine):
    """``allowed`` is what each port may be, by the answers to callers; None is: not there."""

    @initialize()
    def begin(self) -> None:
        super().begin()
        self.allowed: dict[str, set[PortSpec | None]] = {}
        self.down = False

    @rule(asked=_ASKED, crash_at=_CRASH)
    def ask(self, asked: Mapping[str, Mapping[str, object] | None], crash_at: int | None) -> None:
        world = self.world
        ops: list[Call] = []
        for port_id, fields in asked.items():
            number = PORTS.index(port_id) + 1
            ops.append(
                world.delete(port_id) if fields is None else world.put(port_id, make_spec(number, **fields))  # type: ignore[arg-type]
            )
        ran = self.ran()
        before = {r.port_id: r for r in world.store.records()}
        through = world.serve(*ops, crash_at=crash_at)
        for op in ops:
            old = before.get(op.port_id)
            was = self.allowed.get(op.port_id, {None})
            if answer(op) == "error" and old is not None and old.state is PortState.REMOVING:
                may = {*was, None}
            elif answer(op) == "error" and isinstance(op.future.exception(), _WAITS):
                may = {*was, None}  # it goes when its VM does, or when its NIC is back
            else:
                may = {after for spec in was for after in may_be(op, spec)}
            self.allowed[op.port_id] = may
        assert not through or all(op.future.done() for op in ops)
        assert self.ran() >= ran, "a running VM keeps its VF"
        if not through:
            world.restart()

    def ran(self) -> set[str]:
        model = self.world.model
        return {address for address in model.addresses() if model.vf(address).is_open}

    @rule(crash_at=_CRASH)
    def look(self, crash_at: int | None) -> None:
        ran = self.ran()
        self.looked(crash_at)
        assert self.ran() >= ran

    @rule(port_id=_PORT)
    def start_vm(self, port_id: str) -> None:
        record = self.world.store.get(port_id)
        if record is not None and record.state is PortState.ACTIVE and record.claims:
            address, model = record.claims[0].key, self.world.model
            if address in model.addresses() and is_vfio(model.vf(address).driver):
                model.start_vm(address)

    @rule(port_id=_PORT)
    def stop_vm(self, port_id: str) -> None:
        record = self.world.store.get(port_id)
        if record is not None and record.claims:
            self.stop(record.claims[0].key)

    def stop(self, address: str) -> None:
        if address in self.ran():
            self.world.model.stop_vm(address)

    @rule(number=st.integers(0, 8), seed=_SEED)
    def drift(self, number: int, seed: int) -> None:
        """Another program changes the VF of a port; never one that is free, which is not ours to mend."""
        holders = sorted(self.world.holders())
        there = [a for a in holders if a in self.world.model.addresses()]
        if there:
            self.world.model.drift(there[number % len(there)], random.Random(seed))

    @rule(pf=st.sampled_from(["0000:03:00.0", "0000:04:00.0"]), keep=st.booleans())
    def reset_nic(self, pf: str, keep: bool) -> None:
        """Its VFs go, and come back at once or later; the kernel waits until no VM has one."""
        nic = self.world.model.pfs[pf]
        for number in nic.vfs:
            self.stop(nic.vf_address(number))
        nic.make_vfs(nic.total if keep else 0)

    @rule(
        pf=st.sampled_from(["0000:03:00.0", "0000:04:00.0"]),
        away=st.booleans(),
        unreported=st.sets(st.integers(0, 3)),
    )
    def hide(self, pf: str, away: bool, unreported: set[int]) -> None:
        """A NIC is renamed, or reset; or it is back."""
        nic = self.world.model.pfs[pf]
        nic.away, nic.unreported = away, unreported

    @rule(
        groups=st.sets(st.sampled_from(["rate", "link_state", "trust"])),
        broken=st.sets(st.sampled_from(["0000:03:10.1", "0000:04:10.1"])),
        forgetful=st.sets(st.sampled_from(["0000:03:10.2"])),
        unbindable=st.sets(st.sampled_from(["0000:03:10.3"])),
    )
    def fall_ill(self, groups: set[str], broken: set[str], forgetful: set[str], unbindable: set[str]) -> None:
        model = self.world.model
        model.unsupported, model.broken = groups, broken
        model.forgetful, model.unbindable = forgetful, unbindable

    @precondition(lambda self: self.world.store.unfit())
    @rule()
    def release(self) -> None:
        self.world.store.release(list(self.world.store.unfit()))

    @rule()
    def recover(self) -> None:
        """All is well again and no VM runs: everything is as was requested and answered."""
        world = self.world
        heal(world)
        for pf in world.model.pfs.values():
            pf.away, pf.unreported = False, set()
            if len(pf.vfs) < pf.total:
                pf.make_vfs(pf.total)
        for address in self.ran():
            self.stop(address)
        for _ in range(2):
            assert world.check()
        world.assert_settled()
        found = {r.port_id: r.spec for r in world.store.records()}
        for port_id in {*found, *self.allowed}:
            allowed = self.allowed.get(port_id, {None})
            assert found.get(port_id) in allowed, (port_id, found.get(port_id), allowed)
            self.allowed[port_id] = {found.get(port_id)}

    @invariant()
    def one_each(self) -> None:
        self.world.assert_one_each()
        states = [v.state for v in self.world.reconciler.claims.vfs()]
        there = sum(len(pf.vfs) for pf in self.world.model.pfs.values() if not pf.away)
        assert len(states) - states.count("stale") <= there, "none is invented"
        assert len(states) >= there, "none is lost"


class TestAnything(Machine.TestCase):
    settings = crash_settings(60, 50)


@pytest.mark.long
class TestAnythingLong(Machine.TestCase):
    settings = crash_settings(10_000 if LONG else 1, 100)


def test_all_taken_is_an_error_that_leaves_all_as_it_is() -> None:
    with world_at() as world:
        ops: list[Call] = [world.put(f"p{n}", make_spec(n + 1)) for n in range(9)]
        assert world.serve(*ops)
        failed = [op for op in ops if op.future.exception() is not None]
        assert len(failed) == 2
        assert all(isinstance(op.future.exception(), CapacityExhausted) for op in failed)
        world.assert_settled()
