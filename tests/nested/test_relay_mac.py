"""What the migration of a relay (``vdpa``) rests on: its VF takes frames by its MAC, also by one set later.

Facts of a NIC, here of QEMU's emulated 82576. The VM still runs on the other host, at the far end of the
wire; a neighbour has another VF of the NIC that the relay is on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from drivers.vdpa.driver import Vdpa
from drivers.vf.memory import provisional_mac
from tests.lab.driven import Driven
from tests.lab.namespaces import namespace, within
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import CommandError, run, wait_for
from tests.lab.vm import Vm
from tests.nested import nics
from tests.nested.test_vdpa import MAC, OPTIONS, WAIT_S, make_spec
from tests.nested.vfs import DEADLINE_S, FAR, functions, vf_info, whole_state

pytestmark = [
    pytest.mark.nested(cpus=2, memory_mb=2560, hugepages=480),
    pytest.mark.long,
    pytest.mark.timeout(900),
]

ADDRESS, NEIGHBOUR = "10.9.0.5", "neighbour"


@contextmanager
def neighbour(pf: str) -> Iterator[None]:
    """A host on the first VF, in the VLAN of the VM, which knows the VM's MAC for good."""
    device = nics.interface(functions()[0])
    with namespace(NEIGHBOUR):
        run(["ip", "link", "set", pf, "vf", "0", "vlan", "100"])
        run(["ip", "link", "set", device, "netns", NEIGHBOUR, "name", "eth0"])
        for words in (
            "link set eth0 up",
            "address add 10.9.0.20/24 dev eth0",
            f"neigh replace {ADDRESS} lladdr {MAC} dev eth0",
        ):
            run(within(NEIGHBOUR, ["ip", *words.split()]))
        try:
            yield
        finally:
            run(within(NEIGHBOUR, ["ip", "link", "set", "eth0", "netns", "1", "name", device]))
            run(["ip", "link", "set", pf, "vf", "0", "vlan", "0"])


@contextmanager
def vm_at_the_source() -> Iterator[None]:
    """The VM's MAC and address on the wire's far end."""
    add = ["ip", "link", "add", "vm", "link", "wire.100", "address", MAC, "type", "macvlan"]
    run(within(FAR, add))
    try:
        run(within(FAR, ["ip", "link", "set", "vm", "up"]))
        run(within(FAR, ["ip", "address", "add", f"{ADDRESS}/32", "dev", "vm"]))
        yield
    finally:
        run(within(FAR, ["ip", "link", "delete", "vm"]))


def reached(namespace: str) -> bool:
    try:
        run(within(namespace, ["ping", "-c", "1", "-W", "1", ADDRESS]))
    except CommandError:
        return False
    return True


def test_a_vf_takes_frames_by_the_mac_that_its_pf_has_set_last(pf: str, ovs: PrivateOvs, far: str) -> None:
    process = Driven(Path("/run/np-relay"), ovs, OPTIONS, Vdpa, WAIT_S)
    before = whole_state(pf, functions())
    try:
        with neighbour(pf):
            binding = process.put("nic1", make_spec()).model_dump()
            number = binding["vf_index"]
            with vm_at_the_source():
                assert not any(reached(NEIGHBOUR) for _ in range(3)), "nobody runs behind the VF yet"
                give(pf, number, provisional_mac(MAC))
                wait_for(lambda: reached(NEIGHBOUR), DEADLINE_S, "the VM is reached at the source")
            run(within(FAR, ["ip", "neigh", "replace", ADDRESS, "lladdr", MAC, "dev", "wire.100"]))
            with Vm("vm", binding["socket_path"], MAC, ADDRESS):
                ovs.wait_connected(binding["device"], DEADLINE_S)
                assert not any(reached(FAR) for _ in range(3)), "promiscuous as it is, it gets none"
                began = time.monotonic()
                give(pf, number, MAC)
                wait_for(lambda: reached(FAR), DEADLINE_S, "with its MAC it does, open as it was")
                print(f"reached {(time.monotonic() - began) * 1e3:.0f} ms after its PF set the MAC")
                assert reached(NEIGHBOUR)
            assert process.planned() == []
            process.delete("nic1")
    finally:
        process.close()
    assert whole_state(pf, functions())[0][1] == before[0][1]


def give(pf: str, number: int, mac: str) -> None:
    """Set the MAC of a VF through its PF, whoever has the VF open."""
    run(["ip", "link", "set", pf, "vf", str(number), "mac", mac])
    assert vf_info(pf)[number]["address"] == mac
