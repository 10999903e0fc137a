"""Calls that are cut off by a crash between any two of their steps, and what must hold after the restart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TypeVar

from agents.ports.call import Call
from netplugin.api.models import PortSpec
from tests.unit.agents.test_reconciler_crash import may_be
from tests.unit.drivers.sriov.world import World

SomeWorld = TypeVar("SomeWorld", bound=World)


def crash_at_every_step(
    world_at: Callable[[], AbstractContextManager[SomeWorld]],
    prepare: Callable[[SomeWorld], None],
    asked: Mapping[str, PortSpec | None],
    heal: Callable[[SomeWorld], None] | None = None,
) -> int:
    """Make the calls in a fresh world for each crash, until one goes through; returns the number of worlds.

    ``asked``: specs by port, None for a DELETE. ``heal``: the host is no longer as ``prepare`` spoilt it.
    """
    boundary, through = 0, False
    while not through:
        with world_at() as world:
            prepare(world)
            before = {r.port_id: r.spec for r in world.store.records()}
            ops: list[Call] = [
                world.delete(i) if spec is None else world.put(i, spec) for i, spec in asked.items()
            ]
            through = world.serve(*ops, crash_at=boundary)
            world.restart()
            world.assert_one_each()
            assert world.check() and world.check()
            if heal is not None:
                heal(world)
                assert world.check()
            world.assert_settled()
            found = {r.port_id: r.spec for r in world.store.records()}
            for op in ops:
                assert found.get(op.port_id) in may_be(op, before.get(op.port_id))
            for port_id in found:
                assert world.unplug(port_id) is None
            world.assert_settled()
        boundary += 1
    return boundary
