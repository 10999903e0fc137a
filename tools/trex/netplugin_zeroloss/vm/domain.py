"""The libvirt domain of a VM on an image (pure): its devices are at fixed PCI addresses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lxml import etree

from netplugin.libvirt.domain import address, nics, parse_domain, written
from netplugin_zeroloss.values import UnusableInput
from netplugin_zeroloss.vm.image import DISK, INITRD, KERNEL

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
_STEP = "vm-domain"
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
    _add(root, "name", name)
    _add(root, "memory", str(memory_mb), unit="MiB")
    _add(root, "vcpu", str(vcpus))
    system = _add(root, "os")
    _add(system, "type", "hvm", arch="x86_64", machine="q35")
    for tag, value in (
        ("kernel", str(folder / KERNEL)),
        ("initrd", str(folder / INITRD)),
        ("cmdline", arguments),
    ):
        _add(system, tag, value)
    features = _add(root, "features")
    _add(features, "acpi")  # for a clean shutdown
    _add(features, "apic")
    cpu = _add(root, "cpu", mode="maximum" if emulate else "host-passthrough")
    _add(cpu, "topology", sockets="1", cores=str(vcpus), threads="1")
    _add(root, "clock", offset="utc")
    _add(root, "on_reboot", "destroy")
    _add(root, "on_crash", "destroy")
    _devices(_add(root, "devices"), folder / DISK, overlay, console)
    _management(root, ssh_port)
    return written(root)


def with_fixed_addresses(xml: str, macs: Sequence[str], iommu: bool) -> str:
    """Return the domain with the NICs of these MAC addresses at the addresses of ``NICS``, in their order.

    ``iommu``: those that are not virtio need an emulated IOMMU.

    Raises: UnusableInput if the domain has no such NIC; NetpluginError if it is not a domain.
    """
    root = parse_domain(xml, _STEP)
    found = {address(nic): nic for nic in nics(root)}
    for mac, place in zip(macs, NICS, strict=False):
        nic = found.get(mac.lower())
        if nic is None:
            raise UnusableInput("vm", f"the agent gave the domain no NIC {mac}")
        for old in nic.findall("address"):
            nic.remove(old)
        nic.append(_place(place))
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
        _add(features, "ioapic", driver="qemu")
    driver = _add(_add(devices, "iommu", model="intel"), "driver", caching_mode="on")
    driver.set("intremap", "on" if remaps else "off")


def _devices(devices: etree._Element, base: Path, overlay: Path, console: Path) -> None:
    disk = _add(devices, "disk", type="file", device="disk")
    _add(disk, "driver", name="qemu", type="qcow2")
    _add(disk, "source", file=str(overlay))
    backing = _add(disk, "backingStore", type="file")
    _add(backing, "format", type="qcow2")
    # libvirt would make the user of QEMU its owner.
    _add(_add(backing, "source", file=str(base)), "seclabel", model="dac", relabel="no")
    _add(backing, "backingStore")
    _add(disk, "target", dev="vda", bus="virtio")
    disk.append(_place(f"0000:00:{_DISK:02x}.0"))
    _add(devices, "controller", type="usb", model="none")
    _add(devices, "controller", type="pci", index="0", model="pcie-root")
    for number in range(len(NICS)):
        controller = _add(devices, "controller", type="pci", index=str(number + 1), model="pcie-root-port")
        port = _place(f"0000:00:{_ROOT_PORTS:02x}.{number}")
        if not number:
            port.set("multifunction", "on")
        controller.append(port)
    serial = _add(devices, "serial", type="file")
    _add(serial, "source", path=str(console))
    _add(devices, "memballoon", model="none")


def _management(root: etree._Element, ssh_port: int) -> None:
    """Add the NIC for SSH. libvirt has no element for this in QEMU's user network (``hostfwd``)."""
    line = etree.SubElement(root, f"{{{_QEMU}}}commandline")
    device = (
        f"virtio-net-pci,netdev=management,mac={MANAGEMENT_MAC},bus=pcie.0,addr={_slot(MANAGEMENT)},romfile="
    )
    for word in (
        "-netdev",
        f"user,id=management,restrict=on,hostfwd=tcp:{HOST}:{ssh_port}-:22",
        "-device",
        device,
    ):
        etree.SubElement(line, f"{{{_QEMU}}}arg", value=word)


def _slot(place: str) -> str:
    return f"0x{place.split(':')[2].partition('.')[0]}"


def _place(place: str) -> etree._Element:
    numbers, _, function = place.partition(".")
    domain_number, bus, slot = numbers.split(":")
    return etree.Element(
        "address",
        type="pci",
        domain=f"0x{domain_number}",
        bus=f"0x{bus}",
        slot=f"0x{slot}",
        function=f"0x{function}",
    )


def _add(parent: etree._Element, tag: str, text: str | None = None, **attributes: str) -> etree._Element:
    element = etree.SubElement(parent, tag, attributes)
    element.text = text
    return element
