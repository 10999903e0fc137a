"""Names of bridges that the caller chooses (``PhysicalNetworkSpec.bridge``).

All other modules know a bridge by the name that is derived from its segment: ``BridgeNames`` translates
what was read. A bridge with another name has the derived one as its alternative name (since Linux 5.5),
by which the kernel finds it in requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Self

from drivers.linuxbridge.commands import BridgeChange, BridgeKernel
from drivers.linuxbridge.segments import Segment, SegmentDevice, bridge_mark
from netplugin.api.errors import Conflict, InvalidRequest, NetpluginError
from netplugin.host.link_values import Link
from netplugin.host.names import is_our_device, provisional_mac


@dataclass(frozen=True)
class BridgeNames:
    """The derived name of each bridge of ours that has another one on the host, by that one."""

    derived: Mapping[str, str]

    @classmethod
    def among(cls, links: Iterable[Link], chosen: Mapping[str, str]) -> Self:
        """``chosen``: the names that bridges should have, by their derived ones."""
        links = list(links)
        there = {link.name for link in links}
        found = {link.name: derived_name(link, chosen) for link in links}
        return cls({name: own for name, own in found.items() if own and own not in there})

    def link(self, link: Link) -> Link:
        """Return the link with derived names, of itself and of its bridge."""
        master = self.derived.get(link.master, link.master) if link.master else link.master
        return replace(link, name=self.derived.get(link.name, link.name), master=master)

    def members(self, found: Mapping[str, Mapping[str, int]]) -> dict[str, Mapping[str, int]]:
        """Return the members of bridges by their derived names."""
        return {self.derived.get(name, name): members for name, members in found.items()}

    @property
    def on_host(self) -> dict[str, str]:
        """The names on the host, by the derived ones."""
        return {own: name for name, own in self.derived.items()}


def derived_name(link: Link, chosen: Mapping[str, str]) -> str | None:
    """Return the derived name of a bridge of ours; None for other links.

    It is known by its mark with its alternative name, or with the name that was chosen. An agent that
    died before it set the mark leaves the MAC address (``netplugin.host.names.provisional_mac``).
    """
    if link.kind != "bridge":
        return None
    mark = bridge_mark(link.alias)
    if mark is not None:
        own = mark[0].bridge
        return own if own in (link.name, *link.altnames) or chosen.get(own) == link.name else None
    unmarked = (own for own, name in chosen.items() if name == link.name and link.alias is None)
    return next((own for own in unmarked if link.address == provisional_mac(own)), None)


@dataclass(frozen=True)
class NameBridge(BridgeChange):
    """Give a bridge of ours the name that was chosen, and the alternative name by which we find it."""

    described_as = "name bridge {self.found} {self.device.given}, also {self.device.name}"
    device: SegmentDevice
    found: str

    def touches(self) -> frozenset[str]:
        return frozenset({self.device.name, self.device.given, self.found})

    def apply(self, kernel: BridgeKernel, deadline: float) -> None:
        device, links = self.device, kernel.links
        link = links.get(self.found)
        if link is None or derived_name(link, {device.name: self.found}) != device.name:
            return
        if self.found != device.given:
            links.set(self.found, up=False)  # kernels before 6.2 rename no device that is up
            try:
                links.rename(self.found, device.given)
            except NetpluginError:
                links.set(self.found, up=True)
                raise
            links.set(device.given, up=True)
        if device.name not in link.altnames:
            links.add_altname(device.given, device.name)
        links.set(device.given, alias=device.alias)


def refuse_name(kernel: BridgeKernel, network: str, name: str) -> None:
    """Refuse a name for the bridge of a flat network that a device has, or that we may derive.

    Raises: Conflict, InvalidRequest, HostError, OperationTimeout.
    """
    own = Segment(network).bridge
    if is_our_device(name):
        message = f"{name} is, or looks like, a name of the agent's own devices"
        raise InvalidRequest.of_field("bridge", message)
    link = kernel.links.get(name)
    if link is not None and derived_name(link, {own: name}) != own:
        fix = f"choose another name; or look what it is: ip -d link show {name}"
        raise Conflict.of_field("bridge", f"a device named {name} exists and is not ours", fix=fix)
