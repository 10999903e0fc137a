"""Which mode new ports get with ``auto``, and with how many queue pairs: found on the host, once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lxml import etree

from agents.ports.call import Call
from agents.store.port_table import Record
from drivers.ovs.ports import VHOST_TYPE
from drivers.vdpa.model import NATIVE_TYPE
from drivers.vdpa.vduse_host import VHOST_VDPA, VduseHost
from drivers.vdpa.vduse_processes import DeviceStep, waits
from netplugin.api.errors import HostError, InvalidRequest, NetpluginError, Unsupported
from netplugin.backend import Intent
from netplugin.host.names import VHOST, device_name
from tests.unit.drivers.vdpa.test_vduse_ports import binding_of, world_at
from tests.unit.drivers.vdpa.vduse_world import VDUSE_ROOT, VduseWorld, vduse_spec
from tests.unit.drivers.vdpa.world import RELAY_ROOT, vdpa_spec

NPV = device_name(VHOST, "a")


@pytest.fixture
def both() -> Iterator[VduseWorld]:
    """A host that has VFs and VDUSE."""
    with world_at(mode="auto", vfs=True) as made:
        yield made


@pytest.fixture
def without_vfs() -> Iterator[VduseWorld]:
    with world_at(mode="auto") as made:
        yield made


# -- the mode of the host ------------------------------------------------------------------------


def test_it_is_vduse_where_the_host_has_it(both: VduseWorld) -> None:
    assert both.driver.probe().usable and both.driver.facts()["mode"] == "vduse"
    assert both.plug("a", vdpa_spec()) is None, "its network has VFs too"
    assert binding_of(both)["mode"] == "vduse"
    both.assert_settled()


def other_ovs(world: VduseWorld) -> None:
    world.switch.reported = RELAY_ROOT


def no_version(world: VduseWorld) -> None:
    world.switch.reported = replace(VDUSE_ROOT, ovs_version=None)


def no_module(world: VduseWorld) -> None:
    (world.vduse.root / "dev/vduse/control").rmdir()


def no_driver(world: VduseWorld) -> None:
    (world.vduse.root / f"sys/bus/vdpa/drivers/{VHOST_VDPA}").rmdir()


def no_networks(world: VduseWorld) -> None:
    world.vduse.load(0)


def not_asked(world: VduseWorld) -> None:
    world.vduse.load(HostError("try vDPA device npd-try: Operation not permitted", step="vdpa-device"))


LACKS: Mapping[str, Callable[[VduseWorld], None]] = {
    "OVS 3.1.0 has no VDUSE": other_ovs,
    "OVS does not report its version": no_version,
    "kernel module vduse is not loaded": no_module,
    "driver vhost_vdpa of the vDPA bus is not loaded": no_driver,
    "vduse makes no network devices": no_networks,
    "Operation not permitted": not_asked,
}


@pytest.mark.parametrize("why", LACKS)
def test_it_is_relay_where_anything_is_missing_and_says_what(both: VduseWorld, why: str) -> None:
    LACKS[why](both)
    assert both.plug("a", vdpa_spec()) is None
    assert binding_of(both)["mode"] == "relay"
    facts = both.driver.facts()
    assert facts["mode"] == "relay" and why in str(facts["no_vduse"])
    assert both.driver.probe().usable and not both.driver.offered().vdpa_devices


@pytest.mark.parametrize("why", LACKS)
def test_a_host_with_neither_says_both_reasons(without_vfs: VduseWorld, why: str) -> None:
    LACKS[why](without_vfs)
    assert without_vfs.check()
    found = without_vfs.driver.probe()
    assert not found.usable and why in str(found.reason)
    assert "no NIC is configured" in str(found.reason) and "[sriov] devices" in str(found.fix)


def test_native_comes_first(both: VduseWorld) -> None:
    types = frozenset({VHOST_TYPE, "dpdk", NATIVE_TYPE})
    both.switch.reported = replace(VDUSE_ROOT, iface_types=types)
    assert both.driver.facts()["mode"] == "native" and not both.driver.offered().vdpa_devices


def test_a_port_keeps_its_mode_whatever_the_host_has_later(both: VduseWorld) -> None:
    assert both.plug("a", vdpa_spec(1)) is None
    no_networks(both)
    assert both.plug("b", vdpa_spec(2)) is None
    both.restart()
    both.vduse.load(1)
    assert both.plug("c", vdpa_spec(3)) is None
    for port_id, number in (("a", 1), ("b", 2), ("c", 3)):
        assert both.plug(port_id, vdpa_spec(number, 300)) is None, "each is changed in its mode"
    assert [binding_of(both, port_id)["mode"] for port_id in "abc"] == ["vduse", "relay", "vduse"]
    both.assert_settled()


# -- a port that asks for what mode vduse has not ------------------------------------------------

PARTICULAR: Mapping[str, dict[str, Any]] = {
    "a VF": {"vf": {"trusted": True}},
    "queues": {"queues": 2},
    "a socket's user": {"qemu_user": 1000},
}


@pytest.mark.parametrize("what", PARTICULAR)
def test_it_is_relayed_where_there_are_vfs(both: VduseWorld, what: str) -> None:
    assert both.plug("a", vdpa_spec(**PARTICULAR[what])) is None
    assert binding_of(both)["mode"] == "relay"
    assert both.plug("b", vdpa_spec(2)) is None and binding_of(both, "b")["mode"] == "vduse"
    both.assert_settled()


@pytest.mark.parametrize("what", PARTICULAR)
def test_it_is_refused_where_there_are_none(without_vfs: VduseWorld, what: str) -> None:
    refused = without_vfs.plug("a", vduse_spec(**PARTICULAR[what]))
    assert isinstance(refused, Unsupported) and "vduse mode" in refused.detail
    assert without_vfs.store.records() == []


def test_a_network_without_bridge_is_relayed(both: VduseWorld) -> None:
    both.switch.ovs.settings = replace(both.switch.settings, bridge_mappings={"net9": "br9"})
    assert both.plug("a", vdpa_spec()) is None and binding_of(both)["mode"] == "relay"
    assert both.plug("b", vduse_spec(2)) is None and binding_of(both, "b")["mode"] == "vduse"
    refused = both.plug("c", vduse_spec(3, network={"physical_network": "net7"}))
    assert isinstance(refused, InvalidRequest) and "[ovs] bridge_mappings" in refused.detail


def test_what_none_has_is_refused_as_the_preferred_mode_says(both: VduseWorld) -> None:
    refused = both.plug("a", vduse_spec(queues=2))
    assert isinstance(refused, Unsupported) and "2 queue pairs, the most is 1" in refused.detail


def test_an_attachment_is_never_relayed(both: VduseWorld) -> None:
    refused = both.plug("a", vdpa_spec(attachment="netdev", vf={"trusted": True}))
    assert isinstance(refused, Unsupported) and "the port has no VF" in refused.detail


def test_its_features_are_those_of_all_modes_that_a_port_may_get(both: VduseWorld) -> None:
    features = both.driver.offered()
    assert (features.max_queues, features.virtual_functions, features.vdpa_devices) == (128, True, True)
    with world_at(mode="auto") as without_vfs:
        features = without_vfs.driver.offered()
        assert (features.max_queues, features.virtual_functions, features.vdpa_devices) == (1, False, True)


def test_a_port_whose_vm_comes_from_another_host_is_relayed(
    both: VduseWorld, without_vfs: VduseWorld
) -> None:
    """No other mode migrates; so a port that has been made here does not leave."""
    assert both.driver.offered().live_migration and not without_vfs.driver.offered().live_migration
    for world in (both, without_vfs):
        operation = Call(Record("a", vdpa_spec()), time.monotonic() + 30, step="prepare")
        assert world.serve(operation)
        if world is both:
            assert operation.future.exception(0) is None and binding_of(both)["mode"] == "relay"
        else:
            refused = operation.future.exception(0)
            assert isinstance(refused, Unsupported) and "vduse mode: ports are not live" in refused.detail
            assert world.store.get("a") is None
    assert both.plug("b", vduse_spec(2)) is None
    leaves = Call(Intent("b", None), time.monotonic() + 30, step="leave")
    assert both.serve(leaves) and isinstance(leaves.future.exception(0), Unsupported)


# -- queue pairs ---------------------------------------------------------------------------------


def test_a_kernel_that_makes_several_pairs(without_vfs: VduseWorld) -> None:
    without_vfs.vduse.load(128)
    assert without_vfs.plug("a", vduse_spec(queues=4)) is None
    assert without_vfs.plug("b", vduse_spec(2)) is None
    assert without_vfs.driver.offered().max_queues == 128
    ports = without_vfs.switch.ovs.bridges["br9"].ports
    options = [ports[device_name(VHOST, port_id)].interfaces[0].options for port_id in "ab"]
    assert [found.get("vhost-max-queue-pairs") for found in options] == ["4", None]
    queues = [
        etree.fromstring(binding_of(without_vfs, port_id)["interface_xml"]).xpath("string(driver/@queues)")
        for port_id in "ab"
    ]
    assert queues == ["4", ""]
    without_vfs.assert_settled()


def test_a_port_is_not_changed_in_its_pairs(without_vfs: VduseWorld) -> None:
    without_vfs.vduse.load(128)
    assert without_vfs.plug("a", vduse_spec(queues=4)) is None
    without_vfs.vduse.load(1)
    refused = without_vfs.plug("a", vduse_spec(queues=4, vlan_id=300))
    assert isinstance(refused, Unsupported), "OVS could not make its device again"


# -- what the host says --------------------------------------------------------------------------


class Host(VduseHost):
    """Counts how often it is asked."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, directory)
        self.directory.mkdir()
        (directory / "bus/vdpa/drivers" / VHOST_VDPA).mkdir(parents=True)
        self.says: int | NetpluginError = 128
        self.asked = 0

    def load(self) -> None:
        """The kernel module makes its file, which is never that of before."""
        self.control.with_suffix(".new").touch()
        self.control.with_suffix(".new").rename(self.control)

    def learned(self) -> int:
        self.learn(0)
        return self.pairs

    def _has_program(self) -> bool:
        return True

    def _ask_kernel(self, deadline: float) -> int:
        self.asked += 1
        if isinstance(self.says, NetpluginError):
            raise self.says
        return self.says


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_a_module_is_asked_once(host: Host) -> None:
    assert (host.learned(), host.asked) == (1, 0), "there is none"
    host.load()
    assert host.pairs == 1, "until it is asked"
    assert (host.learned(), host.learned(), host.asked) == (128, 128, 1)


def test_another_module_is_asked_again(host: Host) -> None:
    host.load()
    host.learned()
    host.says = 0
    host.load()
    assert host.pairs == 1, "the answer was that of the one before"
    assert (host.learned(), host.asked) == (0, 2)
    host.control.unlink()
    assert host.pairs == 1


def test_who_does_not_answer_is_asked_again_and_who_refuses_is_not(host: Host) -> None:
    host.load()
    host.says = waits(DeviceStep("delete", "npd1"))
    assert (host.learned(), host.learned(), host.asked) == (1, 1, 2)
    assert host.usability_for_auto().usable
    host.says = HostError("refused", step="vdpa-device")
    assert (host.learned(), host.learned(), host.asked) == (1, 1, 3)
    assert host.usability().usable and not host.usability_for_auto().usable
