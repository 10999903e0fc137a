"""The libvirt domain of a VM on an image (pure): its devices are at fixed PCI addresses."""

from __future__ import annotations

from pathlib import Path

from lxml import etree

from netplugin.libvirt.domain import written
from netplugin.libvirt.interfaces import pci_attributes
from netplugin.libvirt.vm_image import DISK, INITRD, KERNEL

#: PCI addresses of the NICs under test in the VM, in the order of the ends. Each is behind a root port of its
#: own. The firmware numbers buses in the order of the root ports, so libvirt and the VM use the same numbers.
NICS = tuple(f"0000:{bus:02x}:00.0" for bus in range(1, 9))
#: The NIC for SSH, which QEMU itself connects to a port of 127.0.0.1.
MANAGEMENT = "0000:00:10.0"
MANAGEMENT_MAC = "52:54:00:5a:ff:00"
#: Port of 127.0.0.1 that leads to the SSH server of the VM.
SSH_PORT = 22022
#: Address and user for SSH.
HOST, USER = "127.0.0.1", "root"

_QEMU = "http://libvirt.org/schemas/domain/qemu/1.0"
#: Slots of bus 0.
_ROOT_PORTS, _DISK = 0x02, 0x03


def domain(
    name: str,
    folder: Path,
    vcpus: int,
    memory_mb: int,
    arguments: str,
    overlay: Path,
    console: Path,
    ssh_port: int = SSH_PORT,
    emulate: bool = False,
) -> str:
    """Return the domain without NICs under test. ``emulate``: without KVM, which is very slow."""
    root = etree.Element("domain", type="qemu" if emulate else "kvm", nsmap={"qemu": _QEMU})
    add(root, "name", name)
    add(root, "memory", str(memory_mb), unit="MiB")
    add(root, "vcpu", str(vcpus))
    system = add(root, "os")
    add(system, "type", "hvm", arch="x86_64", machine="q35")
    for tag, value in (
        ("kernel", str(folder / KERNEL)),
        ("initrd", str(folder / INITRD)),
        ("cmdline", arguments),
    ):
        add(system, tag, value)
    features = add(root, "features")
    add(features, "acpi")  # for a clean shutdown
    add(features, "apic")
    cpu = add(root, "cpu", mode="maximum" if emulate else "host-passthrough")
    add(cpu, "topology", sockets="1", cores=str(vcpus), threads="1")
    add(root, "clock", offset="utc")
    add(root, "on_reboot", "destroy")
    add(root, "on_crash", "destroy")
    _devices(add(root, "devices"), folder / DISK, overlay, console)
    _management(root, ssh_port)
    if emulate:
        # QEMU 7.2 without KVM crashes if a vhost-user NIC uses MSI-X.
        add_arguments(root, "-global", "virtio-net-pci.vectors=0")
    return written(root)


def _devices(devices: etree._Element, base: Path, overlay: Path, console: Path) -> None:
    disk = add(devices, "disk", type="file", device="disk")
    add(disk, "driver", name="qemu", type="qcow2")
    add(disk, "source", file=str(overlay))
    backing = add(disk, "backingStore", type="file")
    add(backing, "format", type="qcow2")
    # libvirt would make the user of QEMU its owner.
    add(add(backing, "source", file=str(base)), "seclabel", model="dac", relabel="no")
    add(backing, "backingStore")
    add(disk, "target", dev="vda", bus="virtio")
    disk.append(place(f"0000:00:{_DISK:02x}.0"))
    add(devices, "controller", type="usb", model="none")
    add(devices, "controller", type="pci", index="0", model="pcie-root")
    for number in range(len(NICS)):
        controller = add(devices, "controller", type="pci", index=str(number + 1), model="pcie-root-port")
        port = place(f"0000:00:{_ROOT_PORTS:02x}.{number}")
        if not number:
            port.set("multifunction", "on")
        controller.append(port)
    serial = add(devices, "serial", type="file")
    add(serial, "source", path=str(console))
    add(devices, "memballoon", model="none")


def _management(root: etree._Element, ssh_port: int) -> None:
    """Add the NIC for SSH. libvirt has no element for this in QEMU's user network (``hostfwd``)."""
    slot = pci_attributes(MANAGEMENT)["slot"]
    device = f"virtio-net-pci,netdev=management,mac={MANAGEMENT_MAC},bus=pcie.0,addr={slot},romfile="
    network = f"user,id=management,restrict=on,hostfwd=tcp:{HOST}:{ssh_port}-:22"
    add_arguments(root, "-netdev", network, "-device", device)


def add_arguments(root: etree._Element, *words: str) -> None:
    """Add arguments of QEMU for what libvirt has no element."""
    name = f"{{{_QEMU}}}commandline"
    line = root.find(name)
    if line is None:
        line = etree.SubElement(root, name)
    for word in words:
        etree.SubElement(line, f"{{{_QEMU}}}arg", value=word)


def place(address: str) -> etree._Element:
    """Return the element for a PCI address."""
    return etree.Element("address", {"type": "pci", **pci_attributes(address)})


def add(parent: etree._Element, tag: str, text: str | None = None, **attributes: str) -> etree._Element:
    """Append an element and return it."""
    element = etree.SubElement(parent, tag, attributes)
    element.text = text
    return element
