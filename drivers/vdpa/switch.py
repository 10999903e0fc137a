"""The host's OVS as the vdpa backend uses it. Tests substitute a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from drivers.ovs import sockets
from drivers.ovs.announce import send_frames
from drivers.ovs.apply import Applier
from drivers.ovs.findings import VswitchdFacts
from drivers.ovs.model import OvsObservation
from drivers.ovs.networks import held_vlans
from drivers.ovs.observe import NOT_READ, OvsReader
from drivers.ovs.ports import VHOST_TYPE
from drivers.ovs.usability import dpdk_usable
from drivers.vdpa.model import BACKEND, DEVICE_OPTIONS, LAYOUT, NATIVE_TYPE
from netplugin.api.errors import HostError
from netplugin.backend import Applied, Change, Intent
from netplugin.host.announcement import announcement
from netplugin.host.ovs import OvsHost, OvsSettings
from netplugin.host.ovs_rows import OvsPort, OvsRoot
from netplugin.host.ovs_view import OvsView
from netplugin.host.usability import Usability, Wake
from netplugin.host.vswitchd import appctl


class Switch:
    """The host's OVS. Not thread-safe, except ``usable``, ``root`` and ``row``."""

    def __init__(self, ovs: OvsHost) -> None:
        self._ovs = ovs
        self._reader = OvsReader(ovs, LAYOUT)
        self._applier = Applier(ovs)
        sockets.make_directories(self.settings)

    @property
    def settings(self) -> OvsSettings:
        return self._ovs.settings

    def hold(self) -> Usability:
        return self._ovs.hold()

    @property
    def view(self) -> OvsView:
        return self._ovs.view

    @property
    def root(self) -> OvsRoot:
        return self._ovs.view.root

    def held_vlans(self) -> Mapping[int, str]:
        """See ``netplugin.optional.HasLocalVlans``."""
        return held_vlans(self._ovs)

    def row(self, port_id: str) -> OvsPort | None:
        """Return a port of the database, as it was read last. Callable from any thread."""
        return self._ovs.view.owned(BACKEND, port_id)

    def follow_connections(self, tell: Callable[[str, bool], None]) -> None:
        self._ovs.follow_connections(BACKEND, tell)

    def usable(self) -> Usability:
        """Check that OVS runs with DPDK and has the port types needed."""
        return dpdk_usable(self._ovs, VHOST_TYPE, "dpdk")

    def look(
        self,
        ports: Collection[str] | None,
        deadline: float,
        *,
        networks: bool = False,
        after_apply: bool = False,
    ) -> tuple[OvsObservation, VswitchdFacts, Mapping[str, str]]:
        """Return the observed state of these ports (None: all), facts that are not in the database, and
        the devices that interfaces name.

        ``networks``: with the bridges of all physical networks; else only those that ports in scope are on,
        unless ports in native mode may come. ``after_apply``: with the flows that ``apply`` has read from
        the bridges together with its writes.

        Raises: BackendUnavailable, HostError, OperationTimeout.
        """
        scope = self._reader.scope(ports, deadline)
        # Ports in relay mode do not use the bridges of networks; without others, do not read these bridges.
        networks |= NATIVE_TYPE in self.root.iface_types or any(
            row.interface and row.interface.type == NATIVE_TYPE for row in scope.rows.values()
        )
        read = self._applier.read if after_apply else NOT_READ
        seen = self._reader.seen(scope, self._reader.bridges(scope, networks), read)
        return seen, self._reader.facts(scope, seen), self._ovs.view.devices(*DEVICE_OPTIONS)

    def apply(self, changes: Sequence[Change], deadline: float) -> Applied:
        return self._applier.apply(changes, deadline)

    def announce(self, intents: Sequence[Intent], deadline: float) -> None:
        """See ``netplugin.optional.Migrates``."""
        send_frames(self._ovs, BACKEND, intents, announcement, deadline)

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

    def subscribe(self, wake: Callable[[Wake], None]) -> None:
        self._ovs.subscribe(BACKEND, wake)
