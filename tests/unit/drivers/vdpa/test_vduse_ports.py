"""Ports in mode vduse through the real reconciler: each row of the table, each crash, each trap."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from lxml import etree

from drivers.vdpa.model import BRIDGE
from drivers.vdpa.vduse_host import VHOST_VDPA, VIRTIO_VDPA
from drivers.vdpa.vduse_plan import vduse_name
from drivers.vdpa.vduse_processes import DeviceStep, waits
from netplugin.api.errors import Conflict, InvalidRequest, OperationTimeout, Unsupported
from netplugin.api.models import Binding, PortSpec, PortState
from netplugin.backend import Intent
from netplugin.host.names import VHOST, device_name
from netplugin.libvirt.domain import complete, parse_domain, written
from netplugin.libvirt.interfaces import Element
from netplugin.tuning.placing.checks import check
from netplugin.tuning.placing.checks.case import Case, DomainNic
from tests.unit.drivers.dpdkvhostuser.model import Bridge
from tests.unit.drivers.sriov.crash_points import crash_at_every_step
from tests.unit.drivers.vdpa.vduse_world import VduseWorld, plugged, vduse_spec
from tests.unit.drivers.vdpa.world import RELAY_ROOT, vdpa_spec

NPD, NPV = vduse_name("a"), device_name(VHOST, "a")


@contextmanager
def world_at(**how: Any) -> Iterator[VduseWorld]:
    with tempfile.TemporaryDirectory() as directory:
        world = VduseWorld(Path(directory), **how)
        yield world
        world.close()


@pytest.fixture
def world() -> Iterator[VduseWorld]:
    with world_at() as made:
        yield made


def binding_of(world: VduseWorld, port_id: str = "a") -> dict[str, Any]:
    record = world.store.get(port_id)
    assert record is not None
    found = json.loads(world.driver.binding(Intent(port_id, record.spec, record.claims)).model_dump_json())
    assert isinstance(found, dict)
    return found


def problem_of(world: VduseWorld, port_id: str = "a") -> str:
    record = world.store.get(port_id)
    assert record is not None and record.error is not None
    return record.error.detail


# -- the port ------------------------------------------------------------------------------------


def test_a_port_needs_no_vf(world: VduseWorld) -> None:
    assert world.driver.probe().usable
    assert world.plug("a", vduse_spec(qos={"ingress_kbps": 7000})) is None
    world.assert_settled()
    row = world.switch.ovs.bridges["br9"].ports[NPV]
    assert (row.tag, row.vlan_mode) == (100, "access") and row.qos
    assert world.plug("a", vduse_spec(vlan_id=200)) is None
    assert world.switch.ovs.bridges["br9"].ports[NPV].tag == 200
    world.assert_settled()
    assert world.unplug("a") is None
    world.assert_settled()
    assert world.switch.ovs.bridges == {} and world.vduse.look() == {}


def test_the_vm_opens_a_device_of_the_kernel(world: VduseWorld) -> None:
    plugged(world)
    reported = binding_of(world)
    assert (reported["vif_type"], reported["mode"]) == ("vhost_vdpa", "vduse")
    device = str(world.vduse.root / "dev/vhost-vdpa-0")
    assert (reported["vhost_vdpa_device"], reported["vdpa_device"]) == (device, NPD)
    assert (reported["bridge"], reported["device"]) == ("br9", NPV)
    needs = reported["domain_requirements"]
    assert needs["shared_memory"] and needs["hugepages"] and not needs["vfio"]
    xml = etree.fromstring(reported["interface_xml"])
    assert xml.xpath("string(@type)") == "vdpa" and xml.xpath("string(source/@dev)") == device
    assert xml.xpath("string(mac/@address)") == vduse_spec().mac


def test_a_domain_with_it_has_shared_memory(world: VduseWorld) -> None:
    plugged(world)
    binding = Binding.model_validate(binding_of(world))
    plain = "<domain><name>vm</name><memory unit='MiB'>64</memory><devices/></domain>"

    def failures(domain: Element) -> set[str]:
        case = Case(domain, (DomainNic("a", binding),), None, None, frozenset())
        return {finding.id for finding in check(case) if finding.status == "fail"}

    domain = parse_domain(plain, "render-domain")
    complete(domain, [binding])
    assert failures(domain) == set() and domain.xpath("string(memoryBacking/access/@mode)") == "shared"
    domain.find("memoryBacking").find("access").set("mode", "private")
    assert failures(domain) == {"memory-shared"}
    with pytest.raises(Conflict, match="shared memory"):
        complete(domain, [binding])
    stale = written(domain).replace("private", "shared").replace("vhost-vdpa-0", "vhost-vdpa-1")
    assert failures(parse_domain(stale, "check-domain")) == {"nic"}, "the kernel has numbered it otherwise"


def test_the_name_in_ovs_may_be_chosen(world: VduseWorld) -> None:
    assert world.plug("a", vduse_spec(port_name="vnic0")) is None
    assert "vnic0" in world.switch.ovs.bridges["br9"].ports and binding_of(world)["device"] == "vnic0"
    assert isinstance(world.plug("b", vduse_spec(2, port_name="vnic0")), Conflict)
    world.assert_settled()


REFUSED: Mapping[str, dict[str, Any]] = {
    "queue pair": {"queues": 2},
    "no VF": {"vf": {"trusted": True}},
    "no vhost-user socket": {"vhost_user_socket": "/run/vhost/vm/nic0"},
    "vhost-user socket": {"qemu_user": 1000},
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_it_cannot_is_refused(world: VduseWorld, why: str) -> None:
    refused = world.plug("a", vduse_spec(**REFUSED[why]))
    assert isinstance(refused, Unsupported) and why in refused.detail
    assert world.store.records() == []


def test_a_network_without_a_bridge_is_refused(world: VduseWorld) -> None:
    refused = world.plug("a", vduse_spec(network={"physical_network": "net7"}))
    assert isinstance(refused, InvalidRequest) and "[ovs] bridge_mappings" in refused.detail


def test_a_host_without_it_says_what_to_load(world: VduseWorld) -> None:
    (world.vduse.root / "dev/vduse/control").rmdir()
    found = world.driver.probe()
    assert not found.usable and "modprobe -a vduse vhost_vdpa" in str(found.fix)
    world.switch.reported = RELAY_ROOT
    assert "OVS 3.1.0 has no VDUSE" in str(world.driver.probe().reason)


def test_its_features_are_those_of_the_mode(world: VduseWorld) -> None:
    assert (world.driver.offered().max_queues, world.driver.offered().virtual_functions) == (1, False)
    with world_at(mode="relay", vfs=True) as relay:
        assert (relay.driver.offered().max_queues, relay.driver.offered().vdpa_devices) == (128, False)


# -- a container ---------------------------------------------------------------------------------


def test_a_container_gets_an_interface(world: VduseWorld) -> None:
    spec = vduse_spec(attachment="netdev", network={"mtu": 1400})
    assert world.plug("a", spec) is None
    world.assert_settled()
    reported = binding_of(world)
    assert (reported["vif_type"], reported["interface"], reported["interface_xml"]) == (
        VIRTIO_VDPA,
        "eth1",
        "",
    )
    assert not reported["domain_requirements"]["shared_memory"]
    world.vduse.set("eth1", mtu=1400, address="52:54:00:00:00:99")
    assert world.check()
    world.assert_settled()
    refused = world.plug("a", vduse_spec(network={"mtu": 1400}))
    assert isinstance(refused, Conflict) and "attachment" in refused.detail
    assert world.unplug("a") is None
    world.assert_settled()


def test_an_interface_that_takes_long_to_come_is_waited_for(
    world: VduseWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device is seen with its driver while that is at work (really_probe in Linux's drivers/base/dd.c)."""
    bind, looks = world.vduse._bind, 0

    def slowly(step: DeviceStep) -> None:
        bind(step)
        world.vduse.move_away(NPD)
        world.vduse.stuck = step
        raise waits(step)

    def pending() -> DeviceStep | None:
        nonlocal looks
        if world.vduse.stuck is not None:
            looks += 1
        if world.vduse.stuck is not None and looks == 3:
            world.vduse.stuck = None
            bind(DeviceStep("bind", NPD, VIRTIO_VDPA))
        return world.vduse.stuck

    monkeypatch.setattr(world.vduse, "_bind", slowly)
    monkeypatch.setattr(world.vduse, "pending", pending)
    assert world.plug("a", vduse_spec(attachment="netdev")) is None
    assert binding_of(world)["interface"] == "eth2" and looks == 3
    world.assert_settled()


def test_an_interface_is_found_where_it_was_moved_to(world: VduseWorld) -> None:
    assert world.plug("a", vduse_spec(attachment="netdev")) is None
    world.vduse.move_away(NPD)
    assert world.check()
    world.assert_settled()
    assert binding_of(world)["interface"] is None
    record_lost(world)
    assert world.check()
    assert world.state("a") is PortState.DEGRADED and "PUT it again" in problem_of(world)
    assert world.vduse.look()[NPD].networked, "it is not taken away from the container"


def test_a_kernel_without_virtio_net_is_reported(world: VduseWorld) -> None:
    assert world.plug("a", vduse_spec(attachment="netdev")) is None
    (world.vduse.devices / NPD / "virtio0/driver").unlink()
    world.vduse.move_away(NPD)
    assert world.check()
    assert "modprobe virtio_net" in problem_of(world)


def test_other_modes_have_no_attachment() -> None:
    with world_at(mode="relay", vfs=True) as world:
        refused = world.plug("a", vdpa_spec(attachment="netdev"))
        assert isinstance(refused, Unsupported) and "no vDPA device of the kernel" in refused.detail


# -- beside ports on VFs -------------------------------------------------------------------------


def test_both_kinds_live_side_by_side_and_keep_their_mode() -> None:
    with world_at(mode="relay", vfs=True) as world:
        assert world.plug("vf", vdpa_spec(7)) is None
        world.mode = "vduse"
        world.restart()
        plugged(world)
        world.assert_settled()
        assert binding_of(world, "vf")["mode"] == "relay"
        world.mode = "relay"
        world.restart()
        assert world.check()
        assert world.plug("a", vduse_spec(vlan_id=300)) is None, "it is changed in its mode"
        assert binding_of(world)["mode"] == "vduse"
        world.assert_settled()
        assert BRIDGE in world.switch.ovs.bridges
        assert world.unplug("vf") is None
        world.assert_settled()
        assert world.unplug("a") is None
        world.assert_settled()


def test_a_lost_store_finds_the_mode_in_the_row() -> None:
    with world_at(vfs=True) as world:
        plugged(world)
        world.store.close()
        world.path.unlink()
        world.mode = "relay"
        world.start()
        assert world.check()
        assert world.vduse.look()[NPD].on_bus, "an orphan stays"
        assert world.plug("a", vduse_spec()) is None
        assert binding_of(world)["mode"] == "vduse"
        world.assert_settled()
        assert world.unplug("a") is None
        world.assert_settled()


def test_an_orphan_is_removed_on_request(world: VduseWorld) -> None:
    plugged(world)
    world.store.close()
    world.path.unlink()
    world.start()
    assert world.check()
    assert world.unplug("a") is None
    world.assert_settled()


# -- the table: every state of the three places --------------------------------------------------


def no_row(world: VduseWorld) -> None:
    del world.switch.ovs.bridges["br9"].ports[NPV]
    world.switch.reconfigure()


def no_device(world: VduseWorld) -> None:
    world.vduse.run(DeviceStep("delete", NPD), 0)


def no_row_no_device(world: VduseWorld) -> None:
    no_row(world)
    world.vduse.served.add(NPD)  # the deletion is answered
    no_device(world)
    world.vduse.served.discard(NPD)


def another_driver(world: VduseWorld) -> None:
    world.vduse.run(DeviceStep("bind", NPD, VIRTIO_VDPA), 0)


def restarted(world: VduseWorld) -> None:
    world.switch.restart()


def record_lost(world: VduseWorld) -> None:
    """vswitchd starts without /var/run/vduse: it refuses the port."""
    world.vduse.lost = {NPD}
    world.switch.restart()


def record_lost_no_device(world: VduseWorld) -> None:
    no_device(world)
    record_lost(world)


def record_lost_no_row(world: VduseWorld) -> None:
    no_row_no_device(world)
    world.vduse.lost = {NPD}


STATES = (
    no_row,
    no_device,
    no_row_no_device,
    another_driver,
    restarted,
    record_lost,
    record_lost_no_device,
    record_lost_no_row,
)


def ends(world: VduseWorld) -> None:
    """The kernel has waited long enough for a vswitchd that did not answer."""
    world.vduse.stuck = None


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_every_state_is_repaired(world: VduseWorld, state: Callable[[VduseWorld], None]) -> None:
    plugged(world, ("a", "b"))
    state(world)
    assert world.check()
    ends(world)
    assert world.check()
    world.assert_settled()


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_every_state_can_be_removed(world: VduseWorld, state: Callable[[VduseWorld], None]) -> None:
    plugged(world, ("a", "b"))
    state(world)
    world.patient = False
    world.unplug("a")
    ends(world)
    assert world.check()
    assert world.unplug("b") is None
    assert world.store.records() == []
    world.assert_settled()


def test_a_driver_that_came_by_itself_is_another(world: VduseWorld) -> None:
    world.vduse.autoprobes = VIRTIO_VDPA
    plugged(world)
    world.assert_settled()
    world.vduse.autoprobes = VHOST_VDPA
    plugged(world, ("b",))
    world.assert_settled()


def test_ovs_makes_no_device(world: VduseWorld) -> None:
    world.vduse.serves = lambda name: True  # type: ignore[method-assign]
    refused = world.plug("a", vduse_spec())
    assert refused is not None and "made no VDUSE device" in str(refused)
    assert world.store.records() == [] and world.switch.ovs.bridges == {}


# -- who holds a device, and what does not end ---------------------------------------------------


def test_a_held_device_is_not_deleted(world: VduseWorld) -> None:
    plugged(world, ("a", "b"))
    world.vduse.held = {NPD}
    refused = world.unplug("a")
    assert isinstance(refused, Conflict) and "open" in refused.detail
    assert world.state("a") is PortState.REMOVING
    assert NPV in world.switch.ovs.bridges["br9"].ports, "the VM still has its network"
    assert world.check() and world.state("a") is PortState.REMOVING
    assert world.unplug("b") is None, "others go on"
    world.vduse.held = set()
    assert world.check()
    assert world.store.records() == []
    world.assert_settled()


def test_on_a_bridge_of_the_operators_a_port_is_marked_with_its_network(world: VduseWorld) -> None:
    world.switch.ovs.bridges["br9"] = Bridge(ours=False)
    assert world.plug("a", vduse_spec(port_security={"enabled": False})) is None
    assert world.switch.ovs.bridges["br9"].ports[NPV].external_ids["netplugin-mapping"] == "net9:br9"


def test_the_bridge_of_a_held_device_stays(world: VduseWorld) -> None:
    plugged(world, ("a", "b"))
    world.vduse.held = {NPD}
    operations = [world.delete("a"), world.delete("b")]
    assert world.serve(*operations)
    assert [type(op.future.exception()) for op in operations] == [Conflict, type(None)]
    assert NPV in world.switch.ovs.bridges["br9"].ports


def test_a_port_is_not_forgotten_while_its_device_is_deleted(world: VduseWorld) -> None:
    plugged(world)
    no_row_no_device(world)
    world.vduse.withdraw(NPD)
    world.vduse.stuck = DeviceStep("delete", NPD)
    world.patient = False
    assert isinstance(world.unplug("a"), OperationTimeout)
    ends(world)
    assert world.check() and world.store.records() == []


def test_a_vm_with_the_record_lost_is_reported(world: VduseWorld) -> None:
    plugged(world)
    world.vduse.held = {NPD}
    record_lost(world)
    assert world.check()
    assert "open" in problem_of(world) and world.state("a") is PortState.FAILED
    world.vduse.held = set()
    assert world.check()
    ends(world)
    assert world.check()
    world.assert_settled()


def test_behind_a_step_that_does_not_end_only_its_mode_waits() -> None:
    with world_at(vfs=True) as world:
        plugged(world, ("a", "b", "c"))
        world.patient = False
        world.vduse.stuck = DeviceStep("delete", NPD)
        (world.vduse.devices / NPD / "driver").unlink()
        [character] = (world.vduse.devices / NPD).iterdir()
        character.rmdir()
        (world.vduse.devices / NPD).rmdir()
        waits = world.unplug("a")
        assert isinstance(waits, OperationTimeout) and "has not finished" in waits.detail
        assert NPV in world.switch.ovs.bridges["br9"].ports, "vswitchd has to answer the kernel"
        for refused in (world.plug("d", vduse_spec(4)), world.unplug("b")):
            assert isinstance(refused, OperationTimeout)
        assert world.plug("c", vduse_spec(3, 400)) is None, "what needs no device is done"
        world.mode = "relay"
        world.restart()
        assert world.plug("vf", vdpa_spec(9)) is None
        assert world.unplug("vf") is None
        ends(world)
        assert world.check() and world.check()
        assert {r.port_id for r in world.store.records()} == {"c"}
        world.assert_settled()


# -- a crash at every step -----------------------------------------------------------------------


def left_over(world: VduseWorld) -> None:
    plugged(world)
    record_lost_no_row(world)


CASES: Mapping[str, tuple[Callable[[VduseWorld], None], Mapping[str, PortSpec | None]]] = {
    "a first PUT": (lambda world: None, {"a": vduse_spec()}),
    "a change": (plugged, {"a": vduse_spec(1, 200, qos={"ingress_kbps": 7000})}),
    "a DELETE": (plugged, {"a": None}),
    "a batch": (
        lambda world: plugged(world, ("a", "b")),
        {"a": None, "b": vduse_spec(2, 300), "c": vduse_spec(3)},
    ),
    "a repair": (left_over, {"a": vduse_spec()}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_crash_at_every_step(name: str) -> None:
    assert crash_at_every_step(world_at, *CASES[name]) > 4, "so many steps there are at least"
