"""What guests send and receive: pings, frames with forged addresses, and their counters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tests.lab.guest import Guest
from tests.lab.hypervisor import Nic
from tests.lab.processes import LabError


def echoes_received(guest: Guest) -> int:
    """The echo requests that have reached the guest since it booted."""
    return _snmp(guest, "Icmp:", "InEchos")


def answers_received(guest: Guest) -> int:
    """The echo replies that have reached the guest since it booted."""
    return _snmp(guest, "Icmp:", "InEchoReps")


def fragments_made(guest: Guest) -> int:
    return _snmp(guest, "Ip:", "FragCreates")


def sent(guest: Guest, device: str) -> int:
    """Frames the guest has sent from a device."""
    return int(guest.check(f"cat /sys/class/net/{device}/statistics/tx_packets"))


def _snmp(guest: Guest, group: str, name: str) -> int:
    """A counter of /proc/net/snmp, which has a line of names and a line of values for a group."""
    lines = [line.split() for line in guest.check("cat /proc/net/snmp").splitlines()]
    names, values = (words for words in lines if words[0] == group)
    return int(values[names.index(name)])


def know(guest: Guest, device: str, nic: Nic) -> None:
    """Let the guest know the MAC of another's address for good: its pings need no ARP first."""
    guest.check(f"arp -i {device} -s {nic.address} {nic.mac}")


def set_neighbour(guest: Guest, device: str, address: str, mac: str) -> None:
    """Let the guest hold an entry that any ARP frame about the address would change."""
    guest.check(f"arp -i {device} -s {address} {mac} temp")


def accept_gratuitous_arp(guest: Guest, device: str) -> None:
    """Let the guest accept addresses from gratuitous ARP."""
    guest.check(f"echo 1 > /proc/sys/net/ipv4/conf/{device}/arp_accept")


def neighbour_mac(guest: Guest, device: str, address: str) -> str:
    """The MAC that the guest takes to be the address's; empty if it knows none."""
    words = guest.check(f"ip neigh show {address} dev {device}").split()
    return words[words.index("lladdr") + 1] if "lladdr" in words else ""


def echo_requests(guest: Guest, to: str, count: int, source: str | None = None) -> None:
    """Send some, whether they are answered or not, and wait a second for the last answer."""
    origin = f"-I {source}" if source else ""
    output = guest.run(f"ping -c {count} -i 0.2 -W 1 {origin} {to}", 60).output
    if f"{count} packets transmitted" not in output:
        raise LabError(f"guest {guest.name} did not send {count} pings: {output}")


def leased(guest: Guest, device: str, tries: int = 3) -> str | None:
    """The address that a DHCP server gives the guest, which sets it; None if it is offered none.

    It asks once a second.
    """
    script = "[ $1 != bound ] || ip addr add $ip/24 dev $interface"
    guest.check(f"printf '#!/bin/sh\\n{script}\\n' >/tmp/bound && chmod +x /tmp/bound")
    status, output = guest.run(f"udhcpc -i {device} -n -q -f -t {tries} -T 1 -s /tmp/bound")
    if status != 0:
        if "no lease" not in output:
            raise LabError(f"guest {guest.name}: udhcpc ended with {status}: {output}")
        return None
    return output.rpartition("lease of ")[2].split()[0]


def claim_by_arp(guest: Guest, device: str, address: str) -> None:
    """Tell everybody that an address of the guest is at the guest's MAC.

    Three times in three seconds: for a second an entry that is new is not changed (locktime).
    """
    guest.run(f"arping -U -c 3 -w 4 -I {device} -s {address} {address}", 60)


@contextmanager
def another_mac(guest: Guest, device: str, nic: Nic, mac: str, knows: Sequence[Nic]) -> Iterator[None]:
    """The guest gives its NIC another MAC for the time of the block."""
    _set_mac(guest, device, mac, knows)
    try:
        yield
    finally:
        _set_mac(guest, device, nic.mac, knows)


def _set_mac(guest: Guest, device: str, mac: str, knows: Sequence[Nic]) -> None:
    guest.check(f"ip link set {device} down && ip link set {device} address {mac}")
    guest.check(f"ip link set {device} up")
    for nic in knows:
        know(guest, device, nic)


@contextmanager
def another_address(guest: Guest, device: str, address: str) -> Iterator[None]:
    """The guest takes one more address for the time of the block."""
    guest.check(f"ip addr add {address}/32 dev {device}")
    try:
        yield
    finally:
        guest.check(f"ip addr del {address}/32 dev {device}")


@contextmanager
def in_background(guest: Guest, command: str) -> Iterator[None]:
    """Run a command in the guest again and again for the time of the block."""
    loop = f"while true; do {command}; sleep 0.05; done"
    pid = guest.check(f"setsid sh -c '{loop}' >/dev/null 2>&1 & echo $!").strip()
    try:
        yield
    finally:
        guest.check(f"kill -9 -{pid}")
