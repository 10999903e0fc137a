"""The linuxbridge backend: read the kernel's state as values, plan changes with ``plan``, apply them."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from drivers.linuxbridge.apply import Writer
from drivers.linuxbridge.bridge_names import refuse_name
from drivers.linuxbridge.commands import BridgeChange, BridgeKernel, SetTapAddress
from drivers.linuxbridge.counters import CounterReader
from drivers.linuxbridge.findings import host_findings
from drivers.linuxbridge.model import BridgeObservation, tap_name
from drivers.linuxbridge.networks import check_network, holders, network_faults, network_remains
from drivers.linuxbridge.observe import VHOST_NET, BridgeReader
from drivers.linuxbridge.options import GROUP, OPTIONS, Settings
from drivers.linuxbridge.plan import make_plan
from drivers.linuxbridge.segments import Segment, service_of
from drivers.linuxbridge.tap_commands import CutOff, refuse_used
from drivers.linuxbridge.uplink_path import no_local_ip
from drivers.linuxbridge.watch import BridgeWatch
from netplugin.api.errors import BackendUnavailable, NetpluginError
from netplugin.api.models import Binding, Features, Finding, PortSpec
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
from netplugin.counters import Readings
from netplugin.data_path import DataPath
from netplugin.host.foreign_filters import ForeignWatch
from netplugin.host.links import TUN_DEVICE, kind_unavailable
from netplugin.host.names import CarriedMark
from netplugin.host.nfnetlink import unavailable as nftables_unavailable
from netplugin.host.physical_networks import Derived, linux_bridge_of
from netplugin.host.shared import Host, SimulatedHost
from netplugin.host.usability import Usability, Wake
from netplugin.libvirt.interfaces import tap_interface
from netplugin.optional import HasCounters, HasFacts, HasFindings, Migrates, NeedsClaims, UsesPhysicalNetworks
from netplugin.service_devices import fit_device

LOG = logging.getLogger(__name__)

#: The name of the lock. The backend's devices and the lock belong to one network namespace.
_LOCK = "linuxbridge"
#: A tap whose MAC was set back so often in so many seconds is taken from the process that has it open: it
#: changes the MAC faster than that, and another VM would have hardly any frames.
_ABUSES, _ABUSE_S = 5, 300.0
#: The kernel module of each kind of device.
_MODULES = {"bridge": "bridge", "vlan": "8021q", "vxlan": "vxlan", "ifb": "ifb"}


class LinuxBridge(
    Backend[BridgeObservation],
    NeedsClaims[BridgeObservation],
    HasFindings[BridgeObservation],
    HasCounters,
    HasFacts,
    UsesPhysicalNetworks[BridgeObservation],
    Migrates,
):
    """See ``netplugin.backend.Backend``."""

    name: ClassVar[str] = "linuxbridge"
    features: ClassVar[Features] = Features(
        networks=("flat", "vlan", "vxlan"),
        live_migration=True,
        qos=True,
        min_rate=False,
        port_security=("mac", "ip"),
        # The API's maximum; a tap supports 256 (MAX_TAP_QUEUES in drivers/net/tun.c).
        max_queues=128,
        needs_shared_memory=False,
        service_ports=True,
        port_names=True,
    )
    network_parts: ClassVar[Mapping[str, bool]] = {"linuxbridge": True}
    # A tap has a carrier, and takes frames for the VM, as soon as QEMU has opened it.
    shut_without_guest: ClassVar[bool] = False
    data_path: ClassVar[DataPath] = DataPath("tap", "device", links=("device", "bridge"))

    def __init__(self, conf: Any, host: Host | None, *, kernel: BridgeKernel | None = None) -> None:
        """``kernel``: a model, for tests; None for the real one."""
        conf.register_opts(OPTIONS, group=GROUP)
        configured = Settings.read(conf)
        shared = host or SimulatedHost()
        shared.networks.configure(configured.networks())
        self._current = Derived(shared.networks, configured.with_networks)
        self._supervisor = shared.supervisor
        self._kernel = kernel or BridgeKernel.make(self._settings.local_ip)
        self._counters = CounterReader()
        self._locks = shared.locks
        self._carried = CarriedMark(shared.mark)
        #: The mark found with the rules at the last read of the whole host; None before that.
        self._mark_there: str | None = None
        self._watch: BridgeWatch | None = None
        self._foreign: ForeignWatch | None = None
        self._makeable: frozenset[str] = frozenset()
        #: When the MACs of taps were set back, by port.
        self._set_back: dict[str, deque[float]] = {}
        #: The ports whose guests the agent waits for, with the names of their taps.
        self._followed: dict[str, str] = {}

    @property
    def _settings(self) -> Settings:
        return self._current.value

    # -- without changing the host ----------------------------------------------------------------

    def hold(self) -> Usability:
        return self._locks.hold(
            _LOCK,
            "the Linux bridges of this network namespace",
            "run this agent in a network namespace of its own; or take linuxbridge out of its [agent] "
            "enabled_backends",
        )

    def probe(self) -> Usability:
        shared = self._settings.shared_interfaces()
        if shared:
            return Usability(
                False,
                f"{', '.join(shared)} is the uplink of several physical networks, but can be on one bridge",
                "name each interface once in [linuxbridge] physical_interfaces",
                "uplink",
            )
        if "bridge" in self._makeable:
            return Usability(True)
        if (without := nftables_unavailable()) is not None:
            return Usability.without(without)
        try:
            os.close(os.open(TUN_DEVICE, os.O_RDWR | os.O_CLOEXEC))
        except OSError as refused:
            reason = f"{TUN_DEVICE}: {refused.strerror}"
            return Usability(False, reason, "modprobe tun, and run the agent as root", "tap")
        error = self._unsupported("bridge")
        if error is not None:
            fix = f"{error.fix}, and give the agent CAP_NET_ADMIN"
            return Usability(False, error.detail, fix, "bridge")
        return Usability(True)

    def validate(self, spec: PortSpec) -> None:
        super().validate(spec)
        if spec.device is not None:
            self._refuse_device(spec, spec.device)
        known, network = self._settings.physical_interfaces, spec.network
        if network.type == "vxlan":
            if not self._settings.local_ip:
                raise no_local_ip()
        elif network.physical_network not in known:
            raise unknown_network(network.physical_network, "[linuxbridge] physical_interfaces", known)
        kinds = [network.type] if self._needs_device(spec) else []
        for kind in (*kinds, *(["ifb"] if spec.qos.egress_kbps else [])):
            if error := self._unsupported(kind):
                raise error

    def _refuse_device(self, spec: PortSpec, device: str) -> None:
        interfaces = filter(None, self._settings.physical_interfaces.values())
        uplinks = dict.fromkeys(interfaces, "[linuxbridge] physical_interfaces")
        link = fit_device(device, spec.network.mtu, uplinks, self._kernel.links.get)
        mark = service_of(link)
        # In place of a VM's id, the spec of a service port has its own (``ServicePortSpec.as_port``).
        if mark is None or mark.port_id != spec.vm_id:
            refuse_used(self._kernel, link)

    def _needs_device(self, spec: PortSpec) -> bool:
        network = spec.network
        interface = self._settings.physical_interfaces.get(network.physical_network or "")
        return network.type == "vxlan" or (network.type == "vlan" and bool(interface))

    def _unsupported(self, kind: str) -> BackendUnavailable | None:
        """Return why the kernel cannot create this kind of device; caches success."""
        if kind in self._makeable:
            return None
        error_text = kind_unavailable(kind)
        if error_text is None:
            self._makeable |= {kind}
            return None
        return BackendUnavailable(
            f"the kernel makes no {kind} device: {error_text}",
            step=kind,
            fix=f"modprobe {_MODULES[kind]}",
        )

    def binding(self, intent: Intent) -> Binding:
        spec = intent.spec
        assert spec is not None
        name, bridge = tap_name(intent.port_id, spec), Segment.of(spec.network).bridge
        return Binding.model_validate(
            {
                "vif_type": "device" if spec.device else "tap",
                "interface_xml": "" if spec.device else tap_interface(spec, name),
                "device": name,
                "bridge": self._settings.bridge_names.get(bridge, bridge),
            }
        )

    def claims(
        self, intent: Intent, observed: BridgeObservation, taken: Mapping[Claim, str]
    ) -> tuple[Claim, ...]:
        return claim_name(intent, taken)

    def plan(self, intents: Sequence[Intent], observed: BridgeObservation) -> Plan:
        return make_plan(intents, observed)

    def findings(self, intents: Sequence[Intent], observed: BridgeObservation) -> Sequence[Finding]:
        return host_findings(observed)

    def check_network(self, name: str, spec: PhysicalNetworkSpec) -> None:
        if chosen := linux_bridge_of(spec):
            refuse_name(self._kernel, name, chosen)
        check_network(self._kernel.links, name, spec)

    def network_faults(self, observed: BridgeObservation) -> Mapping[str, NetpluginError]:
        return network_faults(observed)

    def network_remains(self, name: str, observed: BridgeObservation) -> Sequence[str]:
        return network_remains(name, observed)

    def network_holders(self, name: str) -> Sequence[str]:
        return holders(self._kernel.links, name)

    def port_counters(self, intents: Sequence[Intent], deadline: float) -> Readings:
        return self._counters.read(self._settings, intents, deadline)

    def facts(self) -> Mapping[str, str | int | bool]:
        return {"vhost_net": VHOST_NET.exists(), "local_ip": self._settings.local_ip}

    # -- reading and changing the host ------------------------------------------------------------

    def observe(self, ports: Collection[str] | None, deadline: float) -> BridgeObservation:
        number = self._watch.number() if self._watch else 0
        seen = self._with_guests(BridgeReader(self._settings, self._kernel, ports).read(deadline))
        if self._watch:
            names = frozenset(bridge.given or bridge.link.name for bridge in seen.bridges.values())
            self._watch.observed(number, frozenset(seen.services), names)
        seen = replace(seen, abused=frozenset(self._abused() & seen.taps.keys()))
        if ports is None:
            self._mark_there = seen.store_mark
            seen = replace(seen, store_mark=self._carried.found(seen.store_mark))
        return seen

    def follow_guest(self, intent: Intent) -> None:
        if intent.spec is not None and intent.follows_guest:
            self._followed[intent.port_id] = tap_name(intent.port_id, intent.spec)
        elif self._followed.pop(intent.port_id, None) is None:
            return
        links = {i: self._kernel.links.get(name) for i, name in self._followed.items()}
        self._followed = {i: link.name for i, link in links.items() if link}
        if self._watch:
            self._watch.follow({link.index: (i, link.name) for i, link in links.items() if link})

    def _with_guests(self, seen: BridgeObservation) -> BridgeObservation:
        """With what shows whether guests that the agent waits for run: their first frame, and the carrier.

        QEMU has opened the tap before the guest runs, and after it was paused.
        """
        followed = self._followed.keys() & seen.taps.keys()
        if not followed:
            return seen
        ports = dict(seen.ports)
        for port_id in followed:
            link = seen.taps[port_id]
            runs = self._kernel.fdb.learned(link.index) or None if link.carrier else False
            if port_id in ports:
                ports[port_id] = replace(ports[port_id], guest=runs)
        return replace(seen, ports=ports)

    def announce(self, intents: Sequence[Intent], deadline: float) -> None:
        """The bridge has the MAC on the port as soon as the port is open (of a standby: and its VF is free).

        What QEMU and the guest send when the guest goes on passes the tap, and tells the network.
        """

    def _abused(self) -> set[str]:
        """The ports whose taps' MACs were set back so often lately that a process keeps changing them."""
        since = time.monotonic() - _ABUSE_S
        return {i for i, times in self._set_back.items() if len(times) == _ABUSES and times[0] > since}

    def apply(self, changes: Sequence[Change], deadline: float) -> Applied:
        ours = [change for change in changes if isinstance(change, BridgeChange)]
        for change in ours:
            if isinstance(change, SetTapAddress):
                self._set_back.setdefault(change.ports[0], deque(maxlen=_ABUSES)).append(time.monotonic())
            elif isinstance(change, CutOff):
                self._set_back.pop(change.ports[0], None)
        touched = frozenset[str]().union(*(change.touches() for change in ours))
        with self._watch.suppress_own_events(touched) if self._watch else contextlib.nullcontext():
            return Writer(self._kernel, deadline, self._next_mark()).write(ours)

    def _next_mark(self) -> str:
        """Return the store's mark to write with the rules.

        Empty until the existing mark was read: until then, the mark stays as it is."""
        return "" if self._mark_there is None else self._carried.after(self._mark_there)

    def watch(self, wake: Callable[[Wake], None]) -> None:
        try:
            self._watch = BridgeWatch(wake, self._interfaces, self._supervisor)
        except OSError as refused:
            LOG.warning("linuxbridge: no kernel events, so only periodic reads find drift: %s", refused)
        try:
            self._foreign = ForeignWatch(wake, self._kernel.obstacles.reader, self._supervisor)
        except OSError as refused:
            LOG.warning("linuxbridge: the packet filters of others are read only periodically: %s", refused)
        super().watch(wake)

    def _interfaces(self) -> frozenset[str]:
        return frozenset(filter(None, self._settings.physical_interfaces.values()))

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if self._foreign is not None:
            self._foreign.close()
            self._foreign = None
        self._kernel.members.close()
