"""The vdpa backend: OVS-DPDK connects a VM to a VF of the pool, or (mode ``vduse``) to a network's bridge."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from drivers.ovs import networks, sockets
from drivers.ovs.apply import Failures
from drivers.ovs.backend import VHOST_USER, OvsBackend
from drivers.ovs.findings import of_sockets
from drivers.ovs.placing import mapped_bridge
from drivers.ovs.ports import VHOST_TYPE, RelayVfPort
from drivers.ovs.row_changes import AddPort, RemovePort
from drivers.ovs.switch import Switch
from drivers.vdpa import vduse_plan
from drivers.vdpa.findings import findings
from drivers.vdpa.mode_choice import ModeChoice, first_that_has
from drivers.vdpa.model import (
    BACKEND,
    BRIDGE,
    DEVICE_OPTIONS,
    LAYOUT,
    NATIVE_TYPE,
    Mode,
    VdpaObservation,
    check_migration,
    check_mode,
    claim_vduse,
    mode_of,
    mode_on_host,
    vf_on_host,
)
from drivers.vdpa.options import GROUP, OPTIONS
from drivers.vdpa.plan import DetachVf, make_plan, observed_ports
from drivers.vdpa.vduse_commands import VduseChange
from drivers.vdpa.vduse_host import VHOST_VDPA, VduseHost
from drivers.vf.backend import VfBackend, drops_of
from drivers.vf.commands import KIND, VfChange
from drivers.vf.inventory import Inventory
from drivers.vf.kernel import VfKernel
from drivers.vf.ledger import claim_vf
from drivers.vf.memory import Memory, claim_of
from drivers.vf.plan import check_vlan_qos, in_use, place
from drivers.vf.pool import changed_vfs
from netplugin.api.errors import NetpluginError, OperationTimeout
from netplugin.api.models import Binding, Features, Finding, PortSpec
from netplugin.api.physical_models import PhysicalNetworkSpec
from netplugin.backend import Applied, Change, Claim, Intent, ObservedPort, Plan, claim_name, unknown_network
from netplugin.counters import Readings
from netplugin.data_path import DataPath
from netplugin.host.shared import Host
from netplugin.host.usability import Usability, Wake

#: Changes that affect neither OVS's database nor its flows.
_ELSEWHERE = (VfChange, DetachVf, VduseChange)


class Vdpa(OvsBackend[VdpaObservation], VfBackend[VdpaObservation]):
    """See ``netplugin.backend.Backend``."""

    name: ClassVar[str] = BACKEND
    features: ClassVar[Features] = Features(
        networks=("flat", "vlan", "vxlan"),
        live_migration=True,
        qos=True,
        port_security=("mac", "ip"),
        max_queues=128,
        needs_shared_memory=True,
        virtual_functions=True,
        port_names=True,
        vdpa_devices=True,
    )
    # It leaves ``keep`` to dpdkvhostuser, which shares the bridges of physical networks with it.
    network_parts: ClassVar[Mapping[str, bool]] = {"ovs": False, "sriov": False}
    # The NIC of a relay delivers to its VF by the VM's MAC, whether or not a guest runs.
    shut_without_guest: ClassVar[bool] = False
    data_path: ClassVar[Mapping[str, DataPath]] = {
        "vhostuser": VHOST_USER,
        VHOST_VDPA: replace(VHOST_USER, vm_side="vhostvdpa", device="vhost_vdpa_device"),
    }

    def __init__(
        self,
        conf: Any,
        host: Host | None,
        *,
        kernel: VfKernel | None = None,
        switch: Switch | None = None,
        vduse: VduseHost | None = None,
    ) -> None:
        """``kernel``, ``switch`` and ``vduse``: models of the host, for tests; None for the real ones."""
        conf.register_opts(OPTIONS, group=GROUP)
        self._guest_hugepages: bool = conf[GROUP].guest_hugepages
        super().__init__(conf, host, kernel=kernel)
        if switch is None:
            assert host is not None
            switch = Switch(host.ovs, LAYOUT, VHOST_TYPE, "dpdk")
        self._switch = switch
        self._vduse = vduse or VduseHost()
        self._choice = ModeChoice(conf[GROUP].mode, switch, self._kernel, self._vduse)
        #: The settings of OVS that the last observation was made with.
        self._observed_with = self._settings

    # -- without changing the host ----------------------------------------------------------------

    @property
    def _mode(self) -> Mode:
        """The mode of new ports, but for what ``ModeChoice.possible`` says."""
        return self._choice.preferred

    def probe(self) -> Usability:
        usable = self._switch.usable()
        return self._choice.usability() if usable.usable else usable

    def offered(self) -> Features:
        """What a new port may have."""
        return self._choice.offered(self.features)

    def check_migration(self, intent: Intent) -> None:
        mode = mode_of(intent)
        first_that_has((mode,) if mode else self._choice.possible(), check_migration)

    def validate(self, spec: PortSpec) -> None:
        """Features that depend on the port's mode are checked with its claim."""
        super().validate(spec)
        settings = self._settings
        sockets.check(settings, spec)
        if spec.overlay_id is not None:
            if not self._has_vduse():
                check_mode(spec, self._mode, {}, None)
            networks.check_vxlan(settings, self._switch.root)
            return
        of_vfs, name = self._vf_networks, str(spec.network.physical_network)
        if self._mode is Mode.VDUSE and name not in of_vfs | settings.bridge_mappings.keys():
            raise unknown_network(name, "[ovs] bridge_mappings", settings.bridge_mappings)
        # A port in mode ``vduse`` stays although new ones get another.
        if name not in of_vfs and not (self._has_vduse() and name in settings.bridge_mappings):
            raise unknown_network(name, "[sriov] devices", of_vfs)
        check_vlan_qos(spec)

    def _has_vduse(self) -> bool:
        """Whether there are ports in mode ``vduse``, or new ones get it."""
        return self._mode is Mode.VDUSE or bool(self._vduse.look())

    def claims(
        self, intent: Intent, observed: VdpaObservation, taken: Mapping[Claim, str]
    ) -> tuple[Claim, ...]:
        assert intent.spec is not None
        row = observed.ovs.rows.get(intent.port_id)
        has = mode_of(intent) or mode_on_host(intent.port_id, observed)
        check = partial(
            check_mode,
            intent.spec,
            bridge_mappings=self._settings.bridge_mappings,
            vf_networks=None if claim_of(intent) else self._vf_networks,
            here=observed.ovs.bridges.get(str(row.bridge)) if row else None,
            vduse_pairs=observed.vduse_pairs,
            migrates=intent.closed,
        )
        mode = first_that_has((has,) if has else self._choice.possible(), check)
        if mode is Mode.VDUSE:
            return (claim_vduse(intent, taken), *claim_name(intent, taken))
        had = vf_on_host(intent.port_id, observed.ovs)
        # If a VF keeps its kernel driver, only OVS's rows show that OVS uses it.
        used = {Claim(KIND, d): name for d, name in observed.devices.items() if d != had}
        # VFs of ports are covered by their claims, which also record the VM.
        used = {c: name for c, name in used.items() if c not in taken}
        taken_or_used = {**used, **taken}
        claim = claim_vf(observed.inventory, intent, taken_or_used, mode.use, had=had, notes=mode.notes)
        socket = sockets.claim_socket(self._settings, intent, row, taken)
        return (claim, socket, *claim_name(intent, taken))

    def plan(self, intents: Sequence[Intent], observed: VdpaObservation) -> Plan:
        return make_plan(self._observed_with, intents, observed)

    def observed_ports(
        self, intents: Sequence[Intent], observed: VdpaObservation
    ) -> Mapping[str, ObservedPort]:
        return observed_ports(intents, observed)

    def findings(self, intents: Sequence[Intent], observed: VdpaObservation) -> Sequence[Finding]:
        ovs = observed.ovs
        on_sockets = of_sockets(self._settings, ovs.rows, ovs.sockets)
        return [*findings(observed, self._mode, self._settings.local_ip), *on_sockets]

    def check_network(self, name: str, spec: PhysicalNetworkSpec) -> None:
        OvsBackend.check_network(self, name, spec)
        VfBackend.check_network(self, name, spec)

    def port_counters(self, intents: Sequence[Intent], deadline: float) -> Readings:
        """Those of OVS, with what the NIC has dropped of the VF."""
        on_ovs, vfs = (base.port_counters(self, intents, deadline) for base in (OvsBackend, VfBackend))
        ports = {
            port_id: replace(found, sources={**found.sources, **drops_of(vfs.ports.get(port_id))})
            for port_id, found in on_ovs.ports.items()
        }
        return Readings({**vfs.ports, **ports}, on_ovs.uplinks)

    def facts(self) -> Mapping[str, str | int | bool]:
        return {**self._choice.facts(), **super().facts()}

    def binding(self, intent: Intent) -> Binding:
        """Raises: HostError if the device of a port in mode ``vduse`` is not there now."""
        assert intent.spec is not None
        row, mode, settings = self._switch.row(intent.port_id), mode_of(intent), self._settings
        new = BRIDGE if mode is Mode.RELAY else mapped_bridge(settings, intent)
        bridge = row.bridge if row else new
        if mode is Mode.VDUSE:
            device = self._vduse.device(vduse_plan.vduse_name(intent.port_id))
            return vduse_plan.make_binding(intent, device, bridge, hugepages=self._guest_hugepages)
        claim, socket = claim_of(intent), sockets.socket_path(settings, intent, row)
        assert claim is not None and mode is not None
        of_vf = {"mode": mode.value, "pci_address": claim.key, **place(Memory.of(claim))}
        return self._vhostuser_binding(intent, socket, bridge, **of_vf)

    # -- reading and changing the host ------------------------------------------------------------

    def observe(self, ports: Collection[str] | None, deadline: float) -> VdpaObservation:
        return self._seen(ports, deadline, self._pool.look)

    def read_back(
        self,
        seen: VdpaObservation,
        changes: Sequence[Change],
        ports: Collection[str] | None,
        deadline: float,
    ) -> VdpaObservation:
        touched = [*changed_vfs(changes), *_opened_or_closed(changes)]
        look_again = partial(self._pool.look_again, seen.inventory, touched)
        return self._seen(ports, deadline, look_again, after_apply=True)

    def _seen(
        self,
        ports: Collection[str] | None,
        deadline: float,
        look: Callable[[], Inventory],
        *,
        after_apply: bool = False,
    ) -> VdpaObservation:
        """Read OVS first, so that the VFs that its rows have opened show as open in the inventory."""
        self._observed_with = self._settings
        self._vduse.learn(deadline)
        # Ports in mode ``relay`` do not use the bridges of networks.
        mapped = self._has_vduse() or NATIVE_TYPE in self._switch.root.iface_types
        ovs = self._switch.look(ports, deadline, networks=mapped, after_apply=after_apply)
        start = time.monotonic()
        inventory = look()
        timings = {**ovs.timings_ms, "vfs": (time.monotonic() - start) * 1e3}
        marked = dict.fromkeys(ovs.vf_ports, ObservedPort())
        marked |= {i: ObservedPort(stamp=row.stamp) for i, row in ovs.rows.items()}
        return VdpaObservation(
            marked,
            inventory,
            ovs,
            self._switch.devices(*DEVICE_OPTIONS),
            # First the process, then what it may have done meanwhile.
            vduse_pending=self._vduse.pending(),
            vduse=self._vduse.look(),
            vduse_directory=str(self._vduse.directory),
            vduse_pairs=self._vduse.pairs,
            timings_ms=timings,
            store_mark=ovs.store_mark,
        )

    def apply(self, changes: Sequence[Change], deadline: float) -> Applied:
        """Apply changes of VFs and vDPA devices before and after those of OVS, as they say.

        DPDK lets go of VFs first. The rest of the changes of a port that failed are skipped.
        """
        start = time.monotonic()
        failures = Failures()
        for change in changes:
            if isinstance(change, DetachVf) and (error := self._let_go(change, deadline)):
                failures.add([change], error)
        of_vfs = [c for c in changes if isinstance(c, VfChange) and not failures.has(c)]
        of_pool, unfit = self._pool.apply(of_vfs, deadline)
        failures.join(of_pool)
        vf_ms = (time.monotonic() - start) * 1e3
        device_ms = self._apply_devices(changes, failures, deadline, before_rows=True)
        rest = [c for c in changes if not isinstance(c, _ELSEWHERE) and not failures.has(c)]
        done = self._switch.apply(rest, deadline)
        failures.join(done.failed)
        device_ms += self._apply_devices(changes, failures, deadline, before_rows=False)
        timings = {**done.timings_ms, "vf": vf_ms, "vdpa-device": device_ms}
        return Applied(failures.of_ports, timings, unfit, done.of_networks)

    def _apply_devices(
        self,
        changes: Sequence[Change],
        failures: Failures,
        deadline: float,
        *,
        before_rows: bool,
    ) -> float:
        """Apply the changes of vDPA devices, add to ``failures``, and return the milliseconds it took."""
        start = time.monotonic()
        own = [c for c in changes if isinstance(c, VduseChange) and c.before_rows is before_rows]
        for change in own:
            if failures.has(change):
                continue
            try:
                if time.monotonic() >= deadline:
                    raise OperationTimeout("the time for the operation is over", step="vdpa-device")
                change.apply(self._vduse, deadline)
            except NetpluginError as error:
                failures.add([change], error)
        return (time.monotonic() - start) * 1e3

    def _let_go(self, change: DetachVf, deadline: float) -> NetpluginError | None:
        try:
            if self._switch.detach(change.address, deadline):
                return None
        except NetpluginError as error:
            return error
        return in_use(change.address, change.group)  # another process than OVS has it open

    def watch(self, wake: Callable[[Wake], None]) -> None:
        self._pool.watch(wake)
        super().watch(wake)

    def close(self) -> None:
        super().close()
        self._vduse.close()


def _opened_or_closed(changes: Sequence[Change]) -> list[str]:
    """Return the VFs that OVS opens or closes by these changes."""
    added = [change.port for change in changes if isinstance(change, AddPort)]
    opened = [port.device for port in added if isinstance(port, RelayVfPort)]
    closed = [change.device for change in changes if isinstance(change, RemovePort) and change.device]
    return opened + closed + [c.address for c in changes if isinstance(c, DetachVf)]
