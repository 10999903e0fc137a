"""Two hypervisors and a peer of their VMs on one switch, in one sandbox."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from tests.lab.apart import SHARED, Apart
from tests.lab.hypervisor import BRIDGE_BACKEND, OVS_BACKEND, PHYSICAL_NETWORK, Hypervisor
from tests.lab.namespaces import namespace, within
from tests.lab.processes import run
from tests.lab.switch import switch, wire

NAMES = ("one", "two")
PEER = "np-peer"
PEER_ADDRESS, PEER_MAC = "10.0.0.200", "52:54:00:00:02:00"
PEER_DEVICE = "eth1"
MTU = 1500
# A hypervisor's wire to the switch. The networks are flat: not every kernel has VLAN devices.
UPLINK = {OVS_BACKEND: "eth1", BRIDGE_BACKEND: "eth2"}
#: The device of OVS on a wire: DPDK's AF_PACKET driver is its NIC.
UPLINK_DEVICE = "net_af_packet0,iface={},qdisc_bypass=1,framesz=2048,framecnt=4096,blocksz=16384"
# Both OVS together need no more hugepages than the sandboxes of other tests.
OVS_MEMORY_MB = 128


@dataclass(frozen=True)
class TwoHosts:
    one: Hypervisor
    two: Hypervisor

    def other(self, host: Hypervisor) -> Hypervisor:
        return self.two if host is self.one else self.one


@contextmanager
def two_hosts(backends: Sequence[str]) -> Iterator[TwoHosts]:
    """Two hypervisors, each with these backends on wires to a switch that learns, as a rack's does."""
    with ExitStack() as stack:
        stack.enter_context(switch())
        stack.enter_context(namespace(PEER))
        make_peer()
        hosts = [stack.enter_context(_hypervisor(name, backends)) for name in NAMES]
        yield TwoHosts(*hosts)


def know_at_peer(address: str, mac: str) -> None:
    """Let the peer know the MAC of a VM for good: that the VM is found is up to the network alone."""
    run(within(PEER, ["ip", "neigh", "replace", address, "lladdr", mac, "dev", PEER_DEVICE]))


def make_peer() -> None:
    """Wire the peer, whose namespace is there, to the switch."""
    wire(PEER, PEER_DEVICE, MTU)
    # There is no NIC that sums or cuts for the stack.
    run(within(PEER, ["ethtool", "-K", PEER_DEVICE, "tx", "off", "tso", "off", "gso", "off"]))
    run(within(PEER, ["ip", "link", "set", PEER_DEVICE, "address", PEER_MAC]))
    run(within(PEER, ["ip", "address", "add", f"{PEER_ADDRESS}/24", "dev", PEER_DEVICE]))


@contextmanager
def _hypervisor(name: str, backends: Sequence[str]) -> Iterator[Hypervisor]:
    apart = Apart(f"np-{name}", SHARED / name)
    with namespace(apart.name):
        for backend in backends:
            wire(apart.name, UPLINK[backend], MTU)
        try:
            with Hypervisor(backends, apart.root, apart, _uplinks(backends), OVS_MEMORY_MB) as made:
                yield made
        finally:
            shutil.rmtree(apart.root, ignore_errors=True)


def _uplinks(backends: Sequence[str]) -> dict[str, dict[str, str]]:
    """The agent's options with the wires as the uplinks."""
    bridge = f"{PHYSICAL_NETWORK[BRIDGE_BACKEND]}:{UPLINK[BRIDGE_BACKEND]}"
    driver = UPLINK_DEVICE.format(UPLINK[OVS_BACKEND])
    options = {
        BRIDGE_BACKEND: ("linuxbridge", {"physical_interfaces": bridge}),
        OVS_BACKEND: ("ovs", {"uplinks": f"'\"{PHYSICAL_NETWORK[OVS_BACKEND]}:{driver}\"'"}),
    }
    return dict(options[backend] for backend in backends)
