"""The vdpa backend with ``[vdpa] mode = auto`` on a kernel that has VDUSE, and what that kernel refuses."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from drivers.vdpa.driver import Vdpa
from drivers.vdpa.vduse_host import VduseHost
from netplugin.api.errors import Unsupported
from tests.lab.driven import Driven
from tests.lab.namespaces import namespace
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import LabError, run, wait_for
from tests.nested import nics
from tests.nested.vduse_host import (
    OPTIONS,
    VDUSE,
    WAIT_S,
    assert_nothing_left,
    devices,
    into,
    make_spec,
    netdev,
    pings,
    served_by,
)

pytestmark = [
    pytest.mark.long,
    # In the guest of test_vduse_agent.
    pytest.mark.nested(cpus=2, memory_mb=2400, hugepages=400),
    pytest.mark.timeout(600),
]
#: NETLINK_KOBJECT_UEVENT of linux/netlink.h
_UEVENTS = 15
AUTO = OPTIONS | {"vdpa": OPTIONS["vdpa"] | {"mode": "auto"}}


@pytest.fixture(scope="module")
def ovs() -> Iterator[PrivateOvs]:
    with served_by("forky") as private:
        yield private


@pytest.fixture
def process(ovs: PrivateOvs, tmp_path: Path) -> Iterator[Driven]:
    """It has looked at the host, and so has asked the kernel."""
    made = Driven(Path("/run/np-agent") / tmp_path.name, ovs, AUTO, Vdpa, WAIT_S)
    assert_nothing_left(ovs)
    yield made
    for record in made.store.records():
        made.delete(record.port_id)
    made.close()
    assert_nothing_left(ovs)


def test_ports_are_in_mode_vduse(process: Driven, ovs: PrivateOvs) -> None:
    vdpa = process.backend
    assert isinstance(vdpa, Vdpa)
    assert vdpa.probe().usable and vdpa.facts()["mode"] == "vduse"
    with namespace("na"), namespace("nb"):
        for number, port in ((1, "a"), (2, "b")):
            binding = process.put(port, netdev(number))
            assert binding.model_dump()["mode"] == "vduse"
            into(f"n{port}", binding, number)
        wait_for(lambda: pings("na", 2), WAIT_S, "they meet", ovs.vswitchd.tail)
        process.delete("a")
        process.delete("b")


def test_several_queue_pairs_are_refused_as_the_kernel_refuses_them(process: Driven, ovs: PrivateOvs) -> None:
    vdpa = process.backend
    assert isinstance(vdpa, Vdpa)
    assert vdpa.offered().max_queues == 1
    with pytest.raises(Unsupported, match="2 queue pairs, the most is 1"):
        process.put("a", make_spec(1, queues=2))
    assert process.store.records() == []
    assert_nothing_left(ovs)
    try:
        of_ovs = {pairs: makes(ovs, pairs) for pairs in (1, 2)}
    finally:
        ovs.vsctl("del-br", "br0")
    assert of_ovs == {1: True, 2: False}, "so it does when OVS asks it"


def makes(ovs: PrivateOvs, pairs: int) -> bool:
    """Whether OVS makes a VDUSE device with so many queue pairs, without the agent."""
    ovs.vsctl("--may-exist", "add-br", "br0", "--", "set", "Bridge", "br0", "datapath_type=netdev")
    options = [f"options:vhost-server-path={VDUSE}/other", f"options:vhost-max-queue-pairs={pairs}"]
    add = ["add-port", "br0", "other", "--", "set", "Interface", "other", "type=dpdkvhostuserclient"]
    try:
        ovs.vsctl(*add, *options)
    except LabError:
        pass  # ovs-vsctl says that it could not
    made = (VDUSE / "other").exists()
    ovs.vsctl("--if-exists", "del-port", "br0", "other")
    return made


def announced(action: Callable[[], object]) -> bool:
    """Whether the kernel announces that it makes a VDUSE device during this."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, _UEVENTS) as events:
        events.bind((0, 1))
        action()
        found = []
        with suppress(BlockingIOError):
            while True:
                found.append(events.recv(1 << 16))
    return any(b"ACTION=add" in event and b"SUBSYSTEM=vduse" in event for event in found)


def test_no_device_is_made_when_the_kernel_is_asked(process: Driven, ovs: PrivateOvs) -> None:
    """So nothing is left over, wherever the process is killed."""
    host = VduseHost()
    try:
        assert not announced(lambda: host.learn(time.monotonic() + WAIT_S))
        assert host.pairs == 1 and host.usability_for_auto().usable
        assert announced(lambda: process.put("a", make_spec(1)))
    finally:
        host.close()


def test_a_missing_bus_driver_is_the_reason_for_no_vduse(process: Driven) -> None:
    vdpa = process.backend
    assert isinstance(vdpa, Vdpa)
    run(["modprobe", "-r", "vhost_vdpa"])
    try:
        found = vdpa.probe()
        assert not found.usable and "the driver vhost_vdpa of the vDPA bus is not loaded" in str(found.reason)
        assert vdpa.facts()["mode"] == "relay" and "vhost_vdpa" in str(vdpa.facts()["no_vduse"])
    finally:
        nics.modprobe("vhost_vdpa")
    assert vdpa.probe().usable


def test_the_module_is_asked_again_when_it_is_loaded_again(process: Driven) -> None:
    """Each time one process, which makes no device."""
    host = VduseHost()
    asked: list[str] = []
    real = host.processes.command
    host.processes.command = lambda step: asked.append(step.verb) or real(step)  # type: ignore[func-returns-value]
    try:
        for _ in range(2):
            host.learn(time.monotonic() + WAIT_S)
            host.learn(time.monotonic() + WAIT_S)
            assert host.pairs == 1 and devices() == ([], [])
            run(["modprobe", "-r", "vduse"])
            assert not host.usability().usable
            nics.modprobe("vduse")
    finally:
        nics.modprobe("vduse")
        host.close()
    assert asked == ["try", "try"]
