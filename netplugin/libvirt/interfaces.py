"""Generate the interface XML of the backends, and parse and write libvirt XML."""

from __future__ import annotations

import re
from typing import Final, TypeAlias

from lxml import etree

from netplugin.api.models import PortSpec

Element: TypeAlias = etree._Element

#: Prefix of the alias of a VM's ``<hostdev>``, followed by its MAC address.
ALIAS: Final = "ua-netplugin-"


def vhostuser_interface(spec: PortSpec, socket: str) -> str:
    """A vhost-user NIC whose socket QEMU creates and listens on (``mode='server'``).

    Source: libvirt's formatdomain, "vhost-user interface". No ``mtu`` element: libvirt would set
    the MTU of a kernel device with the port's name and refuse the domain, because a DPDK port has
    no such device.
    """
    interface = _interface("vhostuser", spec.mac)
    etree.SubElement(interface, "source", type="unix", path=socket, mode="server")
    etree.SubElement(interface, "model", type="virtio")
    sizes = {"rx_queue_size": str(spec.rx_queue_size), "tx_queue_size": str(spec.tx_queue_size)}
    etree.SubElement(interface, "driver", {"queues": str(spec.queues), **sizes})
    return text(interface)


def vdpa_interface(spec: PortSpec, device: str) -> str:
    """A NIC on a character device of ``vhost_vdpa``, which libvirt opens as root (since libvirt 6.9).

    Source: libvirt's formatdomain, "vDPA devices". No ring sizes: the device has its own. The guest's MAC is
    that of the element, because a VDUSE device of OVS has none.
    """
    interface = _interface("vdpa", spec.mac)
    etree.SubElement(interface, "source", dev=device)
    etree.SubElement(interface, "model", type="virtio")
    if spec.queues > 1:
        etree.SubElement(interface, "driver", queues=str(spec.queues))
    return text(interface)


def tap_interface(spec: PortSpec, device: str) -> str:
    """A NIC on an existing tap device (``managed='no'``: libvirt neither creates nor changes it).

    No ``tx_queue_size``: QEMU accepts values other than 256 only for vhost-user.
    """
    interface = _interface("ethernet", spec.mac)
    etree.SubElement(interface, "target", dev=device, managed="no")
    etree.SubElement(interface, "model", type="virtio")
    driver = etree.SubElement(interface, "driver", rx_queue_size=str(spec.rx_queue_size))
    if spec.queues > 1:
        driver.set("queues", str(spec.queues))
    etree.SubElement(interface, "mtu", size=str(spec.network.mtu))
    return text(interface)


def hostdev_interface(spec: PortSpec, pci_address: str) -> str:
    """A virtual function as a NIC of the VM; it is bound to vfio-pci already (``managed='no'``).

    libvirt sets MAC and VLAN of such an interface when the VM starts and restores the previous
    values when it stops (virHostdevSetNetConfig, virHostdevRestoreNetConfig). Without ``vlan`` it
    would remove the VLAN.

    libvirt sets every VLAN as 802.1Q (virNetDevSetVfVlan, with IFLA_VF_VLAN), which is wrong for
    802.1ad. A VF with 802.1ad is therefore passed as a generic host device, which libvirt does not
    configure. Its alias contains the MAC address, to find the NIC in a domain after its port got
    another VF.
    """
    if spec.vf.vlan_proto == "802.1ad":
        device = etree.Element("hostdev", mode="subsystem", type="pci", managed="no")
        etree.SubElement(etree.SubElement(device, "source"), "address", pci_attributes(pci_address))
        etree.SubElement(device, "alias", name=ALIAS + spec.mac.replace(":", "-"))
        return text(device)
    interface = _interface("hostdev", spec.mac)
    interface.set("managed", "no")
    source = etree.SubElement(interface, "source")
    etree.SubElement(source, "address", {"type": "pci", **pci_attributes(pci_address)})
    if spec.network.vlan_id is not None:
        vlan = etree.SubElement(interface, "vlan")
        etree.SubElement(vlan, "tag", id=str(spec.network.vlan_id))
    return text(interface)


def mac_of_hostdev(device: Element) -> str:
    """The MAC address in the alias of a ``<hostdev>``, in lower case; empty if it is not ours.

    libvirt keeps an alias only if it begins with ``ua-`` and otherwise has only letters, digits,
    ``-`` and ``_``; it refuses a domain with a duplicate alias. Tested with 9.0.
    """
    alias = device.find("alias")
    name = alias.get("name", "").lower() if alias is not None else ""
    mac = name.removeprefix(ALIAS)
    if mac == name or not re.fullmatch(r"[0-9a-f]{2}(-[0-9a-f]{2}){5}", mac):
        return ""
    return mac.replace("-", ":")


def team_interfaces(persistent: str, transient: str, name: str) -> str:
    """The two NICs of a team, the persistent one first. ``name`` distinguishes teams of a domain.

    libvirt refers to the persistent NIC by its alias; an alias set by the user must begin with
    ``ua-``. Both have one: by their MAC alone libvirt finds two devices (``virDomainNetFindIdx`` in
    src/conf/domain_conf.c), and detaches neither.
    """
    alias = f"ua-{name}"
    stays, goes = fragments(persistent + transient)
    etree.SubElement(stays, "teaming", type="persistent")
    etree.SubElement(stays, "alias", name=alias)
    etree.SubElement(goes, "teaming", type="transient", persistent=alias)
    etree.SubElement(goes, "alias", name=f"{alias}-vf")
    return text(stays) + text(goes)


def pci_attributes(pci_address: str) -> dict[str, str]:
    """A PCI address as attributes of a libvirt ``<address>``."""
    place, _, function = pci_address.partition(".")
    domain, bus, slot = place.split(":")
    numbers = {"domain": domain, "bus": bus, "slot": slot, "function": function}
    return {name: f"0x{digits}" for name, digits in numbers.items()}


def _interface(kind: str, mac: str) -> Element:
    interface = etree.Element("interface", type=kind)
    etree.SubElement(interface, "mac", address=mac)
    return interface


def text(element: Element) -> str:
    etree.indent(element)
    return str(etree.tostring(element, encoding="unicode"))


def parser() -> etree.XMLParser:
    """A parser for untrusted XML in UTF-8, whatever it declares: no entities, no DTD, no network, and the
    limits of libxml2 for depth and size. Which white space it leaves out is as in libvirt.
    """
    return etree.XMLParser(
        encoding="utf-8", resolve_entities=False, load_dtd=False, no_network=True, remove_blank_text=True
    )


def fragments(xml: str) -> list[Element]:
    """Parse the interface XML of a binding: one element, or two with teaming."""
    return list(etree.fromstring(f"<all>{xml}</all>".encode(), parser()))
