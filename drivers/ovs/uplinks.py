"""The desired OVSDB rows of the uplink of a physical network: a DPDK device, or a bond of several."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from drivers.ovs.ports import PortRows
from netplugin.host.names import UPLINK, device_name
from netplugin.host.ovs import OvsSettings
from netplugin.host.ovs_rows import UPLINK_MARK

#: Values of [ovs] bonds, and the columns ``bond_mode`` and ``lacp`` of Port.
BOND_COLUMNS: Mapping[str, tuple[str, str]] = {
    "active-backup": ("active-backup", "off"),
    "balance-slb": ("balance-slb", "off"),
    "lacp": ("balance-tcp", "active"),
}


@dataclass(frozen=True)
class OvsUplink(PortRows):
    """The DPDK port that connects a bridge to its physical network: a device or a bond.

    Other ``options`` of its interfaces, such as ``n_rxq``, belong to the operator. So does the MTU
    of existing interfaces, because a change stops the NIC for all its users; unless the API made the
    network with this MTU (``sets_mtu``).
    """

    kind: ClassVar[str] = "uplink"
    merged: ClassVar[Collection[str]] = ("external_ids", "options")
    shared_mark: ClassVar[str] = UPLINK_MARK

    name: str
    bridge: str
    physical_network: str
    devices: tuple[str, ...]
    bond: str | None
    #: The MTU of a new interface.
    mtu: int
    sets_mtu: bool = False

    @staticmethod
    def of(settings: OvsSettings, bridge: str, network: str) -> OvsUplink | None:
        """The uplink of a network; None if the network has no devices."""
        devices = settings.uplinks.get(network, ())
        if not devices:
            return None
        several = len(devices) > 1
        identity = f"bond {network}" if several else devices[0]
        return OvsUplink(
            name=device_name(UPLINK, identity),
            bridge=bridge,
            physical_network=network,
            devices=devices,
            bond=settings.bonds.get(network, "active-backup") if several else None,
            mtu=settings.mtu_of_uplinks(network),
            sets_mtu=network in settings.made and network in settings.uplink_mtu,
        )

    def port_columns(self) -> dict[str, Any]:
        mode, lacp = BOND_COLUMNS[self.bond] if self.bond else (None, None)
        return {
            "bond_mode": [mode] if mode else [],
            "lacp": [lacp] if lacp else [],
            "external_ids": {UPLINK_MARK: self.physical_network},
        }

    def interfaces(self, *, is_new: bool = False) -> dict[str, dict[str, Any]]:
        mtu = {"mtu_request": [self.mtu]} if self.sets_mtu or is_new else {}
        return {
            device_name(UPLINK, device): {
                "type": "dpdk",
                "options": {"dpdk-devargs": device},
                "external_ids": {UPLINK_MARK: self.physical_network},
                **mtu,
            }
            for device in self.devices
        }

    def awaited_mtu(self, *, is_new: bool) -> int | None:
        return self.mtu if is_new or self.sets_mtu else None

    def summary(self, *, is_new: bool) -> str:
        bond = f", {self.bond}" if self.bond else ""
        mtu = f", MTU {self.mtu}" if self.awaited_mtu(is_new=is_new) else ""
        return f"{', '.join(self.devices)}{bond}{mtu}"
