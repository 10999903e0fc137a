"""Check a domain's NICs: those of its ports' bindings, rings and queues, the user of QEMU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from netplugin.api.models import Finding, VfInfo
from netplugin.libvirt.domain import address, function, number, wrong_user
from netplugin.libvirt.domain import nics as nics_of
from netplugin.libvirt.interfaces import Element, fragments
from netplugin.libvirt.nic_parts import behind_iommu, queues, refused
from netplugin.libvirt.values import mac
from netplugin.tuning.checks.frame import fail, graded, warn
from netplugin.tuning.placing.checks.case import Case, DomainNic

#: Receive ring size in frames: QEMU's maximum for virtio-net.
_RING: Final = 1024
#: Differences in these only slow the NIC down (``warn``); any other difference is a failure.
_SLOWS: Final = ("driver", "mtu")
#: Attributes that libvirt omits when they have these values.
_DEFAULTS: Final = {"queues": "1"}
#: Whether vhost-user ports offer the feature of an IOMMU (ovs-vswitchd.conf.db(5)); off by default.
_IOMMU: Final = "vhost-iommu-support"
_RENDER: Final = "render the domain again: POST /v1/vms/VM:render-domain"


def nics(case: Case) -> Iterator[Finding]:
    there = _There(nics_of(case.domain))
    for nic in case.nics:
        for desired in fragments(nic.binding.interface_xml):
            yield _nic(nic, desired, there)
    other_vfs = {vf.pci_address: vf for vf in case.other_vfs}
    for interface in there.nics:
        if _kind(interface) == "virtio":
            yield from _serves(interface, case)
            yield from _translated(interface, case)
        if vf := other_vfs.get(function(interface)):
            yield _other_vf(interface, vf)


class _There:
    """The NICs of a domain, found by what they have: a VM may have many, and its domain too."""

    def __init__(self, nics: list[Element]) -> None:
        self.nics = nics
        self.by_mac: dict[str, list[Element]] = {}
        self.by_function: dict[str, list[Element]] = {}
        self.by_end: dict[str, Element] = {}
        for nic in nics:
            mac = address(nic)
            self.by_mac.setdefault(mac, []).append(nic)
            if not mac:
                self.by_function.setdefault(function(nic), []).append(nic)
            self.by_end.setdefault(_end(nic), nic)


def _nic(nic: DomainNic, desired: Element, there: _There) -> Finding:
    name = address(desired)
    expected = f"the NIC of port {nic.port_id}, {name} on {_end(desired)}"
    same = there.by_mac.get(name, [])
    if not same and desired.tag == "hostdev":  # libvirt may have dropped the alias only
        same = there.by_function.get(function(desired), [])
    found = next((each for each in same if each.get("type") == desired.get("type")), None)
    found = same[0] if found is None and same else found
    if found is None:
        strange = there.by_end.get(_end(desired))
        if strange is not None:
            wrong = f"a NIC on {_end(desired)} has the MAC {address(strange) or 'that libvirt chooses'}"
            return fail("nic-mac", wrong, expected, _RENDER)
        return fail("nic-missing", f"no NIC has {name}", expected, _RENDER)
    differences = list(_differences(desired, found, ""))
    differences += [(part, f"is set: {why}") for part, why in refused(found, desired)]
    say = warn if all(place.split(" ")[0] in _SLOWS for place, _ in differences) else fail
    wrong = f"{name}: " + "; ".join(f"{place} {what}".strip() for place, what in differences)
    return graded("nic", wrong if differences else None, f"{name} as its port has it", expected, _RENDER, say)


def _other_vf(interface: Element, vf: VfInfo) -> Finding:
    has = f"port {vf.port_id} of another VM has" if vf.port_id else "no port has"
    found = f"<{interface.tag}> on {vf.pci_address}, a VF that {has}"
    fix = "remove it from the domain; a VF that is not for ports is left out of [sriov] devices"
    return fail("nic-vf", found, "of the VFs in [sriov] devices those of the VM's ports alone", fix)


def _differences(desired: Element, found: Element, path: str) -> Iterator[tuple[str, str]]:
    """Attributes and elements of the binding that the domain lacks; additions by libvirt are ignored."""
    for key, value in desired.attrib.items():
        name, should = str(key), str(value)
        has = found.get(name, _DEFAULTS.get(name))
        if (has or "").lower() != should.lower() and not (name == "address" and mac(has or "") == should):
            yield f"{path} {name}".strip(), f"is {has or 'not set'}, not {should}"
    for part in desired:
        below = f"{path} {part.tag}".strip()
        there = found.find(part.tag)
        if there is None:
            yield below, "is missing"
        else:
            yield from _differences(part, there, below)


def _end(interface: Element) -> str:
    """The host end of a NIC: its socket path, vDPA device, tap or PCI function."""
    for tag, name in (("source", "path"), ("source", "dev"), ("target", "dev")):
        element = interface.find(tag)
        if element is not None and element.get(name):
            return str(element.get(name))
    return function(interface) or str(interface.get("type", ""))


def _kind(interface: Element) -> str:
    model = interface.find("model")
    return model.get("type", "") if model is not None else ""


def _serves(interface: Element, case: Case) -> Iterator[Finding]:
    driver, name, count = interface.find("driver"), address(interface), queues(interface)
    found, fix = f"{name} has {count} queues", "ask for the port with fewer queues"
    many = f"{found} for {case.vcpus} vCPUs" if count > case.vcpus else None
    yield graded("queues", many, found, "no more queues than vCPUs", fix)
    if interface.get("type") == "vdpa":
        return  # its rings are those of the device
    ring = number(None if driver is None else driver.get("rx_queue_size"), 256)
    found, fix = f"{name} has a ring of {ring} frames", f"ask for the port with rx_queue_size {_RING}"
    small = f"{found} to receive from" if ring < _RING else None
    yield graded("rings", small, found, f"{_RING} frames, for bursts", fix)


def _translated(interface: Element, case: Case) -> Iterator[Finding]:
    """Without the feature in its backend, QEMU refuses a device behind a guest's IOMMU
    (virtio_bus_device_plugged in its hw/virtio/virtio-bus.c)."""
    vhostuser = interface.get("type") == "vhostuser" and behind_iommu(interface, case.domain)
    if case.other_config is None or not vhostuser:
        return
    what = f"{address(interface)} is behind the VM's IOMMU, and OVS"
    wrong = None if case.other_config.get(_IOMMU) == "true" else f"{what} has {_IOMMU} off"
    expected = f"other_config:{_IOMMU}=true in OVS for a NIC with iommu='on': QEMU does not start otherwise"
    fix = f"ovs-vsctl set Open_vSwitch . other_config:{_IOMMU}=true, and restart OVS; or remove iommu='on'"
    yield graded("nic-iommu", wrong, f"{what} translates for it", expected, fix, fail)


def user(case: Case) -> Iterator[Finding]:
    """One finding per ``qemu_user`` of the ports; none if no port sets it."""
    users = {nic.binding.domain_requirements.qemu_user for nic in case.nics}
    for uid in sorted(each for each in users if each is not None):
        expected = f"<seclabel type='static' model='dac'> with the label +{uid}:+<group>: the sockets of the "
        expected += "VM's ports are open to that user alone"
        fix = f"{_RENDER}; ports of different users are for different VMs"
        wrong = wrong_user(case.domain, uid)
        yield graded("qemu-user", wrong, f"QEMU runs as user {uid}", expected, fix, fail)
