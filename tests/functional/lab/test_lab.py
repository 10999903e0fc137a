"""The lab works: real guests ping each other through a private OVS-DPDK and a Linux bridge.

The tests of the product need all of it, with guests of their own; this says which part of the lab it is.
Run in a sandbox: `python -m tests.lab.sandbox --guests --hugepages 180 -- python -m pytest -m long ...`
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.lab.guest import (
    BOOT_DEADLINE_S,
    Guest,
    apply_tcg_workaround,
    domain_xml,
    with_interface,
    with_shared_memory,
)
from tests.lab.libvirtd import PrivateLibvirt
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import CommandError, LabError, LabTimeout, run
from tests.lab.testpmd import Forward, Testpmd, TestpmdOptions

OVS = Path("/run/lab-ovs")
MACS = ("52:54:00:00:00:01", "52:54:00:00:00:02")
ADDRESSES = ("10.0.0.1", "10.0.0.2")
Pair = tuple[Guest, Guest]

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def daemons() -> Iterator[PrivateLibvirt]:
    with PrivateLibvirt() as running:
        yield running


@pytest.fixture(scope="module")
def ovs() -> Iterator[PrivateOvs]:
    with PrivateOvs(OVS) as switch:
        switch.vsctl("add-br", "br0", "--", "set", "Bridge", "br0", "datapath_type=netdev")
        yield switch


@pytest.fixture(scope="module")
def vhost_guests(daemons: PrivateLibvirt, ovs: PrivateOvs) -> Iterator[Pair]:
    def xml(number: int) -> str:
        path = add_client_port(ovs, f"vhost{number}")
        interface = (
            f"<interface type='vhostuser'><mac address='{MACS[number]}'/>"
            f"<source type='unix' path='{path}' mode='server'/>"
            "<model type='virtio'/><driver queues='2'/></interface>"
        )
        domain = with_shared_memory(domain_xml(f"vhost{number}"))
        return apply_tcg_workaround(with_interface(domain, interface))

    def connected(name: str) -> None:
        ovs.wait_connected(name, BOOT_DEADLINE_S)

    yield from started(daemons, [(f"vhost{number}", xml(number)) for number in range(2)], connected)


@pytest.fixture
def bridge_guests(daemons: PrivateLibvirt) -> Iterator[Pair]:
    run(["ip", "link", "add", "labbr", "type", "bridge"])
    run(["ip", "link", "set", "labbr", "up"])
    for number in range(2):
        tap = ["ip", "tuntap", "add", f"labtap{number}", "mode", "tap", "multi_queue", "vnet_hdr"]
        run(tap)
        run(["ip", "link", "set", f"labtap{number}", "master", "labbr", "up"])

    def xml(number: int) -> str:
        interface = (
            f"<interface type='ethernet'><mac address='{MACS[number]}'/>"
            f"<target dev='labtap{number}' managed='no'/>"
            "<model type='virtio'/><driver queues='2'/></interface>"
        )
        return with_interface(domain_xml(f"tap{number}", vcpus=2), interface)

    yield from started(daemons, [(f"tap{number}", xml(number)) for number in range(2)])
    for name in ("labtap0", "labtap1", "labbr"):
        run(["ip", "link", "del", name])


def started(
    daemons: PrivateLibvirt,
    domains: list[tuple[str, str]],
    wait_connected: Callable[[str], None] = lambda _: None,
) -> Iterator[Pair]:
    """Two booted guests with an address each, destroyed afterwards."""
    guests = [Guest(name) for name, _ in domains]
    connection = daemons.connect()
    try:
        for guest, (_, xml) in zip(guests, domains, strict=True):
            guest.start(connection, xml)
            wait_connected(guest.name)
        for guest, mac, address in zip(guests, MACS, ADDRESSES, strict=True):
            guest.boot()
            guest.configure(mac, f"{address}/24")
        yield guests[0], guests[1]
    finally:
        for guest in guests:
            daemons.destroy_domain(guest.name)


def add_client_port(ovs: PrivateOvs, name: str) -> Path:
    path = OVS / f"{name}.sock"
    settings = ["type=dpdkvhostuserclient", f"options:vhost-server-path={path}"]
    ovs.vsctl("add-port", "br0", name, "--", "set", "Interface", name, *settings)
    return path


def test_guests_ping_through_ovs_dpdk(ovs: PrivateOvs, vhost_guests: Pair) -> None:
    for number in range(2):
        ovs.wait_connected(f"vhost{number}")
    vhost_guests[0].wait_pings(ADDRESSES[1])
    assert vhost_guests[0].pings(ADDRESSES[1])
    assert vhost_guests[1].pings(ADDRESSES[0])


def test_guests_ping_again_after_vswitchd_was_killed(ovs: PrivateOvs, vhost_guests: Pair) -> None:
    ovs.kill_vswitchd()
    assert vhost_guests[0].run(f"ping -c 1 -W 1 {ADDRESSES[1]}").status != 0
    ovs.start_vswitchd()
    try:
        vhost_guests[0].wait_pings(ADDRESSES[1])
    except LabTimeout as silent:
        raise LabError(f"{silent}\n{ovs.vsctl('list', 'Interface')}\n{ovs.vswitchd.tail()}") from silent
    assert vhost_guests[1].pings(ADDRESSES[0])


def test_guests_ping_while_the_database_is_down(ovs: PrivateOvs, vhost_guests: Pair) -> None:
    ovs.kill_ovsdb()
    try:
        assert vhost_guests[0].pings(ADDRESSES[1])
    finally:
        ovs.start_ovsdb()
    ovs.vsctl("set", "Bridge", "br0", "external_ids:seen=yes")


def test_a_paused_vswitchd_answers_once_resumed(ovs: PrivateOvs) -> None:
    ovs.pause_vswitchd()
    with pytest.raises(CommandError):
        ovs.appctl("version", timeout=1)
    ovs.resume_vswitchd()
    assert "Open vSwitch" in ovs.appctl("version")


@pytest.mark.parametrize("hugepages", [False, True])
def test_testpmd_answers_a_guest(ovs: PrivateOvs, vhost_guests: Pair, hugepages: bool) -> None:
    path = add_client_port(ovs, "pmd")
    options = TestpmdOptions(Forward.ICMPECHO, mac="52:54:00:00:00:63", hugepages=hugepages)
    with Testpmd(path, options):
        ovs.wait_connected("pmd")
        vhost_guests[0].wait_pings("10.0.0.99")
        assert vhost_guests[0].pings("10.0.0.99")
        assert options.mac in vhost_guests[0].check("ip neigh")
    ovs.vsctl("del-port", "pmd")


def test_a_nic_is_plugged_into_a_running_guest(
    daemons: PrivateLibvirt, ovs: PrivateOvs, vhost_guests: Pair
) -> None:
    path = add_client_port(ovs, "hot")
    interface = (
        "<interface type='vhostuser'><mac address='52:54:00:00:00:03'/>"
        f"<source type='unix' path='{path}' mode='server'/><model type='virtio'/></interface>"
    )
    guest = Guest("hot")
    domain = with_shared_memory(domain_xml(guest.name, spare_slots=1))
    running = guest.start(daemons.connect(), apply_tcg_workaround(domain))
    guest.boot()
    running.attachDevice(interface)
    ovs.wait_connected("hot")
    guest.wait_nic("52:54:00:00:00:03")
    guest.configure("52:54:00:00:00:03", "10.0.0.3/24")
    guest.wait_pings(ADDRESSES[0])
    assert vhost_guests[0].pings("10.0.0.3")
    daemons.destroy_domain(guest.name)
    ovs.vsctl("del-port", "hot")


def test_guests_ping_through_a_linux_bridge(bridge_guests: Pair) -> None:
    bridge_guests[0].wait_pings(ADDRESSES[1])
    assert bridge_guests[0].pings(ADDRESSES[1])
    assert bridge_guests[1].pings(ADDRESSES[0])


def test_a_command_comes_back_whole(vhost_guests: Pair) -> None:
    guest = vhost_guests[0]
    assert guest.run("printf 'lab 1 0 x\\n'; exit 3") == (3, "lab 1 0 x\n")
    assert guest.run('cat; echo "it\'s" >&2') == (0, "it's\n")
    assert guest.check("seq 1 5000").split() == [str(number) for number in range(1, 5001)]


def test_a_command_that_hangs_is_given_up(vhost_guests: Pair) -> None:
    assert vhost_guests[0].run("sleep 60", timeout=1).status == 128 + signal.SIGKILL
    assert vhost_guests[0].run("echo alive") == (0, "alive\n")


def test_guests_live_on_when_libvirtd_is_killed(daemons: PrivateLibvirt, vhost_guests: Pair) -> None:
    daemons.kill_libvirtd()
    try:
        assert vhost_guests[0].pings(ADDRESSES[1])
    finally:
        daemons.start_libvirtd()
    assert {domain.name() for domain in daemons.connect().listAllDomains()} == {"vhost0", "vhost1"}
