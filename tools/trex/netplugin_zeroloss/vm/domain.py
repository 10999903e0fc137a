"""The NICs under test of a VM on an image (pure): they are at fixed PCI addresses."""

from __future__ import annotations

from collections.abc import Sequence

from lxml import etree

from netplugin.libvirt.domain import address, nics, parse_domain, written
from netplugin.libvirt.image_domain import NICS, add, place
from netplugin_zeroloss.values import UnusableInput

_STEP = "vm-domain"


def with_fixed_addresses(xml: str, macs: Sequence[str], iommu: bool) -> str:
    """Return the domain with the NICs of these MAC addresses at the addresses of ``NICS``, in their order.

    ``iommu``: those that are not virtio need an emulated IOMMU.

    Raises: UnusableInput if the domain has no such NIC; NetpluginError if it is not a domain.
    """
    root = parse_domain(xml, _STEP)
    found = {address(nic): nic for nic in nics(root)}
    for mac, where in zip(macs, NICS, strict=False):
        nic = found.get(mac.lower())
        if nic is None:
            raise UnusableInput("vm", f"the agent gave the domain no NIC {mac}")
        for old in nic.findall("address"):
            nic.remove(old)
        nic.append(place(where))
        model = nic.find("model")
        if iommu and (model is None or model.get("type") != "virtio"):
            _emulate_iommu(root)
    return written(root)


def _emulate_iommu(root: etree._Element) -> None:
    """Add an IOMMU, which VFIO in the VM uses. Its remapping of interrupts needs QEMU's IOAPIC with KVM."""
    devices, features = root.find("devices"), root.find("features")
    if devices is None or devices.find("iommu") is not None:
        return
    remaps = root.get("type") == "kvm"
    if remaps and features is not None:
        add(features, "ioapic", driver="qemu")
    driver = add(add(devices, "iommu", model="intel"), "driver", caching_mode="on")
    driver.set("intremap", "on" if remaps else "off")
