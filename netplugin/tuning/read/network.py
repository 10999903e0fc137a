"""NICs on PCI with their node and driver, interfaces, bonds, and the IOMMU that VFs need."""

from __future__ import annotations

import re

from netplugin.tuning.facts import Interface, IommuFacts, KernelBond, NetworkFacts, Nic
from netplugin.tuning.root import Fact, Root, Unknown, known

_PCI = "/sys/bus/pci/devices"
_NET = "/sys/class/net"
_IOMMU = "/sys/kernel/iommu_groups"
#: PCI class of a network controller (include/linux/pci_ids.h).
_NETWORK = "0x02"
#: Who writes no target for lo; a master is anything that others are enslaved to.
_LOOPBACK = "lo"


def read_network(root: Root) -> NetworkFacts:
    names = root.names(_NET)
    if isinstance(names, Unknown):
        names = () if names.missing else names
    if isinstance(names, Unknown):
        return NetworkFacts(_nics(root), names, ())
    return NetworkFacts(
        nics=_nics(root),
        interfaces=tuple(
            _interface(root, name)
            for name in names
            if name != _LOOPBACK and not isinstance(root.names(f"{_NET}/{name}"), Unknown)
        ),
        bonds=tuple(
            _bond(root, name)
            for name in names
            if not isinstance(root.names(f"{_NET}/{name}/bonding"), Unknown)
        ),
    )


def read_iommu(root: Root) -> IommuFacts:
    groups = root.names(_IOMMU)
    if isinstance(groups, Unknown):
        return IommuFacts(0 if groups.missing else groups, ())
    types = {root.text(f"{_IOMMU}/{group}/type") for group in groups}
    return IommuFacts(len(groups), tuple(sorted(t for t in types if isinstance(t, str))))


def _nics(root: Root) -> Fact[tuple[Nic, ...]]:
    addresses = root.names(_PCI)
    if isinstance(addresses, Unknown):
        return () if addresses.missing else addresses
    found = []
    for address in addresses:
        at = f"{_PCI}/{address}"
        kind = root.text(f"{at}/class")
        if isinstance(kind, str) and kind.startswith(_NETWORK) and not root.link(f"{at}/physfn"):
            found.append(_nic(root, address))
    return tuple(found)


def _nic(root: Root, address: str) -> Nic:
    at = f"{_PCI}/{address}"
    uevent = dict(re.findall(r"^(\w+)=(.*)$", known(root.text(f"{at}/uevent"), ""), re.MULTILINE))
    return Nic(
        address=address,
        node=root.optional(f"{at}/numa_node", _node),
        driver=uevent.get("DRIVER"),
        device=uevent.get("PCI_ID", "").lower(),
        interfaces=_interfaces_of(root, at),
        total_vfs=root.optional(f"{at}/sriov_totalvfs", int),
        vfs=root.optional(f"{at}/sriov_numvfs", int),
    )


def _node(text: str) -> int | None:
    return None if int(text) < 0 else int(text)


def _interfaces_of(root: Root, at: str) -> tuple[str, ...]:
    """Of a virtio NIC they are below its virtio device."""
    below = [name for name in known(root.names(at), ()) if name.startswith("virtio")]
    return tuple(
        name
        for place in (at, *(f"{at}/{b}" for b in below))
        for name in known(root.names(f"{place}/net"), ())
    )


def _interface(root: Root, name: str) -> Interface:
    at = f"{_NET}/{name}"
    queues = known(root.names(f"{at}/queues"), ())
    # Without a link the kernel answers EINVAL, or -1 where the driver does not know.
    speed = known(root.parsed(f"{at}/speed", int), -1)
    return Interface(
        name=name,
        mtu=root.parsed(f"{at}/mtu", int),
        speed_mbps=speed if speed > 0 else None,
        rx_queues=sum(queue.startswith("rx-") for queue in queues),
        tx_queues=sum(queue.startswith("tx-") for queue in queues),
        master=root.link(f"{at}/master"),
        lowers=tuple(
            entry.removeprefix("lower_")
            for entry in known(root.names(at), ())
            if entry.startswith("lower_")
        ),
    )


def _bond(root: Root, name: str) -> KernelBond:
    """Mode and policy are a name and a number: ``802.3ad 4``, ``layer2 0``."""
    at = f"{_NET}/{name}/bonding"
    return KernelBond(
        name=name,
        mode=root.parsed(f"{at}/mode", lambda text: text.split()[0]),
        hash_policy=root.parsed(f"{at}/xmit_hash_policy", lambda text: text.split()[0]),
        members=root.parsed(f"{at}/slaves", lambda text: tuple(text.split())),
    )
