"""What the design of mode ``vduse`` (docs/vduse.md) takes for granted of OVS 4.0 and of the kernel."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab import ovs_releases
from tests.lab.namespaces import namespace, pings, within
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import CommandError, run, wait_for
from tests.nested import nics

pytestmark = [
    pytest.mark.long,
    # A guest of their own: the other tests in it have the machine's own OVS.
    pytest.mark.nested(cpus=2, memory_mb=2400, hugepages=400),
    pytest.mark.timeout(600),
]

BRIDGE = "br0"
BUS = Path("/sys/bus/vdpa")
VDUSE = Path("/dev/vduse")
DEADLINE_S = 90.0
#: linux/vduse.h: _IOW(0x81, 0x03, char[256])
DESTROY = 1 << 30 | 256 << 16 | 0x81 << 8 | 3


@pytest.fixture(scope="module")
def switch() -> Iterator[PrivateOvs]:
    nics.modprobe("vduse", "vhost_vdpa", "virtio_vdpa", "virtio_net")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", ovs_releases.chosen("forky", fetched=True).path(os.environ["PATH"]))
        with PrivateOvs(Path("/run/np-vduse"), other_config={"per-port-memory": "true"}) as private:
            private.vsctl("add-br", BRIDGE, "--", "set", "Bridge", BRIDGE, "datapath_type=netdev")
            yield private


def add_port(ovs: PrivateOvs, name: str, tag: int = 100) -> None:
    made = ("type=dpdkvhostuserclient", f"options:vhost-server-path={VDUSE / name}")
    ovs.vsctl("add-port", BRIDGE, name, f"tag={tag}", "--", "set", "Interface", name, *made)


def add_device(name: str) -> None:
    run(["vdpa", "dev", "add", "name", name, "mgmtdev", "vduse"], timeout=60)


def delete_device(name: str) -> None:
    run(["vdpa", "dev", "del", name], timeout=60)


def bind(name: str, driver: str) -> None:
    """Bind a driver to a vDPA device, whichever the kernel had bound when it came."""
    device = BUS / "devices" / name
    (device / "driver_override").write_text(driver)
    if (device / "driver").exists():
        (device / "driver/unbind").write_text(name)
    (BUS / "drivers_probe").write_text(name)
    assert (device / "driver").resolve().name == driver


def state(name: str) -> tuple[bool, bool]:
    """Whether there is the VDUSE device, and the vDPA device."""
    return (VDUSE / name).exists(), (BUS / "devices" / name).exists()


def removed(ovs: PrivateOvs, *names: str) -> None:
    """In the order of an unplug."""
    for name in names:
        if state(name)[1]:
            delete_device(name)
        ovs.vsctl("--if-exists", "del-port", name)
    assert {state(name) for name in names} == {(False, False)}


def address(number: int) -> str:
    return f"10.7.0.{number}"


def into(namespace_name: str, name: str, number: int) -> None:
    """Bind virtio_vdpa, and move its interface into a namespace, with a MAC and an address."""
    bind(name, "virtio_vdpa")
    [found] = (BUS / "devices" / name).glob("virtio*/net/*")
    run(["ip", "link", "set", found.name, "netns", namespace_name, "name", "eth0"])
    for words in (
        ["address", f"52:54:00:00:00:{number:02x}"],
        ["up"],
    ):
        run(within(namespace_name, ["ip", "link", "set", "eth0", *words]))
    run(within(namespace_name, ["ip", "addr", "add", f"{address(number)}/24", "dev", "eth0"]))


def process_state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_the_port_comes_first(switch: PrivateOvs) -> None:
    with pytest.raises(CommandError, match="Invalid argument"):
        add_device("first")
    add_port(switch, "first")
    wait_for(lambda: state("first") == (True, False), DEADLINE_S, "OVS offers the device")
    add_device("first")
    assert state("first") == (True, True)
    for driver in ("vhost_vdpa", "virtio_vdpa", "vhost_vdpa"):
        bind("first", driver)
    removed(switch, "first")


def test_two_meet_on_their_vlan_and_outlive_vswitchd(switch: PrivateOvs) -> None:
    with namespace("na"), namespace("nb"):
        for number, name in ((1, "a"), (2, "b")):
            add_port(switch, name)
            wait_for(lambda n=name: state(n)[0], DEADLINE_S, "OVS offers the device")
            add_device(name)
            into(f"n{name}", name, number)
        wait_for(lambda: pings("na", address(2)), DEADLINE_S, "they meet", switch.vswitchd.tail)
        assert pings("na", address(2), 5)
        switch.vsctl("set", "Port", "b", "tag=200")
        assert not pings("na", address(2), 3)
        switch.vsctl("set", "Port", "b", "tag=100")
        switch.kill_vswitchd()
        switch.start_vswitchd()
        wait_for(lambda: pings("na", address(2)), DEADLINE_S, "and again", switch.vswitchd.tail)
        removed(switch, "a", "b")


def test_a_device_that_is_held_cannot_be_deleted(switch: PrivateOvs) -> None:
    """The deletion waits for who has it open, and cannot be killed."""
    add_port(switch, "held")
    wait_for(lambda: state("held")[0], DEADLINE_S, "OVS offers the device")
    add_device("held")
    bind("held", "vhost_vdpa")
    device = BUS / "devices/held"
    [character] = [Path("/dev") / path.name for path in device.glob("vhost-vdpa-*")]
    with contextlib.ExitStack() as stack:
        holder = os.open(character, os.O_RDWR | os.O_CLOEXEC)
        stack.callback(os.close, holder)
        with pytest.raises(OSError) as refused:
            os.open(character, os.O_RDWR | os.O_CLOEXEC)
        assert refused.value.errno == errno.EBUSY
        deletion = subprocess.Popen(["vdpa", "dev", "del", "held"])
        wait_for(lambda: process_state(deletion.pid) == "D", DEADLINE_S, "the deletion waits")
        deletion.kill()
        show = subprocess.Popen(["vdpa", "dev", "show"], stdout=subprocess.DEVNULL)
        wait_for(lambda: process_state(show.pid) == "D", DEADLINE_S, "and so does who asks by netlink")
        assert process_state(deletion.pid) == "D", "nor does SIGKILL end it"
        assert state("held") == (True, False), "it is not seen any more, although it is not deleted yet"
        stack.pop_all()
        os.close(holder)
    deletion.wait(DEADLINE_S)
    show.wait(DEADLINE_S)
    assert state("held") == (True, False)
    removed(switch, "held")


def test_what_a_dead_vswitchd_leaves_over(switch: PrivateOvs) -> None:
    add_port(switch, "left")
    wait_for(lambda: state("left")[0], DEADLINE_S, "OVS offers the device")
    add_device("left")
    bind("left", "vhost_vdpa")
    switch.kill_vswitchd()
    begin = time.monotonic()
    delete_device("left")
    print(f"deleted without vswitchd after {time.monotonic() - begin:.1f} s")
    switch.vsctl("--no-wait", "del-port", "left")
    switch.start_vswitchd()
    assert state("left") == (True, False), "the new one knows nothing of it"
    with (VDUSE / "control").open("rb+", buffering=0) as control:
        fcntl.ioctl(control, DESTROY, b"left".ljust(256, b"\0"))
    assert state("left") == (False, False)
