"""Options of the linuxbridge backend."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from oslo_config import cfg, types

from drivers.linuxbridge.segments import Segment
from netplugin.api.physical_models import BridgeUplinkSpec, PhysicalNetworkSpec
from netplugin.host.physical_networks import Networks, linux_bridge_of

GROUP = "linuxbridge"
_MTU = 1500  # of a kept segment whose network has no mtu
OPTIONS = [
    cfg.Opt(
        "physical_interfaces",
        type=types.Dict(types.String()),
        default={},
        help="The uplink interface (a NIC, or a bond that you made) of each physical network, like "
        "physnet1:eth1,physnet2:bond0. For a flat network, the agent adds the interface to a bridge of its "
        "own with the first port and removes it with the last; the interface must have no IP addresses and "
        "be on no other bridge. For a VLAN network, the agent creates a VLAN device on it, and it may have "
        "addresses. The operator brings the interface up and sets an MTU not below that of the largest "
        "network. A name without an interface (physnet3:) is for networks that stay on this host: their "
        "bridges have no uplink.",
    ),
    cfg.IPOpt(
        "local_ip",
        help="Local address of VXLAN tunnels, IPv4 or IPv6, like 10.1.0.7. It must be on an interface of "
        "this host that is up and whose MTU exceeds that of the VXLAN networks by at least 50 bytes (70 with "
        "IPv6). The other hosts must list it as a peer. If it is not set, this backend has no VXLAN "
        "networks.",
    ),
]


@dataclass(frozen=True)
class Settings:
    """The options as values. A network without an interface has an empty name."""

    physical_interfaces: Mapping[str, str]
    local_ip: str = ""
    #: The networks whose flat segment exists while no port does, with its MTU in bytes.
    kept: Mapping[str, int] = field(default_factory=dict)
    #: The names that callers chose for the bridges of flat networks, by the derived ones.
    bridge_names: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, conf: Any) -> Settings:
        group = conf[GROUP]
        local_ip = str(ipaddress.ip_address(group.local_ip)) if group.local_ip else ""
        return cls(dict(group.physical_interfaces), local_ip)

    def networks(self) -> Networks:
        """The physical networks of the options."""
        return {
            name: PhysicalNetworkSpec.model_construct(
                linuxbridge=BridgeUplinkSpec.model_construct(interface=interface or None)
            )
            for name, interface in self.physical_interfaces.items()
        }

    def with_networks(self, made: Networks) -> Settings:
        """These settings with the networks that the API made."""
        here = {name: spec for name, spec in made.items() if spec.linuxbridge}
        interfaces = {n: spec.linuxbridge.interface or "" for n, spec in here.items() if spec.linuxbridge}
        kept = {name: spec.mtu or _MTU for name, spec in here.items() if spec.keep}
        chosen = {Segment(n).bridge: name for n, spec in here.items() if (name := linux_bridge_of(spec))}
        known = {**self.physical_interfaces, **interfaces}
        return replace(self, physical_interfaces=known, kept=kept, bridge_names=chosen)

    def shared_interfaces(self) -> list[str]:
        """Return interfaces listed for more than one network: an interface can be on one bridge only."""
        counted = Counter(name for name in self.physical_interfaces.values() if name)
        return sorted(name for name, times in counted.items() if times > 1)


def list_opts() -> list[tuple[str, list[Any]]]:
    return [(GROUP, OPTIONS)]
