"""Apply the changes of a plan to the kernel, and report the ports that failed."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from drivers.linuxbridge import commands as c
from drivers.linuxbridge import filters
from drivers.linuxbridge.segments import SegmentDevice, is_ours
from netplugin.api.errors import NetpluginError, OperationTimeout
from netplugin.backend import Applied, Change
from netplugin.host.fdb import Fdb
from netplugin.host.link_messages import Bridge, Ifb, Link
from netplugin.host.links import Links
from netplugin.host.nftables import Command, Nftables
from netplugin.host.processes import remaining
from netplugin.host.tc import Tc
from netplugin.host.vxlan import VxlanFilter

# -- The kernel interfaces that the backend uses. Tests substitute models. ------------------------


@dataclass(frozen=True)
class BridgeKernel:
    links: Links = field(default_factory=Links)
    fdb: Fdb = field(default_factory=Fdb)
    tc: Tc = field(default_factory=Tc)
    nft: Nftables = field(default_factory=lambda: Nftables(filters.FAMILY, filters.TABLE))
    vxlan: VxlanFilter = field(default_factory=lambda: VxlanFilter(""))


# -- Apply the changes of a plan and report the ports that failed. --------------------------------


LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Writer:
    kernel: BridgeKernel
    deadline: float
    #: The mark of the store to write with the rules; empty: leave the existing mark.
    store_mark: str = ""
    failed: dict[str, NetpluginError] = field(default_factory=dict)

    def write(self, changes: Sequence[Change]) -> Applied:
        timings = {"netlink": 0.0, "nftables": 0.0}
        for of_rules, group in groupby(changes, lambda ch: isinstance(ch, c.FilterChange)):
            start = time.monotonic()
            if of_rules:
                self._rules(list(group))
            else:
                self._links(group)
            timings["nftables" if of_rules else "netlink"] += (time.monotonic() - start) * 1e3
        return Applied(self.failed, timings)

    # -- links -----------------------------------------------------------------------------------

    def _links(self, changes: Iterable[Change]) -> None:
        for change in changes:
            if self._hopeless(change):
                continue
            try:
                if not remaining(self.deadline):
                    raise OperationTimeout("the time for the operation is over", step="netlink")
                self._link(change)
            except NetpluginError as error:
                self._fail(change, error)

    def _link(self, change: Change) -> None:
        links = self.kernel.links
        match change:
            case c.CreateDevice(device=device):
                self._create(device)
            case c.SetDevice(device=device):
                self._set(device)
            case c.RemoveDevice():
                self._remove(change.name)
            case c.AddUplink():
                links.set(change.interface, master=change.bridge)
            case c.RemoveUplink():
                interface = links.get(change.interface)
                if interface is not None and interface.master == change.bridge:
                    links.set(change.interface, master="")
            case c.AddPeer() | c.RemovePeer():
                self._peer(change)
            case c.CreateTap(tap=tap):
                links.create_tap(tap.name, tap.alias, multi_queue=tap.multi_queue, mtu=tap.mtu)
            case c.SetTap(tap=tap):
                self._plug(tap)
            case c.SetGuard():
                if (link := self._ours(change.device)) is not None:
                    self.kernel.tc.set_guard(link.index, change.program)
            case c.RemoveTap():
                self._remove(change.name)
            case _:
                self._rate(change)

    def _create(self, device: SegmentDevice) -> None:
        links = self.kernel.links
        links.create(device.name, device.made, alias=device.alias, address=device.address, mtu=device.mtu)
        if isinstance(device.made, Bridge | Ifb):
            links.set(device.name, up=True)

    def _set(self, device: SegmentDevice) -> None:
        if self._ours(device.name) is None:
            return
        links, made = self.kernel.links, device.made
        links.refuse_ipv6(device.name)
        links.set(
            device.name,
            mtu=device.mtu,
            alias=device.alias,
            bridge=made if isinstance(made, Bridge) else None,
            up=True,
        )

    def _plug(self, tap: c.Tap) -> None:
        links, fdb = self.kernel.links, self.kernel.fdb
        links.refuse_ipv6(tap.name)
        alias = tap.alias if tap.stamp else None
        links.set(tap.name, mtu=tap.mtu, alias=alias, master=tap.bridge)
        link = self._ours(tap.name)
        if link is None:
            return  # the read-back reports it
        index = link.index
        for mac in fdb.fixed(index) - {tap.mac}:
            fdb.release(index, mac)
        fixed = tap.mac != "" and fdb.holder(index, tap.mac) in (None, index)
        if fixed:
            fdb.fix(index, tap.mac)
        links.set(tap.name, learning=not fixed, up=True)

    def _remove(self, name: str) -> None:
        if self._ours(name) is not None:
            self.kernel.links.delete(name)

    def _ours(self, name: str) -> Link | None:
        """Return the link, read just before it is changed; None if it is missing or not ours."""
        link = self.kernel.links.get(name)
        return link if link is not None and is_ours(link) else None

    def _peer(self, change: c.AddPeer | c.RemovePeer) -> None:
        link = self._ours(change.device)
        if link is None:
            return  # the read-back reports it
        if isinstance(change, c.AddPeer):
            self.kernel.fdb.add_peer(link.index, change.peer)
        else:
            self.kernel.fdb.remove_peer(link.index, change.peer)

    # -- rates -----------------------------------------------------------------------------------

    def _rate(self, change: Change) -> None:
        tc = self.kernel.tc
        match change:
            case c.SetRate():
                if (link := self._ours(change.device)) is not None:
                    tc.set_root(link.index, change.rate)
            case c.RemoveRate():
                if (link := self._ours(change.device)) is not None:
                    tc.delete_root(link.index)
            case c.SetRedirect():
                link, shaper = self._ours(change.tap), self._ours(change.shaper)
                if link is not None and shaper is not None:
                    tc.set_redirect(link.index, shaper.index)
            case c.RemoveRedirect():
                if (link := self._ours(change.tap)) is not None:
                    tc.delete_redirect(link.index)
            case _:
                raise AssertionError(change)

    # -- rules -----------------------------------------------------------------------------------

    def _rules(self, changes: Sequence[Change]) -> None:
        """Commit all changes in one transaction; if the kernel refuses it, commit them one by one.

        The second pass attributes the error to a port."""
        changes = [change for change in changes if not self._hopeless(change)]
        for change in changes:
            self._sources(change)
        changes = [change for change in changes if not isinstance(change, c.SourcesChange)]
        commands = [command for change in changes for command in self._commands(change)]
        if self.store_mark and not any(isinstance(change, c.RemoveTable) for change in changes):
            chain = filters.store_chain(self.store_mark)
            commands += self.kernel.nft.set_chain(filters.STORE, chain) if commands else []
        try:
            self.kernel.nft.commit(commands, self.deadline)
        except NetpluginError as error:
            if error.code == "host_error" and len(changes) > 1:
                for change in changes:
                    self._rules([change])
                return
            for change in changes:
                self._fail(change, error)

    def _sources(self, change: Change) -> None:
        """Update the VXLAN source filter, one transaction per network: few networks change at a time."""
        vxlan = self.kernel.vxlan
        try:
            match change:
                case c.AllowPeers():
                    vxlan.allow(change.network, change.peers, change.gone, self.deadline)
                case c.ForgetPeers():
                    vxlan.forget(change.network, change.peers, self.deadline)
                case c.RemoveVxlanTable():
                    vxlan.remove(self.deadline)
        except NetpluginError as error:
            self._fail(change, error)

    def _commands(self, change: Change) -> list[Command]:
        nft = self.kernel.nft
        match change:
            case c.SetBase():
                return [
                    nft.add_table(),
                    nft.command("add", "map", name=filters.PORTS, type="ifname", map="verdict"),
                    *(cmd for name in change.remake for cmd in nft.delete_chain(name)),
                    *(cmd for name, ch in filters.BASE.items() for cmd in nft.set_chain(name, ch)),
                ]
            case c.SetFilter():
                name = change.name
                chain = filters.port_chain(change.port_id, change.spec)
                unlink = [nft.delete_element(filters.PORTS, name)] * change.relink
                return [
                    *nft.set_chain(name, chain),
                    *unlink,
                    nft.add_jump(filters.PORTS, name, name),
                ]
            case c.RemoveFilter():
                unlink = [nft.delete_element(filters.PORTS, change.name)] * change.linked
                return [*unlink, *(nft.delete_chain(change.name) if change.chain else ())]
            case c.RemoveTable():
                return [nft.delete_table()]
        raise AssertionError(change)

    # -- failures --------------------------------------------------------------------------------

    def _hopeless(self, change: Change) -> bool:
        """Whether every port that the change is for has already failed."""
        return bool(change.ports) and all(port in self.failed for port in change.ports)

    def _fail(self, change: Change, error: NetpluginError) -> None:
        if not change.ports:
            LOG.warning("linuxbridge: could not %s: %s", change.describe(), error)
        for port in change.ports:
            self.failed.setdefault(port, error.for_port(port))


def touched(changes: Iterable[Change]) -> frozenset[str]:
    """Return the names of the links that the changes affect."""
    names: set[str] = set()
    for change in changes:
        match change:
            case c.CreateTap(tap=tap) | c.SetTap(tap=tap):
                names |= {tap.name, tap.bridge}
            case c.CreateDevice(device=device) | c.SetDevice(device=device):
                names.add(device.name)
            case c.AddUplink() | c.RemoveUplink():
                names |= {change.bridge, change.interface}
            case c.RemoveTap() | c.RemoveDevice():
                names.add(change.name)
            case c.SetGuard() | c.SetRate() | c.RemoveRate() | c.AddPeer() | c.RemovePeer():
                names.add(change.device)
            case c.SetRedirect() | c.RemoveRedirect():
                names.add(change.tap)
    return frozenset(names)
