"""ovs-vswitchd is killed under running guests: all comes back, and no filter is open in between.

The listener pings the honest guest, so echo requests that reach the listener are the liar's alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import pytest

from tests.lab.guest import Guest
from tests.lab.hypervisor import OVS_BACKEND, Hypervisor, Nic
from tests.lab.processes import LabError, wait_for
from tests.lab.traffic import (
    accept_gratuitous_arp,
    another_address,
    another_mac,
    answers_received,
    echo_requests,
    echoes_received,
    in_background,
    know,
    neighbour_mac,
    sent,
)

DEVICE = "eth0"
VLAN, OTHER_VLAN = 100, 200
BRIDGE = "br-phys1"
OTHER_MAC = "52:54:00:66:66:66"
OTHER_ADDRESS = "10.0.0.66"
OPEN = {"enabled": False}
# Between two lies, and so many of them that they went on while all was up again.
INTERVAL_S = 0.05
ENOUGH = 20
DEADLINE_S = 60.0


@dataclass(frozen=True)
class Trio:
    """Three guests on one VLAN, and the bridge's flows when all was well."""

    host: Hypervisor
    honest_nic: Nic
    liar_nic: Nic
    listener_nic: Nic
    honest: Guest
    liar: Guest
    listener: Guest

    @property
    def nics(self) -> tuple[Nic, ...]:
        return (self.honest_nic, self.liar_nic, self.listener_nic)

    def plug(self) -> None:
        """The ports as they are to be: the liar may send from its own addresses only."""
        self.host.plug(self.honest_nic)
        self.host.plug(self.listener_nic)
        self.host.plug(self.liar_nic, port_security=self.own_addresses())

    def own_addresses(self) -> dict[str, object]:
        return {"allowed_addresses": [{"ip": self.liar_nic.address}]}

    def wait_liar(self) -> None:
        """Wait until the liar has sent enough from now on."""
        start = sent(self.liar, DEVICE)
        wait_for(
            lambda: sent(self.liar, DEVICE) >= start + ENOUGH,
            DEADLINE_S,
            f"the liar sends {ENOUGH} frames",
        )


@pytest.fixture(scope="module")
def trio() -> Iterator[Trio]:
    nics = [Nic(OVS_BACKEND, number, VLAN) for number in (1, 2, 3)]
    with Hypervisor([OVS_BACKEND]) as host:
        for nic in nics:
            host.plug(nic)
        honest, liar, listener = host.boot(nics)
        for guest in (honest, liar):
            guest.wait_pings(nics[2].address)
        know(liar, DEVICE, nics[2])
        know(listener, DEVICE, nics[0])
        accept_gratuitous_arp(listener, DEVICE)
        yield Trio(host, nics[0], nics[1], nics[2], honest, liar, listener)
        host.destroy(nics)
        host.unplug(nics)


@contextmanager
def lying(trio: Trio, how: str) -> Iterator[None]:
    """The liar says something it must not, all the time."""
    to = trio.listener_nic.address
    with ExitStack() as stack:
        if how == "mac":
            change = another_mac(trio.liar, DEVICE, trio.liar_nic, OTHER_MAC, [trio.listener_nic])
            stack.enter_context(change)
            ping = f"ping -q -i {INTERVAL_S} -c 1000 {to}"
        else:
            stack.enter_context(another_address(trio.liar, DEVICE, OTHER_ADDRESS))
            ping = f"ping -q -i {INTERVAL_S} -c 1000 -I {OTHER_ADDRESS} {to}"
            arp = f"arping -q -U -c 1000 -I {DEVICE} -s {OTHER_ADDRESS} {OTHER_ADDRESS}"
            stack.enter_context(in_background(trio.liar, arp))
        stack.enter_context(in_background(trio.liar, ping))
        yield


@dataclass(frozen=True)
class Recovery:
    """Seconds from the start of vswitchd until it was up, its flows were back, a ping got through."""

    up: float
    flows: float
    ping: float

    def __str__(self) -> str:
        return (
            f"vswitchd up after {self.up:.2f} s, filters back after {self.flows:.2f} s, honest"
            f" guests heard after {self.ping:.2f} s ({self.ping - self.up:+.2f} s after it was up)"
        )


def killed_and_started(trio: Trio) -> Recovery:
    ovs, listener = trio.host.ovs, trio.listener
    before = flows(trio)
    with in_background(listener, f"ping -q -i {INTERVAL_S} -c 1000 {trio.honest_nic.address}"):
        wait_answers(listener)
        ovs.kill_vswitchd()
        received = answers_received(listener)
        start = time.monotonic()
        ovs.start_vswitchd()
        up = time.monotonic() - start
        wait_for(lambda: flows(trio) == before, DEADLINE_S, "the flows are back")
        back = time.monotonic() - start
        wait_for(
            lambda: answers_received(listener) > received,
            DEADLINE_S,
            "the honest guest is heard",
            partial(counted, trio),
        )
        return Recovery(up, back, time.monotonic() - start)


def counted(trio: Trio) -> str:
    """What OVS and the guests have counted: where frames end."""
    ovs = trio.host.ovs
    of_ovs = [
        ovs.ofctl("dump-ports", BRIDGE),
        ovs.ofctl("dump-flows", BRIDGE),
        ovs.appctl("fdb/show", BRIDGE),
    ]
    guests = (trio.honest, trio.listener)
    return "\n".join([*of_ovs, *(guest.run("cat /proc/net/dev; ip neigh").output for guest in guests)])


def wait_answers(guest: Guest) -> None:
    received = answers_received(guest)
    wait_for(lambda: answers_received(guest) > received, DEADLINE_S, f"{guest.name} is answered")


def flows(trio: Trio) -> list[str]:
    """The bridge's flows; none while it cannot be asked."""
    try:
        lines = trio.host.ovs.ofctl("dump-flows", BRIDGE, "--no-stats").splitlines()
        return sorted(line for line in lines if "cookie=" in line)
    except LabError:
        return []


def tags(trio: Trio) -> list[str]:
    ports = trio.host.ovs.vsctl("list-ports", BRIDGE).split()
    return [f"{port} {trio.host.ovs.get('Port', port, 'tag')}" for port in ports]


def check_restarts(trio: Trio, how: str, times: int) -> Iterator[Recovery]:
    """Kill and start vswitchd, and tell of each time, while the liar lies and nobody receives it."""
    trio.plug()
    before = tags(trio)
    with lying(trio, how):
        trio.host.plug(trio.liar_nic, port_security=OPEN)
        wait_for(lambda: spoofed_received(trio, how), DEADLINE_S, "lies are heard without a filter")
        trio.plug()
        forget(trio.listener)
        received = echoes_received(trio.listener)
        trio.wait_liar()
        assert echoes_received(trio.listener) == received, "the filter lets lies through"
        for _ in range(times):
            yield killed_and_started(trio)
            trio.wait_liar()
            assert echoes_received(trio.listener) == received, "a filter was open"
            assert neighbour_mac(trio.listener, DEVICE, OTHER_ADDRESS) == ""
    assert tags(trio) == before
    assert trio.host.call("POST", "/v1/reconcile", {"dry_run": True})["changes"] == []
    states = [trio.host.call("GET", f"/v1/ports/{nic.port_id}")["state"] for nic in trio.nics]
    assert states == ["active"] * 3
    assert trio.liar.pings(trio.listener_nic.address), "what the liar may say is heard"


def spoofed_received(trio: Trio, how: str) -> bool:
    """Whether the listener hears pings of the liar now, and (`address`) accepts its ARP."""
    start = echoes_received(trio.listener)
    trio.wait_liar()
    is_misled = neighbour_mac(trio.listener, DEVICE, OTHER_ADDRESS) == trio.liar_nic.mac
    return echoes_received(trio.listener) > start and (is_misled or how == "mac")


def forget(guest: Guest) -> None:
    """Make the guest forget what it assumes of addresses; what it knows for good stays."""
    guest.check(f"ip neigh flush dev {DEVICE} nud all; arp -i {DEVICE} -d {OTHER_ADDRESS}; true")
    wait_for(lambda: not neighbour_mac(guest, DEVICE, OTHER_ADDRESS), DEADLINE_S, "it is forgotten")


@pytest.mark.parametrize("how", ["mac", "address"])
def test_no_spoofed_frame_passes_while_vswitchd_is_killed_and_started(
    trio: Trio, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for recovery in check_restarts(trio, how, times=3):
        with capsys.disabled():
            print(f"\n  {recovery}", end="")


@pytest.mark.long
@pytest.mark.parametrize("how", ["mac", "address"])
def test_no_spoofed_frame_passes_through_many_kills(trio: Trio, how: str) -> None:
    found = [recovery.ping - recovery.up for recovery in check_restarts(trio, how, times=25)]
    print(f"{len(found)} kills, honest guests heard {min(found):.2f} to {max(found):.2f} s after")


def test_vlans_are_apart_after_a_restart(trio: Trio) -> None:
    trio.plug()
    trio.host.plug(trio.honest_nic, vlan_id=OTHER_VLAN)
    before = flows(trio)
    trio.host.ovs.kill_vswitchd()
    trio.host.ovs.start_vswitchd()
    wait_for(lambda: flows(trio) == before, DEADLINE_S, "the flows are back")
    trio.liar.wait_pings(trio.listener_nic.address)
    before = echoes_received(trio.honest)
    echo_requests(trio.listener, trio.honest_nic.address, 3)
    assert echoes_received(trio.honest) == before
    trio.host.plug(trio.honest_nic)
    trio.listener.wait_pings(trio.honest_nic.address)


def test_filters_stay_shut_while_the_agent_is_dead(trio: Trio) -> None:
    """Nobody puts the flows back: then nothing at all arrives, until the agent comes."""
    trio.plug()
    with lying(trio, "address"):
        received = echoes_received(trio.listener)
        trio.host.agent.kill()
        trio.host.ovs.kill_vswitchd()
        trio.host.ovs.start_vswitchd()
        for guest in (trio.liar, trio.listener):
            wait_for(partial(has_carrier, guest), DEADLINE_S, f"{guest.name} has a link")
        trio.wait_liar()
        assert flows(trio) == []
        assert trio.listener.run(f"ping -c 1 -W 1 {trio.honest_nic.address}").status != 0
        trio.host.agent.start()
        trio.listener.wait_pings(trio.honest_nic.address)
        trio.wait_liar()
        assert echoes_received(trio.listener) == received


def has_carrier(guest: Guest) -> bool:
    """Whether OVS is on the NIC's other side; its row in the database may be behind for good."""
    return guest.check(f"cat /sys/class/net/{DEVICE}/carrier").strip() == "1"
