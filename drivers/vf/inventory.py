"""The physical and virtual functions of the host as values, read from sysfs and one netlink dump.

The root of sysfs is a parameter, so that a whole tree may be test data. What is read for each of a
thousand VFs is four links and files; what only a PF can say is read once for the PF.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from drivers.vf.options import By, Device
from netplugin.backend import Usability
from netplugin.host.vfs import NicLink, VfAttributes, is_vfio, read_link, read_text

_VIRTFN = "virtfn"
# What a representor calls itself (``devlink_port_attrs`` in net/devlink/port.c).
_REPRESENTOR = re.compile(r"(?:c\d+)?pf(\d+)vf(\d+)\Z")
_UPLINK = re.compile(r"p(\d+)\Z")


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

    @property
    def name(self) -> str:
        """What people call it."""
        return self.link.name if self.link else self.address

    @property
    def permanent_mac(self) -> str | None:
        return self.link.permanent_mac if self.link else None


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
    #: The host's interface of it, if that is on a bridge or bond.
    enslaved: str | None = None
    #: What the PF holds of it; None if the PF's interface does not tell.
    attributes: VfAttributes | None = None


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

    @cached_property
    def by_place(self) -> Mapping[tuple[str, int], Vf]:
        """VFs by the address of their PF and their number on it."""
        return {(vf.pf, vf.number): vf for vf in self.vfs.values()}

    @cached_property
    def shared_groups(self) -> frozenset[str]:
        """IOMMU groups that hold more than one VF: neither can be given to a VM alone."""
        seen: set[str] = set()
        shared: set[str] = set()
        for vf in self.vfs.values():
            if vf.iommu_group is not None:
                (shared if vf.iommu_group in seen else seen).add(vf.iommu_group)
        return frozenset(shared)


def read_inventory(sys: Path, devices: Sequence[Device], links: Mapping[str, NicLink]) -> Inventory:
    """What there is of the operator's ``devices``; ``links`` are the interfaces of PCI devices."""
    networks, missing = find_pfs(sys, devices)
    by_parent: dict[str, list[NicLink]] = {}
    for link in links.values():
        by_parent.setdefault(link.parent, []).append(link)
    pfs: dict[str, Pf] = {}
    vfs: dict[str, Vf] = {}
    for address, names in sorted(networks.items()):
        pf = _read_pf(sys, address, names[0], links)
        pfs[address] = pf
        vfs.update({vf.address: vf for vf in _read_vfs(sys, pf, by_parent)})
    ambiguous = {a: names for a, names in networks.items() if len(names) > 1}
    return Inventory(pfs, vfs, missing, ambiguous)


def read_again(sys: Path, seen: Inventory, links: Mapping[str, NicLink]) -> Inventory:
    """What was seen, with these NICs (their interfaces by address) and their VFs as they are now.

    Whether the host's interface of a VF is on a bridge is as it was, while the VF has its driver.
    """
    pfs, vfs = dict(seen.pfs), {a: vf for a, vf in seen.vfs.items() if vf.pf not in links}
    for address, link in links.items():
        pfs[address] = _read_pf(sys, address, seen.pfs[address].network, {link.name: link})
        for vf in _read_vfs(sys, pfs[address], {}):
            old = seen.vfs.get(vf.address)
            kept = old.enslaved if old and old.driver == vf.driver else None
            vfs[vf.address] = replace(vf, enslaved=kept)
    return replace(seen, pfs=pfs, vfs=vfs)


def find_pfs(
    sys: Path, devices: Sequence[Device]
) -> tuple[dict[str, tuple[str, ...]], tuple[Device, ...]]:
    """The PFs of the list by address, with their networks; and the entries that name none."""
    found: dict[str, tuple[str, ...]] = {}
    missing: list[Device] = []
    for device in devices:
        addresses = _addresses(sys, device)
        if not addresses:
            missing.append(device)
        for address in addresses:
            found[address] = tuple(dict.fromkeys((*found.get(address, ()), device.network)))
    return found, tuple(missing)


def _addresses(sys: Path, device: Device) -> list[str]:
    match device.by:
        case By.ADDRESS:
            candidates = [device.name]
        case By.INTERFACE:
            address = read_link(sys / "class/net" / device.name / "device")
            candidates = [address] if address else []
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
    if len(names) > 1:
        names = [n for n in names if not _REPRESENTOR.match(_port_name(sys, n))]
    return names[0] if names else None


def _port_name(sys: Path, interface: str) -> str:
    return read_text(sys / "class/net" / interface / "phys_port_name")


def _representors(sys: Path, uplink: str, switch: str) -> dict[int, str]:
    own = _UPLINK.match(_port_name(sys, uplink))
    found: dict[int, str] = {}
    for name in _entries(sys / "class/net"):
        match = _REPRESENTOR.match(_port_name(sys, name))
        if match is None or (own and match[1] != own[1]):
            continue
        if read_text(sys / "class/net" / name / "phys_switch_id") == switch:
            found[int(match[2])] = name
    return found


def _read_vfs(sys: Path, pf: Pf, by_parent: Mapping[str, Sequence[NicLink]]) -> Iterator[Vf]:
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
            enslaved=next((i.name for i in by_parent.get(address, ()) if i.enslaved), None),
            attributes=attributes.get(int(number)),
        )
