"""The options of the linuxbridge backend."""

from __future__ import annotations

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
        help="The network interface behind each physical network, like physnet1:eth1,physnet2:bond0. "
        "The agent puts it on a bridge of its own when the first port comes and takes it off with "
        "the last; MTU, state and addresses stay the operator's: it must be up, without IP "
        "addresses and on no other bridge. Nothing after the colon (physnet3:) means a network "
        "that stays on this host, a bridge without an interface.",
    ),
    cfg.HostAddressOpt(
        "local_ip",
        help="Address of this host that VXLAN tunnels are to end at. VXLAN is not available on this "
        "backend yet: the option is there so that a configuration can be complete.",
    ),
]


@dataclass(frozen=True)
class Settings:
    """The options as values; an interface is empty for a network without one."""

    physical_interfaces: Mapping[str, str]

    @classmethod
    def read(cls, conf: Any) -> Settings:
        return cls(dict(conf[GROUP].physical_interfaces))

    def shared_interfaces(self) -> list[str]:
        """Interfaces that stand behind more than one network: they can be on one bridge only."""
        counted = Counter(name for name in self.physical_interfaces.values() if name)
        return sorted(name for name, times in counted.items() if times > 1)


def list_opts() -> list[tuple[str, list[Any]]]:
    return [(GROUP, OPTIONS)]
