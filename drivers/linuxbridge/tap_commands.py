"""Changes that the backend can make to the devices of ports: its taps, and devices of the host."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass

from drivers.linuxbridge.commands import (
    BridgeChange,
    BridgeKernel,
    DeviceChange,
    RemoveDevice,
    device_in_the_way,
)
from drivers.linuxbridge.model import Tap
from drivers.linuxbridge.segments import PORT_MARK, marked_port, service_of, stamp_of, with_stamp
from netplugin.api.errors import Conflict
from netplugin.host.link_values import Link
from netplugin.service_devices import refuse_enslaved


@dataclass(frozen=True)
class TapChange(BridgeChange, ABC):
    tap: Tap

    def touches(self) -> frozenset[str]:
        return frozenset({self.tap.name, self.tap.bridge})

    @property
    def macs(self) -> str:
        """What the bridge is to have at the tap, in words."""
        tap = self.tap
        found = f"MAC {tap.mac} fixed" if tap.mac else "MACs learned"
        if tap.left_to_vf:
            found = f"MAC {tap.left_to_vf} left to the VF"
        if tap.vf_unknown:
            found = "MACs as they are"
        return found + (", closed to what it is not known to have" if tap.shut else "")

    def set_macs(self, kernel: BridgeKernel, index: int) -> None:
        """Set it at the tap with this index, on its bridge."""
        tap = self.tap
        if tap.vf_unknown:
            return
        learning = tap.learns(fix_mac(kernel, index, tap.mac))
        kernel.links.set(tap.name, learning=learning, flooding=not tap.shut)
        if tap.left_to_vf:
            kernel.fdb.release(index, tap.left_to_vf)


@dataclass(frozen=True)
class CreateTap(TapChange):
    """Create the tap, down and on no bridge: its filter and its rates are set first."""

    def describe(self) -> str:
        queues = "several queues" if self.tap.multi_queue else "one queue"
        return f"create tap {self.tap.name} with {queues}"

    def apply(self, kernel: BridgeKernel, deadline: float) -> None:
        tap, links = self.tap, kernel.links
        there = links.get(tap.name)
        if there is None:
            links.create_tap(
                tap.name,
                tap.alias,
                address=tap.address,
                multi_queue=tap.multi_queue,
                mtu=tap.mtu,
                altname=tap.derived if tap.is_named else "",
                group=tap.group or 0,
            )
        elif tap.is_named and marked_port(there.alias or "", PORT_MARK) == tap.port_id:
            links.add_altname(tap.name, tap.derived)  # it is only not found by the port's ID
        else:
            raise device_in_the_way(tap.name)


@dataclass(frozen=True)
class RenameTap(TapChange):
    """Give a tap its name back."""

    described_as = "rename {self.found} to {self.tap.name}"
    found: str

    def touches(self) -> frozenset[str]:
        return super().touches() | {self.found}

    def apply(self, kernel: BridgeKernel, deadline: float) -> None:
        if kernel.links.get(self.tap.name) is not None:
            raise device_in_the_way(self.tap.name)
        if kernel.ours(self.found) is not None:
            kernel.links.rename(self.found, self.tap.name)


@dataclass(frozen=True)
class KeepForRoot(TapChange):
    """Let root alone open the tap, after a process that had it open has changed that."""

    described_as = "let root alone open tap {self.tap.name}, and keep it"

    def apply(self, kernel: BridgeKernel, deadline: float) -> None:
        if kernel.ours(self.tap.name) is not None:
            kernel.links.keep_for_root(self.tap.name, multi_queue=self.tap.multi_queue)


@dataclass(frozen=True)
class SetMacs(TapChange):
    """Set what the bridge knows of a tap: the MACs that are there, and what it sends to it."""

    described_as, closes = "let {self.tap.bridge} have at tap {self.tap.name}: {self.macs}", True

    def apply(self, kernel: BridgeKernel, deadline: float) -> None:
        if (link := kernel.ours(self.tap.name)) is not None:
            self.set_macs(kernel, link.index)


@dataclass(frozen=True)
class MoveMac(SetMacs):
    """Only where the bridge has the MAC changes, because the VM took its VF or gave it back."""

    follows_guest = True


@dataclass(frozen=True)
class SetTap(TapChange):
    """Put a tap on its bridge, and set it up: what opens the port."""

    described_as = (
        "put tap {self.tap.name} on {self.tap.bridge}, MTU {self.tap.mtu}, up, no IPv6, {self.macs}"
    )

    def apply(self, kernel: BridgeKernel, deadline: float) -> None:
        tap, links = self.tap, kernel.links
        link, bridge = kernel.ours(tap.name), kernel.ours(tap.bridge)
        if link is None or bridge is None:
            return
        links.refuse_ipv6(tap.name)
        alias = tap.alias if tap.stamp else None
        links.set(tap.name, mtu=tap.mtu, alias=alias, group=tap.group, master=tap.bridge)
        self.set_macs(kernel, link.index)
        links.set(tap.name, up=True)


@dataclass(frozen=True)
class RemoveTap(RemoveDevice):
    described_as = "remove tap {self.name}"


@dataclass(frozen=True)
class CutOff(RemoveTap):
    """Take the tap from a process that changes its MAC again and again, faster than it is set back."""

    described_as = f"{RemoveTap.described_as}: its MAC is changed again and again. Start its VM again"
    closes = True


def fix_mac(kernel: BridgeKernel, index: int, mac: str) -> frozenset[str]:
    """Fix a MAC at a bridge port, unless it is empty or another port has it; return what is fixed there."""
    fdb = kernel.fdb
    for other in fdb.fixed(index) - {mac}:
        fdb.release(index, other)
    if mac == "" or fdb.holder(index, mac) not in (None, index):
        return frozenset()
    fdb.fix(index, mac)
    return frozenset({mac})


# -- service ports: devices of the host, which other programs made and which stay ------------------


@dataclass(frozen=True)
class PlaceDevice(TapChange):
    """Mark and guard a device of the host, and put it on its bridge. Its rules are there before."""

    described_as = "mark and guard device {self.tap.name} and put it on {self.tap.bridge}, {self.macs}"

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
class ReleaseDevice(DeviceChange):
    """Take a device of the host off its bridge. The mark goes last: until then the device is found again."""

    described_as = "take device {self.name} off its bridge, and remove its guard and its mark"

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
