"""What the dpdkvhostuser backend can do to a host, each step as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from netplugin.backend import Change
from netplugin.host.ovs_rows import BACKEND_MARK, PORT_MARK, UPLINK_MARK, OvsPort
from netplugin.models import PortSpec

PORT_TYPE = "dpdkvhostuserclient"
BACKEND = "dpdkvhostuser"


@dataclass(frozen=True)
class VhostPort:
    """All that the rows of one port say; made from its spec alone."""

    port_id: str
    name: str
    bridge: str
    tag: int
    socket: str
    mtu: int
    mac: str
    vm_id: str

    def port_columns(self) -> dict[str, Any]:
        """A flat port is an access port of tag 0: without a tag it would be a trunk of all VLANs."""
        return {
            "tag": [self.tag],
            "vlan_mode": ["access"],
            "external_ids": {PORT_MARK: self.port_id, BACKEND_MARK: BACKEND},
        }

    def interface_columns(self) -> dict[str, Any]:
        """The ids are those of OVS's integration guide, so that other tools know the NIC."""
        return {
            "type": PORT_TYPE,
            "options": {"vhost-server-path": self.socket},
            "mtu_request": [self.mtu],
            "external_ids": {
                "iface-id": self.port_id,
                "attached-mac": self.mac,
                "vm-uuid": self.vm_id,
                PORT_MARK: self.port_id,
            },
        }

    def must_be_remade(self, row: OvsPort) -> bool:
        """Whether the port must go and come again: OVS changes neither of these on a live port."""
        interface = row.interface
        return (
            interface is None
            or row.name != self.name
            or row.bridge != self.bridge
            or interface.type != PORT_TYPE
            or dict(interface.options).get("vhost-server-path") != self.socket
        )

    def differs(self, row: OvsPort) -> bool:
        """Whether a column that can be changed live is not as wanted."""
        interface = row.interface
        return (
            interface is None
            or row.tag != self.tag
            or row.vlan_mode != "access"
            or interface.mtu_request != self.mtu
            or dict(interface.options) != self.interface_columns()["options"]
            or not _within(self.port_columns()["external_ids"], row.external_ids)
            or not _within(self.interface_columns()["external_ids"], interface.external_ids)
        )


def _within(wanted: Mapping[str, str], found: Mapping[str, str]) -> bool:
    return all(found.get(key) == value for key, value in wanted.items())


@dataclass(frozen=True)
class Uplink:
    """The DPDK port that joins a bridge to its physical network."""

    name: str
    bridge: str
    physical_network: str
    device: str
    mtu: int

    def interface_columns(self) -> dict[str, Any]:
        return {
            "type": "dpdk",
            "options": {"dpdk-devargs": self.device},
            "mtu_request": [self.mtu],
            "external_ids": {UPLINK_MARK: self.physical_network},
        }

    def port_columns(self) -> dict[str, Any]:
        return {"external_ids": {UPLINK_MARK: self.physical_network}}


@dataclass(frozen=True)
class CreateBridge(Change):
    name: str
    physical_network: str

    def describe(self) -> str:
        return f"create bridge {self.name} for {self.physical_network}"


@dataclass(frozen=True)
class SecureBridge(Change):
    """Put ``fail_mode`` back: standalone would leave the filters open after a vswitchd restart."""

    name: str

    def describe(self) -> str:
        return f"set fail_mode of bridge {self.name} to secure"


@dataclass(frozen=True)
class RemoveBridge(Change):
    name: str

    def describe(self) -> str:
        return f"remove bridge {self.name}, which no port needs any more"


@dataclass(frozen=True)
class AddUplink(Change):
    uplink: Uplink

    def describe(self) -> str:
        return f"add uplink {self.uplink.name} ({self.uplink.device}) to {self.uplink.bridge}"


@dataclass(frozen=True)
class SetUplink(Change):
    uplink: Uplink

    def describe(self) -> str:
        return f"set MTU of uplink {self.uplink.name} to {self.uplink.mtu}"


@dataclass(frozen=True)
class RemoveUplink(Change):
    bridge: str
    name: str

    def describe(self) -> str:
        return f"remove uplink {self.name} from {self.bridge}"


@dataclass(frozen=True)
class AddPort(Change):
    port: VhostPort

    def describe(self) -> str:
        return f"add port {self.port.name} to {self.port.bridge}, tag {self.port.tag}, MTU {self.port.mtu}"


@dataclass(frozen=True)
class SetPort(Change):
    port: VhostPort

    def describe(self) -> str:
        return f"set port {self.port.name}: tag {self.port.tag}, MTU {self.port.mtu}, ids"


@dataclass(frozen=True)
class RemovePort(Change):
    bridge: str
    name: str

    def describe(self) -> str:
        return f"remove port {self.name} from {self.bridge}"


@dataclass(frozen=True)
class SetFilter(Change):
    """Replace the flows of one port; which ofport it has is known when it is applied."""

    bridge: str
    name: str
    port_id: str
    spec: PortSpec

    def describe(self) -> str:
        count = len(self.spec.port_security.allowed_addresses)
        what = f"{count} addresses" if self.spec.port_security.enabled else "no filter"
        return f"set flows of port {self.name} on {self.bridge} ({what})"


@dataclass(frozen=True)
class SetBridgeFlows(Change):
    """Replace the flows of the bridge's own, for the ports that are no VM's."""

    bridge: str

    def describe(self) -> str:
        return f"set the base flows of {self.bridge}"


@dataclass(frozen=True)
class DropFlows(Change):
    """Remove flows of ours that belong to no port any more."""

    bridge: str
    cookies: tuple[int, ...]

    def describe(self) -> str:
        return f"remove flows left on {self.bridge} ({', '.join(f'{c:#x}' for c in self.cookies)})"


@dataclass(frozen=True)
class RemoveSocket(Change):
    """Remove the socket file that QEMU left; never while the port is only being remade."""

    path: str

    def describe(self) -> str:
        return f"remove socket {self.path}"
