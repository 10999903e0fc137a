"""NICs with VFs in memory: they take what is written, refuse it, forget it, or lose their VFs.

What a driver refuses, and with which error, is data (``Quirks``), written after its source.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

from drivers.vf.inventory import Inventory, Pf, Vf, libvirt_file
from drivers.vf.kernel import VfKernel
from drivers.vf.options import ALL_VFS, VfNumbers, parse_devices
from netplugin.api.errors import HostError, Unsupported
from netplugin.host.nic_models import max_queues
from netplugin.host.usability import Usability
from netplugin.host.vf_messages import GROUPS, NO_MAC, NicLink, VfAttributes
from netplugin.host.vfs import VFIO, HostInterface, HostUse, VfRefuses, Vfs, _error, is_vfio


def _nothing() -> None:
    """The step that is no boundary."""


@dataclass
class ModelVf:
    """One VF, as its PF and sysfs have it."""

    number: int
    attributes: VfAttributes
    driver: str | None
    override: str | None = None
    is_open: bool = False
    #: A driver and attributes of a VM before may be left until it is reset.
    dirty: bool = False
    #: Whether its MAC was written through the PF: then the VF's driver may not change it.
    admin_mac: bool = False
    #: Its host interface, if a network driver has it.
    up: bool = False
    enslaved: bool = False
    elsewhere: bool = False
    #: The MAC of its host interface, where that is not the one that the PF reports.
    chosen_mac: str | None = None
    #: MAC and VLAN that libvirt writes back when its VM has stopped.
    saved: tuple[str, int] | None = None


@dataclass
class ModelPf:
    """One NIC. ``vf_driver`` binds to VFs that come, or nothing does."""

    address: str
    name: str
    network: str = "net1"
    numa_node: int | None = 0
    vf_driver: str | None = "igbvf"
    total: int = 7
    switchdev: bool = False
    link: dict[str, Any] = field(default_factory=dict)
    vfs: dict[int, ModelVf] = field(default_factory=dict)
    #: The MAC it was built with.
    mac: str = ""
    driver: str = "igb"
    #: VFs that the driver leaves out of what it reports, because they are being reset.
    unreported: set[int] = field(default_factory=set)
    #: Whether it is renamed, so that the operator's list does not find it.
    away: bool = False
    #: Those that the operator's list lets ports have.
    numbers: VfNumbers = ALL_VFS

    def __post_init__(self) -> None:
        self.mac = self.mac or f"52:54:00:00:00:{self.address[5:7]}"

    def make_vfs(self, count: int) -> None:
        """What writing sriov_numvfs does; like the kernel it does not wait for who has one open."""
        self.vfs = {n: self.new_vf(n) for n in range(count)}

    def new_vf(self, number: int) -> ModelVf:
        vf = ModelVf(number, VfAttributes(spoofchk=True, trusted=False), self.vf_driver)
        self.choose_mac(vf)
        return vf

    def choose_mac(self, vf: ModelVf) -> None:
        """igbvf chooses a MAC where none is set, and its PF tells of it; mlx5 does not tell."""
        if vf.driver == "igbvf" and vf.attributes.mac == NO_MAC:
            chosen = f"02:00:00:00:{self.address[5:7]}:{vf.number:02x}"
            vf.attributes = replace(vf.attributes, mac=chosen)

    def vf_address(self, number: int) -> str:
        return f"{self.address[:8]}{0x10 + number // 8:02x}.{number % 8}"


#: What a driver answers to a setting of a VF, or when a driver is to be bound (``driver``): an errno,
#: or 0 if it takes it.
Refuses = Callable[[ModelPf, int, str, VfAttributes], int]


def takes_all(pf: ModelPf, number: int, group: str, want: VfAttributes) -> int:
    return 0


class ModelVfs(Vfs):
    """The primitives on the model; each is a boundary between steps."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self._model = model

    def set(self, pf_index: int, vf_number: int, group: str, want: VfAttributes) -> None:
        model = self._model
        model.tick()
        pf = next(p for i, p in enumerate(model.pfs.values()) if i == pf_index)
        vf = pf.vfs.get(vf_number)
        if vf is None:
            raise HostError("No such device", step="set-vf")
        address = pf.vf_address(vf_number)
        code = model.refuses(pf, vf_number, group, want)
        if code:
            raise _error("set-vf", f"{group}: {os.strerror(code)}", code, group)
        if group in model.unsupported:
            model.not_supported.add((address, group))
            raise Unsupported(f"{group}: Operation not supported", step="set-vf")
        if address in model.broken:
            raise VfRefuses(f"{group}: Input/output error", step="set-vf")
        if address not in model.forgetful:
            names = {name: getattr(want, name) for name in GROUPS[group]}
            vf.attributes = replace(vf.attributes, **names)
            if group == "mac":
                vf.admin_mac = want.mac != NO_MAC
        model.written.append((address, group))
        model.tick()

    def link(self, index: int) -> NicLink | None:
        pf = next((p for i, p in enumerate(self._model.pfs.values()) if i == index), None)
        return None if pf is None or pf.away else self._model.link(index, pf)

    def is_open(self, address: str) -> bool:
        return self._vf(address)[1].is_open

    def override(self, address: str, driver: str | None) -> None:
        self._vf(address)[1].override = driver

    def host_use(self, address: str, *, may_be_up: bool = False) -> HostUse | None:
        pf, vf = self._vf(address)
        seen = self._model.see(pf, vf)
        return seen.host_hold if may_be_up else seen.host_use

    def unbind(self, address: str) -> None:
        _, vf = self._vf(address)
        assert not vf.is_open, "a VM's device is taken from it"
        vf.driver = None

    def reset(self, address: str) -> None:
        _, vf = self._vf(address)
        assert not vf.is_open, "a VM's device is reset"
        vf.dirty = False

    def probe(self, address: str) -> None:
        pf, vf = self._vf(address)
        if code := self._model.refuses(pf, vf.number, "driver", vf.attributes):
            raise _error("bind-vf", f"driver: {os.strerror(code)}", code, "driver")
        if vf.driver is None and address not in self._model.unbindable:
            vf.driver, vf.chosen_mac = vf.override or pf.vf_driver, None
            assert not (vf.driver == pf.vf_driver and vf.dirty), "given back without a reset"
            pf.choose_mac(vf)

    def _vf(self, address: str) -> tuple[ModelPf, ModelVf]:
        self._model.tick()
        for pf in self._model.pfs.values():
            for number, vf in pf.vfs.items():
                if pf.vf_address(number) == address:
                    return pf, vf
        raise HostError(f"{address}: No such file or directory", step="bind-vf")


class Model(VfKernel):
    """See the knobs: what is not supported, which VFs are ill; ``tick`` is called at each boundary."""

    def __init__(self, *pfs: ModelPf, tick: Callable[[], None] = _nothing) -> None:
        super().__init__(parse_devices([f"{pf.network}:{pf.address}" for pf in pfs]))
        self.pfs = {pf.address: pf for pf in pfs}
        self.tick = tick
        self.unsupported: set[str] = set()
        #: What was refused for that, by VF: it is not put back either.
        self.not_supported: set[tuple[str, str]] = set()
        self.broken: set[str] = set()
        self.refuses: Refuses = takes_all
        #: Called at each look.
        self.seen: Callable[[], None] = _nothing
        self.forgetful: set[str] = set()
        #: VFs that vfio-pci does not take.
        self.unbindable: set[str] = set()
        self.written: list[tuple[str, str]] = []
        self.looks = 0
        self.looks_again = 0
        self.vfs = ModelVfs(self)
        for pf in pfs:
            if not pf.vfs:
                pf.make_vfs(pf.total)

    def usability(self, *, for_dpdk: bool = False) -> Usability:
        return Usability(True) if self.devices else super().usability(for_dpdk=for_dpdk)

    def nics(self) -> tuple[str, ...]:
        return tuple(self.pfs)

    def max_queues(self) -> int:
        return max(max_queues(pf.driver, len(pf.vfs)) for pf in self.pfs.values())

    def look(self) -> Inventory:
        self.tick()
        self.seen()
        self.looks += 1
        pfs = self._seen_pfs()
        vfs = (self.see(self.pfs[a], vf) for a in pfs for vf in self.pfs[a].vfs.values())
        return Inventory(pfs, {vf.address: vf for vf in vfs})

    def saved(self) -> frozenset[str]:
        return frozenset(
            libvirt_file(pf.name, vf.number)
            for pf in self.pfs.values()
            for vf in pf.vfs.values()
            if vf.saved is not None
        )

    def look_again(self, seen: Inventory, nics: Collection[str]) -> Inventory:
        """What is not among ``nics`` is old, as it would be."""
        self.tick()
        self.seen()
        self.looks_again += 1
        pfs = self._seen_pfs()
        if not set(nics) <= set(pfs):
            return self.look()
        old = {a: vf for a, vf in seen.vfs.items() if vf.pf not in nics}
        new = [self.see(self.pfs[n], vf) for n in nics for vf in self.pfs[n].vfs.values()]
        return Inventory(
            {a: pf if a in nics else seen.pfs[a] for a, pf in pfs.items()},
            {**old, **{vf.address: vf for vf in new}},
        )

    def _seen_pfs(self) -> dict[str, Pf]:
        there = enumerate(self.pfs.values())
        return {pf.address: self._pf(index, pf) for index, pf in there if not pf.away}

    def link(self, index: int, pf: ModelPf) -> NicLink:
        reported = {"mtu": 1500, "up": True, "carrier": True, **pf.link}
        vfs = {n: vf.attributes for n, vf in pf.vfs.items() if n not in pf.unreported}
        return NicLink(index, pf.name, permanent_mac=pf.mac, vfs=vfs, **reported)

    def _pf(self, index: int, pf: ModelPf) -> Pf:
        return Pf(
            pf.address,
            pf.network,
            pf.driver,
            pf.numa_node,
            pf.total,
            len(pf.vfs),
            self.link(index, pf),
            pf.switchdev,
            {n: f"{pf.name}_{n}" for n in pf.vfs} if pf.switchdev else {},
            numbers=pf.numbers,
        )

    def see(self, pf: ModelPf, vf: ModelVf) -> Vf:
        is_driven = vf.driver is not None and not is_vfio(vf.driver) and not vf.elsewhere
        name, mac = f"{pf.name}v{vf.number}", vf.chosen_mac or vf.attributes.mac
        own_mac = vf.chosen_mac is not None or (mac != NO_MAC and not vf.admin_mac)
        return Vf(
            address=pf.vf_address(vf.number),
            number=vf.number,
            pf=pf.address,
            numa_node=pf.numa_node,
            iommu_group=f"{pf.name}-{vf.number}",
            driver=vf.driver,
            driver_override=vf.override,
            is_open=vf.is_open,
            interfaces=(HostInterface(name, vf.up, vf.enslaved, own_mac, mac),) if is_driven else (),
            saved_by_libvirt=vf.saved is not None,
            attributes=None if vf.number in pf.unreported else vf.attributes,
        )

    # -- what others do to it --------------------------------------------------------------------

    def vf(self, address: str) -> ModelVf:
        return {pf.vf_address(n): vf for pf in self.pfs.values() for n, vf in pf.vfs.items()}[address]

    def addresses(self) -> list[str]:
        return [pf.vf_address(n) for pf in self.pfs.values() for n in pf.vfs]

    def start_vm(self, address: str, mac: str | None = None) -> None:
        """A VM opens it; libvirt remembers MAC and VLAN before, and writes the MAC of its XML."""
        vf = self.vf(address)
        assert is_vfio(vf.driver), "libvirt refuses a device that is not on vfio (managed='no')"
        vf.saved = (vf.attributes.mac, vf.attributes.vlan)
        if mac is not None:
            vf.attributes, vf.admin_mac = replace(vf.attributes, mac=mac), True
        vf.is_open = vf.dirty = True

    def stop_vm(self, address: str, *, libvirt_is_slow: bool = False) -> None:
        vf = self.vf(address)
        vf.is_open = False
        if not libvirt_is_slow:
            self.libvirt_writes_back(address)

    def libvirt_writes_back(self, address: str) -> None:
        vf = self.vf(address)
        if vf.saved is not None:
            mac, vlan = vf.saved
            vf.attributes = replace(vf.attributes, mac=mac, vlan=vlan, vlan_qos=0)
            vf.saved = None

    def drift(self, address: str, chance: random.Random) -> None:
        """Another program with root."""
        vf = self.vf(address)
        vf.attributes = replace(
            vf.attributes,
            mac=f"02:66:00:00:00:{chance.randrange(256):02x}",
            vlan=chance.randrange(5),
            trusted=chance.random() < 0.5,
            max_mbps=chance.randrange(3),
        )
        vf.admin_mac = True
        if not vf.is_open and chance.random() < 0.3:
            vf.driver, vf.override = chance.choice([("igbvf", None), (None, None), (None, VFIO)])
            vf.dirty = vf.dirty and vf.driver is None
