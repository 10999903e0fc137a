"""libvirt XML: the interface elements of the backends, and a domain completed with them."""

from __future__ import annotations

from collections.abc import Sequence

from lxml import etree

from netplugin.errors import Conflict, FieldError, InvalidRequest, Unsupported
from netplugin.models import Binding, DomainPolicy, DomainRequirements, PortSpec

Element = etree._Element


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
    return _text(interface)


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
    return _text(interface)


def hostdev_interface(spec: PortSpec, pci_address: str, *, managed: bool) -> str:
    """A virtual function of a NIC, as a NIC of the VM.

    libvirt sets MAC and VLAN of such an interface once more when the VM starts, and puts back what
    it found when it stops (virHostdevSetNetConfig, virHostdevRestoreNetConfig): without ``vlan`` it
    would take the VLAN off. ``managed`` has it bind the function to vfio-pci, and back.
    """
    domain, bus, slot = pci_address.partition(".")[0].split(":")
    function = pci_address.partition(".")[2]
    interface = _interface("hostdev", spec.mac)
    interface.set("managed", "yes" if managed else "no")
    source = etree.SubElement(interface, "source")
    etree.SubElement(
        source, "address",
        type="pci", domain=f"0x{domain}", bus=f"0x{bus}", slot=f"0x{slot}", function=f"0x{function}",
    )  # fmt: skip
    if spec.network.vlan_id is not None:
        vlan = etree.SubElement(interface, "vlan")
        etree.SubElement(vlan, "tag", id=str(spec.network.vlan_id))
    return _text(interface)


def team_interfaces(persistent: str, transient: str, name: str) -> str:
    """The two NICs of a team, the one that stays first. ``name`` tells them apart from other teams.

    libvirt refers to the one that stays by an alias, which a user's must begin with ``ua-``.
    """
    alias = f"ua-{name}"
    stays, goes = _fragments(persistent + transient)
    etree.SubElement(stays, "teaming", type="persistent")
    etree.SubElement(stays, "alias", name=alias)
    etree.SubElement(goes, "teaming", type="transient", persistent=alias)
    return _text(stays) + _text(goes)


def render_domain(xml: str, bindings: Sequence[Binding], policy: DomainPolicy) -> str:
    """The same domain with these NICs (one of the same MAC is replaced) and what they need.

    Raises: InvalidRequest if it is no domain; Conflict if it contradicts what a NIC needs;
    Unsupported for a policy that is not built yet.
    """
    if policy.pin or policy.realtime:
        raise Unsupported(
            "placing a domain's threads (policy.pin, policy.realtime) is not available yet",
            step="render-domain",
        )
    domain = _parse_domain(xml)
    devices = domain.find("devices")
    if devices is None:
        devices = etree.SubElement(domain, "devices")
    for binding in bindings:
        _replace_interfaces(devices, _fragments(binding.interface_xml))
    for binding in bindings:
        _require(domain, binding.domain_requirements)
    nodes = {b.domain_requirements.numa_node for b in bindings} | {policy.numa_node}
    _place(domain, {node for node in nodes if node is not None})
    return _text(domain)


def _interface(kind: str, mac: str) -> Element:
    interface = etree.Element("interface", type=kind)
    etree.SubElement(interface, "mac", address=mac)
    return interface


def _text(element: Element) -> str:
    etree.indent(element)
    return str(etree.tostring(element, encoding="unicode"))


def _parser() -> etree.XMLParser:
    """No entities, no DTD, no network: the XML comes from outside."""
    return etree.XMLParser(
        resolve_entities=False, load_dtd=False, no_network=True, remove_blank_text=True
    )


def _parse_domain(xml: str) -> Element:
    try:
        domain = etree.fromstring(xml.encode(), _parser())
    except (etree.XMLSyntaxError, ValueError) as broken:
        raise _invalid(f"not XML: {broken}") from broken
    if domain.getroottree().docinfo.internalDTD is not None:
        raise _invalid("a document type declaration is not allowed")
    if domain.tag != "domain":
        raise _invalid(f"the root element is <{domain.tag}>, not <domain>")
    return domain


def _invalid(message: str) -> InvalidRequest:
    return InvalidRequest(
        f"xml: {message}", step="render-domain", errors=[FieldError(field="xml", message=message)]
    )


def _fragments(xml: str) -> list[Element]:
    """The elements of a binding: one, or two with teaming."""
    return list(etree.fromstring(f"<all>{xml}</all>".encode(), _parser()))


def _replace_interfaces(devices: Element, interfaces: Sequence[Element]) -> None:
    """Those of the same MAC go, wherever they came from; the new ones stand in the first's place."""
    addresses = {_address(interface) for interface in interfaces}
    old = [each for each in devices.findall("interface") if _address(each) in addresses]
    place = list(devices).index(old[0]) if old else len(devices)
    for each in old:
        devices.remove(each)
    devices[place:place] = interfaces


def _address(interface: Element) -> str:
    mac = interface.find("mac")
    return mac.get("address", "").lower() if mac is not None else ""


def _require(domain: Element, needs: DomainRequirements) -> None:
    if not (needs.shared_memory or needs.hugepages):
        return
    backing = domain.find("memoryBacking")
    if backing is None:
        backing = etree.Element("memoryBacking")
        _insert_before_vcpu(domain, backing)
    if needs.hugepages and backing.find("hugepages") is None:
        backing.insert(0, etree.Element("hugepages"))
    if needs.shared_memory:
        _share(domain, backing)


def _share(domain: Element, backing: Element) -> None:
    """vhost-user needs the guest's memory mapped by OVS too: a file, shared."""
    access = backing.find("access")
    if access is None:
        access = etree.SubElement(backing, "access", mode="shared")
    elif access.get("mode") != "shared":
        raise Conflict(
            "memoryBacking has access mode='private', and a vhost-user NIC needs shared memory",
            step="render-domain", fix="remove <access> from the domain's <memoryBacking>",
        )  # fmt: skip
    for cell in domain.iterfind("cpu/numa/cell"):
        if cell.get("memAccess", "shared") != "shared":
            raise Conflict(
                "a NUMA cell has memAccess='private', and a vhost-user NIC needs shared memory",
                step="render-domain", fix="remove memAccess from the domain's NUMA cells",
            )  # fmt: skip
        cell.set("memAccess", "shared")
    source = backing.find("source")
    if source is None:
        if backing.find("hugepages") is None:
            source = etree.Element("source", type="memfd")
            backing.insert(list(backing).index(access), source)
    elif source.get("type") == "anonymous":
        raise Conflict(
            "memoryBacking has source type='anonymous', which cannot be shared",
            step="render-domain", fix="remove <source> from the domain's <memoryBacking>",
        )  # fmt: skip


def _insert_before_vcpu(domain: Element, element: Element) -> None:
    vcpu = domain.find("vcpu")
    if vcpu is None:
        domain.append(element)
    else:
        domain.insert(list(domain).index(vcpu), element)


def _place(domain: Element, nodes: set[int]) -> None:
    if not nodes:
        return
    if len(nodes) > 1:
        raise Conflict(
            f"the NICs and the policy ask for different NUMA nodes: {sorted(nodes)}",
            step="render-domain", fix="ask for one node, or none",
        )  # fmt: skip
    numatune = domain.find("numatune")
    if numatune is None:
        numatune = etree.Element("numatune")
        _insert_before_vcpu(domain, numatune)
    memory = numatune.find("memory")
    if memory is None:
        memory = etree.SubElement(numatune, "memory", mode="strict")
    memory.set("nodeset", str(nodes.pop()))
