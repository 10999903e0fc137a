"""What others change of bridges, their ports and taps is set back at the kernel's notice, counted and told.

The agent looks at the whole host once an hour here, so it is the notice that it acts on.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import signal
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from netplugin.host.names import BRIDGE, TAP, VXLAN, device_name
from tests.lab.namespaces import connect, entered
from tests.lab.processes import wait_for
from tests.lab.raw_nic import RawNic, marker, opened, until
from tests.lab.steps import host_state
from tests.lab.switch import SWITCH, switch
from tests.lab.traffic_hosts import Host, host, make_spec, overlay

WIRE = "wire0"
SOON_S = 60.0
NETWORK = {"type": "flat", "physical_network": "physnet1"}
BR, TAP_A, TAP_B = device_name(BRIDGE, "physnet1"), device_name(TAP, "a"), device_name(TAP, "b")
OVERLAY = device_name(VXLAN, "vxlan/blue")
MAC_A, MAC_B, MAC_C = (f"52:54:00:00:00:{n:02x}" for n in (1, 2, 3))
NOBODY = 65534
_SIOCSIFHWADDR, _TUNSETIFF, _TUNSETPERSIST, _TUNSETOWNER = 0x8924, 0x400454CA, 0x400454CB, 0x400454CC


@pytest.fixture(scope="module")
def one() -> Iterator[Host]:
    with ExitStack() as stack:
        stack.enter_context(switch())
        made = stack.enter_context(host(1, f"physnet1:{WIRE}", reconcile_s=3600))
        connect(made.name, WIRE, SWITCH, "wire1")
        made.network("blue", 5001, ["10.9.0.7"])
        made.plug("a", make_spec(1, NETWORK))
        made.plug("b", make_spec(2, NETWORK))
        made.plug("c", make_spec(3, NETWORK))
        made.plug("d", make_spec(4, overlay("blue")))
        made.repair()
        yield made


def state(one: Host) -> dict[str, int]:
    return host_state.compared(host_state.of_links(one.name), host_state.of_bridges(one.name))


def repaired(one: Host) -> int:
    """How many changes the agent has made because of drift."""
    text = str(one.agent.get("/metrics")[1])
    found = re.findall(r'netplugin_changes_total\{.*why="drift".*\} ([0-9.]+)', text)
    return sum(int(float(each)) for each in found)


def reported(one: Host, port_id: str, what: str) -> bool:
    """Whether an event of this port says so."""
    return what in str(one.agent.get(f"/v1/events?follow=false&after=0&kind=drift&port_id={port_id}")[1])


@pytest.fixture(scope="module")
def before(one: Host) -> dict[str, int]:
    return state(one)


def of_bridge(*words: str) -> list[str]:
    return ["ip", "link", "set", BR, "type", "bridge", *words]


def of_port(device: str, *words: str) -> list[str]:
    return ["ip", "link", "set", device, "type", "bridge_slave", *words]


#: By what is set otherwise: the commands.
CHANGED = {
    "STP, and a guard removed": [
        of_bridge("stp_state", "1"),
        ["tc", "qdisc", "del", "dev", TAP_A, "ingress"],
    ],
    "reserved groups": [of_bridge("group_fwd_mask", "0xfff8")],
    "ageing": [of_bridge("ageing_time", "0")],
    "snooping": [of_bridge("mcast_snooping", "1")],
    "learning of reserved groups": [of_bridge("no_linklocal_learn", "0")],
    "the host's rules": [of_bridge("nf_call_iptables", "1")],
    "the bridge's MAC": [["ip", "link", "set", BR, "address", MAC_B]],
    "the bridge's MTU": [["ip", "link", "set", BR, "mtu", "1000"]],
    "a tap's MAC": [["ip", "link", "set", TAP_A, "address", MAC_B]],
    "the VLAN device's or VXLAN device's MAC": [["ip", "link", "set", OVERLAY, "address", MAC_B]],
    "learning of a port": [["bridge", "link", "set", "dev", TAP_A, "learning", "on"]],
    "flooding": [["bridge", "link", "set", "dev", TAP_A, "flood", "off"]],
    "isolated": [["bridge", "link", "set", "dev", TAP_A, "isolated", "on"]],
    "hairpin": [of_port(TAP_A, "hairpin", "on")],
    "proxy ARP": [of_port(TAP_A, "proxy_arp", "on")],
    "several at once": [of_port(TAP_A, "guard", "on", "neigh_suppress", "on", "group_fwd_mask", "0xfff8")],
    "the uplink's port": [["bridge", "link", "set", "dev", WIRE, "learning", "off", "hairpin", "on"]],
    "the tunnel's port": [["bridge", "link", "set", "dev", OVERLAY, "isolated", "on"]],
    "a fixed MAC removed": [["bridge", "fdb", "del", MAC_A, "dev", TAP_A, "master"]],
    "a fixed MAC moved": [["bridge", "fdb", "replace", MAC_A, "dev", TAP_B, "master", "static"]],
    "a fixed MAC for the host": [["bridge", "fdb", "replace", MAC_A, "dev", TAP_B, "master", "permanent"]],
    "a fixed MAC on the uplink": [["bridge", "fdb", "replace", MAC_A, "dev", WIRE, "master", "static"]],
    "a peer removed": [["bridge", "fdb", "del", "00:00:00:00:00:00", "dev", OVERLAY, "dst", "10.9.0.7"]],
    "a peer made": [["bridge", "fdb", "append", "00:00:00:00:00:00", "dev", OVERLAY, "dst", "10.9.0.66"]],
}


@pytest.mark.parametrize("commands", CHANGED.values(), ids=CHANGED)
def test_what_others_set_is_set_back_at_the_kernels_notice(
    one: Host, before: dict[str, int], commands: list[list[str]]
) -> None:
    made = repaired(one)
    for command in commands:
        one.sh(*command)
    wait_for(lambda: repaired(one) > made and state(one) == before, SOON_S, "it is as before")


def drop_privileges() -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def own_mac(mac: str) -> bytes:
    """A request that gives the first tap this MAC."""
    return struct.pack("16sH6s8x", TAP_A.encode(), 1, bytes.fromhex(mac.replace(":", "")))


def unprivileged(descriptor: int, request: int, argument: bytes | int) -> bool:
    """Whether a process without capabilities may do it."""
    child = os.fork()
    if child == 0:
        try:
            drop_privileges()
            fcntl.ioctl(descriptor, request, argument)
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def test_a_tap_that_takes_a_neighbours_mac_gives_it_back(one: Host) -> None:
    evil, victim, other = (RawNic(one.name, device_name(TAP, each)) for each in ("a", "b", "c"))
    with opened(evil, victim, other):
        until(other, victim, marker(MAC_C, MAC_B))
        made = repaired(one)
        assert unprivileged(evil.fileno(), _SIOCSIFHWADDR, own_mac(MAC_B)), "who has it open may do so"
        start = time.monotonic()
        wait_for(lambda: repaired(one) > made, SOON_S, "the agent acts")
        until(other, victim, marker(MAC_C, MAC_B))
        print(f"the neighbour has its frames again after {time.monotonic() - start:.2f} s")
    wait_for(lambda: one.link(TAP_A)["address"] != MAC_B, SOON_S, "the tap has its own MAC")
    wait_for(lambda: reported(one, "a", f"give {TAP_A} its own MAC"), SOON_S, "the event names the port")


def test_a_tap_that_keeps_taking_a_neighbours_mac_is_taken_from_its_process(one: Host) -> None:
    evil, victim, other = (RawNic(one.name, device_name(TAP, each)) for each in ("a", "b", "c"))
    index = one.link(TAP_A)["ifindex"]
    with opened(evil, victim, other):
        child = os.fork()
        if child == 0:
            drop_privileges()
            for mac in itertools.cycle((MAC_B, "52:54:00:00:00:77")):
                with suppress(OSError):
                    fcntl.ioctl(evil.fileno(), _SIOCSIFHWADDR, own_mac(mac))
                time.sleep(0.001)
        try:
            wait_for(lambda: one.link(TAP_A).get("ifindex", index) != index, SOON_S, "the tap is another")
            until(other, victim, marker(MAC_C, MAC_B))
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    wait_for(
        lambda: reported(one, "a", f"remove tap {TAP_A}: its MAC is changed"), SOON_S, "the event says why"
    )
    wait_for(
        lambda: one.changes() == [] and one.port("a")["state"] == "active", SOON_S, "its VM can start again"
    )


def test_who_may_open_a_tap_is_set_back_when_no_process_has_it_open(one: Host) -> None:
    nic = RawNic(one.name, TAP_A)
    with opened(nic):
        assert unprivileged(nic.fileno(), _TUNSETOWNER, NOBODY)
        assert unprivileged(nic.fileno(), _TUNSETPERSIST, 0)
        assert unprivileged(nic.fileno(), _TUNSETPERSIST, 1)
        made = repaired(one)
        checks = one.agent.get("/v1/host/checks")[1]
        assert [each for each in checks if each["id"] == "tap-users" and TAP_A in each["found"]]
    wait_for(lambda: repaired(one) > made and one.changes() == [], SOON_S, "the tap is root's again")
    with entered(one.name):
        intruder = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    try:
        asked = struct.pack("16sH22x", TAP_A.encode(), 0x5002)
        assert not unprivileged(intruder, _TUNSETIFF, asked), "another user opens the tap of a VM"
    finally:
        os.close(intruder)
