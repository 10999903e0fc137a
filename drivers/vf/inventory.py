"""The physical and virtual functions of the host as values, read from sysfs and one netlink dump.

The root of sysfs is a parameter, so that a whole tree may be test data. What is read for each of a
thousand VFs is few links and files; what only a PF can say is read once for the PF.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from drivers.vf.options import ALL_VFS, By, Device, VfNumbers
from netplugin.backend import Usability
from netplugin.host.vfs import (
    GROUPS,
    HostInterface,
    HostUse,
    NicLink,
    VfAttributes,
    host_use,
    is_vfio,
    read_interfaces,
    read_link,
    read_text,
)

_VIRTFN = "virtfn"
# What ports of a NIC's switch call themselves (``__devlink_port_phys_port_name_get`` in
# net/devlink/port.c): the representors of VFs, of subfunctions, and of PFs seen from a DPU.
_REPRESENTOR = re.compile(r"(?:c\d+)?pf(\d+)(?:vf(\d+)|sf\d+)?\Z")
_UPLINK = re.compile(r"p(\d+)\Z")
# PCI_CLASS_BRIDGE_PCI of include/linux/pci_ids.h: a bridge has no driver that takes the group from
# vfio (``driver_managed_dma`` of drivers/pci/pcie/portdrv.c).
_BRIDGE = "0x0604"


_HELD = Usability(True)


@dataclass(frozen=True, slots=True)
class Pf:
    """A physical function: a NIC of the operator's list."""

    address: str
    network: str
    driver: str | None
    numa_node: int | None
    total_vfs: int
    #: How many it has been told to have.
    wanted_vfs: int
    #: Its network interface; None if there is none in this network namespace.
    link: NicLink | None = None
    switchdev: bool = False
    #: The interface that stands for each VF on the NIC's switch, by number; in switchdev mode.
    representors: Mapping[int, str] = field(default_factory=dict)
    #: Whether its lock is this agent's; if not, its VFs are another's to give out and to reset.
    held: Usability = _HELD
    #: Which of its VFs may be given away.
    numbers: VfNumbers = ALL_VFS

    @property
    def name(self) -> str:
        """What people call it."""
        return self.link.name if self.link else self.address

    @property
    def permanent_mac(self) -> str | None:
        return self.link.permanent_mac if self.link else None


@dataclass(frozen=True, slots=True)
class Setting:
    """A group of attributes (see ``GROUPS``) with its values."""

    group: str
    values: tuple[object, ...]

    @classmethod
    def of(cls, group: str, attributes: VfAttributes) -> Setting:
        return cls(group, tuple(getattr(attributes, name) for name in GROUPS[group]))

    def by_name(self) -> dict[str, Any]:
        """The values by the names of the attributes."""
        return dict(zip(GROUPS[self.group], self.values, strict=True))


@dataclass(frozen=True, slots=True)
class Vf:
    """A virtual function. Its place on its PF is ``number``; there may be gaps."""

    address: str
    number: int
    pf: str
    numa_node: int | None
    iommu_group: str | None
    driver: str | None
    driver_override: str | None
    #: Whether a process has it open through vfio: a VM runs with it.
    is_open: bool = False
    #: The host's interfaces of it, in the agent's network namespace.
    interfaces: tuple[HostInterface, ...] = ()
    #: The other devices of its IOMMU group, bridges aside: vfio gives a group to one process whole
    #: (``iommu_group_claim_dma_owner`` in drivers/iommu/iommu.c).
    group_mates: tuple[str, ...] = ()
    #: Whether libvirt has settings of it to write when its VM has stopped.
    saved_by_libvirt: bool = False
    #: What the PF reports of it. None if it does not: its interface is away, or the driver leaves
    #: the VF out because it is being reset (``rtnl_fill_vfinfo`` in net/core/rtnetlink.c).
    attributes: VfAttributes | None = None
    #: What its NIC refused as unsupported where it was optional (``SetVf``).
    unsupported: frozenset[Setting] = frozenset()
    #: Whether it is likely to be reported soon, though it is not now.
    is_awaited: bool = False

    @property
    def is_with_vm(self) -> bool:
        """Whether a VM has it, or libvirt is about to give it to one or to take it back."""
        return self.is_open or self.saved_by_libvirt

    @property
    def host_use(self) -> HostUse | None:
        """How the host's network uses it; None if a VM may have it instead."""
        return host_use(self.driver, self.interfaces)

    @property
    def host_hold(self) -> HostUse | None:
        """As ``host_use``, without an interface that is only up: that may be left of DPDK's use."""
        return host_use(self.driver, self.interfaces, may_be_up=True)


@dataclass(frozen=True)
class Inventory:
    """All PFs of the operator's list, all of their VFs, and the entries nothing was found for."""

    pfs: Mapping[str, Pf] = field(default_factory=dict)
    vfs: Mapping[str, Vf] = field(default_factory=dict)
    missing: tuple[Device, ...] = ()
    #: PFs that stand in the list for two networks, with the networks.
    ambiguous: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def pf_of(self, vf: Vf) -> Pf:
        return self.pfs[vf.pf]

    def hides(self, vf: Vf) -> bool:
        """Whether the interface of its PF is there and does not report it."""
        return vf.attributes is None and self.pf_of(vf).link is not None

    @cached_property
    def by_place(self) -> Mapping[tuple[str, int], Vf]:
        """VFs by the address of their PF and their number on it."""
        return {(vf.pf, vf.number): vf for vf in self.vfs.values()}


def read_inventory(
    sys: Path,
    devices: Sequence[Device],
    links: Mapping[str, NicLink],
    saved: Collection[str] = (),
) -> Inventory:
    """What there is of the operator's ``devices``; ``links`` are the interfaces of PCI devices.

    ``saved`` are the files of libvirt with the settings of VFs, see ``Kernel``.
    """
    found, missing = find_pfs(sys, devices)
    pfs: dict[str, Pf] = {}
    vfs: dict[str, Vf] = {}
    for address, entries in sorted(found.items()):
        numbers = sum((entry.numbers for entry in entries), ALL_VFS)
        pf = replace(_read_pf(sys, address, entries[0].network, links), numbers=numbers)
        pfs[address] = pf
        vfs.update({vf.address: vf for vf in _read_vfs(sys, pf, saved)})
    networks = {address: networks_of(entries) for address, entries in found.items()}
    ambiguous = {a: names for a, names in networks.items() if len(names) > 1}
    return Inventory(pfs, vfs, missing, ambiguous)


def read_again(
    sys: Path, seen: Inventory, links: Mapping[str, NicLink], saved: Collection[str] = ()
) -> Inventory:
    """What was seen, with these NICs (their interfaces by address) and their VFs as they are now."""
    pfs, vfs = dict(seen.pfs), {a: vf for a, vf in seen.vfs.items() if vf.pf not in links}
    for address, link in links.items():
        old = seen.pfs[address]
        pf = _read_pf(sys, address, old.network, {link.name: link})
        pfs[address] = replace(pf, numbers=old.numbers)
        vfs.update({vf.address: vf for vf in _read_vfs(sys, pfs[address], saved)})
    return replace(seen, pfs=pfs, vfs=vfs)


def find_pfs(
    sys: Path, devices: Sequence[Device]
) -> tuple[dict[str, tuple[Device, ...]], tuple[Device, ...]]:
    """The PFs of the list by address, with their entries; and the entries that name none."""
    found: dict[str, tuple[Device, ...]] = {}
    missing: list[Device] = []
    for device in devices:
        addresses = _addresses(sys, device)
        if not addresses:
            missing.append(device)
        for address in addresses:
            found[address] = (*found.get(address, ()), device)
    return found, tuple(missing)


def networks_of(entries: Sequence[Device]) -> tuple[str, ...]:
    """The networks of the entries that name one PF: there should be one."""
    return tuple(dict.fromkeys(entry.network for entry in entries))


def _addresses(sys: Path, device: Device) -> list[str]:
    match device.by:
        case By.ADDRESS:
            candidates = [device.name]
        case By.INTERFACE:
            address = read_link(sys / "class/net" / device.name / "device")
            is_own = not _REPRESENTOR.match(_port_name(sys, device.name))
            candidates = [address] if address and is_own else []
        case By.KIND:
            return [
                address
                for address in sorted(_entries(sys / "bus/pci/devices"))
                if _is_pf(sys, address) and _kind(sys, address) == device.name
            ]
    return [address for address in candidates if _is_pf(sys, address)]


def _is_pf(sys: Path, address: str) -> bool:
    return os.path.exists(f"{sys}/bus/pci/devices/{address}/sriov_totalvfs")


def _kind(sys: Path, address: str) -> str:
    device = f"{sys}/bus/pci/devices/{address}"
    words = (read_text(f"{device}/{name}").removeprefix("0x") for name in ("vendor", "device"))
    return ":".join(words).lower()


def _entries(directory: Path | str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _read_pf(sys: Path, address: str, network: str, links: Mapping[str, NicLink]) -> Pf:
    device = f"{sys}/bus/pci/devices/{address}"
    name = _interface(sys, device)
    switch = read_text(sys / "class/net" / name / "phys_switch_id") if name else ""
    node = read_text(f"{device}/numa_node")
    return Pf(
        address=address,
        network=network,
        driver=read_link(f"{device}/driver"),
        numa_node=int(node) if node.isdecimal() else None,  # -1: the machine has no nodes
        total_vfs=_number(read_text(f"{device}/sriov_totalvfs")),
        wanted_vfs=_number(read_text(f"{device}/sriov_numvfs")),
        link=links.get(name) if name else None,
        switchdev=bool(switch),
        representors=_representors(sys, name, switch) if name and switch else {},
    )


def _interface(sys: Path, device: str) -> str | None:
    """The PF's own interface: in switchdev mode the representors are its device's too."""
    names = sorted(_entries(f"{device}/net"))
    return next((n for n in names if not _REPRESENTOR.match(_port_name(sys, n))), None)


def interface_index(sys: Path, device: Path | str) -> int | None:
    """The number of a PF's own interface; None if it has none in this network namespace."""
    name = _interface(sys, str(device))
    text = read_text(sys / "class/net" / name / "ifindex") if name else ""
    return int(text) if text.isdecimal() else None


def _port_name(sys: Path, interface: str) -> str:
    return read_text(sys / "class/net" / interface / "phys_port_name")


def _representors(sys: Path, uplink: str, switch: str) -> dict[int, str]:
    own = _UPLINK.match(_port_name(sys, uplink))
    found: dict[int, str] = {}
    for name in _entries(sys / "class/net"):
        match = _REPRESENTOR.match(_port_name(sys, name))
        if match is None or match[2] is None or (own and match[1] != own[1]):
            continue
        if read_text(sys / "class/net" / name / "phys_switch_id") == switch:
            found[int(match[2])] = name
    return found


def _read_vfs(sys: Path, pf: Pf, saved: Collection[str]) -> Iterator[Vf]:
    device = f"{sys}/bus/pci/devices/{pf.address}"
    attributes = pf.link.vfs if pf.link else {}
    for entry in _entries(device):
        number = entry.removeprefix(_VIRTFN)
        address = read_link(f"{device}/{entry}") if number != entry and number.isdecimal() else None
        if address is None:
            continue
        at = f"{sys}/bus/pci/devices/{address}"
        driver = read_link(f"{at}/driver")
        override = read_text(f"{at}/driver_override")
        yield Vf(
            address=address,
            number=int(number),
            pf=pf.address,
            numa_node=pf.numa_node,  # they are parts of one device
            iommu_group=read_link(f"{at}/iommu_group"),
            driver=driver,
            driver_override=None if override in ("", "(null)") else override,
            is_open=is_vfio(driver) and read_text(f"{at}/enable") not in ("", "0"),
            interfaces=() if driver is None or is_vfio(driver) else read_interfaces(at),
            group_mates=_group_mates(sys, address),
            saved_by_libvirt=libvirt_file(pf.name, int(number)) in saved,
            attributes=attributes.get(int(number)),
        )


def libvirt_file(pf: str, number: int) -> str:
    """The name of libvirt's file with the settings of a VF, see ``Kernel``."""
    return f"{pf}_vf{number}"


def _group_mates(sys: Path, address: str) -> tuple[str, ...]:
    devices = f"{sys}/bus/pci/devices"
    mates = sorted(set(_entries(f"{devices}/{address}/iommu_group/devices")) - {address})
    return tuple(m for m in mates if not read_text(f"{devices}/{m}/class").startswith(_BRIDGE))
