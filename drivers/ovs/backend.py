"""What the backends on OVS have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from drivers.ovs import networks, usability
from drivers.ovs.ports import port_name
from drivers.ovs.switch import Switch
from netplugin.api.models import Binding, DomainRequirements
from netplugin.api.physical_models import PhysicalNetworkSpec
from netplugin.backend import Backend, Intent, Observation
from netplugin.counters import Readings
from netplugin.data_path import DataPath
from netplugin.host.announcement import announcement
from netplugin.host.ovs import OvsSettings
from netplugin.host.usability import Usability, Wake
from netplugin.libvirt.interfaces import vhostuser_interface
from netplugin.optional import HasCounters, HasFacts, HasLocalVlans, Migrates, UsesPhysicalNetworks

ObservationT = TypeVar("ObservationT", bound=Observation)

#: The data path of a port with a vhost-user socket.
VHOST_USER = DataPath("vhostuser", "socket_path", ovs_bridge="bridge", ovs_port="device", pmd_threads=True)


class OvsBackend(
    Backend[ObservationT], HasCounters, HasLocalVlans, HasFacts, UsesPhysicalNetworks[ObservationT], Migrates
):
    """See ``netplugin.backend.Backend``."""

    _switch: Switch
    _guest_hugepages: bool

    @property
    def _settings(self) -> OvsSettings:
        return self._switch.settings

    def hold(self) -> Usability:
        held = self._switch.hold()
        return super().hold() if held.usable else held

    def facts(self) -> Mapping[str, str | int | bool]:
        return usability.facts(self._switch.root)

    def held_vlans(self) -> Mapping[int, str]:
        return self._switch.held_vlans()

    def port_counters(self, intents: Sequence[Intent], deadline: float) -> Readings:
        return self._switch.counters(intents, deadline)

    def check_network(self, name: str, spec: PhysicalNetworkSpec) -> None:
        networks.check_network(self._switch.caught_up(), name, spec)

    def network_holders(self, name: str) -> Sequence[str]:
        return networks.network_holders(self._settings, self._switch.caught_up(), name)

    def announce(self, intents: Sequence[Intent], deadline: float) -> None:
        self._switch.send(intents, announcement, deadline)

    def follow_connections(self, tell: Callable[[str, bool], None]) -> None:
        self._switch.follow_connections(tell)

    def watch(self, wake: Callable[[Wake], None]) -> None:
        self._switch.subscribe(wake)

    def _vhostuser_binding(self, intent: Intent, socket: str, bridge: str | None, **others: Any) -> Binding:
        """The binding of a VM that has the port by a vhost-user socket, with these other fields."""
        spec = intent.spec
        assert spec is not None
        return Binding.model_validate(
            {
                "vif_type": "vhostuser",
                "interface_xml": vhostuser_interface(spec, socket),
                "domain_requirements": DomainRequirements(
                    shared_memory=True,
                    hugepages=self._guest_hugepages,
                    numa_node=spec.numa_node,
                    qemu_user=spec.qemu_user,
                ),
                "socket_path": socket,
                "bridge": bridge,
                "device": port_name(intent.port_id, spec),
                **others,
            }
        )
