"""The linuxbridge backend: reads the kernel into values, lets ``plan`` think, writes what it says."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, ClassVar

from drivers.linuxbridge import changes as c
from drivers.linuxbridge import filters
from drivers.linuxbridge.options import GROUP, OPTIONS, Settings
from drivers.linuxbridge.plan import (
    Seen,
    SeenBridge,
    SeenInterface,
    is_our_bridge,
    is_our_tap,
    make_plan,
    uplink_problem,
    wanted_tap,
)
from drivers.linuxbridge.watch import Watch
from netplugin.backend import (
    Applied,
    Backend,
    Change,
    Intent,
    ObservedPort,
    Plan,
    Usability,
    Wake,
    unknown_network,
)
from netplugin.errors import (
    NetpluginError,
    OperationTimeout,
)
from netplugin.host.links import BRIDGE_OPTIONS, TUN_DEVICE, Link, Links, bridges_unavailable
from netplugin.host.names import BRIDGE, TAP, device_name
from netplugin.host.nftables import Command, Nftables, Table
from netplugin.host.processes import remaining
from netplugin.host.shared import Host
from netplugin.libvirt_xml import tap_interface
from netplugin.models import Binding, Features, PortSpec

LOG = logging.getLogger(__name__)


class LinuxBridge(Backend[Seen]):
    """See ``netplugin.backend.Backend``."""

    name: ClassVar[str] = c.BACKEND
    features: ClassVar[Features] = Features(
        networks=("flat",),
        live_migration=False,
        qos=False,
        port_security=("mac", "ip"),
        # What a PortSpec can ask for; a tap has up to 256 (MAX_TAP_QUEUES in drivers/net/tun.c).
        max_queues=128,
        needs_shared_memory=False,
    )
    # A tap has several queues or one from its making on; the rest is the domain's.
    fixed_fields: ClassVar[frozenset[str]] = frozenset(
        {"vm_id", "mac", "backend", "queues", "rx_queue_size", "tx_queue_size", "numa_node"}
    )

    def __init__(
        self,
        conf: Any,
        host: Host | None,
        *,
        links: Links | None = None,
        nft: Nftables | None = None,
    ) -> None:
        """``links`` and ``nft`` are the kernel's, unless it is a model that is meant."""
        conf.register_opts(OPTIONS, group=GROUP)
        self._settings = Settings.read(conf)
        self._links = links or Links()
        self._nft = nft or Nftables(filters.FAMILY, filters.TABLE)
        self._watch: Watch | None = None
        self._kernel_is_fit = False

    # -- what can be said without touching the host ---------------------------------------------

    def probe(self) -> Usability:
        shared = self._settings.shared_interfaces()
        if shared:
            return Usability(
                False, f"{', '.join(shared)} stands behind several physical networks, and can be on "
                "one bridge only", "name each interface once in [linuxbridge] physical_interfaces",
                "uplink",
            )  # fmt: skip
        if shutil.which("nft") is None:
            return Usability(False, "nft is not installed", "install nftables", "nftables")
        if not self._kernel_is_fit:
            missing = _missing_in_kernel()
            if missing is not None:
                return missing
            self._kernel_is_fit = True
        return Usability(True)

    def validate(self, spec: PortSpec) -> None:
        super().validate(spec)
        known, name = self._settings.physical_interfaces, spec.network.physical_network
        if name not in known:
            raise unknown_network(name, "[linuxbridge] physical_interfaces", known)

    def binding(self, intent: Intent) -> Binding:
        assert intent.spec is not None
        tap = wanted_tap(intent.port_id, intent.spec)
        return Binding.model_validate(
            {
                "vif_type": "tap",
                "interface_xml": tap_interface(intent.spec, tap.name),
                "device": tap.name,
                "bridge": tap.bridge,
            }
        )

    def plan(self, intents: Sequence[Intent], observed: Seen) -> Plan:
        return make_plan(self._settings, intents, observed)

    # -- reading ---------------------------------------------------------------------------------

    def observe(self, ports: Collection[str] | None, deadline: float) -> Seen:
        start = time.monotonic()
        links = self._all_links() if ports is None else self._links_of(ports)
        taps = {i: link for link in links if (i := _port_of(link)) is not None}
        bridges = self._bridges(links)
        names = {device_name(TAP, i) for i in (taps if ports is None else ports)}
        interfaces = self._interfaces()
        links_read = time.monotonic()
        table = self._nft.read(None if ports is None else [*filters.BASE, *names], deadline)
        rules_read = time.monotonic()
        filtered = _filtered_ports(table)
        ours = {link.name for link in (*taps.values(), *(b.link for b in bridges.values()))}
        seen = Seen(
            ports={},
            taps=taps,
            bridges=bridges,
            interfaces=interfaces,
            taken_names=frozenset(link.name for link in links) - ours,
            table=table,
            stray_chains=_strays(table, taps, filtered) if ports is None else frozenset(),
            timings_ms={
                "netlink": (links_read - start) * 1e3,
                "nftables": (rules_read - links_read) * 1e3,
            },
        )
        entries = {port_id: self._observed_port(seen, port_id) for port_id in {*taps, *filtered}}
        return replace(seen, ports=entries)

    def _all_links(self) -> list[Link]:
        """All that is ours by its mark or its name."""
        return self._links.find(
            lambda name, alias: (
                name.startswith((TAP, BRIDGE)) or alias.startswith((c.PORT_MARK, c.BRIDGE_MARK))
            )
        )

    def _links_of(self, ports: Collection[str]) -> list[Link]:
        """The taps of these ports, and every bridge that can have to do with them."""
        taps = [self._links.get(device_name(TAP, port_id)) for port_id in ports]
        names = {device_name(BRIDGE, n) for n in self._settings.physical_interfaces}
        names |= {tap.master for tap in taps if tap is not None and tap.master is not None}
        found = [*taps, *(self._links.get(name) for name in sorted(names))]
        ours = (TAP, BRIDGE)
        return [link for link in found if link is not None and link.name.startswith(ours)]

    def _bridges(self, links: Iterable[Link]) -> dict[str, SeenBridge]:
        expected = {device_name(BRIDGE, n): n for n in self._settings.physical_interfaces}
        found: dict[str, SeenBridge] = {}
        for link in links:
            mark = c.bridge_mark(link.alias)
            network = mark[0] if mark else expected.get(link.name)
            if network is None or link.name != device_name(BRIDGE, network):
                continue
            if is_our_bridge(link, network):
                members = {m.name: m.mtu for m in self._links.members(link)}
                found[network] = SeenBridge(network, link, members)
        return found

    def _interfaces(self) -> dict[str, SeenInterface]:
        found: dict[str, SeenInterface] = {}
        for name in filter(None, self._settings.physical_interfaces.values()):
            link = self._links.get(name)
            if link is not None:
                found[name] = SeenInterface(link, self._links.addresses(name))
        return found

    def _observed_port(self, seen: Seen, port_id: str) -> ObservedPort:
        link = seen.taps.get(port_id)
        details: dict[str, Any] = {"device": device_name(TAP, port_id)}
        if link is None:
            return ObservedPort(details={**details, "link_state": None})
        details |= {
            "bridge": link.master,
            "mtu": link.mtu,
            "link_state": "up" if link.up else "down",
            "carrier": link.carrier,
            "multi_queue": link.multi_queue,
        }
        networks = (n for n, bridge in seen.bridges.items() if bridge.link.name == link.master)
        problems = [uplink_problem(self._settings, n, link.mtu, seen) for n in networks]
        faults = [f"{p.detail} ({p.fix})" for p in problems if p is not None]
        return ObservedPort(faults[0] if faults else None, details)

    # -- writing ---------------------------------------------------------------------------------

    def apply(self, changes: Sequence[Change], deadline: float) -> Applied:
        failed: dict[str, NetpluginError] = {}
        timings = {"netlink": 0.0, "nftables": 0.0}
        watch = self._watch
        with watch.quiet(_touched(changes)) if watch else contextlib.nullcontext():
            for of_rules, group in groupby(changes, lambda ch: isinstance(ch, c.FilterChange)):
                start = time.monotonic()
                if of_rules:
                    self._write_rules(list(group), deadline, failed)
                else:
                    self._write_links(group, deadline, failed)
                spent = (time.monotonic() - start) * 1e3
                timings["nftables" if of_rules else "netlink"] += spent
        return Applied(failed, timings)

    def _write_links(
        self, changes: Iterable[Change], deadline: float, failed: dict[str, NetpluginError]
    ) -> None:
        for change in changes:
            if _hopeless(change, failed):
                continue
            try:
                if not remaining(deadline):
                    raise OperationTimeout("the time for the operation is over", step="netlink")
                self._write_link(change)
            except NetpluginError as error:
                _fail(change, error, failed)

    def _write_link(self, change: Change) -> None:
        links = self._links
        match change:
            case c.CreateBridge(bridge=bridge):
                links.create_bridge(bridge.name, bridge.alias, bridge.mtu, bridge.address)
            case c.SetBridge(bridge=bridge):
                if self._is_our_bridge(bridge.name, bridge.physical_network):
                    links.refuse_ipv6(bridge.name)
                    links.set(
                        bridge.name,
                        mtu=bridge.mtu,
                        alias=bridge.alias,
                        up=True,
                        options=BRIDGE_OPTIONS,
                    )
            case c.RemoveBridge():
                if self._is_our_bridge(change.name, change.physical_network):
                    links.delete(change.name)
            case c.AddUplink():
                links.set(change.interface, master=change.bridge)
            case c.RemoveUplink():
                interface = links.get(change.interface)
                if interface is not None and interface.master == change.bridge:
                    links.set(change.interface, master="")
            case c.CreateTap(tap=tap):
                links.create_tap(tap.name, tap.alias, multi_queue=tap.multi_queue, mtu=tap.mtu)
            case c.SetTap(tap=tap):
                links.refuse_ipv6(tap.name)
                links.set(tap.name, mtu=tap.mtu, master=tap.bridge, up=True)
            case c.RemoveTap():
                link = links.get(change.name)
                if link is not None and is_our_tap(link, change.port_id):
                    links.delete(change.name)

    def _is_our_bridge(self, name: str, physical_network: str) -> bool:
        """Looked at once more, just before it is changed: it may be another's by now."""
        link = self._links.get(name)
        return link is not None and is_our_bridge(link, physical_network)

    def _write_rules(
        self, changes: Sequence[Change], deadline: float, failed: dict[str, NetpluginError]
    ) -> None:
        """One transaction for all; if the kernel refuses it, one for each change, to find whose."""
        changes = [change for change in changes if not _hopeless(change, failed)]
        try:
            self._nft.commit([cmd for ch in changes for cmd in self._commands(ch)], deadline)
        except NetpluginError as error:
            if error.code == "host_error" and len(changes) > 1:
                for change in changes:
                    self._write_rules([change], deadline, failed)
                return
            for change in changes:
                _fail(change, error, failed)

    def _commands(self, change: Change) -> list[Command]:
        nft = self._nft
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

    # -- news and the end ------------------------------------------------------------------------

    def watch(self, wake: Callable[[Wake], None]) -> None:
        interfaces = frozenset(filter(None, self._settings.physical_interfaces.values()))
        try:
            self._watch = Watch(wake, interfaces)
        except OSError as refused:
            LOG.warning(
                "linuxbridge: no news from the kernel, drift is found by looking: %s", refused
            )
        super().watch(wake)

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        self._links.close()


def _missing_in_kernel() -> Usability | None:
    try:
        os.close(os.open(TUN_DEVICE, os.O_RDWR | os.O_CLOEXEC))
    except OSError as refused:
        return Usability(
            False,
            f"{TUN_DEVICE}: {refused.strerror}",
            "modprobe tun, and run the agent as root",
            "tap",
        )
    words = bridges_unavailable()
    if words is None:
        return None
    fix = "modprobe bridge, and give the agent CAP_NET_ADMIN"
    return Usability(False, f"the kernel makes no bridge: {words}", fix, "bridge")


def _port_of(link: Link) -> str | None:
    """Whose tap a link is: by its mark, if it has the name that goes with it."""
    alias = link.alias or ""
    port_id = alias.removeprefix(c.PORT_MARK)
    if port_id == alias or link.name != device_name(TAP, port_id):
        return None
    return port_id


def _filtered_ports(table: Table | None) -> set[str]:
    """The ports whose chains are there, by what the chains say of themselves."""
    owners = {n: filters.owner(chain) for n, chain in (table.chains if table else {}).items()}
    return {i for name, i in owners.items() if i is not None and name == device_name(TAP, i)}


def _strays(
    table: Table | None, taps: Mapping[str, Link], filtered: Collection[str]
) -> frozenset[str]:
    if table is None:
        return frozenset()
    known = {device_name(TAP, i) for i in (*taps, *filtered)}
    linked = table.maps.get(filters.PORTS, {})
    return frozenset({*table.names, *linked} - known - set(filters.BASE))


def _touched(changes: Sequence[Change]) -> frozenset[str]:
    """The names of the links that the changes have to do with."""
    names: set[str] = set()
    for change in changes:
        match change:
            case c.CreateTap(tap=tap) | c.SetTap(tap=tap):
                names |= {tap.name, tap.bridge}
            case c.CreateBridge(bridge=bridge) | c.SetBridge(bridge=bridge):
                names |= {bridge.name, bridge.uplink}
            case c.AddUplink() | c.RemoveUplink():
                names |= {change.bridge, change.interface}
            case c.RemoveTap() | c.RemoveBridge():
                names.add(change.name)
    return frozenset(names)


def _hopeless(change: Change, failed: Mapping[str, NetpluginError]) -> bool:
    """Whether every port that the change is for has failed already."""
    return bool(change.ports) and all(port in failed for port in change.ports)


def _fail(change: Change, error: NetpluginError, failed: dict[str, NetpluginError]) -> None:
    if not change.ports:
        LOG.warning("linuxbridge: could not %s: %s", change.describe(), error)
    for port in change.ports:
        failed.setdefault(port, error.for_port(port))
