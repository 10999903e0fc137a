"""Open vSwitch on this host, shared by all backends: database, flows, and availability."""

from __future__ import annotations

import ipaddress
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from netplugin.api.errors import BackendUnavailable, NetpluginError
from netplugin.api.physical_models import UPLINK_MTU, OvsUplinkSpec, PhysicalNetworkSpec
from netplugin.host.bridge_watch import OvsBridgeWatch
from netplugin.host.names import Claimed, Mark, nothing_claimed, unmarked
from netplugin.host.openflow import OpenFlow
from netplugin.host.ovs_rows import BRIDGE_MARK
from netplugin.host.ovs_sockets import OvsSockets
from netplugin.host.ovs_versions import fix_of_start
from netplugin.host.ovs_view import Drift, OvsView, VmConnection
from netplugin.host.ovsdb import Ovsdb
from netplugin.host.ovsdb_replica import Touch
from netplugin.host.physical_networks import Derived, Networks, PhysicalNetworks, bridge_of
from netplugin.host.processes import remaining
from netplugin.host.supervisor import Supervisor
from netplugin.host.usability import Usability, Wake
from netplugin.host.vswitchd import VswitchdWatch, appctl

LOG = logging.getLogger(__name__)
_QUIET_S = 5.0
_SETTLE_S = 0.5  # between the starts of two attempts


@dataclass(frozen=True)
class OvsSettings:
    """The ``[ovs]`` options as a value.

    ``uplinks`` has the devices of each physical network, ``bonds`` their bond mode if they are
    several, ``uplink_mtu`` the MTU that they are created with (bytes).
    """

    #: Where its daemons listen.
    sockets: OvsSockets
    vhost_socket_dir: Path
    vhost_socket_group: str
    #: Further directories below which callers may choose paths of sockets.
    vhost_socket_roots: tuple[Path, ...] = ()
    bridge_mappings: Mapping[str, str] = field(default_factory=dict)
    uplinks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    bonds: Mapping[str, str] = field(default_factory=dict)
    uplink_mtu: Mapping[str, int] = field(default_factory=dict)
    #: Networks that the API made: existing uplinks get the ``uplink_mtu`` of these as well.
    made: frozenset[str] = frozenset()
    #: Networks whose bridge and uplink exist while no port does.
    kept: frozenset[str] = frozenset()
    #: The host's address for VXLAN tunnels, in canonical form.
    local_ip: str | None = None
    #: Ports of the operator from which our bridges accept every frame.
    service_ports: frozenset[str] = frozenset()
    timeout_s: float = 10.0
    quiet_datapath_log: bool = False

    def mtu_of_uplinks(self, network: str) -> int:
        """The MTU in bytes that the uplinks of a physical network are created with."""
        return self.uplink_mtu.get(network, UPLINK_MTU)

    def keeps(self, bridge: str, mark: str) -> bool:
        """Whether a bridge with this mark of ours stays without a port."""
        return mark in self.kept and self.bridge_mappings.get(mark) == bridge

    def networks(self) -> Networks:
        """The physical networks of the options."""
        return {
            name: PhysicalNetworkSpec.model_construct(
                bridge=bridge,
                mtu=self.uplink_mtu.get(name),
                ovs=OvsUplinkSpec.model_construct(
                    devices=self.uplinks.get(name, ()),
                    bond=self.bonds.get(name) if len(self.uplinks.get(name, ())) > 1 else None,
                ),
            )
            for name, bridge in self.bridge_mappings.items()
        }

    def with_networks(self, made: Networks) -> OvsSettings:
        """These settings with the networks that the API made."""
        bridges = {name: bridge for name, spec in made.items() if (bridge := bridge_of(name, spec))}
        on_ovs = {name: (bridge, made[name].ovs) for name, bridge in bridges.items()}
        return replace(
            self,
            bridge_mappings={**self.bridge_mappings, **{n: bridge for n, (bridge, _) in on_ovs.items()}},
            uplinks={**self.uplinks, **{n: ovs.devices for n, (_, ovs) in on_ovs.items() if ovs}},
            bonds={**self.bonds, **{n: ovs.bond for n, (_, ovs) in on_ovs.items() if ovs and ovs.bond}},
            uplink_mtu={**self.uplink_mtu, **{n: mtu for n in on_ovs if (mtu := made[n].mtu)}},
            made=frozenset(on_ovs),
            kept=frozenset(name for name in on_ovs if made[name].keep),
        )

    @staticmethod
    def read(conf: Any) -> OvsSettings:
        """Read the options. Raises: ValueError naming the option."""
        uplinks: dict[str, tuple[str, ...]] = {}
        for entry in conf.ovs.uplinks:
            network, colon, device = entry.strip().strip('"').partition(":")
            if not (network and colon and device):
                raise ValueError(f"[ovs] uplinks: {entry!r} is not physical_network:device")
            if any(device in devices for devices in uplinks.values()):
                raise ValueError(f"[ovs] uplinks: {device} is listed twice")
            uplinks[network] = (*uplinks.get(network, ()), device)
        named = {"uplinks": uplinks, "bonds": conf.ovs.bonds, "uplink_mtu": conf.ovs.uplink_mtu}
        for option, networks in named.items():
            unknown = sorted(set(networks) - set(conf.ovs.bridge_mappings))
            if unknown:
                raise ValueError(f"[ovs] {option}: {', '.join(unknown)} is not in bridge_mappings")
        bridges = list(conf.ovs.bridge_mappings.values())
        if len(bridges) != len(set(bridges)):
            raise ValueError("[ovs] bridge_mappings: two networks share a bridge")
        return OvsSettings(
            sockets=OvsSockets.read(conf),
            vhost_socket_dir=Path(conf.ovs.vhost_socket_dir),
            vhost_socket_group=conf.ovs.vhost_socket_group,
            vhost_socket_roots=tuple(map(_root, conf.ovs.vhost_socket_roots)),
            bridge_mappings=dict(conf.ovs.bridge_mappings),
            uplinks=uplinks,
            bonds=dict(conf.ovs.bonds),
            uplink_mtu=dict(conf.ovs.uplink_mtu),
            local_ip=_tunnel_address(conf.ovs.local_ip),
            service_ports=frozenset(conf.ovs.service_ports),
            timeout_s=float(conf.ovs.timeout),
            quiet_datapath_log=conf.ovs.quiet_datapath_log,
        )


def _root(text: str) -> Path:
    path = Path(text)
    if not path.is_absolute() or ".." in path.parts or len(path.parts) < 2:
        raise ValueError(f"[ovs] vhost_socket_roots: {text!r} is not the absolute path of a directory")
    return path


def _tunnel_address(text: str | None) -> str | None:
    if text is None:
        return None
    address = ipaddress.ip_address(text)
    if address.is_loopback or address.is_unspecified or address.is_multicast or address.is_link_local:
        raise ValueError(f"[ovs] local_ip: {text} is no address that other hosts can send to")
    return str(address)


class OvsHost:
    """The connections to ovsdb-server and vswitchd, and their events for subscribed backends."""

    def __init__(
        self,
        settings: OvsSettings,
        supervisor: Supervisor,
        holder: str | None = None,
        mark: Mark = unmarked,
        networks: PhysicalNetworks | None = None,
        claimed: Claimed = nothing_claimed,
    ) -> None:
        """``holder`` identifies this process in the lock; None: request no lock.

        ``mark``: see ``Ovsdb``. ``networks``: where those of the options are added, and those that the
        API made are found. ``claimed``: what the ports of the agent have claimed.
        """
        networks = networks or PhysicalNetworks()
        networks.configure(settings.networks())
        self._settings = Derived(networks, settings.with_networks)
        self.claimed = claimed
        self._supervisor = supervisor
        self.flows = OpenFlow(settings.sockets, self._gone)
        self._subscribers: list[tuple[str, Callable[[Wake], None]]] = []
        self._followers: dict[str, Callable[[str, bool], None]] = {}
        self._telling = threading.Lock()  # one connection after the other, in their order
        self._lock = threading.Lock()
        self._settled = threading.Event()
        self._closed = threading.Event()
        self._generation = 0  # incremented whenever vswitchd comes or goes
        self._was_alive = False
        #: Whether a purge of datapath flows has failed; of all backends together.
        self.purge_failed = False
        remote = settings.sockets.connection
        self.db = Ovsdb(remote, self._drifted, self._db_changed, holder, mark, self._connection_changed)
        self.vswitchd = VswitchdWatch(settings.sockets, self._vswitchd_changed, supervisor)
        self._bridge_watch = OvsBridgeWatch(self.flows, self._watched, self._announce, supervisor)
        self.db.start()  # its callbacks need all of the above

    @property
    def settings(self) -> OvsSettings:
        """The options, with the physical networks that there are now."""
        return self._settings.value

    @property
    def view(self) -> OvsView:
        return self.db.view

    def caught_up(self) -> OvsView:
        """``view`` with all that was committed before this call (``Ovsdb.catch_up``)."""
        self.db.catch_up()
        return self.view

    def subscribe(self, backend: str, wake: Callable[[Wake], None]) -> None:
        """Call ``wake`` for drift of this backend's ports and when OVS is available again."""
        with self._lock:
            self._subscribers.append((backend, wake))
        if self.usable().usable:
            wake(Wake("OVS is there"))

    def follow_connections(self, backend: str, tell: Callable[[str, bool], None]) -> None:
        """Call ``tell`` with the id of each port of this backend, and whether a VM is connected to it.

        First for all ports that are known, then for each change, in the thread of the database.
        """
        with self._telling:
            self._followers[backend] = tell
            for (owner, port_id), connected in self.view.connections().items():
                if owner == backend:
                    tell(port_id, connected)

    def _gone(self) -> BackendUnavailable | None:
        return None if self.vswitchd.alive() else self.vswitchd.missing()

    def hold(self) -> Usability:
        """Whether the database answers and its lock is ours. The lock request stays queued at the server."""
        try:
            self.db.require_lock()
        except BackendUnavailable as missing:
            return Usability.without(missing)
        return Usability(True)

    def usable(self) -> Usability:
        """Whether OVS answers and its lock is ours."""
        held = self.hold()
        return self.answers() if held.usable else held

    def answers(self) -> Usability:
        """Whether OVS can be read: the database answers and vswitchd has applied its configuration."""
        try:
            self.db.require_online()
        except BackendUnavailable as missing:
            return Usability.without(missing)
        if not self.vswitchd.alive():
            gone, root = Usability.without(self.vswitchd.missing()), self.view.root
            fixes = (gone.fix, fix_of_start(root.version, root.other_config))
            return replace(gone, fix="; ".join(filter(None, fixes)) or None)
        if not self._settled.is_set():
            reason = "ovs-vswitchd has just started and is not configured yet"
            return Usability(False, reason, "try again in a few seconds", "vswitchd")
        return Usability(True)

    def close(self) -> None:
        self._generation += 1
        self._closed.set()
        self.vswitchd.close()
        self._bridge_watch.close()
        self.flows.close()
        self.db.close()

    # -- callbacks, on the threads of the connections --------------------------------------------

    def _drifted(self, drifts: Collection[Drift]) -> None:
        ports: dict[str | None, set[str]] = defaultdict(set)
        for drift in drifts:
            if drift.port_id is None:
                self._tell(Wake("a bridge was changed in the OVS database"))
            else:
                ports[drift.backend].add(drift.port_id)
        for backend, changed in ports.items():
            self._tell(Wake("a port was changed in the OVS database", frozenset(changed)), backend)

    def _connection_changed(self, connection: VmConnection) -> None:
        with self._telling:
            tell = self._followers.get(connection.backend)
            if tell is not None:
                tell(connection.port_id, connection.connected)
        # What is known of the port, its connection above all, is from before.
        wake = Wake("a VM connected or disconnected", frozenset({connection.port_id}))
        self._tell(wake, connection.backend)

    def _db_changed(self) -> None:
        self._announce("the OVS database can be written")

    def _vswitchd_changed(self, alive: bool) -> None:
        self._generation += 1
        if not alive:
            self._settled.clear()
            return
        if self.settings.quiet_datapath_log:
            self._quiet()
        first, self._was_alive = not self._was_alive, True
        if first:
            # vswitchd ran before the agent started: it is observed without a write.
            self._settled.set()
            self._announce("ovs-vswitchd is there")
            return
        self._supervisor.thread("ovs-settle", partial(self._settle, self._generation), self._closed)

    def _quiet(self) -> None:
        deadline = time.monotonic() + _QUIET_S
        try:
            appctl(self.settings.sockets, "vlog/set", "dpif_netdev:any:warn", deadline=deadline)
        except NetpluginError as failed:
            LOG.warning("quiet_datapath_log: %s", failed)

    def _settle(self, generation: int) -> None:
        """After a restart of vswitchd, wait until it has created its bridges again, then announce it."""
        while generation == self._generation:
            next_attempt = time.monotonic() + _SETTLE_S
            try:
                if not self.db.locked and self._has_bridges():
                    if generation == self._generation:
                        self._settled.set()  # for reads
                        # The lock is announced when it is acquired: here, if that was since the first look.
                        self._announce("ovs-vswitchd was restarted")
                    return
                self.db.require_lock(0.5)
                next_cfg = self.db.commit([Touch()], time.monotonic() + 5)
                while generation == self._generation:
                    configured = self.db.configured(next_cfg, time.monotonic() + 0.5)
                    if configured and generation == self._generation:
                        self._settled.set()
                        self._announce("ovs-vswitchd was restarted")
                        return
            except NetpluginError as failed:
                LOG.debug("vswitchd is not settled yet: %s", failed)
            # An attempt may fail at once, for example while an earlier transaction is unanswered.
            self._closed.wait(remaining(next_attempt))

    def _has_bridges(self) -> bool:
        """Whether vswitchd has created its bridges, without a write to the database.

        One thread of vswitchd applies a whole configuration and then answers (the loop of
        ``vswitchd/ovs-vswitchd.c``): if it lists bridges, their ports exist too.

        Raises: BackendUnavailable, HostError, OperationTimeout.
        """
        self.db.require_online(_SETTLE_S)
        deadline = time.monotonic() + _QUIET_S
        made = appctl(self.settings.sockets, "ofproto/list", deadline=deadline)
        return bool(made.strip()) or not self.view.bridges()

    def _watched(self) -> list[str]:
        """The bridges whose flows and settings are watched: ours, and those with ports of ours."""
        if not self.usable().usable:
            return []
        bridges = self.view.bridges()
        return [b.name for b in bridges if BRIDGE_MARK in b.external_ids or self.view.count_owned_on(b)]

    def _announce(self, reason: str) -> None:
        """Wake all subscribers, if the database and vswitchd are both available."""
        if self.usable().usable:
            self._tell(Wake(reason))

    def _tell(self, wake: Wake, backend: str | None = None) -> None:
        with self._lock:
            subscribers = list(self._subscribers)
        for name, subscriber in subscribers:
            if backend in (None, name):
                subscriber(wake)
