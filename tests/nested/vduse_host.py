"""The vdpa backend in mode vduse, in a guest whose kernel has VDUSE: what its tests share."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from drivers.vdpa import vduse_host
from drivers.vdpa.driver import Vdpa
from drivers.vdpa.vduse_processes import DeviceProcesses
from netplugin.api.errors import Conflict, TryAgain
from tests.lab import namespaces, ovs_releases
from tests.lab.driven import Driven
from tests.lab.namespaces import entered, within
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import run, wait_for
from tests.lab.sequenced import PORT
from tests.lab.testpmd import Testpmd, TestpmdOptions
from tests.nested import nics

BUS = Path("/sys/bus/vdpa")
VDUSE = Path("/dev/vduse")
#: Where DPDK keeps what it needs to find its devices again (lib/vhost/vduse.c).
RECORDS = Path("/var/run/vduse")
WAIT_S = 90.0
#: How long the agent waits for a step. Beside OVS and a VM that poll on two emulated CPUs, a process takes
#: seconds to start.
STEP_S = 20.0
OPTIONS = {
    "vdpa": {"mode": "vduse", "guest_hugepages": "false"},
    "ovs": {"bridge_mappings": "physnet1:br-phys1", "timeout": "60"},
}


@contextmanager
def served_by(release: str) -> Iterator[PrivateOvs]:
    """The OVS of this release of Debian, on a kernel with VDUSE."""
    nics.modprobe("vduse", "vhost_vdpa", "virtio_vdpa", "virtio_net")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", ovs_releases.chosen(release, fetched=True).path(os.environ["PATH"]))
        directory = Path(f"/run/np-{release}")
        with PrivateOvs(directory, pmd_mask="0x2", other_config={"per-port-memory": "true"}) as private:
            yield private


@contextmanager
def agent_on(ovs: PrivateOvs, directory: Path) -> Iterator[Driven]:
    """The agent without its front end. In the end it removes its ports, and nothing is left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vduse_host, "DeviceProcesses", partial(DeviceProcesses, wait_s=STEP_S))
        made = Driven(directory, ovs, OPTIONS, Vdpa, WAIT_S)
        yield made
        for record in made.store.records():
            made.delete(record.port_id)
        made.close()
    assert_nothing_left(ovs)


def make_spec(number: int, vlan_id: int = 100, **fields: Any) -> dict[str, Any]:
    return {
        "vm_id": f"vm{number}",
        "mac": mac(number),
        "backend": "vdpa",
        "network": {"type": "vlan", "physical_network": "physnet1", "vlan_id": vlan_id},
        **fields,
    }


def mac(number: int) -> str:
    return f"52:54:00:00:00:{number:02x}"


def address(number: int) -> str:
    return f"10.7.0.{number}"


def netdev(number: int, vlan_id: int = 100) -> dict[str, Any]:
    return make_spec(number, vlan_id, attachment="netdev")


def devices() -> tuple[list[str], list[str]]:
    """The VDUSE devices and the vDPA devices."""
    offered = [name for name in os.listdir(VDUSE) if name != "control"]
    return sorted(offered), sorted(os.listdir(BUS / "devices"))


def assert_nothing_left(ovs: PrivateOvs) -> None:
    assert devices() == ([], []) and ovs.vsctl("list-br") == ""


def driver(name: str) -> str:
    return (BUS / "devices" / name / "driver").resolve().name


def into(container: str, binding: Any, number: int) -> None:
    """Move the interface of a port into a namespace, as who makes a container does."""
    run(["ip", "link", "set", binding.interface, "netns", container, "name", "eth0"])
    run(within(container, ["ip", "addr", "add", f"{address(number)}/24", "dev", "eth0"]))
    run(within(container, ["ip", "link", "set", "eth0", "up"]))


def pings(source: str, number: int, count: int = 1, wait_s: int = 1) -> bool:
    return namespaces.pings(source, address(number), count, wait_s)


def vm(binding: Any, number: int, log: Path) -> Testpmd:
    """dpdk-testpmd in the VM's place: it opens the device as QEMU does, and answers ARP and pings."""
    return Testpmd(Path(binding.vhost_vdpa_device), TestpmdOptions(mac=mac(number)), log)


def streamed(data: bytes, source: str, target: str, number: int) -> str:
    """Send it by TCP from a namespace to another, which has this address; the digest of what arrived."""
    with entered(target):
        listening = socket.create_server((address(number), PORT))
    digest = hashlib.sha256()

    def take() -> None:
        taken, _ = listening.accept()
        with taken:
            taken.settimeout(WAIT_S)
            while part := taken.recv(1 << 16):
                digest.update(part)

    taker = threading.Thread(target=take, daemon=True)
    with listening:
        listening.settimeout(WAIT_S)
        taker.start()
        with entered(source):
            sending = socket.create_connection((address(number), PORT), WAIT_S)
        with sending:
            sending.sendall(data)
        taker.join(2 * WAIT_S)
        assert not taker.is_alive(), "the stream has not ended"
    return digest.hexdigest()


def delete_refused(process: Driven, port: str) -> None:
    """Delete a port whose device is open, until the answer says so.

    Before it is "try again" as long as the process that asks the kernel is late, on a machine that is busy.
    """

    def refused() -> bool:
        try:
            process.delete(port)
        except TryAgain:
            return False
        except Conflict as printed:
            assert "open" in printed.detail
            return True
        raise AssertionError(f"{port} was deleted, and its device is open")

    wait_for(refused, WAIT_S, "the answer is that the device is open")


def removed(process: Driven, port: str) -> None:
    """Delete a port whose device nobody has open, at once or when the agent tries again."""
    with suppress(TryAgain):
        process.delete(port)
    wait_for(lambda: gone(process, port), WAIT_S, f"{port} is removed")


def gone(process: Driven, port: str) -> bool:
    """Whether a port is gone that was to be deleted."""
    process.reconciler.check()
    return process.store.get(port) is None


def settled(process: Driven) -> bool:
    process.reconciler.check()
    return process.planned() == [] and not process.reconciler.unsettled()
