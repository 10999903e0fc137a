"""Service ports on Linux bridges: devices of the host, which other programs made and which stay."""

from __future__ import annotations

from dataclasses import dataclass

from drivers.linuxbridge.commands import BridgeChange, BridgeKernel, TapChange, fix_mac
from drivers.linuxbridge.segments import service_of, stamp_of, with_stamp
from netplugin.api.errors import Conflict
from netplugin.host.link_values import Link
from netplugin.service_devices import refuse_enslaved


@dataclass(frozen=True)
class PlaceDevice(TapChange):
    """Mark and guard a device of the host, and put it on its bridge. Its rules are there before."""

    def describe(self) -> str:
        macs = f"MAC {self.tap.mac} fixed" if self.tap.mac else "MACs learned"
        return f"mark and guard device {self.tap.name} and put it on {self.tap.bridge}, {macs}"

    def apply(self, kernel: BridgeKernel, deadline: float) -> None:
        tap, links = self.tap, kernel.links
        link = links.get(tap.name)
        if link is None:
            return  # the read-back finds the rules without the device, which is the port's fault
        mark = service_of(link)
        if mark is None or mark.port_id != tap.port_id:
            refuse_used(kernel, link)
        links.set(tap.name, alias=with_stamp(tap.mark, tap.stamp or stamp_of(link)))
        kernel.tc.set_guard(link.index, tap.guard)
        links.set(tap.name, master=tap.bridge)
        links.set(tap.name, learning=tap.learns(fix_mac(kernel, link.index, tap.mac)))


@dataclass(frozen=True)
class ReleaseDevice(BridgeChange):
    """Take a device of the host off its bridge. The mark goes last: until then the device is found again."""

    name: str

    def describe(self) -> str:
        return f"take device {self.name} off its bridge, and remove its guard and its mark"

    def touches(self) -> frozenset[str]:
        return frozenset({self.name})

    def apply(self, kernel: BridgeKernel, deadline: float) -> None:
        link = kernel.links.get(self.name)
        mark = service_of(link) if link else None
        if link is None or mark is None or mark.port_id not in self.ports:
            return
        if link.master and kernel.ours(link.master) is not None:
            kernel.links.set(self.name, master="")
        kernel.tc.delete_guard(link.index)
        kernel.links.set(self.name, alias="")


def refuse_used(kernel: BridgeKernel, link: Link) -> None:
    """Refuse a device that another program or another service port uses. Raises: Conflict."""
    mark = service_of(link)
    if mark is not None:
        raise Conflict(
            f"device {link.name} is of service port {mark.port_id}",
            step="validate",
            fix=f"DELETE /v1/service-ports/{mark.port_id}, or name another device",
        )
    if link.master and kernel.ours(link.master) is None:
        refuse_enslaved(link)
    if link.alias:
        raise Conflict(
            f"device {link.name} has the alias {link.alias!r}, where the mark of netplugin would be",
            step="validate",
            fix=f"ip link set {link.name} alias ''",
        )
