"""The image of the VM under test in a folder, and the domain of a VM on it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lxml import etree

from netplugin.api.errors import InvalidRequest
from netplugin.libvirt import vm_image
from netplugin.libvirt.domain import address, nics, parse_domain, written
from netplugin.libvirt.image_domain import NICS, add, place
from netplugin.libvirt.vm_image import Image
from netplugin_zeroloss.values import UnusableInput

#: Folder of images, unless ``vm build --folder`` names another.
FOLDER = Path("/var/lib/netplugin-zeroloss")
#: Link in the folder of images to the image that was built last.
LATEST = "latest"


def read(folder: Path) -> Image:
    """Read the image in a folder. Raises: UnusableInput if there is none."""
    try:
        return vm_image.read(folder)
    except InvalidRequest as error:
        raise UnusableInput(str(folder), error.detail.removeprefix(f"{folder}: ")) from error


def with_fixed_addresses(xml: str, macs: Sequence[str], iommu: bool) -> str:
    """Return the domain with the NICs of these MAC addresses at the addresses of ``NICS``, in order (pure).

    ``iommu``: those that are not virtio need an emulated IOMMU.

    Raises: UnusableInput if the domain has no such NIC; NetpluginError if it is not a domain.
    """
    root = parse_domain(xml, "vm-domain")
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
