"""libvirt XML: the interface elements of the backends, and how such XML is read and written."""

from __future__ import annotations

import re
from typing import Final, TypeAlias

from lxml import etree

from netplugin.models import PortSpec

Element: TypeAlias = etree._Element

#: What the alias of a VM's ``<hostdev>`` begins with, before its MAC address.
_ALIAS: Final = "ua-netplugin-"


def vhostuser_interface(spec: PortSpec, socket: str) -> str:
    """A vhost-user NIC whose socket QEMU makes and listens on (``mode='server'``).

    Source: libvirt's formatdomain, "vhost-user interface". No ``mtu``: libvirt would set it on a
    kernel device of the port's name, which a DPDK port has not, and then refuse the domain.
    """
    interface = _interface("vhostuser", spec.mac)
    etree.SubElement(interface, "source", type="unix", path=socket, mode="server")
    etree.SubElement(interface, "model", type="virtio")
    etree.SubElement(
        interface, "driver",
        queues=str(spec.queues), rx_queue_size=str(spec.rx_queue_size),
        tx_queue_size=str(spec.tx_queue_size),
    )  # fmt: skip
    return text(interface)


def tap_interface(spec: PortSpec, device: str) -> str:
    """A NIC on a tap that exists already (``managed='no'``: libvirt neither makes nor changes it).

    No ``tx_queue_size``: QEMU takes another than 256 for vhost-user only.
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
    """A virtual function of a NIC, as a NIC of the VM; it is on vfio-pci already (``managed='no'``).

    libvirt sets MAC and VLAN of such an interface once more when the VM starts, and puts back what
    it found when it stops (virHostdevSetNetConfig, virHostdevRestoreNetConfig): without ``vlan`` it
    would take the VLAN off.

    It sets every VLAN as one of 802.1Q (virNetDevSetVfVlan, by IFLA_VF_VLAN), which for a VLAN of
    802.1ad is another network. Such a VF is given to the VM as a device like any other, of which
    libvirt sets nothing. Its alias has the MAC address, by which the NIC is found in a domain when
    its port has another VF.
    """
    if spec.vf.vlan_proto == "802.1ad":
        device = etree.Element("hostdev", mode="subsystem", type="pci", managed="no")
        etree.SubElement(etree.SubElement(device, "source"), "address", _function(pci_address))
        etree.SubElement(device, "alias", name=_ALIAS + spec.mac.replace(":", "-"))
        return text(device)
    interface = _interface("hostdev", spec.mac)
    interface.set("managed", "no")
    source = etree.SubElement(interface, "source")
    etree.SubElement(source, "address", {"type": "pci", **_function(pci_address)})
    if spec.network.vlan_id is not None:
        vlan = etree.SubElement(interface, "vlan")
        etree.SubElement(vlan, "tag", id=str(spec.network.vlan_id))
    return text(interface)


def mac_of_hostdev(device: Element) -> str:
    """The MAC address in the alias of a ``<hostdev>``, in lower case; empty if it is of no port.

    libvirt keeps an alias that begins with ``ua-`` and has letters, digits, ``-`` and ``_`` alone; it
    drops any other, one with colons too, and refuses a domain that has one twice. Run with 9.0.
    """
    alias = device.find("alias")
    name = alias.get("name", "").lower() if alias is not None else ""
    mac = name.removeprefix(_ALIAS)
    if mac == name or not re.fullmatch(r"[0-9a-f]{2}(-[0-9a-f]{2}){5}", mac):
        return ""
    return mac.replace("-", ":")


def team_interfaces(persistent: str, transient: str, name: str) -> str:
    """The two NICs of a team, the one that stays first. ``name`` tells them apart from other teams.

    libvirt refers to the one that stays by an alias, which a user's must begin with ``ua-``.
    """
    alias = f"ua-{name}"
    stays, goes = fragments(persistent + transient)
    etree.SubElement(stays, "teaming", type="persistent")
    etree.SubElement(stays, "alias", name=alias)
    etree.SubElement(goes, "teaming", type="transient", persistent=alias)
    return text(stays) + text(goes)


def _function(pci_address: str) -> dict[str, str]:
    """A PCI address as libvirt writes it."""
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
    """No entities, no DTD, no network: the XML comes from outside."""
    return etree.XMLParser(
        resolve_entities=False, load_dtd=False, no_network=True, remove_blank_text=True
    )


def fragments(xml: str) -> list[Element]:
    """The elements of a binding: one, or two with teaming."""
    return list(etree.fromstring(f"<all>{xml}</all>".encode(), parser()))
