"""NICs with VFs in memory: they take what is written, refuse it, forget it, or lose their VFs."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

from drivers.vf.inventory import Inventory, Pf, Vf
from drivers.vf.kernel import Kernel
from drivers.vf.options import parse_devices
from netplugin.backend import Usability
from netplugin.errors import HostError, Unsupported
from netplugin.host.vfs import (
    GROUPS,
    NO_MAC,
    VFIO,
    NicLink,
    VfAttributes,
    VfRefuses,
    Vfs,
    is_vfio,
)


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


@dataclass
class ModelPf:
    """One NIC. ``vf_driver`` binds to VFs that come, or nothing does."""

    address: str
    name: str
    network: str = "net1"
    numa_node: int = 0
    vf_driver: str | None = "igbvf"
    total: int = 7
    switchdev: bool = False
    link: dict[str, Any] = field(default_factory=dict)
    vfs: dict[int, ModelVf] = field(default_factory=dict)
    #: The MAC it was built with.
    mac: str = ""

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
        if group in model.unsupported:
            raise Unsupported(f"{group}: Operation not supported", step="set-vf")
        if address in model.broken:
            raise VfRefuses(f"{group}: Input/output error", step="set-vf")
        if address not in model.forgetful:
            names = {name: getattr(want, name) for name in GROUPS[group]}
            vf.attributes = replace(vf.attributes, **names)
        model.written.append((address, group))
        model.tick()

    def override(self, address: str, driver: str | None) -> None:
        self._vf(address)[1].override = driver

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
        if vf.driver is None and address not in self._model.unbindable:
            vf.driver = vf.override or pf.vf_driver
            assert not (vf.driver == pf.vf_driver and vf.dirty), "given back without a reset"
            pf.choose_mac(vf)

    def _vf(self, address: str) -> tuple[ModelPf, ModelVf]:
        self._model.tick()
        for pf in self._model.pfs.values():
            for number, vf in pf.vfs.items():
                if pf.vf_address(number) == address:
                    return pf, vf
        raise HostError(f"{address}: No such file or directory", step="bind-vf")


class Model(Kernel):
    """See the knobs: what is not supported, which VFs are ill; ``tick`` is called at each boundary."""

    def __init__(self, *pfs: ModelPf, tick: Callable[[], None] = _nothing) -> None:
        super().__init__(parse_devices([f"{pf.network}:{pf.address}" for pf in pfs]))
        self.pfs = {pf.address: pf for pf in pfs}
        self.tick = tick
        self.unsupported: set[str] = set()
        self.broken: set[str] = set()
        self.forgetful: set[str] = set()
        #: VFs that vfio-pci does not take.
        self.unbindable: set[str] = set()
        self.written: list[tuple[str, str]] = []
        self.looks = 0
        self.looks_again = 0
        self._vfs = ModelVfs(self)
        for pf in pfs:
            if not pf.vfs:
                pf.make_vfs(pf.total)

    def usability(self) -> Usability:
        return Usability(True)

    def nics(self) -> tuple[str, ...]:
        return tuple(self.pfs)

    def look(self) -> Inventory:
        self.tick()
        self.looks += 1
        pfs = {pf.address: self._pf(index, pf) for index, pf in enumerate(self.pfs.values())}
        vfs = (self._vf(pf, vf) for pf in self.pfs.values() for vf in pf.vfs.values())
        return Inventory(pfs, {vf.address: vf for vf in vfs})

    def look_again(self, seen: Inventory, nics: Collection[str]) -> Inventory:
        """What is not among ``nics`` is old, as it would be."""
        self.tick()
        self.looks_again += 1
        pfs = {pf.address: self._pf(index, pf) for index, pf in enumerate(self.pfs.values())}
        assert set(nics) <= set(pfs)
        old = {a: vf for a, vf in seen.vfs.items() if vf.pf not in nics}
        new = [self._vf(self.pfs[n], vf) for n in nics for vf in self.pfs[n].vfs.values()]
        return Inventory(
            {a: pf if a in nics else seen.pfs[a] for a, pf in pfs.items()},
            {**old, **{vf.address: vf for vf in new}},
        )

    def _pf(self, index: int, pf: ModelPf) -> Pf:
        told = {"mtu": 1500, "up": True, "carrier": True, **pf.link}
        vfs = {n: vf.attributes for n, vf in pf.vfs.items()}
        link = NicLink(index, pf.name, pf.address, permanent_mac=pf.mac, vfs=vfs, **told)
        return Pf(
            pf.address, pf.network, "igb", pf.numa_node, pf.total, len(pf.vfs), link, pf.switchdev,
            {n: f"{pf.name}_{n}" for n in pf.vfs} if pf.switchdev else {},
        )  # fmt: skip

    def _vf(self, pf: ModelPf, vf: ModelVf) -> Vf:
        address = pf.vf_address(vf.number)
        return Vf(
            address, vf.number, pf.address, pf.numa_node, f"{pf.name}-{vf.number}", vf.driver,
            vf.override, vf.is_open, None, vf.attributes,
        )  # fmt: skip

    # -- what others do to it --------------------------------------------------------------------

    def vf(self, address: str) -> ModelVf:
        return {
            pf.vf_address(n): vf for pf in self.pfs.values() for n, vf in pf.vfs.items()
        }[address]  # fmt: skip

    def addresses(self) -> list[str]:
        return [pf.vf_address(n) for pf in self.pfs.values() for n in pf.vfs]

    def start_vm(self, address: str) -> None:
        """A VM opens it; a driver that is left in place is changed by libvirt."""
        vf = self.vf(address)
        vf.driver = vf.driver if is_vfio(vf.driver) else VFIO
        vf.is_open = vf.dirty = True

    def stop_vm(self, address: str, kept: str | None = None) -> None:
        """``kept`` is the driver that libvirt gives it back to (``managed='yes'``)."""
        vf = self.vf(address)
        vf.is_open = False
        if kept is not None:
            vf.driver, vf.dirty = kept, False

    def drift(self, address: str, chance: random.Random) -> None:
        """A stranger with root."""
        vf = self.vf(address)
        vf.attributes = replace(
            vf.attributes, mac=f"02:66:00:00:00:{chance.randrange(256):02x}",
            vlan=chance.randrange(5), trusted=chance.random() < 0.5, max_mbps=chance.randrange(3),
        )  # fmt: skip
        if not vf.is_open and chance.random() < 0.3:
            vf.driver, vf.override = chance.choice([("igbvf", None), (None, None), (None, VFIO)])
            vf.dirty = vf.dirty and vf.driver is None
