"""Read the host's PFs and VFs from sysfs and netlink, as values.

The sysfs root is a parameter, so tests can use a directory tree. To scale to a thousand VFs, only a few
links and files are read per VF; everything that is common to a PF is read once per PF.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from drivers.vf.options import ALL_VFS, By, PoolDevice, VfNumbers
from netplugin.host.usability import Usability
from netplugin.host.vf_messages import GROUPS, NicLink, VfAttributes
from netplugin.host.vfs import (
    HostInterface,
    HostUse,
    host_use,
    is_open,
    is_vfio,
    read_interfaces,
    read_link,
    read_text,
)

_VIRTFN = "virtfn"
# phys_port_name of the ports of a NIC's embedded switch (``__devlink_port_phys_port_name_get`` in
# net/devlink/port.c): representors of VFs, of subfunctions, and of PFs as seen from a DPU.
_REPRESENTOR = re.compile(r"(?:c\d+)?pf(\d+)(?:vf(\d+)|sf\d+)?\Z")
# PCI_CLASS_BRIDGE_PCI of include/linux/pci_ids.h. Bridges do not prevent vfio from owning a group
# (``driver_managed_dma`` of drivers/pci/pcie/portdrv.c).
_BRIDGE = "0x0604"


_HELD = Usability(True)


@dataclass(frozen=True, slots=True)
class Pf:
    """A physical function of a NIC listed in ``[sriov] devices``."""

    address: str
    network: str
    driver: str | None
    numa_node: int | None
    total_vfs: int
    #: The configured number of VFs (``sriov_numvfs``).
    desired_vfs: int
    #: Its network interface; None if there is none in this network namespace.
    link: NicLink | None = None
    switchdev: bool = False
    #: Whether this agent holds the PF's lock. If not, another agent allocates and resets its VFs.
    held: Usability = _HELD
    #: The VFs that may be allocated.
    numbers: VfNumbers = ALL_VFS

    @property
    def name(self) -> str:
        """The interface name, or the PCI address if there is no interface."""
        return self.link.name if self.link else self.address

    @property
    def permanent_mac(self) -> str | None:
        return self.link.permanent_mac if self.link else None


@dataclass(frozen=True, slots=True)
class Setting:
    """One attribute group (see ``GROUPS``) with its values."""

    group: str
    values: tuple[object, ...]

    @classmethod
    def of(cls, group: str, attributes: VfAttributes) -> Setting:
        return cls(group, tuple(getattr(attributes, name) for name in GROUPS[group]))


@dataclass(frozen=True, slots=True)
class Vf:
    """A virtual function. ``number`` is its index on the PF; numbers may have gaps."""

    address: str
    number: int
    pf: str
    numa_node: int | None
    iommu_group: str | None
    driver: str | None
    driver_override: str | None
    #: Whether a process has opened it through vfio, that is, a VM runs with it.
    is_open: bool = False
    #: Its network interfaces in the agent's network namespace.
    interfaces: tuple[HostInterface, ...] = ()
    #: The other devices of its IOMMU group, except bridges. vfio assigns a group to one process as a whole
    #: (``iommu_group_claim_dma_owner`` in drivers/iommu/iommu.c).
    group_mates: tuple[str, ...] = ()
    #: Whether libvirt will restore saved settings of it after its VM stops.
    saved_by_libvirt: bool = False
    #: What the PF reports about it. None if the PF's interface is missing, or if the driver omits
    #: the VF during a reset (``rtnl_fill_vfinfo`` in net/core/rtnetlink.c).
    attributes: VfAttributes | None = None
    #: Optional settings that the NIC refused as unsupported (``SetVf``).
    unsupported: frozenset[Setting] = frozenset()
    #: Whether the PF does not report it now but is likely to do so soon.
    is_awaited: bool = False

    @property
    def is_with_vm(self) -> bool:
        """Whether a VM has it, or libvirt is attaching or detaching it."""
        return self.is_open or self.saved_by_libvirt

    @property
    def host_use(self) -> HostUse | None:
        """How the host's network uses it; None if it can be given to a VM."""
        return host_use(self.driver, self.interfaces)

    @property
    def host_hold(self) -> HostUse | None:
        """Like ``host_use``, but ignores an interface that is merely up: DPDK may have left it up."""
        return host_use(self.driver, self.interfaces, may_be_up=True)


@dataclass(frozen=True)
class Inventory:
    """All configured PFs with all of their VFs, and the entries that match no NIC."""

    pfs: Mapping[str, Pf] = field(default_factory=dict)
    vfs: Mapping[str, Vf] = field(default_factory=dict)
    missing: tuple[PoolDevice, ...] = ()

    def pf_of(self, vf: Vf) -> Pf:
        return self.pfs[vf.pf]

    def hides(self, vf: Vf) -> bool:
        """Whether the VF's PF has an interface but does not report the VF."""
        return vf.attributes is None and self.pf_of(vf).link is not None


def read_inventory(
    sys: Path, devices: Sequence[PoolDevice], links: Mapping[str, NicLink], saved: Collection[str] = ()
) -> Inventory:
    """Read the NICs of ``devices`` and their VFs; ``links`` are their interfaces by name.

    ``saved``: the names of the files in which libvirt keeps VF settings, see ``Kernel``.
    """
    found, missing = find_pfs(sys, devices)
    pfs: dict[str, Pf] = {}
    vfs: dict[str, Vf] = {}
    for address, entries in sorted(found.items()):
        numbers = sum((entry.numbers for entry in entries), ALL_VFS)
        pf = replace(_read_pf(sys, address, entries[0].network, links), numbers=numbers)
        pfs[address] = pf
        vfs.update({vf.address: vf for vf in _read_vfs(sys, pf, saved)})
    return Inventory(pfs, vfs, missing)


def read_again(
    sys: Path,
    seen: Inventory,
    nics: Collection[str],
    links: Mapping[str, NicLink],
    saved: Collection[str] = (),
) -> Inventory:
    """Read these NICs (by PCI address) and their VFs again; keep the rest of ``seen``."""
    pfs, vfs = dict(seen.pfs), {a: vf for a, vf in seen.vfs.items() if vf.pf not in nics}
    for address in nics:
        old = seen.pfs[address]
        pfs[address] = replace(_read_pf(sys, address, old.network, links), numbers=old.numbers)
        vfs.update({vf.address: vf for vf in _read_vfs(sys, pfs[address], saved)})
    return replace(seen, pfs=pfs, vfs=vfs)


def find_pfs(
    sys: Path, devices: Sequence[PoolDevice]
) -> tuple[dict[str, tuple[PoolDevice, ...]], tuple[PoolDevice, ...]]:
    """Return the PFs by address with the entries that match them, and the entries that match none."""
    found: dict[str, tuple[PoolDevice, ...]] = {}
    missing: list[PoolDevice] = []
    for device in devices:
        addresses = _addresses(sys, device)
        if not addresses:
            missing.append(device)
        for address in addresses:
            found[address] = (*found.get(address, ()), device)
    return found, tuple(missing)


def ambiguous(found: Mapping[str, tuple[PoolDevice, ...]]) -> dict[str, tuple[str, ...]]:
    """Return the PFs that entries name for several networks, with these: a configuration error."""
    networks = {a: tuple(dict.fromkeys(each.network for each in entries)) for a, entries in found.items()}
    return {address: names for address, names in networks.items() if len(names) > 1}


def _addresses(sys: Path, device: PoolDevice) -> list[str]:
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
                for address in sorted(names_in(sys / "bus/pci/devices"))
                if _is_pf(sys, address) and _kind(sys, address) == device.name
            ]
    return [address for address in candidates if _is_pf(sys, address)]


def _is_pf(sys: Path, address: str) -> bool:
    return os.path.exists(f"{sys}/bus/pci/devices/{address}/sriov_totalvfs")


def _kind(sys: Path, address: str) -> str:
    device = f"{sys}/bus/pci/devices/{address}"
    words = (read_text(f"{device}/{name}").removeprefix("0x") for name in ("vendor", "device"))
    return ":".join(words).lower()


def names_in(directory: Path | str) -> list[str]:
    """Return the names in a directory; none if there is no such directory."""
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
        desired_vfs=_number(read_text(f"{device}/sriov_numvfs")),
        link=links.get(name) if name else None,
        switchdev=bool(switch),
    )


def _interface(sys: Path, device: str) -> str | None:
    """Return the PF's own interface. In switchdev mode, representors belong to the same PCI device."""
    names = sorted(names_in(f"{device}/net"))
    return next((n for n in names if not _REPRESENTOR.match(_port_name(sys, n))), None)


def interface_index(sys: Path, device: Path | str) -> int | None:
    """Return the index of a PF's own interface; None if it has none in this network namespace."""
    name = _interface(sys, str(device))
    text = read_text(sys / "class/net" / name / "ifindex") if name else ""
    return int(text) if text.isdecimal() else None


def _port_name(sys: Path, interface: str) -> str:
    return read_text(sys / "class/net" / interface / "phys_port_name")


def _read_vfs(sys: Path, pf: Pf, saved: Collection[str]) -> Iterator[Vf]:
    device = f"{sys}/bus/pci/devices/{pf.address}"
    attributes = pf.link.vfs if pf.link else {}
    for entry in names_in(device):
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
            numa_node=pf.numa_node,  # a VF is on the node of its PF
            iommu_group=read_link(f"{at}/iommu_group"),
            driver=driver,
            driver_override=None if override in ("", "(null)") else override,
            is_open=is_open(at, driver),
            interfaces=() if driver is None or is_vfio(driver) else read_interfaces(at),
            group_mates=_group_mates(sys, address),
            saved_by_libvirt=libvirt_file(pf.name, int(number)) in saved,
            attributes=attributes.get(int(number)),
        )


def libvirt_file(pf: str, number: int) -> str:
    """Return the name of the file in which libvirt keeps the settings of a VF, see ``Kernel``."""
    return f"{pf}_vf{number}"


def _group_mates(sys: Path, address: str) -> tuple[str, ...]:
    devices = f"{sys}/bus/pci/devices"
    mates = sorted(set(names_in(f"{devices}/{address}/iommu_group/devices")) - {address})
    return tuple(m for m in mates if not read_text(f"{devices}/{m}/class").startswith(_BRIDGE))
