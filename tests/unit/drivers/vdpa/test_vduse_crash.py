"""Ports in mode vduse and on VFs in one agent: crashes, drift and restarts in any order.

What must hold: no step is begun behind one that waits in the kernel, no device that somebody holds is taken
away, and in the end every port is as it was asked for and nothing else is there.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from drivers.vdpa.vduse_host import VHOST_VDPA, VIRTIO_VDPA
from drivers.vdpa.vduse_processes import DeviceStep
from netplugin.api.models import PortSpec
from tests.unit.agents.test_reconciler_crash import LONG
from tests.unit.drivers.sriov.world import CrashMachine, crash_settings
from tests.unit.drivers.vdpa.vduse_world import NETWORKS, VduseWorld, overlay_spec, vduse_spec
from tests.unit.drivers.vdpa.world import vdpa_spec

#: The last is one on a VF if it comes while the option says so.
PORTS = ["a", "b", "c", "d"]
_VARIANT = st.fixed_dictionaries(
    {},
    optional={
        "vlan_id": st.sampled_from([None, 100, 200]),
        "attachment": st.sampled_from([None, "netdev"]),
        "network_id": st.sampled_from(NETWORKS),
    },
)
_ASKED = st.dictionaries(st.sampled_from(PORTS), st.none() | _VARIANT, min_size=1, max_size=3)
_CRASH = st.none() | st.integers(0, 40)


def spec_of(port_id: str, mode: str, fields: Mapping[str, object]) -> PortSpec:
    number = PORTS.index(port_id) + 1
    if mode == "relay":
        return vdpa_spec(number, vlan_id=100)
    if "network_id" in fields:
        return overlay_spec(number, **{name: fields[name] for name in fields if name != "vlan_id"})  # type: ignore[arg-type]
    return vduse_spec(number, **fields)  # type: ignore[arg-type]


class Machine(CrashMachine):
    world: VduseWorld

    def make_world(self, directory: Path) -> VduseWorld:
        return VduseWorld(directory, vfs=True)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            super().teardown()
            self.world.close()

    @rule(asked=_ASKED, crash_at=_CRASH)
    def ask(self, asked: Mapping[str, Mapping[str, object] | None], crash_at: int | None) -> None:
        self.asked(
            {
                i: None if fields is None else spec_of(i, self.world.mode, fields)
                for i, fields in asked.items()
            },
            crash_at,
        )

    @rule(crash_at=_CRASH)
    def look(self, crash_at: int | None) -> None:
        self.looked(crash_at)

    @rule(mode=st.sampled_from(["vduse", "vduse", "relay"]))
    def the_option_changes(self, mode: str) -> None:
        self.world.mode = mode
        self.world.restart()

    @rule(loses=st.booleans())
    def vswitchd_restarts(self, loses: bool) -> None:
        if loses:
            self.world.vduse.lost = {*self.world.vduse.look()}
        self.world.switch.restart()

    @rule()
    def a_step_ends(self) -> None:
        self.world.vduse.stuck = None

    @rule(seed=st.integers(0, 1 << 16))
    def a_vm_starts_or_stops(self, seed: int) -> None:
        vduse = self.world.vduse
        there = sorted(name for name, device in vduse.look().items() if device.character)
        if vduse.held:
            vduse.held = set()
        elif there:
            vduse.held = {random.Random(seed).choice(there)}

    @rule(seed=st.integers(0, 1 << 16))
    def drift(self, seed: int) -> None:
        """Another program takes away a port of OVS or a vDPA device, or binds another driver."""
        dice, world = random.Random(seed), self.world
        bridges = [bridge for bridge in world.switch.ovs.bridges.values() if bridge.ports]
        there = sorted(n for n, d in world.vduse.look().items() if d.on_bus and n not in world.vduse.held)
        if bridges and dice.random() < 0.4:
            bridge = dice.choice(bridges)
            del bridge.ports[dice.choice(sorted(bridge.ports))]
            world.switch.reconfigure()
        elif there and world.vduse.stuck is None:
            name = dice.choice(there)
            if dice.random() < 0.5 and name in world.vduse.served:
                world.vduse.run(DeviceStep("delete", name), 0)
            else:
                world.vduse.run(DeviceStep("bind", name, dice.choice([VHOST_VDPA, VIRTIO_VDPA])), 0)

    @rule()
    def recover(self) -> None:
        """VMs stop, the kernel finishes; twice, as a repair of a lost record takes a deletion that waits."""
        world = self.world
        world.vduse.held = set()
        for _ in range(8):
            world.vduse.stuck = None
            world.vduse.lost &= {name for name, device in world.vduse.look().items() if not device.networked}
            world.switch.reconfigure()
            assert world.check()
        world.assert_settled()

    @invariant()
    def held_devices_stay(self) -> None:
        found = self.world.vduse.look()
        assert all(found[name].on_bus for name in self.world.vduse.held)


class TestAnything(Machine.TestCase):
    settings = crash_settings(25, 25)


@pytest.mark.long
class TestAnythingLong(Machine.TestCase):
    settings = crash_settings(1_000 if LONG else 1, 80)
