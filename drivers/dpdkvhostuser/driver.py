"""The dpdkvhostuser backend: observe OVS as values, plan changes with ``plan``, and apply them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

from drivers.dpdkvhostuser.findings import findings
from drivers.dpdkvhostuser.model import BACKEND, VhostUserObservation
from drivers.dpdkvhostuser.observe import Observer
from drivers.dpdkvhostuser.options import GROUP, OPTIONS
from drivers.dpdkvhostuser.plan import make_plan
from drivers.ovs import networks, service_ports, sockets, usability
from drivers.ovs.announce import send_frames
from drivers.ovs.apply import Applier
from drivers.ovs.findings import of_sockets
from drivers.ovs.placing import mapped_bridge
from drivers.ovs.ports import VHOST_TYPE, port_name
from drivers.ovs.usability import dpdk_usable
from netplugin.api.errors import NetpluginError
from netplugin.api.models import Binding, DomainRequirements, Features, Finding, PortSpec
from netplugin.api.physical_models import PhysicalNetworkSpec
from netplugin.backend import (
    Applied,
    Backend,
    Change,
    Claim,
    Intent,
    Plan,
    claim_name,
    unknown_network,
)
from netplugin.data_path import DataPath
from netplugin.host.announcement import announcement, handover
from netplugin.host.ovs import OvsSettings
from netplugin.host.shared import Host
from netplugin.host.usability import Usability, Wake
from netplugin.libvirt.interfaces import vhostuser_interface
from netplugin.optional import (
    HasFacts,
    HasFindings,
    HasLocalVlans,
    Migrates,
    NeedsClaims,
    UsesPhysicalNetworks,
)


class DpdkVhostUser(
    Backend[VhostUserObservation],
    NeedsClaims[VhostUserObservation],
    HasFindings[VhostUserObservation],
    HasLocalVlans,
    HasFacts,
    UsesPhysicalNetworks[VhostUserObservation],
    Migrates,
):
    """See ``netplugin.backend.Backend``."""

    name: ClassVar[str] = BACKEND
    features: ClassVar[Features] = Features(
        networks=("flat", "vlan", "vxlan"),
        live_migration=True,
        qos=True,
        port_security=("mac", "ip"),
        max_queues=128,
        needs_shared_memory=True,
        service_ports=True,
        internal_ports=True,
        port_names=True,
    )
    network_parts: ClassVar[Mapping[str, bool]] = {"ovs": True}
    # OVS neither takes frames from a port whose rings QEMU has not started nor puts any into them, and
    # QEMU starts them when the VM runs.
    shut_without_guest: ClassVar[bool] = True
    data_path: ClassVar[DataPath] = DataPath(
        "vhostuser", "socket_path", ovs_bridge="bridge", ovs_port="device", pmd_threads=True
    )

    def __init__(self, conf: Any, host: Host) -> None:
        conf.register_opts(OPTIONS, group=GROUP)
        self._guest_hugepages: bool = conf[GROUP].guest_hugepages
        self._ovs = host.ovs
        #: Those that the last observation was made with.
        self._observed_with = self._settings
        self._observer = Observer(self._ovs)
        self._applier = Applier(self._ovs)
        sockets.make_directories(self._settings)

    @property
    def _settings(self) -> OvsSettings:
        return self._ovs.settings

    # -- without changing the host ----------------------------------------------------------------

    def hold(self) -> Usability:
        return self._ovs.hold()

    def probe(self) -> Usability:
        return dpdk_usable(self._ovs, VHOST_TYPE)

    def validate(self, spec: PortSpec) -> None:
        super().validate(spec)
        sockets.check(self._settings, spec)
        if spec.device is not None:
            service_ports.refuse(self._ovs, spec, spec.device)
        if spec.overlay_id is not None:
            networks.check_vxlan(self._settings, self._ovs.view.root)
            return
        known, name = self._settings.bridge_mappings, spec.network.physical_network
        if name not in known:
            raise unknown_network(name, "[ovs] bridge_mappings", known)

    def facts(self) -> Mapping[str, str | int | bool]:
        return usability.facts(self._ovs.view.root)

    def held_vlans(self) -> Mapping[int, str]:
        return networks.held_vlans(self._ovs)

    def binding(self, intent: Intent) -> Binding:
        assert intent.spec is not None
        row = self._ovs.view.owned(BACKEND, intent.port_id)
        mapped = mapped_bridge(self._settings, intent)
        if intent.spec.device:
            return Binding.model_validate(
                {
                    "vif_type": "device",
                    "interface_xml": "",
                    "bridge": row.bridge if row else mapped,
                    "device": intent.spec.device,
                }
            )
        socket = sockets.socket_path(self._settings, intent, row)
        return Binding.model_validate(
            {
                "vif_type": "vhostuser",
                "interface_xml": vhostuser_interface(intent.spec, socket),
                "domain_requirements": DomainRequirements(
                    shared_memory=True,
                    hugepages=self._guest_hugepages,
                    numa_node=intent.spec.numa_node,
                    qemu_user=intent.spec.qemu_user,
                ),
                "socket_path": socket,
                "bridge": row.bridge if row else mapped,
                "device": port_name(intent.port_id, intent.spec),
            }
        )

    def claims(
        self, intent: Intent, observed: VhostUserObservation, taken: Mapping[Claim, str]
    ) -> tuple[Claim, ...]:
        if intent.spec and intent.spec.device:
            return (service_ports.claim(self._ovs, intent, taken),)
        row = observed.rows.get(intent.port_id)
        socket = sockets.claim_socket(self._settings, intent, row, taken)
        return (socket, *claim_name(intent, taken))

    def plan(self, intents: Sequence[Intent], observed: VhostUserObservation) -> Plan:
        return make_plan(self._observed_with, intents, observed)

    def check_network(self, name: str, spec: PhysicalNetworkSpec) -> None:
        networks.check_network(self._ovs.view, name, spec)

    def network_faults(self, observed: VhostUserObservation) -> Mapping[str, NetpluginError]:
        return networks.network_faults(self._observed_with, observed)

    def network_remains(self, name: str, observed: VhostUserObservation) -> Sequence[str]:
        return networks.network_remains(name, observed)

    def network_holders(self, name: str) -> Sequence[str]:
        return networks.network_holders(self._settings, self._ovs.view, name)

    def findings(self, intents: Sequence[Intent], observed: VhostUserObservation) -> Sequence[Finding]:
        on_sockets = of_sockets(self._settings, observed.rows, observed.sockets)
        return [*findings(observed, self._settings.local_ip), *on_sockets]

    # -- reading and changing the host ------------------------------------------------------------

    def observe(self, ports: Collection[str] | None, deadline: float) -> VhostUserObservation:
        self._observed_with = self._settings
        return self._observer.observe(ports, deadline)

    def read_back(
        self,
        seen: VhostUserObservation,
        changes: Sequence[Change],
        ports: Collection[str] | None,
        deadline: float,
    ) -> VhostUserObservation:
        """With the flows that ``apply`` has read from the bridges together with its writes."""
        self._observed_with = self._settings
        return self._observer.observe(ports, deadline, self._applier.read)

    def apply(self, changes: Sequence[Change], deadline: float) -> Applied:
        return self._applier.apply(changes, deadline)

    def announce(self, intents: Sequence[Intent], deadline: float) -> None:
        send_frames(self._ovs, self.name, intents, announcement, deadline)

    def hand_over(self, intents: Sequence[Intent], deadline: float) -> None:
        send_frames(self._ovs, self.name, intents, handover, deadline)

    def follow_connections(self, tell: Callable[[str, bool], None]) -> None:
        self._ovs.follow_connections(self.name, tell)

    def watch(self, wake: Callable[[Wake], None]) -> None:
        self._ovs.subscribe(self.name, wake)
