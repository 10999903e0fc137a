"""What the dpdkvhostuser backend can do to a host, each step as a value."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from drivers.dpdkvhostuser.wanted import TunnelPort, Uplink, VhostPort
from netplugin.backend import Change, Overlay
from netplugin.models import PortSpec


@dataclass(frozen=True)
class CreateBridge(Change):
    name: str
    mark: str

    def describe(self) -> str:
        return f"create bridge {self.name} for {self.mark}"


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
        devices, bond = ", ".join(self.uplink.devices), self.uplink.bond
        how = f"{devices}, {bond}" if bond else devices
        return f"add uplink {self.uplink.name} ({how}) to {self.uplink.bridge}"


@dataclass(frozen=True)
class SetUplink(Change):
    uplink: Uplink

    def describe(self) -> str:
        uplink = self.uplink
        return f"set uplink {uplink.name}: {', '.join(uplink.devices)}, MTU {uplink.mtu}" + (
            f", {uplink.bond}" if uplink.bond else ""
        )


@dataclass(frozen=True)
class RemoveUplink(Change):
    bridge: str
    name: str

    def describe(self) -> str:
        return f"remove uplink {self.name} from {self.bridge}"


@dataclass(frozen=True)
class AddTunnelPort(Change):
    port: TunnelPort

    def describe(self) -> str:
        return f"add {self.port.type} port {self.port.name} to {self.port.bridge}"


@dataclass(frozen=True)
class SetTunnelPort(Change):
    port: TunnelPort

    def describe(self) -> str:
        return f"set {self.port.type} port {self.port.name}"


@dataclass(frozen=True)
class RemoveTunnelPort(Change):
    bridge: str
    name: str

    def describe(self) -> str:
        return f"remove port {self.name} from {self.bridge}"


@dataclass(frozen=True)
class AddPort(Change):
    port: VhostPort

    def describe(self) -> str:
        return f"add port {self.port.name} to {self.port.bridge}, tag {self.port.tag}, MTU {self.port.mtu}"


@dataclass(frozen=True)
class SetPort(Change):
    port: VhostPort

    def describe(self) -> str:
        rate = f", sends {self.port.sends.kbps} kbit/s" if self.port.sends else ""
        return f"set port {self.port.name}: tag {self.port.tag}, MTU {self.port.mtu}, ids{rate}"


@dataclass(frozen=True)
class RemovePort(Change):
    bridge: str
    name: str

    def describe(self) -> str:
        return f"remove port {self.name} from {self.bridge}"


@dataclass(frozen=True)
class SetQos(Change):
    """Set what the VM may receive; the port's other columns stay as they are."""

    port: VhostPort

    def describe(self) -> str:
        rate = f"{self.port.receives.kbps} kbit/s" if self.port.receives else "any rate"
        return f"let port {self.port.name} receive {rate}"


@dataclass(frozen=True)
class DropQos(Change):
    """Remove a row of QoS of ours that no port uses."""

    row: UUID

    def describe(self) -> str:
        return f"remove QoS {self.row}, which no port uses"


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
class SetNetwork(Change):
    """Bring the flows of one VXLAN network to what is wanted; those that are right stay."""

    bridge: str
    overlay: Overlay

    def describe(self) -> str:
        spec = self.overlay.spec
        return (
            f"set flows of network {self.overlay.network_id}: VNI {spec.vni} is VLAN "
            f"{self.overlay.local_vlan}, {len(spec.peers)} peers"
        )


@dataclass(frozen=True)
class DropFlows(Change):
    """Remove flows of ours that belong to nothing any more."""

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
