"""The options of the linuxbridge backend."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oslo_config import cfg, types

GROUP = "linuxbridge"
OPTIONS = [
    cfg.Opt(
        "physical_interfaces",
        type=types.Dict(types.String()),
        default={},
        help="The network interface (a NIC, or a bond that you made) behind each physical network, "
        "like physnet1:eth1,physnet2:bond0. For a flat network the agent puts it on a bridge of its "
        "own when the first port comes and takes it off with the last: it must then have no IP "
        "addresses and be on no other bridge. For a VLAN network the agent makes a VLAN device on "
        "it, and addresses do no harm. MTU, state and addresses stay the operator's: it must be up, "
        "and its MTU that of the largest network at least. Nothing after the colon (physnet3:) means "
        "networks that stay on this host, bridges without an interface.",
    ),
    cfg.IPOpt(
        "local_ip",
        help="Address of this host that VXLAN tunnels end at, IPv4 or IPv6, like 10.1.0.7. It must "
        "be on an interface of this host that is up and whose MTU is that of the VXLAN networks and "
        "50 bytes (70 with IPv6) more; the other hosts send to it, and have it among their peers. "
        "Without it there are no VXLAN networks on this backend.",
    ),
]


@dataclass(frozen=True)
class Settings:
    """The options as values; an interface is empty for a network without one."""

    physical_interfaces: Mapping[str, str]
    local_ip: str = ""

    @classmethod
    def read(cls, conf: Any) -> Settings:
        group = conf[GROUP]
        local_ip = str(ipaddress.ip_address(group.local_ip)) if group.local_ip else ""
        return cls(dict(group.physical_interfaces), local_ip)

    def shared_interfaces(self) -> list[str]:
        """Interfaces that stand behind more than one network: they can be on one bridge only."""
        counted = Counter(name for name in self.physical_interfaces.values() if name)
        return sorted(name for name, times in counted.items() if times > 1)


def list_opts() -> list[tuple[str, list[Any]]]:
    return [(GROUP, OPTIONS)]
