"""The dpdkvhostuser backend: observe OVS as values, plan changes with ``plan``, and apply them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from drivers.dpdkvhostuser.findings import findings, with_ports
from drivers.dpdkvhostuser.options import GROUP, OPTIONS
from drivers.dpdkvhostuser.plan import BACKEND, LAYOUT, make_plan
from drivers.ovs import networks, service_ports, sockets
from drivers.ovs.backend import VHOST_USER, OvsBackend
from drivers.ovs.findings import of_sockets
from drivers.ovs.model import OvsObservation
from drivers.ovs.placing import mapped_bridge
from drivers.ovs.ports import VHOST_TYPE
from drivers.ovs.switch import Switch
from netplugin.api.errors import NetpluginError
from netplugin.api.models import Binding, Features, Finding, PortSpec
from netplugin.backend import Applied, Change, Claim, Intent, Plan, claim_name, unknown_network
from netplugin.data_path import DataPath
from netplugin.host.announcement import handover
from netplugin.host.shared import Host
from netplugin.host.usability import Usability
from netplugin.optional import HasFindings, NeedsClaims


class DpdkVhostUser(OvsBackend[OvsObservation], NeedsClaims[OvsObservation], HasFindings[OvsObservation]):
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
    data_path: ClassVar[DataPath] = VHOST_USER

    def __init__(self, conf: Any, host: Host) -> None:
        conf.register_opts(OPTIONS, group=GROUP)
        self._guest_hugepages: bool = conf[GROUP].guest_hugepages
        self._ovs = host.ovs
        self._switch = Switch(host.ovs, LAYOUT, VHOST_TYPE)
        #: The settings of OVS that the last observation was made with.
        self._observed_with = self._settings

    # -- without changing the host ----------------------------------------------------------------

    def probe(self) -> Usability:
        return self._switch.usable()

    def validate(self, spec: PortSpec) -> None:
        super().validate(spec)
        sockets.check(self._settings, spec)
        if spec.device is not None:
            service_ports.refuse(self._ovs, spec, spec.device)
        if spec.overlay_id is not None:
            networks.check_vxlan(self._settings, self._switch.root)
            return
        known, name = self._settings.bridge_mappings, spec.network.physical_network
        if name not in known:
            raise unknown_network(name, "[ovs] bridge_mappings", known)

    def binding(self, intent: Intent) -> Binding:
        assert intent.spec is not None
        row = self._switch.row(intent.port_id)
        bridge = row.bridge if row else mapped_bridge(self._settings, intent)
        if device := intent.spec.device:
            of_device = {"vif_type": "device", "interface_xml": "", "bridge": bridge, "device": device}
            return Binding.model_validate(of_device)
        return self._vhostuser_binding(intent, sockets.socket_path(self._settings, intent, row), bridge)

    def claims(
        self, intent: Intent, observed: OvsObservation, taken: Mapping[Claim, str]
    ) -> tuple[Claim, ...]:
        if intent.spec and intent.spec.device:
            return (service_ports.claim(self._ovs, intent, taken),)
        row = observed.rows.get(intent.port_id)
        socket = sockets.claim_socket(self._settings, intent, row, taken)
        return (socket, *claim_name(intent, taken))

    def plan(self, intents: Sequence[Intent], observed: OvsObservation) -> Plan:
        return make_plan(self._observed_with, intents, observed)

    def network_faults(self, observed: OvsObservation) -> Mapping[str, NetpluginError]:
        return networks.network_faults(self._observed_with, observed)

    def network_remains(self, name: str, observed: OvsObservation) -> Sequence[str]:
        return networks.network_remains(name, observed)

    def findings(self, intents: Sequence[Intent], observed: OvsObservation) -> Sequence[Finding]:
        on_sockets = of_sockets(self._settings, observed.rows, observed.sockets)
        return [*findings(observed, self._settings.local_ip), *on_sockets]

    # -- reading and changing the host ------------------------------------------------------------

    def observe(self, ports: Collection[str] | None, deadline: float) -> OvsObservation:
        return self._seen(ports, deadline)

    def read_back(
        self,
        seen: OvsObservation,
        changes: Sequence[Change],
        ports: Collection[str] | None,
        deadline: float,
    ) -> OvsObservation:
        """With the flows that ``apply`` has read from the bridges together with its writes."""
        return self._seen(ports, deadline, after_apply=True)

    def _seen(
        self, ports: Collection[str] | None, deadline: float, *, after_apply: bool = False
    ) -> OvsObservation:
        self._observed_with = self._settings
        return with_ports(self._switch.look(ports, deadline, after_apply=after_apply))

    def apply(self, changes: Sequence[Change], deadline: float) -> Applied:
        return self._switch.apply(changes, deadline)

    def hand_over(self, intents: Sequence[Intent], deadline: float) -> None:
        self._switch.send(intents, handover, deadline)
