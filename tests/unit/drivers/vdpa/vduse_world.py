"""The vdpa backend in mode vduse: a tree of files in place of /dev and /sys, and the kernel as a model."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from drivers.ovs.overlays import OVERLAY, TO_OVERLAY, TUNNELS, vxlan_name
from drivers.ovs.sockets import path_of
from drivers.ovs.tunnels import network_flows
from drivers.vdpa.driver import Vdpa
from drivers.vdpa.model import BRIDGE, VDUSE_KIND
from drivers.vdpa.options import GROUP, OPTIONS
from drivers.vdpa.vduse_host import VHOST_VDPA, VduseHost
from drivers.vdpa.vduse_plan import driver_of, vduse_name
from drivers.vdpa.vduse_processes import DeviceStep, waits
from netplugin import options
from netplugin.api.errors import Conflict, HostError, NetpluginError
from netplugin.api.models import NetworkSpec, PortSpec, PortState
from netplugin.host.flow import COOKIE_MARK, Flow
from netplugin.host.ovs_rows import OvsPort
from tests.unit.drivers.dpdkvhostuser.columns import LOCAL_IP
from tests.unit.drivers.dpdkvhostuser.model import SETTINGS
from tests.unit.drivers.sriov.model import ModelPf
from tests.unit.drivers.vdpa.world import RELAY_ROOT, ModelSwitch, VdpaWorld, vdpa_spec

VDUSE_ROOT = replace(RELAY_ROOT, ovs_version="4.0.0", dpdk_version="DPDK 25.11.4")
#: The network of the VFs, and one more, each on a bridge.
VDUSE_SETTINGS = replace(SETTINGS, bridge_mappings={"net1": "br1", "net9": "br9"}, uplinks={})


#: VXLAN networks, each on a UDP port of its own.
NETWORKS = ("blue", "red")


def network_spec(number: int, *peers: str) -> NetworkSpec:
    peers = peers or ("10.9.0.2",)
    return NetworkSpec(type="vxlan", vni=5001 + number, peers=peers, udp_port=4789 + number)


def vduse_spec(number: int = 1, vlan_id: int | None = 100, **fields: Any) -> PortSpec:
    network = {"physical_network": "net9", **fields.pop("network", {})}
    return vdpa_spec(number, vlan_id, network=network, **fields)


def overlay_spec(number: int = 1, network_id: str = "blue", **fields: Any) -> PortSpec:
    """On a VXLAN network of the world; with the MTU of the network."""
    network = {"type": "vxlan", "physical_network": None, "network_id": network_id}
    return vduse_spec(number, None, network=network, **fields)


class ModelVduse(VduseHost):
    """The kernel. Its names for character devices are the lowest that are free."""

    def __init__(self, tick: Callable[[], None]) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="npd", dir="/tmp"))  # short: it is part of a socket's path
        for place in ("dev/vduse/control", "sys/bus/vdpa/devices", f"sys/bus/vdpa/drivers/{VHOST_VDPA}"):
            (self.root / place).mkdir(parents=True)
        super().__init__(self.root / "dev", self.root / "sys")
        #: What the kernel says if it is asked.
        self.says: int | NetpluginError = 1
        self._tick = tick
        self._interfaces = 0
        self.links = self
        self.devices = self.root / "sys/bus/vdpa/devices"
        #: The devices that vswitchd serves, those that a process holds, and those whose record is lost.
        self.served: set[str] = set()
        self.held: set[str] = set()
        self.lost: set[str] = set()
        #: The driver that the kernel binds by itself.
        self.autoprobes: str | None = None
        #: The step that does not end.
        self.stuck: DeviceStep | None = None

    def _has_program(self) -> bool:
        return True  # whether or not it is installed here

    def load(self, says: int | NetpluginError) -> None:
        """Another kernel module, which makes its file anew."""
        self.says = says
        other = self.control.with_suffix(".new")
        other.mkdir()
        self.control.rmdir()
        other.rename(self.control)

    def _ask_kernel(self, deadline: float) -> int:
        if isinstance(self.says, NetpluginError):
            raise self.says
        return self.says

    def pending(self) -> DeviceStep | None:
        return self.stuck

    def run(self, step: DeviceStep, deadline: float) -> None:
        if self.stuck is not None:
            raise waits(self.stuck)  # as DeviceProcesses does
        self._tick()
        steps = {"create": self._create, "bind": self._bind, "delete": self._delete, "destroy": self._destroy}
        steps[step.verb](step)
        self._tick()

    def _create(self, step: DeviceStep) -> None:
        assert self.device(step.name).offered, "the port comes first"
        if self.device(step.name).on_bus:
            raise HostError("File exists", step="vdpa-device")
        (self.devices / step.name).mkdir()
        if self.autoprobes:
            self._probe(step.name, self.autoprobes)

    def _bind(self, step: DeviceStep) -> None:
        self._refuse_held(step)
        self._unprobe(step.name)
        self._probe(step.name, step.driver)

    def _delete(self, step: DeviceStep) -> None:
        self._refuse_held(step)
        if step.name not in self.served:
            self.stuck = step  # for 30 s: nobody answers the kernel
        shutil.rmtree(self.devices / step.name)
        if self.stuck:
            raise waits(self.stuck)

    def _destroy(self, step: DeviceStep) -> None:
        if step.name in self.served or self.device(step.name).on_bus:
            raise Conflict("busy", step="vdpa-device")
        self.withdraw(step.name)

    def _refuse_held(self, step: DeviceStep) -> None:
        if step.name in self.held:
            raise Conflict(f"{step}: a process has it open", step="vdpa-device")

    def _probe(self, name: str, driver: str) -> None:
        os.symlink(f"../../drivers/{driver}", self.devices / name / "driver")
        if driver == VHOST_VDPA:
            used = {place.name for place in self.devices.glob("*/vhost-vdpa-*")}
            free = next(n for n in range(999) if f"vhost-vdpa-{n}" not in used)
            (self.devices / name / f"vhost-vdpa-{free}").mkdir()
        else:
            self._interfaces += 1
            net = self.devices / name / "virtio0/net" / f"eth{self._interfaces}"
            net.mkdir(parents=True)
            os.symlink("../../../drivers/virtio_net", self.devices / name / "virtio0/driver")
            self.set(net.name, mtu=1500, address="00:00:00:00:00:00")

    def _unprobe(self, name: str) -> None:
        shutil.rmtree(self.devices / name)
        (self.devices / name).mkdir()

    def set(self, name: str, *, mtu: int, address: str) -> None:
        """As ``Links`` does."""
        [place] = self.devices.glob(f"*/virtio0/net/{name}")
        (place / "address").write_text(f"{address}\n")
        (place / "mtu").write_text(f"{mtu}\n")

    def move_away(self, name: str) -> None:
        """An interface goes into another namespace: it is not in this /sys any more."""
        [place] = (self.devices / name).glob("virtio0/net/*")
        shutil.rmtree(place)

    # -- vswitchd --------------------------------------------------------------------------------

    def serves(self, name: str) -> bool:
        """Whether vswitchd can serve a device of this name: a new one, or one of before."""
        if name not in self.served:
            if self.device(name).offered and name in self.lost:
                return False
            (self.root / "dev/vduse" / name).touch()
            self.served.add(name)
            self.lost.discard(name)
        return True

    def withdraw(self, name: str) -> None:
        (self.root / "dev/vduse" / name).unlink()

    def close(self) -> None:
        """The model outlives the process."""


class VduseSwitch(ModelSwitch):
    """OVS 4.0: with a port it makes its VDUSE device, or finds it."""

    vduse: ModelVduse

    def reconfigure(self) -> None:
        super().reconfigure()
        named = {
            name for b in self.ovs.bridges.values() for row in b.ports.values() if (name := self._name(row))
        }
        for name in self.vduse.served - named:
            self.vduse.served.discard(name)
            if not self.vduse.device(name).on_bus:  # else "busy"
                self.vduse.withdraw(name)

    def restart(self) -> None:
        self.vduse.served.clear()
        super().restart()

    def _name(self, row: OvsPort) -> str | None:
        path = path_of(row)
        return Path(path).name if path and Path(path).parent == self.vduse.directory else None

    def _made(self, row: OvsPort) -> OvsPort:
        name = self._name(row)
        if name is None:
            return super()._made(row)
        [interface] = row.interfaces
        works = self.vduse.serves(name)
        ofport = abs(interface.ofport or 1) * (1 if works else -1)
        error = None if works else "could not open network device (Invalid argument)"
        return replace(row, interfaces=(replace(interface, error=error, ofport=ofport),))


class VduseWorld(VdpaWorld):
    """Ports in mode ``vduse``, and with NICs those of before in mode ``relay`` beside them."""

    def __init__(self, directory: Path, *pfs: ModelPf, mode: str = "vduse", vfs: bool = False) -> None:
        self._vduse: ModelVduse | None = None
        self.has_vfs = vfs or bool(pfs)
        super().__init__(directory, *pfs, mode=mode)

    def start(self) -> None:
        """Once the platform has made its VXLAN networks: again, if the store was lost."""
        super().start()
        for number, name in enumerate(NETWORKS):
            if self.store.network(name) is None:
                self.store.save_network(name, network_spec(number), self.driver.held_vlans())

    @property
    def vduse(self) -> ModelVduse:
        if self._vduse is None:
            self._vduse = ModelVduse(self.clock.tick)
        return self._vduse

    @property
    def switch(self) -> VduseSwitch:
        if self._switch is None:
            if not self.has_vfs:
                self.model._devices = ()
            self._switch = VduseSwitch(self.model, VDUSE_SETTINGS)
            self._switch.vduse = self.vduse
            self._switch.reported = VDUSE_ROOT
        assert isinstance(self._switch, VduseSwitch)
        return self._switch

    def make_driver(self) -> Any:
        conf = options.load([])
        conf.register_opts(OPTIONS, group=GROUP)
        conf.set_override("mode", self.mode, group=GROUP)
        return Vdpa(conf, None, kernel=self.model, switch=self.switch, vduse=self.vduse)

    def close(self) -> None:
        self.store.close()
        shutil.rmtree(self.vduse.root)

    def vduse_ports(self) -> list[str]:
        """The ports in this mode, which claim names."""
        claims = {claim.key for claim in self.store.claims() if claim.kind == VDUSE_KIND}
        return [r.port_id for r in self.store.records() if vduse_name(r.port_id) in claims]

    def assert_settled(self) -> None:
        """Each port has its row, its device and its driver; and no other device is there."""
        ports = self.vduse_ports()
        for record in self.store.records():
            assert (record.state, record.error) == (PortState.ACTIVE, None), record
        names = {vduse_name(port_id) for port_id in ports}
        found = self.vduse.look()
        assert found.keys() == names == self.vduse.served
        for port_id in ports:
            record, device = self.store.get(port_id), found[vduse_name(port_id)]
            assert record is not None and device.offered and device.on_bus
            assert device.driver == driver_of(record.spec) and (device.character or device.networked)
            if device.interface is not None:
                assert (device.interface.mac, device.interface.mtu) == (
                    record.spec.mac,
                    record.spec.network.mtu,
                )
        seen = self.switch.ovs.common()
        of_vfs = seen.vf_ports.keys()
        assert seen.rows.keys() == {*ports, *of_vfs}
        for port_id in ports:
            assert path_of(seen.rows[port_id]) == f"{self.vduse.directory}/{vduse_name(port_id)}"
            assert seen.flows[port_id], port_id
        used = {n for n, b in self.switch.ovs.bridges.items() if any(p.owner for p in b.ports.values())}
        assert (BRIDGE in used) == bool(of_vfs)
        assert self.switch.ovs.bridges.keys() == used | ({TUNNELS} if OVERLAY in used else set())
        self.assert_networks()
        assert self.reconciler.check(dry_run=True).changes == []

    def assert_networks(self) -> None:
        """The tunnel bridge has the flows of networks with ports, and no others."""
        bridges = self.switch.ovs.bridges
        specs = [record.spec for record in self.store.records()]
        networks = {i: self.store.network(i) for i in {spec.overlay_id for spec in specs} if i}
        assert (OVERLAY in bridges) == bool(networks)
        found = {flow for flow in bridges[TUNNELS].flows if flow.cookie != COOKIE_MARK} if networks else set()
        desired: set[Flow] = set()
        for network in networks.values():
            assert network is not None
            names = (vxlan_name(network.spec.udp_port), TO_OVERLAY)
            tunnel, patch = (row.interface for row in (bridges[TUNNELS].ports[name] for name in names))
            assert tunnel and patch and tunnel.ofport and patch.ofport
            desired |= network_flows(network, LOCAL_IP, tunnel.ofport, patch.ofport)
        assert found == desired


def plugged(world: VduseWorld, ports: Sequence[str] = ("a",)) -> None:
    for number, port_id in enumerate(ports, 1):
        assert world.plug(port_id, vduse_spec(number)) is None
