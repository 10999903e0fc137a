"""NICs that another agent works at: their VFs are not given out, and nothing on them is touched."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from drivers.sriov.driver import Sriov
from netplugin import options
from netplugin.api.errors import BackendUnavailable
from netplugin.api.models import PortState
from netplugin.host.locks import Locks
from netplugin.host.shared import Host
from tests.unit.drivers.sriov.model import ModelPf
from tests.unit.drivers.sriov.world import World, make_spec

OTHERS = "52:54:00:99:99:99"


class LockedWorld(World):
    """An agent that takes locks; another is on the same host."""

    def start(self) -> None:
        self.host = Host(options.load([]))
        super().start()

    def end(self) -> None:
        self.store.close()
        self.driver.close()
        self.host.close()

    def make_driver(self) -> Any:
        return Sriov(options.load([]), self.host, kernel=self.model)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[LockedWorld]:
    domain = f"{random.randrange(1 << 16):04x}"  # locks are the whole machine's
    made = LockedWorld(
        tmp_path,
        ModelPf(f"{domain}:03:00.0", "eth3", total=2),
        ModelPf(f"{domain}:04:00.0", "eth4", total=2),
    )
    yield made
    made.end()


@pytest.fixture
def other() -> Iterator[Locks]:
    with closing(Locks()) as locks:
        yield locks


def take(other: Locks, *nics: str) -> None:
    for nic in nics:
        assert other.take(f"pf/{nic}") is None


def test_vfs_of_a_nic_of_another_agent_are_not_given_out(world: LockedWorld, other: Locks) -> None:
    first, second = world.model.pfs
    world.end()
    take(other, first)
    world.start()
    for port_id, number in (("a", 1), ("b", 2)):
        assert world.plug(port_id, make_spec(number)) is None
        assert world.model.vf(world.address_of(port_id)) in world.model.pfs[second].vfs.values()
    assert world.plug("c", make_spec(3)) is not None, "the other NIC is not ours"
    named = world.model.pfs[first].vf_address(0)
    refused = world.plug("d", make_spec(4, vf={"pci_address": named}))
    assert isinstance(refused, BackendUnavailable) and refused.step == "lock", refused
    assert f"has NIC {first}" in refused.detail
    reported = {vf.pci_address: vf for vf in world.reconciler.claims.vfs()}
    assert reported[named].state == "unusable" and reported[named].reason == refused.detail
    [finding] = [f for f in world.reconciler.findings() if f.id == f"vf-nic-{first}"]
    assert (finding.found, finding.fix) == (refused.detail, refused.fix)
    assert world.reconciler.ports.usable().usable, "one of two is enough"
    other.close()
    assert world.plug("d", make_spec(4, vf={"pci_address": named})) is None
    world.assert_settled()


def test_a_port_whose_nic_another_agent_has_is_left_as_it_is(world: LockedWorld, other: Locks) -> None:
    assert world.plug("a", make_spec()) is None
    vf, before = world.vf_of("a"), asdict(world.vf_of("a"))
    world.end()
    take(other, *world.model.pfs)
    world.start()
    assert not world.reconciler.ports.usable().usable
    with pytest.raises(BackendUnavailable, match="one agent at a time"):
        world.reconciler.check()
    vf.attributes = replace(vf.attributes, mac=OTHERS)  # as if the other agent had set it
    changed = asdict(vf)
    refused = world.unplug("a")
    assert isinstance(refused, BackendUnavailable), refused
    assert world.state("a") is PortState.REMOVING and asdict(vf) == changed != before
    other.close()
    assert world.check()
    assert world.store.records() == []
    world.assert_as_before()


def test_of_two_nics_one_of_which_another_has_the_ports_of_that_one_wait(
    world: LockedWorld, other: Locks
) -> None:
    first, second = world.model.pfs
    for number, (port_id, pf) in enumerate((("a", first), ("b", second))):
        named = world.model.pfs[pf].vf_address(0)
        assert world.plug(port_id, make_spec(number, vf={"pci_address": named})) is None
    world.end()
    take(other, first)
    world.start()
    for port_id in ("a", "b"):
        vf = world.vf_of(port_id)
        vf.attributes = replace(vf.attributes, mac=OTHERS)
    changed = asdict(world.vf_of("a"))
    assert world.check()
    assert (world.state("a"), world.state("b")) == (PortState.FAILED, PortState.ACTIVE)
    assert asdict(world.vf_of("a")) == changed
    record = world.store.get("a")
    assert record is not None and record.error is not None
    assert (record.error.code, record.error.step) == ("backend_unavailable", "lock")
    other.close()
    assert world.check()
    world.assert_settled()
