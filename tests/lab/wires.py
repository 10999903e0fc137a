"""Wires of a hypervisor, their far ends in a network namespace: where a traffic generator sits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.lab.namespaces import namespace, within
from tests.lab.processes import run

NETWORKS = ("left", "right", "left2", "right2")


@dataclass(frozen=True, slots=True)
class Wires:
    """Kernel devices, one for each of the physical networks, in pairs."""

    netns: str
    networks: tuple[str, ...]
    #: The hypervisor's NICs, and the far ends in ``netns``.
    nics: tuple[str, ...]
    ends: tuple[str, ...]

    def agent_options(self) -> dict[str, dict[str, str]]:
        """The networks for every backend that can have them: DPDK's AF_PACKET driver is OVS's NIC."""
        by_network = dict(zip(self.networks, self.nics, strict=True))
        uplinks = [
            f'"{network}:net_af_packet{number},iface={nic},qdisc_bypass=1,'
            'framesz=2048,framecnt=16384,blocksz=16384"'
            for number, (network, nic) in enumerate(by_network.items())
        ]
        return {
            "ovs": {
                "bridge_mappings": ",".join(f"{network}:br-{network}" for network in self.networks),
                "uplinks": f"'{','.join(uplinks)}'",
            },
            "linuxbridge": {"physical_interfaces": ",".join(f"{n}:{nic}" for n, nic in by_network.items())},
        }

    def described(self, name: str, agent_url: str, ovs_rundir: Path) -> dict[str, Any]:
        """A run description without search and matrix: tcpreplay both ways, VNFs that are packaged."""
        both_ways = [{"send": end, "receive": self.ends[n ^ 1]} for n, end in enumerate(self.ends)]
        return {
            "name": name,
            "agent": {"url": agent_url},
            "ends": [{"network": {"type": "flat", "physical_network": network}} for network in self.networks],
            "vnf": {"type": "testpmd", "hugepages": False, "memory_mb": 128},
            "vnf_cores": {"main": 0, "workers": "0"},
            "evidence": {"ovs_rundir": str(ovs_rundir), "devices": list(self.nics)},
            "generator": {"type": "tcpreplay", "netns": self.netns, "paths": both_ways},
            # testpmd takes no tap of one queue unless the kernel has vhost_net.
            "overrides": [{"cells": {"backend": "linuxbridge"}, "vnf": {"type": "taps"}}],
        }


@contextmanager
def wires(netns: str = "zl-far", pairs: int = 1) -> Iterator[Wires]:
    """All of them, up and silent: the kernel says nothing on them by itself."""
    numbers = range(2 * pairs)
    nics, ends = tuple(f"zlnic{n}" for n in numbers), tuple(f"zlend{n}" for n in numbers)
    made = Wires(netns, NETWORKS[: 2 * pairs], nics, ends)
    with namespace(netns):
        try:
            for nic, end in zip(made.nics, made.ends, strict=True):
                run(["ip", "link", "add", nic, "type", "veth", "peer", "name", end, "netns", netns])
                for where, name in ((None, nic), (netns, end)):
                    run(within(where, ["sysctl", "-qw", f"net.ipv6.conf.{name}.disable_ipv6=1"]))
                    run(within(where, ["ip", "link", "set", name, "up"]))
            yield made
        finally:
            for nic in made.nics:
                run(["ip", "link", "delete", nic])
