"""What a NIC takes over from the one that it replaces: one rule for each element and attribute (pure)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from lxml import etree

from netplugin.libvirt.interfaces import ALIAS, Element
from netplugin.libvirt.values import content, unsigned

OURS: Final = "of the port"
VMS: Final = "of the VM"
_NO_TAP: Final = "the port is the host's end of the NIC, and the agent sets it up"
#: libvirt sets it down as that of a network device of QEMU, which has none for a function
#: (qemuProcessSetLinkStates in libvirt's src/qemu/qemu_process.c; QEMU's set_link answers DeviceNotFound).
_NO_LINK: Final = "QEMU has no link of a VF to set down, and the VM would not start"
#: Each part of libvirt's <interface> and <hostdev> (interface-options and hostdev in domaincommon.rng), with
#: ``@`` before an attribute. OURS: as the binding has it, or not at all. VMS: kept where the binding has
#: none, as is what is not listed. Another text is why it is refused: the port decides it, or libvirt takes it
#: for none of the kinds of NIC that ports have (observed with 9.0).
PARTS: Final = {
    **dict.fromkeys(("@type", "@mode", "@managed", "source", "target", "model"), OURS),
    **dict.fromkeys(("driver@queues", "driver@rx_queue_size", "driver@tx_queue_size"), OURS),
    **dict.fromkeys(("backend@type", "backend@logFile"), OURS),  # of a network in user space
    **dict.fromkeys(("driver@name", "driver@txmode", "driver@ioeventfd", "driver@event_idx"), VMS),
    **dict.fromkeys(("driver@rss", "driver@rss_hash_report", "driver@packed", "driver@page_per_vq"), VMS),
    **dict.fromkeys(("driver@iommu", "driver@ats", "driver", "driver/host", "driver/guest", "mac"), VMS),
    **dict.fromkeys(("link", "guest", "tune", "@trustGuestRxFilters", "alias", "acpi", "address"), VMS),
    **dict.fromkeys(("boot", "rom", "teaming", "backend", "readonly", "shareable"), VMS),
    "mtu": "the port's network.mtu is its MTU",
    "vlan": "the port's network.vlan_id and network.trunk are its VLANs",
    "virtualport": "the port's backend and network say where it is connected",
    "filterref": "port_security of the port is its filter",
    "bandwidth": "qos of the port has its rates",
    "port": "libvirt isolates only ports of its own bridges",
    "coalesce": "libvirt sets it only on its own taps",
    "ip": "QEMU sets no addresses in a guest",
    "route": "QEMU sets no routes in a guest",
    "portForward": "it is for networks in user space",
    **dict.fromkeys(("script", "downscript"), _NO_TAP),
    "backenddomain": "it is for Xen",
}
#: What an earlier render wrote into a NIC of this kind, and is the port's therefore.
_WRITTEN: Final = {"hostdev": "vlan", "ethernet": "mtu"}


def refused(old: Element, new: Element) -> Iterator[tuple[str, str]]:
    """Yield each element of the domain's NIC that the port's NIC cannot have, and why."""
    for part in old.iterchildren(etree.Element):
        reason = PARTS.get(str(part.tag), VMS)
        if part.tag == "link" and part.get("state") == "down" and _is_function(new):
            yield "link", _NO_LINK
        elif reason not in (OURS, VMS) and new.find(part.tag) is None:
            yield str(part.tag), reason


def take_over(old: Element, new: Element) -> list[tuple[str, str]]:
    """Give the new NIC what the VM has in the old one; the result is what is refused, as ``refused``.

    Of an element that is there twice libvirt reads the first.
    """
    _take(old, new, "", same_hardware=_is_function(old) == _is_function(new))
    return [each for each in refused(old, new) if each[0] != _WRITTEN.get(kind(old))]


def queues(nic: Element) -> int:
    """Queue pairs of a NIC; 1 for a function of the host, of which libvirt has none."""
    driver = nic.find("driver")
    return 1 if driver is None or _is_function(nic) else unsigned(driver.get("queues", "1")) or 1


def kind(nic: Element) -> str:
    """The type of an <interface>; ``pci`` for a <hostdev>."""
    return nic.get("type", "")


def behind_iommu(nic: Element, domain: Element) -> bool:
    """Whether the guest's IOMMU translates for the NIC.

    It does for a virtio device only with ``iommu='on'`` (QEMU's ``iommu_platform``, which is
    VIRTIO_F_ACCESS_PLATFORM), and for every other PCI device of the guest.
    """
    if domain.find("devices/iommu") is None:
        return False
    model, driver = nic.find("model"), nic.find("driver")
    if _is_function(nic) or model is None or not model.get("type", "").startswith("virtio"):
        return True
    return driver is not None and driver.get("iommu") == "on"


def _is_function(nic: Element) -> bool:
    """Whether the NIC is a PCI function of the host, and no device of QEMU."""
    return "hostdev" in (nic.tag, nic.get("type"))


def _fits(address: Element, nic: Element) -> bool:
    """Whether libvirt takes an address of this type for a NIC, which is virtio's or a function of the host
    (observed with 9.0)."""
    where = address.get("type", "pci")
    if _is_function(nic):
        return where == "pci" or (where == "unassigned" and nic.tag == "hostdev")
    return where in ("pci", "ccw", "virtio-mmio")


def _take(old: Element, new: Element, path: str, same_hardware: bool = True) -> None:
    for name, value in old.attrib.items():
        if name not in new.attrib and PARTS.get(f"{path}@{name!s}", VMS) == VMS:
            new.set(name, value)
    first: dict[str, Element] = {}
    for part in old.iterchildren(etree.Element):
        first.setdefault(str(part.tag), part)
    for tag, part in first.items():
        below = f"{path}/{tag}" if path else tag
        if PARTS.get(below, VMS) != VMS or (below == "driver" and not same_hardware):
            continue
        if below == "alias" and part.get("name", "").startswith(ALIAS):
            continue  # it has the MAC of a port
        if (below == "address" and not _fits(part, new)) or (below == "teaming" and _is_function(new)):
            continue
        there = new.find(tag)
        if there is None:
            there = etree.SubElement(new, part.tag)
            there.text = (content(part) or None) if part.find("*") is None else None
        _take(part, there, below)
