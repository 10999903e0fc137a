"""What the machine's own kernel may lack: VLANs, bonds and vhost, on Debian's, with real packets.

One hypervisor in a namespace; the other end of its wires is a namespace without an agent, whose
own VLAN devices and bonds show what is on the wire.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from drivers.linuxbridge.segments import Segment
from netplugin.host.names import TAP, device_name
from tests.lab.namespaces import ANSWER_S, connect, namespace, within
from tests.lab.processes import opened_files, run, wait_for
from tests.lab.service import service
from tests.lab.switch import switch
from tests.lab.traffic_driver import Driven, driven
from tests.lab.traffic_hosts import make_spec

pytestmark = pytest.mark.nested

FAR, WIRE, FAR_WIRE = "np-far", "eth2", "far2"
INTERFACES = f"physnet1:{WIRE},physnet2:,bonded:bond0"
FLAT = {"type": "flat", "physical_network": "physnet1", "mtu": 9000}
BONDED = {"type": "flat", "physical_network": "bonded", "mtu": 1500}
BOND_LINKS = ("link0", "link1")


def vlan(tag: int) -> dict[str, Any]:
    return {"type": "vlan", "physical_network": "physnet1", "vlan_id": tag, "mtu": 9000}


def far(*words: str) -> str:
    return run(within(FAR, ["ip", *words]))


@pytest.fixture(scope="module")
def hypervisor() -> Iterator[Driven]:
    with ExitStack() as stack:
        stack.enter_context(switch())
        stack.enter_context(namespace(FAR))
        made = stack.enter_context(driven(1, INTERFACES))
        connect(made.name, WIRE, FAR, FAR_WIRE, mtu=9000)
        far("addr", "add", "10.0.0.50/24", "dev", FAR_WIRE)
        for tag in (100, 200):
            device = f"far2.{tag}"
            far("link", "add", "link", FAR_WIRE, "name", device, "type", "vlan", "id", str(tag))
            far("addr", "add", f"10.{tag}.0.50/24", "dev", device)
            far("link", "set", device, "up")
        yield made


@pytest.fixture(autouse=True)
def clean(hypervisor: Driven) -> Iterator[None]:
    before = hypervisor.links()
    yield
    hypervisor.unplug(*hypervisor.ports())
    assert hypervisor.links() == before


def test_vlans_and_a_flat_network_share_a_wire(hypervisor: Driven) -> None:
    with (
        hypervisor.vm("a", make_spec(1, vlan(100)), "10.100.0.1") as a,
        hypervisor.vm("b", make_spec(2, vlan(200)), "10.200.0.2") as b,
        hypervisor.vm("c", make_spec(3, vlan(100)), "10.100.0.3") as c,
        hypervisor.vm("d", make_spec(4, FLAT), "10.0.0.4") as d,
    ):
        # With its own VLAN device the other end receives them: the tag is on the wire.
        assert a.reaches("10.100.0.50") and b.reaches("10.200.0.50") and d.reaches("10.0.0.50")
        assert c.reaches("10.100.0.1")
        # Exactly the MTU, with a tag in addition.
        assert a.pings("10.100.0.50", 9000 - 28, ANSWER_S)
        # In another's network with an address of theirs, a VM finds nobody.
        for vm, theirs in ((b, "10.100.0.9"), (d, "10.100.0.9"), (a, "10.0.0.9")):
            vm.ip("address", "add", f"{theirs}/24", "dev", "eth0")
            other = theirs.rpartition(".")[0] + ".50"
            assert not vm.pings(other), f"{theirs} reached {other}"
        assert hypervisor.changes() == []
        device = hypervisor.link(Segment("physnet1", 100).device)
        assert device["link"] == WIRE and device["linkinfo"]["info_data"]["id"] == 100
    # The flat network goes; the VLANs on the same interface stay.
    hypervisor.unplug("d", "b")
    assert "master" not in hypervisor.link(WIRE)
    with hypervisor.vm("a", make_spec(1, vlan(100)), "10.100.0.1") as a:
        assert a.reaches("10.100.0.50")


def test_a_vlan_stays_on_its_wire_when_its_network_has_another(hypervisor: Driven) -> None:
    configured = hypervisor.interfaces
    with hypervisor.vm("a", make_spec(1, vlan(100)), "10.100.0.1") as a:
        assert a.reaches("10.100.0.50")
        try:
            hypervisor.interfaces = {**configured, "physnet1": "eth1"}
            hypervisor.repair()
            assert a.reaches("10.100.0.50")
            status, problem = hypervisor.put("b", make_spec(2, vlan(100)))
            assert (status, problem["code"]) == (409, "conflict") and WIRE in problem["detail"]
        finally:
            hypervisor.interfaces = configured


def test_a_wire_too_small_for_a_vlan_is_refused_and_reported(hypervisor: Driven) -> None:
    before = hypervisor.links()
    hypervisor.sh("ip", "link", "set", WIRE, "mtu", "8999")
    try:
        status, problem = hypervisor.put("a", make_spec(1, vlan(100)))
        assert (status, problem["code"], problem["step"]) == (409, "conflict", "uplink")
        assert hypervisor.links() == before
    finally:
        hypervisor.sh("ip", "link", "set", WIRE, "mtu", "9000")
    hypervisor.sh("ip", "link", "add", "link", WIRE, "name", "theirs", "type", "vlan", "id", "100")
    try:
        status, problem = hypervisor.put("a", make_spec(1, vlan(100)))
        assert (status, problem["code"]) == (409, "conflict") and "theirs" in problem["detail"]
    finally:
        hypervisor.sh("ip", "link", "delete", "theirs")
    assert hypervisor.links() == before


# -- bonds -----------------------------------------------------------------------------------------


@contextmanager
def bond(hypervisor: Driven, mode: str, *options: str) -> Iterator[None]:
    """Two wires: here a bond, and a bond (or for active-backup a bridge) at the other end."""
    for link in BOND_LINKS:
        connect(hypervisor.name, link, FAR, f"far-{link}")
    bonded = ["bond", "mode", mode, "miimon", "50", *options]
    bridged = ["bridge", "forward_delay", "0"]
    run(within(hypervisor.name, ["ip", "link", "add", "bond0", "type", *bonded]))
    far("link", "add", "bond9", "type", *(bridged if mode == "active-backup" else bonded))
    for name, device, links in (
        (hypervisor.name, "bond0", BOND_LINKS),
        (FAR, "bond9", [f"far-{link}" for link in BOND_LINKS]),
    ):
        for link in links:
            run(within(name, ["ip", "link", "set", link, "down"]))
            run(within(name, ["ip", "link", "set", link, "master", device]))
            run(within(name, ["ip", "link", "set", link, "up"]))
        run(within(name, ["ip", "link", "set", device, "up"]))
    far("addr", "add", "10.1.0.50/24", "dev", "bond9")
    try:
        yield
    finally:
        hypervisor.unplug("a")
        far("link", "delete", "bond9")
        hypervisor.sh("ip", "link", "delete", "bond0")
        for link in BOND_LINKS:
            hypervisor.sh("ip", "link", "delete", link)


def wait_for_link(hypervisor: Driven, link: str, state: str) -> None:
    """The bond looks at its links each 50 ms, and LACP takes its time."""

    def looked_at() -> bool:
        member = hypervisor.link(link)["linkinfo"]["info_slave_data"]
        return bool(member["mii_status"] == state)

    wait_for(looked_at, 60, f"the bond sees {link} {state}")


@pytest.mark.parametrize(
    ("mode", "options", "reported"),
    [
        ("active-backup", [], "ok"),
        ("balance-xor", ["xmit_hash_policy", "layer2"], None),
        ("802.3ad", ["xmit_hash_policy", "layer3+4", "lacp_rate", "fast"], None),
    ],
)
def test_a_bond_carries_on_with_one_link(
    hypervisor: Driven, mode: str, options: list[str], reported: str | None
) -> None:
    with (
        bond(hypervisor, mode, *options),
        hypervisor.vm("a", make_spec(1, BONDED), "10.1.0.1") as a,
    ):
        assert a.reaches("10.1.0.50", deadline_s=60)
        assert ("bond-hash" in hypervisor.findings()) == (reported is not None)
        if reported:
            assert hypervisor.findings()["bond-hash"].status == reported
        far("link", "set", "far-link0", "down")
        wait_for_link(hypervisor, "link0", "DOWN")
        assert a.reaches("10.1.0.50")
        hypervisor.repair()
        port = hypervisor.port("a")
        seen = port["observed"]["uplink"]["bond"]
        assert port["state"] == "active" and seen["mode"] == mode
        assert {n: m["link"] for n, m in seen["members"].items()} == {
            "link0": "down",
            "link1": "up",
        }
        assert hypervisor.findings()["bond-link-down"].status == "warn"
        if mode == "802.3ad":
            assert seen["lacp_partner"] and "bond-lacp" not in hypervisor.findings()
        far("link", "set", "far-link1", "down")
        wait_for_link(hypervisor, "link1", "DOWN")
        hypervisor.repair()
        port = hypervisor.port("a")
        assert port["state"] == "degraded" and "no link left" in port["error"]["detail"]
        assert hypervisor.findings()["bond-link-down"].status == "fail"


def test_a_bond_under_tunnels_is_reported_when_one_link_carries_all(hypervisor: Driven) -> None:
    with bond(hypervisor, "balance-xor", "xmit_hash_policy", "layer2+3"):
        assert "bond-hash" not in hypervisor.findings()
        hypervisor.sh("ip", "addr", "flush", "dev", "eth1")
        hypervisor.sh("ip", "addr", "add", f"{hypervisor.address}/24", "dev", "bond0")
        reported = hypervisor.findings()["bond-hash"]
        assert reported.status == "warn" and "one link carries all" in reported.found
        hypervisor.sh(*str(reported.fix).split())  # the fix is a command that works
        assert "bond-hash" not in hypervisor.findings()


# -- vhost -----------------------------------------------------------------------------------------


def test_a_tap_of_two_queues_takes_vhost(hypervisor: Driven) -> None:
    """QEMU opens it as libvirt has it do, and the kernel's threads carry its frames."""
    run(["modprobe", "vhost_net"])
    with hypervisor.driver() as driver:
        assert driver.facts()["vhost_net"] is True and Path("/dev/vhost-net").exists()
    hypervisor.plug("a", make_spec(1, FLAT, queues=2))
    tap = device_name(TAP, "a")
    netdev = f"tap,id=n0,ifname={tap},script=no,downscript=no,queues=2,vhost=on"
    qemu = [
        "qemu-system-x86_64",
        "-S",
        "-nodefaults",
        "-display",
        "none",
        "-accel",
        "tcg",
        "-m",
        "64",
        "-netdev",
        netdev,
        "-device",
        "virtio-net-pci,netdev=n0,mq=on",
        "-monitor",
        "stdio",
    ]
    with subprocess.Popen(
        [str(word) for word in within(hypervisor.name, qemu)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdin is not None
        process.stdin.write("info network\n")
        process.stdin.flush()
        wait_for(
            lambda: opened_files(process.pid).count("/dev/vhost-net") == 2,
            120,
            "QEMU has a vhost device for each queue",
        )
        assert "LOWER_UP" in hypervisor.link(tap)["flags"]
        process.stdin.write("quit\n")
        process.stdin.flush()
        process.wait(timeout=60)


def test_a_service_port_serves_its_vlan(hypervisor: Driven) -> None:
    network = {**vlan(100), "mtu": 1500}
    with service("np-svc", "svc0", "52:54:00:00:05:01", "10.100.0.5", hypervisor.name) as svc:
        spec = {**make_spec(5, network), "vm_id": "svc", "mac": svc.mac, "device": svc.device}
        hypervisor.plug("svc", spec)
        with hypervisor.vm("a", make_spec(1, network), "10.100.0.1") as a:
            assert a.reaches(svc.address) and svc.pings("10.100.0.50", ANSWER_S)
            assert hypervisor.changes() == []
        hypervisor.plug("svc", {**spec, "network": {**network, "vlan_id": 200}})
        assert not svc.pings("10.100.0.50"), "it is on another VLAN now"
        hypervisor.unplug("svc")
        assert "master" not in hypervisor.link("svc0")
        hypervisor.sh("ip", "link", "delete", "svc0")
