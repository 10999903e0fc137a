"""A crash between any two steps, and any order of anything, with two backends on the same VFs.

What must hold: no VF is two ports', whichever backend's; none is lost; one that nobody has is as it
was before anybody had it; and nothing is unbound or reset while OVS or a VM has it open.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from drivers.vdpa.model import BRIDGE
from netplugin.api.models import PortSpec
from tests.unit.agents.test_reconciler_crash import LONG
from tests.unit.drivers.sriov.crash_points import crash_at_every_step
from tests.unit.drivers.sriov.world import CrashMachine, crash_settings, make_spec
from tests.unit.drivers.vdpa.world import Both, VdpaWorld, vdpa_spec


@contextmanager
def world_at() -> Iterator[VdpaWorld]:
    with tempfile.TemporaryDirectory() as directory:
        world = VdpaWorld(Path(directory))
        yield world
        world.store.close()


# -- at every step of every kind of call ---------------------------------------------------------

OLD, NEW = vdpa_spec(1, 100), vdpa_spec(1, 200, qos={"ingress_kbps": 7000})


def nothing(world: VdpaWorld) -> None:
    """There is nothing before."""


def plugged(world: VdpaWorld) -> None:
    assert world.plug("a", OLD) is None


def unflowed(world: VdpaWorld) -> None:
    plugged(world)
    world.switch.restart()


def sticky(world: VdpaWorld) -> None:
    plugged(world)
    world.switch.sticky = {world.address_of("a")}


Prepare = Callable[[VdpaWorld], None]
CASES: Mapping[str, tuple[Prepare, Mapping[str, PortSpec | None]]] = {
    "a first PUT": (nothing, {"a": NEW}),
    "a first PUT on a driver that stays": (nothing, {"a": vdpa_spec(1, numa_node=1)}),
    "a change": (plugged, {"a": NEW}),
    "a DELETE": (plugged, {"a": None}),
    "a DELETE of what DPDK took by itself": (sticky, {"a": None}),
    "a batch": (plugged, {"a": None, "b": vdpa_spec(2), "c": vdpa_spec(3)}),
    "a batch after a restart of vswitchd": (unflowed, {"a": NEW, "b": vdpa_spec(2)}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_crash_at_every_step(name: str) -> None:
    assert crash_at_every_step(world_at, *CASES[name]) > 10, "so many steps there are at least"


# -- two backends, any order of anything ---------------------------------------------------------

#: For seven VFs: five ports of each backend.
PORTS = [f"{kind}{n}" for kind in ("sriov", "vdpa") for n in range(5)]
_VARIANT = st.fixed_dictionaries(
    {},
    optional={
        "vlan_id": st.sampled_from([None, 100, 200]),
        "numa_node": st.sampled_from([None, None, 0, 1]),
        "vf": st.fixed_dictionaries(
            {}, optional={"pci_address": st.sampled_from(["0000:03:10.1", "0000:04:10.0"])}
        ),
    },
)
_ASKED = st.dictionaries(st.sampled_from(PORTS), st.none() | _VARIANT, min_size=1, max_size=4)
_CRASH = st.none() | st.integers(0, 60)


def spec_of(port_id: str, fields: Mapping[str, object]) -> PortSpec:
    make = vdpa_spec if port_id.startswith("vdpa") else make_spec
    return make(PORTS.index(port_id) + 1, **fields)  # type: ignore[arg-type]


class Machine(CrashMachine):
    world: Both

    def make_world(self, directory: Path) -> Both:
        return Both(directory)

    @rule(asked=_ASKED, crash_at=_CRASH)
    def ask(self, asked: Mapping[str, Mapping[str, object] | None], crash_at: int | None) -> None:
        self.asked(
            {i: None if fields is None else spec_of(i, fields) for i, fields in asked.items()}, crash_at
        )

    @rule(crash_at=_CRASH)
    def look(self, crash_at: int | None) -> None:
        self.looked(crash_at)

    @rule()
    def vswitchd_restarts(self) -> None:
        self.world.switch.restart()

    @rule(seed=st.integers(0, 1 << 16))
    def drift(self, seed: int) -> None:
        """Another program takes a port off OVS, or changes a VF that is somebody's."""
        dice, world = random.Random(seed), self.world
        bridge = world.switch.ovs.bridges.get(BRIDGE)
        if bridge and bridge.ports and dice.random() < 0.5:
            del bridge.ports[dice.choice(sorted(bridge.ports))]
            world.switch.reconfigure()
        holders = sorted(world.holders())
        if holders and dice.random() < 0.5:
            world.model.drift(dice.choice(holders), dice)

    @rule()
    def recover(self) -> None:
        for _ in range(2):
            assert self.world.check()
        self.world.assert_settled()

    @invariant()
    def one_each(self) -> None:
        self.world.assert_one_each()


class TestAnything(Machine.TestCase):
    settings = crash_settings(30, 40)


@pytest.mark.long
class TestAnythingLong(Machine.TestCase):
    settings = crash_settings(5_000 if LONG else 1, 100)
