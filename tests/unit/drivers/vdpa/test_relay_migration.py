"""A relay migrates with the MAC of its VF: phases, crashes at every step, guests, on NICs of each kind."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from agents.ports.call import Call
from agents.store.port_table import Record
from drivers.ovs.filters import are_closed
from drivers.vf.memory import provisional_mac
from netplugin.api.errors import NetpluginError, OperationTimeout, Unsupported
from netplugin.api.migration import Activation
from netplugin.api.migration_models import MigrationStep
from netplugin.api.models import PortSpec, PortState
from netplugin.backend import Intent
from netplugin.host.flow_actions import output
from netplugin.host.nic_models import KEPT_BY_DPDK
from netplugin.host.ovs_rows import MAC_MARK
from tests.unit.drivers.sriov.model import ModelPf
from tests.unit.drivers.vdpa.vduse_world import VduseWorld, vduse_spec
from tests.unit.drivers.vdpa.world import NATIVE_ROOT, RELAY_ROOT, VdpaWorld, vdpa_spec

PORT = "p"


@dataclass(frozen=True)
class Kind:
    """A NIC by the drivers of its PF and VFs, and the port on it. ``sticky``: DPDK keeps the VF."""

    pf_driver: str
    vf_driver: str | None
    vlan_id: int | None = 100
    sticky: bool = False

    @property
    def spec(self) -> PortSpec:
        return vdpa_spec(1, self.vlan_id)

    @property
    def opens_again(self) -> bool:
        return self.pf_driver not in ("igb", "ixgbe") or (self.pf_driver == "ixgbe" and self.vlan_id is None)


KINDS = {
    "igb": Kind("igb", "igbvf"),
    "ixgbe, untrusted": Kind("ixgbe", "ixgbevf"),
    "ixgbe, trusted": Kind("ixgbe", "ixgbevf", vlan_id=None),
    "i40e": Kind("i40e", "iavf"),
    "i40e, probed by DPDK": Kind("i40e", "iavf", sticky=True),
    "mlx5": Kind("mlx5_core", "mlx5_core"),
    "unknown": Kind("nfp", None),
}


class Relays(VdpaWorld):
    """One NIC of a kind, and what is observed at every boundary between two steps."""

    def __init__(self, directory: Path, kind: Kind) -> None:
        self.kind = kind
        pf = ModelPf("0000:03:00.0", "eth3", total=2, driver=kind.pf_driver, vf_driver=kind.vf_driver)
        super().__init__(directory, pf)
        if kind.sticky:
            self.switch.sticky = set(self.model.addresses())
        if kind.vf_driver in KEPT_BY_DPDK:  # its interface has a MAC that it chose, and its PF reports none
            for address in self.model.addresses():
                self.model.vf(address).chosen_mac = f"02:00:00:00:01:0{address[-1]}"
                self.before[address] = asdict(self.model.vf(address))
        #: What must hold at every boundary.
        self.invariant: Callable[[], None] = self.opened_as_it_is
        self.model.tick = self._tick

    def assert_as_before(self, addresses: Sequence[str] | None = None) -> None:
        """But for a MAC that the driver of a VF chooses anew each time that it is bound."""
        for address in set(self.model.addresses()) - self.holders().keys():
            self.model.vf(address).chosen_mac = self.before[address]["chosen_mac"]
        super().assert_as_before(addresses)

    def _tick(self) -> None:
        self.invariant()
        self.clock.tick()

    def opened_as_it_is(self) -> None:
        """OVS does not have a VF open that gets another MAC, unless the NIC takes it at once."""
        if self.kind.opens_again:
            for address, mac in self.switch.opened.items():
                assert self.model.vf(address).attributes.mac == mac or not self.is_driven(address)

    def is_driven(self, address: str) -> bool:
        return address in self.switch.devices() or self.model.vf(address).is_open

    @property
    def has_mac(self) -> bool:
        """Whether the switch of the NIC has the VM's MAC for a VF."""
        vfs = (self.model.vf(address) for address in self.model.addresses())
        return self.kind.spec.mac in {vf.attributes.mac for vf in vfs}

    @property
    def forwards(self) -> bool:
        """Whether there are flows from the VF to the VM."""
        seen = self.switch.ovs.common([PORT])
        if PORT not in seen.rows or PORT not in seen.vf_ports:
            return False
        interface = seen.rows[PORT].interface
        assert interface is not None and interface.ofport is not None
        return any(flow.actions == output(interface.ofport) for flow in seen.flows[PORT])

    def carries(self) -> bool:
        """Whether frames to the VM pass: the NIC gives them to its VF, and OVS to the VM."""
        if not (self.forwards and self.has_mac):
            return False
        opened = self.switch.opened.get(self.address_of(PORT))
        return not self.kind.opens_again or opened == self.kind.spec.mac

    def step(self, step: MigrationStep, activation: Activation | None = None) -> Call:
        spec = self.kind.spec if step == "prepare" else None
        return Call(
            Record(PORT, spec) if spec else Intent(PORT, None),
            time.monotonic() + 30,
            step=step,
            activation=activation,
        )

    def done(self, step: MigrationStep, activation: Activation | None = None) -> Any:
        operation = self.step(step, activation)
        assert self.serve(operation)
        return operation.future.result(0)

    @property
    def phase(self) -> str | None:
        record = self.store.get(PORT)
        return record.migration.phase.value if record and record.migration else None

    def look(self) -> str:
        """What there is of the port, on the NIC, in OVS and in the store, which are the same."""
        assert self.reconciler.check(dry_run=True).changes == []
        self.assert_as_before()
        record, seen = self.store.get(PORT), self.switch.ovs.common()
        if record is None:
            assert not self.has_mac and not seen.rows and not seen.vf_ports
            return "gone"
        assert (record.state, record.error) == (PortState.ACTIVE, None)
        vf, mac = self.vf_of(PORT), self.kind.spec.mac
        row, vf_port = seen.rows[PORT], seen.vf_ports[PORT]
        assert row.interface and vf_port.interface
        assert seen.bridges[str(row.bridge)].neighbours == 0
        if self.kind.opens_again:
            assert self.switch.opened[self.address_of(PORT)] == vf.attributes.mac
            assert vf_port.interface.external_ids.get(MAC_MARK, mac) == vf.attributes.mac
        assert record.migration is None or record.migration.is_closed == (not self.carries())
        if self.carries():
            asked = [flow for flow in seen.flows[PORT] if "arp_tha" in flow.match]
            assert asked == [], "no host asks this one to announce the VM"
            return "open"
        assert vf.attributes.mac == provisional_mac(mac) != mac and not self.has_mac
        closed = seen.flows[PORT]
        assert are_closed(closed) and len(closed) == 2, "from the VM and from the VF"
        return "closed"


@contextmanager
def relays(name: str) -> Iterator[Relays]:
    with tempfile.TemporaryDirectory() as directory:
        world = Relays(Path(directory), KINDS[name])
        yield world
        world.store.close()


def prepared(world: Relays) -> None:
    world.done("prepare")


def activated(world: Relays) -> None:
    world.done("prepare")
    world.done("activate")


def plugged(world: Relays) -> None:
    assert world.plug(PORT, world.kind.spec) is None


def left(world: Relays) -> None:
    plugged(world)
    world.done("leave")


#: What was before, the step, and what is looked at before it and after it.
CASES: list[tuple[Callable[[Relays], None], MigrationStep, str, str]] = [
    (lambda world: None, "prepare", "gone", "closed"),
    (prepared, "activate", "closed", "open"),
    (prepared, "abort", "closed", "gone"),
    (prepared, "commit", "closed", "open"),
    (activated, "commit", "open", "open"),
    (activated, "abort", "open", "gone"),
    (plugged, "leave", "open", "closed"),
    (left, "abort", "closed", "open"),
    (left, "commit", "closed", "gone"),
]


@pytest.mark.parametrize("name", ["igb", "i40e", "i40e, probed by DPDK", "mlx5"])
@pytest.mark.parametrize(("before", "step", "was", "becomes"), CASES)
def test_a_crash_at_every_step(
    name: str, before: Callable[[Relays], None], step: MigrationStep, was: str, becomes: str
) -> None:
    through, crash_at = False, 0
    while not through:
        with relays(name) as world:
            before(world)
            assert world.look() == was
            world.switch.announced.clear()
            world.invariant = at_every_boundary(world, was, becomes)
            through = world.serve(world.step(step), crash_at=crash_at)
            world.restart()
            assert world.check()
            assert world.look() in (was, becomes), crash_at
            # The caller has no answer, and sends it again.
            world.done(step)
            assert world.look() == becomes, crash_at
            if becomes == "open" and was == "closed":
                assert PORT in world.switch.announced, crash_at
            else:
                assert was == "open" or PORT not in world.switch.announced
            if becomes != "gone":
                assert world.unplug(PORT) is None
            world.invariant = world.opened_as_it_is
            assert world.look() == "gone"
        crash_at += 1
    assert crash_at >= 4


def at_every_boundary(world: Relays, was: str, becomes: str) -> Callable[[], None]:
    """While the VM does not run here, before or after, the NIC does not have its MAC for a moment."""

    def holds() -> None:
        world.opened_as_it_is()
        if "open" not in (was, becomes):
            assert not world.has_mac
        if was == "closed":
            assert world.carries() or not world.forwards, "the MAC is there before the flows"

    return holds


@pytest.mark.parametrize("name", KINDS)
def test_the_agent_follows_the_guest_at_both_ends(name: str) -> None:
    with relays(name) as world:
        world.switch.guests[PORT] = False
        world.done("prepare", "auto")
        world.check()
        assert (world.phase, world.look()) == ("prepared", "closed"), "until the guest runs"
        world.switch.guests[PORT] = True
        world.reconciler.check([PORT])
        assert (world.phase, world.look()) == ("activated", "open")
        assert world.switch.announced == [PORT]
        world.done("commit")
        world.done("leave", "auto")
        assert (world.phase, world.look()) == ("leaving", "open")
        world.switch.guests[PORT] = False
        world.reconciler.check([PORT])
        assert (world.phase, world.look()) == ("left", "closed")
        world.switch.guests[PORT] = True
        world.reconciler.check([PORT])
        assert (world.phase, world.look()) == ("leaving", "open"), "it goes on here"
        assert world.switch.announced == [PORT, PORT]


@pytest.mark.parametrize("name", KINDS)
def test_a_closed_relay_stays_closed(name: str) -> None:
    """After a restart of vswitchd, a row that somebody deleted, and a MAC that somebody set."""
    with relays(name) as world:
        prepared(world)
        world.switch.restart()
        assert world.check() and world.look() == "closed"
        [bridge] = world.switch.ovs.bridges.values()
        for row in sorted(bridge.ports):
            del bridge.ports[row]
            world.switch.reconfigure()
            assert world.check() and world.look() == "closed"
        world.invariant = lambda: None
        vf = world.vf_of(PORT)
        vf.attributes = replace(vf.attributes, mac="02:00:00:00:00:09")
        assert world.check() and not world.has_mac
        assert vf.attributes.mac == provisional_mac(world.kind.spec.mac)


@pytest.mark.parametrize("name", ["igb", "ixgbe, trusted", "i40e"])
def test_a_nic_that_is_away_or_in_reset_for_a_while_changes_nothing(name: str) -> None:
    with relays(name) as world:
        prepared(world)
        rows, [pf] = world.switch.ovs.common().vf_ports, world.model.pfs.values()
        pf.away = True
        assert world.check() and world.switch.ovs.common().vf_ports == rows
        pf.away = False
        pf.unreported = {*pf.vfs}
        assert world.check() and world.switch.ovs.common().vf_ports == rows
        pf.unreported = set()
        assert world.check() and world.look() == "closed"


def test_who_has_a_vf_open_but_dpdk_is_reported() -> None:
    """The VF stays open without a row: its MAC is not changed under whoever has it."""
    with relays("i40e, probed by DPDK") as world:
        plugged(world)
        address = world.address_of(PORT)
        world.model.vf(address).is_open = True
        [bridge] = world.switch.ovs.bridges.values()
        vf_port = world.switch.devices()[address]
        del bridge.ports[vf_port]
        world.switch.opened.pop(address)
        with pytest.raises(NetpluginError, match="is in use") as refused:
            world.done("leave")
        assert not isinstance(refused.value, OperationTimeout)
        assert world.has_mac and vf_port not in bridge.ports


# -- modes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "moves"), [("relay", True), ("native", False), ("vduse", False)])
def test_new_ports_in_relay_mode_alone_migrate(tmp_path: Path, mode: str, moves: bool) -> None:
    world = VdpaWorld(tmp_path, mode=mode)
    world.switch.reported = NATIVE_ROOT if mode == "native" else RELAY_ROOT
    assert world.driver.offered().live_migration is moves
    operation = Call(Record(PORT, vdpa_spec()), time.monotonic() + 30, step="prepare")
    assert world.serve(operation)
    refused = operation.future.exception(0)
    if not moves:
        assert isinstance(refused, Unsupported) and f"{mode} mode" in refused.detail
    assert (world.store.get(PORT) is not None) is moves
    world.store.close()


def test_a_port_keeps_the_mode_in_which_it_migrates(tmp_path: Path) -> None:
    """The mode of the port decides, not that of new ports."""
    with closing(VduseWorld(tmp_path)) as world:
        assert world.plug("a", vduse_spec()) is None
        operation = Call(Intent("a", None), time.monotonic() + 30, step="leave")
        world.mode = "relay"
        world.restart()
        assert world.serve(operation)
        refused = operation.future.exception(0)
        assert isinstance(refused, Unsupported) and "shadow virtqueues" in refused.detail
        record = world.store.get("a")
        assert record is not None and record.migration is None
