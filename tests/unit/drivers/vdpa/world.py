"""The real driver and reconciler over model NICs, a model OVS that opens VFs, and a real store."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agents.ports.call import Call
from agents.ports.reconciler import Reconciler
from agents.telemetry.metrics import Metrics
from drivers.ovs.flow_changes import FlowChange
from drivers.ovs.model import OvsObservation
from drivers.ovs.overlays import OVERLAY
from drivers.ovs.ports import VHOST_TYPE
from drivers.ovs.switch import Switch
from drivers.vdpa.driver import Vdpa
from drivers.vdpa.model import BRIDGE, DEVICE_OPTIONS, LAYOUT, NATIVE_TYPE
from drivers.vdpa.options import GROUP, OPTIONS
from drivers.vdpa.vduse_host import VduseHost
from drivers.vdpa.vduse_processes import DeviceProcesses
from drivers.vf.plan import attributes_of
from netplugin import options
from netplugin.api.errors import HostError
from netplugin.api.models import PortSpec
from netplugin.backend import Applied, Change, Intent
from netplugin.host.flow_actions import DROP, output
from netplugin.host.nic_models import KEPT_BY_DPDK
from netplugin.host.ovs import OvsSettings
from netplugin.host.ovs_rows import OvsPort, OvsRoot
from netplugin.host.usability import Usability, Wake
from netplugin.host.vf_messages import VfAttributes
from netplugin.host.vfs import is_vfio
from tests.unit.drivers.dpdkvhostuser.model import SETTINGS
from tests.unit.drivers.dpdkvhostuser.model import Model as OvsModel
from tests.unit.drivers.sriov.model import Model, ModelPf
from tests.unit.drivers.sriov.world import World, make_spec, serve_all

RELAY_ROOT = OvsRoot(
    dpdk_initialized=True,
    dpdk_version="DPDK 22.11",
    ovs_version="3.1.0",
    iface_types=frozenset({VHOST_TYPE, "dpdk"}),
)
#: A directory that there is not.
NOWHERE = Path("/nonexistent")
NATIVE_ROOT = replace(RELAY_ROOT, iface_types=RELAY_ROOT.iface_types | {NATIVE_TYPE})


def vdpa_spec(number: int = 1, vlan_id: int | None = 100, **fields: Any) -> PortSpec:
    return make_spec(number, vlan_id, **{"backend": "vdpa", **fields})


class ModelSwitch(Switch):
    """OVS in memory. Like vswitchd it has the VFs open that its rows name, if it can have them."""

    def __init__(self, kernel: Model, settings: OvsSettings = SETTINGS) -> None:
        self.kernel = kernel
        self.ovs = OvsModel(settings, LAYOUT)
        self.reported = RELAY_ROOT
        #: The VFs that are open, each with the MAC that it had when it was opened.
        self.opened: dict[str, str] = {}
        #: Whether a guest runs behind a port, as far as vswitchd tells.
        self.guests: dict[str, bool] = {}
        self.announced: list[str] = []
        #: VFs that DPDK does not let go of with their port, and those that it was asked to.
        self.sticky: set[str] = set()
        self.detached: list[str] = []
        self.refuses_detach: HostError | None = None

    @property
    def settings(self) -> OvsSettings:
        return self.ovs.settings

    @property
    def root(self) -> OvsRoot:
        return self.reported

    def held_vlans(self) -> dict[int, str]:
        bridge = self.ovs.bridges.get(OVERLAY)
        rows = bridge.ports.values() if bridge else ()
        return {row.tag: row.network[0] for row in rows if row.tag and row.network}

    def row(self, port_id: str) -> OvsPort | None:
        return self.ovs.common([port_id]).rows.get(port_id)

    def hold(self) -> Usability:
        return Usability(True)

    def usable(self) -> Usability:
        return Usability(True)

    def look(
        self,
        ports: Collection[str] | None,
        deadline: float,
        *,
        networks: bool = True,
        after_apply: bool = False,
    ) -> OvsObservation:
        self.kernel.tick()
        seen = self.ovs.common(ports)
        rows = {i: self._with_guest(row, self.guests.get(i)) for i, row in seen.rows.items()}
        return replace(seen, rows=rows, root=self.reported)

    def apply(self, changes: Sequence[Change], deadline: float) -> Applied:
        """Rows are one transaction; flows come after, and a crash may come between any two."""
        self.kernel.tick()
        self.ovs.apply([change for change in changes if not isinstance(change, FlowChange)])
        self.reconfigure()
        for change in changes:
            if isinstance(change, FlowChange):
                self.kernel.tick()
                if change.bridge in self.ovs.bridges:
                    self.ovs.apply([change])
        self.kernel.tick()
        return Applied({})

    def send(self, intents: Sequence[Intent], frame: Callable[[str], bytes], deadline: float) -> None:
        self.kernel.tick()
        self.announced += [intent.port_id for intent in intents]

    def detach(self, device: str, deadline: float) -> bool:
        self.kernel.tick()
        if self.refuses_detach:
            raise self.refuses_detach
        if device not in self.opened:
            return False
        self.detached.append(device)
        self.sticky.discard(device)
        self.reconfigure()
        return True

    def subscribe(self, wake: Callable[[Wake], None]) -> None:
        wake(Wake("OVS is there"))

    # -- vswitchd --------------------------------------------------------------------------------

    def restart(self) -> None:
        """It dies and comes again: the flows are lost, and what it had open was closed meanwhile."""
        for address in self.opened:
            self._close(address)
        self.opened = {}
        for bridge in self.ovs.bridges.values():
            bridge.flows.clear()
            bridge.matches_fragments = False
        self.reconfigure()

    def reconfigure(self) -> None:
        """Have open what the rows name, no more and no less; a row that fails reports it."""
        named = self.devices()
        for address in self.opened.keys() - named.keys() - self.sticky:
            self._close(address)
            del self.opened[address]
        for bridge in self.ovs.bridges.values():
            for name, row in bridge.ports.items():
                bridge.ports[name] = self._made(row)

    def devices(self, *options: str) -> dict[str, str]:
        found: dict[str, str] = {}
        for bridge in self.ovs.bridges.values():
            for row in bridge.ports.values():
                for interface in row.interfaces:
                    asked = (interface.options.get(option) for option in options or DEVICE_OPTIONS)
                    found |= {device: interface.name for device in asked if device}
        return found

    def _made(self, row: OvsPort) -> OvsPort:
        [interface] = row.interfaces
        device = interface.options.get("dpdk-devargs", "")
        if interface.type != "dpdk":
            return row
        works = device in self.opened or self._open(device)
        error = None if works else f"Error attaching device '{device}' to DPDK"
        ofport = (abs(interface.ofport or 1)) * (1 if works else -1)
        return replace(row, interfaces=(replace(interface, error=error, ofport=ofport),))

    def _open(self, address: str) -> bool:
        if address not in self.kernel.addresses():
            return False
        vf = self.kernel.vf(address)
        if is_vfio(vf.driver):
            if vf.is_open:
                return False  # another has it
            vf.is_open = vf.dirty = True
        elif vf.driver != "mlx5_core":
            return False
        self.opened[address] = vf.attributes.mac
        return True

    @staticmethod
    def _with_guest(row: OvsPort, guest: bool | None) -> OvsPort:
        [interface] = row.interfaces
        return replace(row, interfaces=(replace(interface, connection=guest),))

    def _close(self, address: str) -> None:
        if address in self.kernel.addresses():
            self.kernel.vf(address).is_open = False


class VdpaWorld(World):
    """The vdpa backend, its host, and the process that may end at any time."""

    def __init__(self, directory: Path, *pfs: ModelPf, mode: str = "auto") -> None:
        self.mode = mode
        self._switch: ModelSwitch | None = None
        super().__init__(directory, *pfs)

    @property
    def switch(self) -> ModelSwitch:
        if self._switch is None:
            self._switch = ModelSwitch(self.model)
        return self._switch

    def make_driver(self) -> Any:
        conf = options.load([])
        conf.register_opts(OPTIONS, group=GROUP)
        conf.set_override("mode", self.mode, group=GROUP)
        # A host without VDUSE, not this one: its processes would be searched at each start.
        vduse = VduseHost(NOWHERE, NOWHERE, DeviceProcesses(proc=NOWHERE))
        return Vdpa(conf, None, kernel=self.model, switch=self.switch, vduse=vduse)

    def wants(self, spec: PortSpec) -> VfAttributes:
        return attributes_of(spec) if spec.backend == "vdpa" else super().wants(spec)

    def binds(self, spec: PortSpec, driver: str | None) -> bool:
        return spec.backend != "vdpa" or driver not in KEPT_BY_DPDK

    def assert_relayed(self) -> None:
        """Each port that is active has its two ports and their flows, and nothing else is there."""
        ports = [r.port_id for r in self.store.records() if r.spec.backend == "vdpa"]
        seen = self.switch.ovs.common()
        assert seen.rows.keys() == seen.vf_ports.keys() == set(ports)
        for port_id in ports:
            assert self.switch.devices()[self.address_of(port_id)] == seen.vf_ports[port_id].name
            vm, vf = (m[port_id].interface.ofport for m in (seen.rows, seen.vf_ports))  # type: ignore[union-attr]
            ways = {(f"in_port={a},", output(b)) for a, b in ((vm, vf), (vf, vm))}
            flows = seen.flows[port_id]
            assert {w for w in ways for f in flows if w[0] in f.match and w[1] == f.actions} == ways
            assert {flow.actions for flow in flows} <= {way[1] for way in ways} | {DROP}
        assert (BRIDGE in self.switch.ovs.bridges) == bool(ports)

    def assert_settled(self) -> None:
        super().assert_settled()
        self.assert_relayed()


class Both(VdpaWorld):
    """The backends sriov and vdpa in one agent: two workers, one store, the same NICs."""

    def start(self) -> None:
        super().start()
        sriov = World.make_driver(self)
        self.reconcilers = {
            "vdpa": self.reconciler,
            "sriov": Reconciler(sriov, self.store, Metrics(self.store)),
        }

    def serve(self, *operations: Call, crash_at: int | None = None) -> bool:
        """Each backend's share in its worker, the one after the other."""

        def all_of_them() -> None:
            for name, reconciler in self.reconcilers.items():
                its_own = [op for op in operations if self.backend_of(op) == name]
                serve_all(reconciler, its_own, patient=self.patient)

        return self.clock.completes(all_of_them, crash_at)

    def backend_of(self, operation: Call) -> str:
        record = self.store.get(operation.port_id)
        if operation.port.spec is not None:
            return operation.port.spec.backend
        return record.spec.backend if record else "vdpa"

    def check(self, crash_at: int | None = None) -> bool:
        return self.clock.completes(lambda: [r.check() for r in self.reconcilers.values()], crash_at)

    def assert_settled(self) -> None:
        super().assert_settled()
        assert self.reconcilers["sriov"].check(dry_run=True).changes == []
