"""Read a guest's vCPUs, NUMA cells, clock, IOMMU and NICs from its domain (pure). Source: formatdomain."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from netplugin.host.processes import printable
from netplugin.libvirt.domain import address, invalid, nics, parse_domain
from netplugin.libvirt.interfaces import Element
from netplugin.libvirt.needs import cells_of, memory_kb, pages, parse_number, vcpus
from netplugin.libvirt.nic_parts import behind_iommu
from netplugin.libvirt.pins import is_marked_realtime, is_x86
from netplugin.libvirt.values import content, pci_address

STEP: Final = "guest-plan"


class NicKind(StrEnum):
    VIRTIO = "virtio"
    VF = "VF"
    #: A NIC that QEMU emulates.
    EMULATED = "emulated"


@dataclass(frozen=True)
class GuestNic:
    """``address`` is the PCI address in libvirt's numbering. ``ours``: a kind of NIC that netplugin plugs.

    ``vhostuser``: the host end is OVS-DPDK. ``teamed``: one of a pair that the guest kernel joins.
    ``translated``: the emulated IOMMU translates for it.
    """

    mac: str
    kind: NicKind
    address: str | None
    queues: int
    mtu: int | None
    ours: bool
    vhostuser: bool
    teamed: bool
    translated: bool


@dataclass(frozen=True)
class GuestDomain:
    """``cells_kb`` is the memory of each NUMA cell; ``backing_kb`` the host hugepage size that the domain
    requests, None for none; ``threads`` are threads per core; ``iommu`` is the emulated IOMMU's model."""

    name: str
    vcpus: int
    threads: int
    cells_kb: tuple[int, ...]
    backing_kb: int | None
    whole_cpu: bool
    kvmclock: bool
    iommu: str | None
    realtime: bool
    machine: str
    x86: bool
    nics: tuple[GuestNic, ...]

    @property
    def memory_kb(self) -> int:
        return sum(self.cells_kb)

    @property
    def pcie(self) -> bool:
        """False for the machine type ``pc`` (i440fx), which has only conventional PCI."""
        return not re.match(r"pc($|-i440fx|-[0-9])", self.machine)


def read_domain(xml: str) -> GuestDomain:
    """Parse domain XML. Raises: InvalidRequest naming ``xml``."""
    domain = parse_domain(xml, STEP)
    count = _online(domain, vcpus(domain, STEP))
    cells = tuple(cell.memory_kb for cell in cells_of(domain, STEP) if cell.memory_kb)
    machine = domain.find("os/type")
    model = domain.find("devices/iommu")
    return GuestDomain(
        name=_one_line(content(domain.find("name"))) or "guest",
        vcpus=count,
        threads=max(1, _number(domain.find("cpu/topology"), "threads", 1)),
        cells_kb=cells or (memory_kb(domain, STEP),),
        backing_kb=min((size for size, _ in pages(domain, STEP)), default=None),
        whole_cpu=_attribute(domain, "cpu", "mode") in ("host-passthrough", "maximum"),
        kvmclock=not any(
            timer.get("name") == "kvmclock" and timer.get("present") == "no"
            for timer in domain.iterfind("clock/timer")
        ),
        iommu=None if model is None else _one_line(model.get("model", "unknown")),
        realtime=is_marked_realtime(domain) or domain.find("cputune/vcpusched") is not None,
        machine="" if machine is None else _one_line(machine.get("machine", "")),
        x86=is_x86(domain),
        nics=tuple(_nics(domain)),
    )


def _one_line(text: str) -> str:
    """The text without line breaks and control characters, for a line of a report."""
    return " ".join(printable(text).split())


def _online(domain: Element, most: int) -> int:
    """The number of vCPUs that are present at boot."""
    current = _number(domain.find("vcpu"), "current", most)
    if not 0 < current <= most:
        raise invalid(f"<vcpu> has current={current}, not 1 to {most}", STEP)
    return current


def _nics(domain: Element) -> Iterator[GuestNic]:
    for interface in nics(domain):
        mac = address(interface)
        if interface.tag == "hostdev" and not mac:
            continue  # not a NIC, or one without a known MAC
        if not mac:
            found = f"an <interface> has the MAC address {_attribute(interface, 'mac', 'address')[:30]!r}"
            raise invalid(found, STEP, "take the domain as libvirt has it: virsh dumpxml")
        of = interface.get("type")
        mtu = _number(interface.find("mtu"), "size", 0)
        yield GuestNic(
            mac=mac,
            kind=_kind(interface),
            address=_address(interface),
            queues=max(1, _number(interface.find("driver"), "queues", 1)),
            mtu=mtu or None,
            ours=of in ("vhostuser", "vdpa", "hostdev")
            or interface.tag == "hostdev"
            or (of == "ethernet" and _attribute(interface, "target", "managed") == "no"),
            vhostuser=of in ("vhostuser", "vdpa"),
            teamed=interface.find("teaming") is not None,
            translated=behind_iommu(interface, domain),
        )


def _kind(interface: Element) -> NicKind:
    if "hostdev" in (interface.tag, interface.get("type")):
        return NicKind.VF
    model = _attribute(interface, "model", "type")
    return NicKind.VIRTIO if model.startswith("virtio") else NicKind.EMULATED


def _address(interface: Element) -> str | None:
    found = interface.find("address")
    if found is None or found.get("type") != "pci":
        return None
    where = pci_address(found)
    if not where:
        raise invalid("a number of a PCI address is none", STEP)
    return where


def _attribute(element: Element, path: str, name: str) -> str:
    found = element.find(path)
    return "" if found is None else found.get(name, "")


def _number(element: Element | None, name: str, default: int) -> int:
    text = "" if element is None else element.get(name, "")
    return parse_number(text, name, STEP, bits=32) if text else default
