"""Why a relay (``vdpa``) does not migrate in phases: what its VF takes with the VM's MAC, and without it.

Facts of a NIC, here of QEMU's emulated 82576. The VM still runs on the other host, at the far end of the
wire; a neighbour has another VF of the NIC that the relay is prepared on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from drivers.vdpa.driver import Vdpa
from drivers.vdpa.model import BRIDGE
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


def test_a_prepared_relay_takes_what_its_neighbours_send_to_the_vm(
    pf: str, ovs: PrivateOvs, far: str, record_property: Callable[[str, object], None]
) -> None:
    process = Driven(Path("/run/np-relay"), ovs, OPTIONS, Vdpa, WAIT_S)
    before = whole_state(pf, functions())
    try:
        with neighbour(pf):
            with vm_at_the_source():
                wait_for(lambda: reached(NEIGHBOUR), DEADLINE_S, "the VM is reached at the source")
                binding = process.put("nic1", make_spec()).model_dump()
                assert vf_info(pf)[binding["vf_index"]]["address"] == MAC
                assert not any(reached(NEIGHBOUR) for _ in range(3)), "nobody runs behind the VF yet"
                process.delete("nic1")
                wait_for(lambda: reached(NEIGHBOUR), DEADLINE_S, "the NIC has forgotten the MAC")
            # The other way: the VF has a MAC of its own, and gets the VM's when the VM runs here.
            binding = process.put("nic1", make_spec()).model_dump()
            number, relay = binding["vf_index"], relay_of(ovs)
            run(within(FAR, ["ip", "neigh", "replace", ADDRESS, "lladdr", MAC, "dev", "wire.100"]))
            with Vm("vm", binding["socket_path"], MAC, ADDRESS):
                ovs.wait_connected(binding["device"], DEADLINE_S)
                wait_for(lambda: reached(FAR), DEADLINE_S, "the relay works")
                give(ovs, pf, number, "52:54:00:00:0f:01", relay)
                assert not any(reached(FAR) for _ in range(3)), "promiscuous as it is, it gets none"
                began = time.monotonic()
                give(ovs, pf, number, MAC, relay)
                wait_for(lambda: reached(FAR), DEADLINE_S, "with its MAC it does")
                record_property("interruption, ms", round((time.monotonic() - began) * 1e3))
                process.reconciler.check()
            process.delete("nic1")
    finally:
        process.close()
    assert whole_state(pf, functions())[0][1] == before[0][1]


def relay_of(ovs: PrivateOvs) -> tuple[str, str]:
    """The DPDK port of the VF, and its device."""
    [name] = ovs.vsctl("--bare", "--columns=name", "find", "Interface", "type=dpdk").split()
    return name, ovs.vsctl("get", "Interface", name, "options:dpdk-devargs").strip().strip('"')


def give(ovs: PrivateOvs, pf: str, number: int, mac: str, relay: tuple[str, str]) -> None:
    """Close the VF, give it a MAC by its PF, and open it again, as it was on the bridge."""
    name, devargs = relay
    ofport = ovs.vsctl("get", "Interface", name, "ofport").strip()
    marks = {table: ovs.vsctl("get", table, name, "external_ids").strip() for table in ("Port", "Interface")}
    ovs.vsctl("del-port", BRIDGE, name)
    run(["ip", "link", "set", pf, "vf", str(number), "mac", mac])
    ovs.vsctl(
        *("add-port", BRIDGE, name, "--", "set", "Port", name, f"external_ids={marks['Port']}"),
        *("--", "set", "Interface", name, "type=dpdk", f"options:dpdk-devargs={devargs}"),
        *(f"ofport_request={ofport}", f"external_ids={marks['Interface']}"),
    )
