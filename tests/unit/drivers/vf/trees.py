"""Whole /sys trees with NICs and virtual functions, as files and links below a directory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from drivers.vf.inventory import Inventory, Vf
from netplugin.host.vf_messages import NicLink, VfAttributes


@dataclass(frozen=True)
class Nic:
    """A physical function to be; ``vfs`` are the numbers of its virtual functions."""

    address: str = "0000:03:00.0"
    interface: str = "eth0"
    vfs: Sequence[int] = tuple(range(7))
    total: int = 8
    numa_node: int = 0
    kind: tuple[str, str] = ("0x8086", "0x10c9")
    driver: str = "igb"
    vf_driver: str | None = "igbvf"
    #: The bus of its VFs.
    vf_bus: str = "03"
    mac: str = "52:54:00:00:aa:01"
    switch_id: str = ""
    port_name: str = ""
    representors: Mapping[int, str] = field(default_factory=dict)
    #: Other interfaces of the device by name, with what they call themselves.
    others: Mapping[str, str] = field(default_factory=dict)

    def vf_address(self, number: int) -> str:
        return f"0000:{self.vf_bus}:{0x10 + number // 8:02x}.{number % 8}"

    def link(self, index: int = 2, **fields: object) -> NicLink:
        """Its interface as netlink tells of it."""
        attributes = {n: VfAttributes(spoofchk=True, trusted=False) for n in self.vfs}
        values = {
            "mtu": 1500,
            "up": True,
            "carrier": True,
            "permanent_mac": self.mac,
            "vfs": attributes,
            **fields,
        }
        return NicLink(index=index, name=self.interface, **values)  # type: ignore[arg-type]


#: Another NIC, on another node, whose VFs have gaps.
SECOND = Nic(
    address="0000:81:00.0",
    interface="eth1",
    vfs=(0, 2, 5),
    numa_node=1,
    vf_bus="81",
    mac="52:54:00:00:aa:02",
    kind=("0x15b3", "0x1019"),
    driver="mlx5_core",
    vf_driver="mlx5_core",
)


def build(root: Path, *nics: Nic, vfio: bool = True, groups: int = 10) -> Path:
    """The tree; IOMMU groups are numbered from ``groups`` on, one for each VF."""
    for directory in ("bus/pci/devices", "bus/pci/drivers", "class/net", "kernel/iommu_groups"):
        (root / directory).mkdir(parents=True)
    if vfio:
        (root / "bus/pci/drivers/vfio-pci").mkdir()
    for index, nic in enumerate(nics, 2):
        groups = _add_nic(root, nic, groups)
        _write(root / "class/net" / nic.interface, ifindex=index)
    return root


def by_place(inventory: Inventory) -> dict[tuple[str, int], Vf]:
    """VFs by the PCI address of their PF and their number on it."""
    return {(vf.pf, vf.number): vf for vf in inventory.vfs.values()}


def _add_nic(root: Path, nic: Nic, group: int) -> int:
    device = _add_device(root, nic.address, nic.driver, nic.numa_node, nic.kind)
    _write(device, sriov_totalvfs=nic.total, sriov_numvfs=len(nic.vfs))
    _add_interface(root, device, nic.interface, nic.switch_id, nic.port_name)
    for number, name in nic.representors.items():
        _add_interface(root, device, name, nic.switch_id, f"pf{nic.port_name[1:]}vf{number}")
    for name, port_name in nic.others.items():
        _add_interface(root, device, name, nic.switch_id, port_name)
    for number in nic.vfs:
        address = nic.vf_address(number)
        vf = _add_device(root, address, nic.vf_driver, nic.numa_node, ("0x8086", "0x10ca"))
        _write(vf, driver_override="(null)", reset="", enable=int(nic.vf_driver is not None))
        _link(vf / "physfn", f"../{nic.address}")
        _link(device / f"virtfn{number}", f"../{address}")
        if nic.vf_driver and "vfio" not in nic.vf_driver:
            own = vf / "net" / f"{nic.interface}v{number}"
            own.mkdir(parents=True)
            _write(own, flags="0x1002", addr_assign_type=0)
        (root / f"kernel/iommu_groups/{group}/devices").mkdir(parents=True)
        (root / f"kernel/iommu_groups/{group}/devices/{address}").touch()
        _link(vf / "iommu_group", f"../../../kernel/iommu_groups/{group}")
        group += 1
    return group


def _add_device(root: Path, address: str, driver: str | None, numa_node: int, kind: tuple[str, str]) -> Path:
    device = root / "devices/pci0000:00" / address
    device.mkdir(parents=True)
    _write(device, vendor=kind[0], device=kind[1], numa_node=numa_node)
    _link(root / "bus/pci/devices" / address, f"../../../devices/pci0000:00/{address}")
    if driver is not None:
        (root / "bus/pci/drivers" / driver).mkdir(exist_ok=True)
        _link(device / "driver", f"../../../bus/pci/drivers/{driver}")
    return device


def _add_interface(root: Path, device: Path, name: str, switch_id: str, port_name: str) -> None:
    interface = device / "net" / name
    interface.mkdir(parents=True)
    _write(interface, phys_switch_id=switch_id, phys_port_name=port_name)
    _link(interface / "device", f"../../../{device.name}")
    _link(root / "class/net" / name, os.path.relpath(interface, root / "class/net"))


def _link(at: Path, to: str) -> None:
    at.symlink_to(to)


def _write(directory: Path, **files: object) -> None:
    for name, value in files.items():
        (directory / name).write_text(f"{value}\n")
