"""A switch in a namespace of its own that joins the wires of hosts, and a peer on it that never answers."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tests.lab.namespaces import entered, namespace, within
from tests.lab.processes import CommandError, run

SWITCH = "np-switch"
VXLAN_PORT = 4789


@contextmanager
def switch() -> Iterator[str]:
    """The switch, a bridge ``sw`` for jumbo frames that floods multicast and learns at once."""
    with namespace(SWITCH) as name:
        # With an address of its own, or it would take another as wires come: VMs know it by ARP.
        bridge = "type bridge forward_delay 0 mcast_snooping 0".split()
        add = ["ip", "link", "add", "sw", "address", "02:00:00:00:fe:01", "mtu", "9600"]
        run(within(name, [*add, *bridge]))
        run(within(name, ["ip", "link", "set", "sw", "up"]))
        yield name


def wire(host: str, device: str = "eth1", mtu: int = 9600) -> None:
    """Join a device of a host, with this MTU, to the switch, whose end has the name of both.

    The kernel takes a namespace apart after it has been removed: the end of the last host of this name may
    still be there.
    """
    far = f"{host}-{device}"[-15:]
    with suppress(CommandError):
        run(within(SWITCH, ["ip", "link", "del", far]))
    peer = f"type veth peer name {far} netns {SWITCH} mtu 9600".split()
    run(within(host, ["ip", "link", "add", device, "mtu", str(mtu), *peer]))
    run(within(host, ["ip", "link", "set", device, "up"]))
    run(within(SWITCH, ["ip", "link", "set", far, "master", "sw", "up"]))


@contextmanager
def silent_peer(address: str) -> Iterator[None]:
    """The other end of every tunnel to this IPv4 address of the switch; it answers nothing."""
    run(within(SWITCH, ["ip", "address", "add", f"{address}/24", "dev", "sw"]))
    with entered(SWITCH):
        inbox = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with inbox:
        inbox.bind((address, VXLAN_PORT))
        yield
