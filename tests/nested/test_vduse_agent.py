"""The vdpa backend in mode vduse over OVS 4.0 and 3.5 and a kernel that has VDUSE."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from agents.store.store import Store
from drivers.vdpa.vduse_plan import vduse_name
from drivers.vdpa.vduse_processes import DeviceProcesses
from netplugin.api.errors import NetpluginError, OperationTimeout
from netplugin.api.models import PortState
from netplugin.host.openflow import OpenFlow
from netplugin.host.ovsdb import Ovsdb
from netplugin.libvirt.domain import complete, parse_domain, written
from tests.lab.driven import Driven
from tests.lab.libvirtd import PrivateLibvirt
from tests.lab.namespaces import namespace, within
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import run, wait_for
from tests.nested.vduse_host import (
    RECORDS,
    WAIT_S,
    agent_on,
    assert_nothing_left,
    delete_refused,
    devices,
    driver,
    gone,
    into,
    make_spec,
    netdev,
    pings,
    served_by,
    settled,
    vm,
)

pytestmark = [
    pytest.mark.long,
    # A guest of their own: the other tests in it have the machine's own OVS.
    pytest.mark.nested(cpus=2, memory_mb=2400, hugepages=400),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module", params=("forky", "trixie"))
def ovs(request: pytest.FixtureRequest) -> Iterator[PrivateOvs]:
    with served_by(request.param) as private:
        yield private


@pytest.fixture
def process(ovs: PrivateOvs, tmp_path: Path) -> Iterator[Driven]:
    with agent_on(ovs, Path("/run/np-agent") / tmp_path.name) as made:
        yield made


@contextmanager
def held(device: str) -> Iterator[None]:
    """A process has the device open."""
    opened = os.open(device, os.O_RDWR | os.O_CLOEXEC)
    try:
        yield
    finally:
        os.close(opened)


# -- what a container and a VM get ---------------------------------------------------------------


def test_containers_meet_on_their_vlan_alone(process: Driven, ovs: PrivateOvs) -> None:
    with namespace("na"), namespace("nb"):
        for number, port in ((1, "a"), (2, "b")):
            binding = process.put(port, netdev(number))
            assert (binding.vif_type, binding.model_dump()["mode"]) == ("virtio_vdpa", "vduse")
            into(f"n{port}", binding, number)
        wait_for(lambda: pings("na", 2), WAIT_S, "they meet", ovs.vswitchd.tail)
        mac = run(within("na", ["cat", "/sys/class/net/eth0/address"])).strip()
        assert mac == "52:54:00:00:00:01" and settled(process), "it is found where it was moved to"
        process.put("b", netdev(2, 200))
        assert not pings("na", 2, 3)
        process.put("b", netdev(2))
        wait_for(lambda: pings("na", 2), WAIT_S, "they meet again", ovs.vswitchd.tail)
        run(within("na", ["ip", "link", "set", "eth0", "address", "52:54:00:00:00:99"]))
        assert not pings("na", 2, 3), "from another MAC nothing is heard"
        run(within("na", ["ip", "link", "set", "eth0", "address", "52:54:00:00:00:01"]))
        security = {"allowed_addresses": [{"ip": "10.7.0.9"}]}
        process.put("a", netdev(1) | {"port_security": security})
        assert not pings("na", 2, 3), "nor from another address"
        process.put("a", netdev(1))
        ovs.kill_vswitchd()
        ovs.start_vswitchd()
        process.wait_for_ovs()
        wait_for(lambda: settled(process), WAIT_S, "it is right again")
        wait_for(lambda: pings("na", 2), WAIT_S, "they meet after a restart", ovs.vswitchd.tail)
        process.delete("a")
        process.delete("b")


def test_a_vm_holds_its_device(process: Driven, ovs: PrivateOvs, tmp_path: Path) -> None:
    with namespace("nb"):
        into("nb", process.put("b", netdev(2)), 2)
        binding: Any = process.put("a", make_spec(1))
        assert driver(vduse_name("a")) == "vhost_vdpa"
        with vm(binding, 1, tmp_path / "testpmd.log") as running:
            wait_for(lambda: pings("nb", 1), WAIT_S, "the VM answers", running.daemon.tail)
            delete_refused(process, "a")
            record = process.store.get("a")
            assert record is not None and record.state is PortState.REMOVING
            assert pings("nb", 1, 3), "it still has its network"
        wait_for(lambda: gone(process, "a"), WAIT_S, "the port goes with the VM")
        assert vduse_name("a") not in devices()[1]


DOMAIN = """
<domain type='qemu'>
  <name>vm1</name><memory unit='MiB'>64</memory><vcpu>1</vcpu>
  <os><type arch='x86_64' machine='q35'>hvm</type></os>
  <devices><emulator>/usr/bin/qemu-system-x86_64</emulator></devices>
</domain>
"""


def test_libvirt_opens_the_device_for_qemu(process: Driven) -> None:
    """This domain has no system to boot: QEMU has the device, and its firmware does not use it."""
    domain = parse_domain(DOMAIN, "render-domain")
    complete(domain, [process.put("a", make_spec(1))])
    with PrivateLibvirt() as libvirtd:
        running = libvirtd.connect().createXML(written(domain))
        assert "<interface type='vdpa'>" in running.XMLDesc()
        delete_refused(process, "a")
        running.destroy()
        wait_for(lambda: gone(process, "a"), WAIT_S, "it is removed")


# -- traps ---------------------------------------------------------------------------------------


def test_a_deletion_that_waits_is_found_and_waited_for(process: Driven) -> None:
    """Whoever has begun it: an agent of before, or its process that was left alone."""
    binding: Any = process.put("a", make_spec(1))
    with held(binding.vhost_vdpa_device):
        deletion = subprocess.Popen(["vdpa", "dev", "del", vduse_name("a")])
        wait_for(lambda: vduse_name("a") not in devices()[1], WAIT_S, "the deletion waits")
        process.end()
        process.start()
        with pytest.raises(OperationTimeout, match="has not finished"):
            _late(process, lambda: process.put("b", make_spec(2)))
        assert deletion.poll() is None
    deletion.wait(WAIT_S)
    wait_for(lambda: settled(process), WAIT_S, "it is made again")
    assert driver(vduse_name("a")) == "vhost_vdpa"


def _late(process: Driven, call: Callable[[], object]) -> None:
    """A caller that waits for a few seconds only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "_deadline_s", 12.0)
        call()


def test_a_port_is_removed_while_vswitchd_is_dead(process: Driven, ovs: PrivateOvs) -> None:
    process.put("a", make_spec(1))
    ovs.kill_vswitchd()
    with pytest.raises(NetpluginError):
        _late(process, lambda: process.delete("a"))
    ovs.start_vswitchd()
    process.wait_for_ovs()

    wait_for(lambda: gone(process, "a"), WAIT_S, "it is removed")
    assert_nothing_left(ovs)


def test_lost_records_are_repaired_when_nobody_holds_the_device(
    process: Driven, ovs: PrivateOvs, tmp_path: Path
) -> None:
    with namespace("nb"):
        binding: Any = process.put("a", make_spec(1))
        with held(binding.vhost_vdpa_device):
            ovs.kill_vswitchd()
            shutil.rmtree(RECORDS)
            ovs.start_vswitchd()
            process.wait_for_ovs()
            process.reconciler.check()
            record = process.store.get("a")
            assert record is not None and record.error is not None and record.state is PortState.FAILED
            assert "open" in record.error.detail, record.error
        wait_for(lambda: settled(process), WAIT_S, "it is made anew")
        into("nb", process.put("b", netdev(2)), 2)
        with vm(process.put("a", make_spec(1)), 1, tmp_path / "testpmd.log") as running:
            wait_for(lambda: pings("nb", 1), WAIT_S, "the VM answers", running.daemon.tail)


# -- a process that ends between two steps -------------------------------------------------------


class Crash(BaseException):
    """The process ends here: nothing of ours may catch it."""


@contextmanager
def dies_after(owner: type, method: str, times: int = 1) -> Iterator[None]:
    """The process ends when it has done this so often."""
    real: Callable[..., Any] = getattr(owner, method)
    left = times

    def done_and_dead(*arguments: Any, **options: Any) -> None:
        nonlocal left
        real(*arguments, **options)
        left -= 1
        if not left:
            raise Crash

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Crash):
        patch.setattr(owner, method, done_and_dead)
        yield


Step = tuple[type, str, int]
#: Claim, rows, flows, create, bind.
PLUG: list[Step] = [
    (Store, "save", 1),
    (Ovsdb, "write", 1),
    (OpenFlow, "replace", 1),
    (DeviceProcesses, "run", 1),
    (DeviceProcesses, "run", 2),
]
#: Intent, delete, rows.
UNPLUG: list[Step] = [(Store, "save", 1), (DeviceProcesses, "run", 1), (Ovsdb, "write", 1)]


def test_killed_between_any_two_steps(process: Driven, ovs: PrivateOvs) -> None:
    """Every boundary is in tests/unit/drivers/vdpa/test_vduse_ports.py; this is the real host's part."""
    name = vduse_name("a")
    for plug, unplug in zip_longest(PLUG, UNPLUG):
        with dies_after(*plug):
            process.put("a", make_spec(1))
        process.end()
        process.start()
        record = process.store.get("a")
        assert record is not None and record.state is PortState.ACTIVE, (plug, record)
        assert process.planned() == [] and driver(name) == "vhost_vdpa", plug
        assert devices() == ([name], [name]), plug
        if unplug is None:
            process.delete("a")
        else:
            with dies_after(*unplug):
                process.delete("a")
            process.end()
            process.start()
        assert process.store.records() == [], unplug
        assert_nothing_left(ovs)
