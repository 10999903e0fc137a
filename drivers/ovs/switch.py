"""The host's OVS as its backends use it. Tests substitute a model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence

from drivers.ovs import sockets
from drivers.ovs.apply import Applier
from drivers.ovs.counters import read_counters
from drivers.ovs.model import Layout, OvsObservation
from drivers.ovs.observe import NOT_READ, OvsReader
from drivers.ovs.usability import dpdk_usable
from netplugin.api.errors import HostError
from netplugin.backend import Intent
from netplugin.counters import Readings
from netplugin.host.ovs import OvsHost, OvsSettings
from netplugin.host.ovs_rows import OvsPort, OvsRoot
from netplugin.host.ovs_view import OvsView
from netplugin.host.usability import Usability, Wake
from netplugin.host.vswitchd import appctl


class Switch(Applier):
    """The host's OVS, and what changes it. Not thread-safe, except ``usable``, ``root``, ``row`` and
    ``counters``."""

    def __init__(self, ovs: OvsHost, layout: Layout, *types: str) -> None:
        """``types``: the interface types that the backend needs."""
        super().__init__(ovs)
        self._backend, self._types = layout.backend, types
        self._reader = OvsReader(ovs, layout)
        sockets.make_directories(self.settings)

    @property
    def settings(self) -> OvsSettings:
        return self._ovs.settings

    @property
    def view(self) -> OvsView:
        return self._ovs.view

    def caught_up(self) -> OvsView:
        return self._ovs.caught_up()

    @property
    def root(self) -> OvsRoot:
        return self._ovs.view.root

    def hold(self) -> Usability:
        return self._ovs.hold()

    def usable(self) -> Usability:
        """Whether OVS runs with DPDK and has the interface types."""
        return dpdk_usable(self._ovs, *self._types)

    def held_vlans(self) -> Mapping[int, str]:
        """See ``netplugin.optional.HasLocalVlans``; those of all backends, which share the bridge."""
        if self.settings.local_ip is not None:
            # Until the database has been read, networks would appear to have no local VLANs.
            self._ovs.db.require_online()
        return self.view.networks()

    def row(self, port_id: str) -> OvsPort | None:
        """A port of the database, as it was read last. Callable from any thread."""
        return self.view.owned(self._backend, port_id)

    def devices(self, *options: str) -> Mapping[str, str]:
        """The devices that interfaces name in these options, each with the interface."""
        return self.view.devices(*options)

    def follow_connections(self, tell: Callable[[str, bool], None]) -> None:
        self._ovs.follow_connections(self._backend, tell)

    def subscribe(self, wake: Callable[[Wake], None]) -> None:
        self._ovs.subscribe(self._backend, wake)

    def look(
        self,
        ports: Collection[str] | None,
        deadline: float,
        *,
        networks: bool = True,
        after_apply: bool = False,
    ) -> OvsObservation:
        """The observed state of these ports (None: all), without ``ports``.

        ``networks``: with the bridges of all physical networks; else only if a port in scope is on one.
        ``after_apply``: with the flows that ``apply`` has read from the bridges together with its writes.

        Raises: BackendUnavailable, HostError, OperationTimeout.
        """
        if not after_apply:
            self._ovs.db.catch_up(deadline)
        read = self.read if after_apply else NOT_READ
        return self._reader.observe(ports, deadline, read, networks=networks)

    def send(self, intents: Sequence[Intent], frame: Callable[[str], bytes], deadline: float) -> None:
        """Send the frame that ``frame`` makes of a MAC for each of these VMs, as if the VM had sent it.

        The frames go through the flows of their ports: the bridge learns the MACs, and uplinks, VXLAN
        peers or the relay VF get them.
        """
        frames: dict[str, list[tuple[int, bytes]]] = defaultdict(list)
        for intent in intents:
            row = self.row(intent.port_id)
            ofport = row.works_at if row else None
            if row is not None and ofport and intent.spec is not None:
                frames[str(row.bridge)].append((ofport, frame(intent.spec.mac)))
        for bridge, those in frames.items():
            self._ovs.flows.send(bridge, those, deadline)

    def counters(self, intents: Sequence[Intent], deadline: float) -> Readings:
        """See ``netplugin.optional.HasCounters``. Callable from any thread."""
        return read_counters(self._ovs, self._backend, intents, deadline)

    def detach(self, device: str, deadline: float) -> bool:
        """Make DPDK detach a device; return whether DPDK had it.

        Raises: HostError if DPDK keeps it or vswitchd fails, BackendUnavailable, OperationTimeout.
        """
        try:
            appctl(self.settings.sockets, "netdev-dpdk/detach", device, deadline=deadline)
        except HostError as refused:
            if "not found in DPDK" not in refused.detail:  # netdev_dpdk_detach in lib/netdev-dpdk.c
                raise
            return False
        return True
