"""Read PCI NICs with NUMA node and driver, interfaces, bonds and the IOMMU."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeVar

from netplugin.tuning.facts import HostNic, InterfaceFacts, IommuFacts, KernelBond, NetworkFacts
from netplugin.tuning.root import Fact, Root, Unknown, known, sure, whole

T = TypeVar("T")

PCI = "/sys/bus/pci/devices"
_NET = "/sys/class/net"
_IOMMU = "/sys/kernel/iommu_groups"
#: A PCI address. Others do not occur on a host, and would become text of udev rules and shell commands.
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
#: The links of a NIC to its VFs.
_VF = re.compile(r"virtfn\d+")
#: PCI class of a network controller (include/linux/pci_ids.h).
_NETWORK = "0x02"
#: Names of representors of VFs and SFs (__devlink_port_phys_port_name_get in net/devlink/port.c).
_REPRESENTOR = re.compile(r"(?:c\d+)?pf\d+(?:vf|sf)\d+")
#: Kinds of devices by their ARPHRD number (if_arp.h), of those without a DEVTYPE.
_KINDS = {768: "ipip", 769: "ip6tnl", 776: "sit", 778: "gre", 823: "ip6gre"}
#: The columns of destination, mask (of IPv6: length of the prefix) and interface (``fib_route_seq_show`` in
#: net/ipv4/fib_trie.c, ``ipv6_route_native_seq_show`` in net/ipv6/ip6_fib.c).
_ROUTES = {"/proc/net/route": (1, 7, 0), "/proc/net/ipv6_route": (0, 1, 9)}
#: The loopback interface is not listed; unreachable IPv6 destinations have it.
_LOOPBACK = "lo"


def read_network(root: Root) -> NetworkFacts:
    names = root.names(_NET)
    if isinstance(names, Unknown) and not names.missing:
        return NetworkFacts(_nics(root), names, ())
    there = known(names, ())
    interfaces = _all(_interface(root, name) for name in there if name != _LOOPBACK)
    bonds = (name for name in there if "bonding" in known(root.names(f"{_NET}/{name}"), ()))
    return NetworkFacts(_nics(root), interfaces, tuple(_bond(root, name) for name in bonds))


def read_iommu(root: Root) -> IommuFacts:
    groups = root.names(_IOMMU)
    if isinstance(groups, Unknown):
        return IommuFacts(0 if groups.missing else groups, ())
    types = {root.text(f"{_IOMMU}/{group}/type") for group in groups}
    return IommuFacts(len(groups), tuple(sorted(t for t in types if isinstance(t, str))))


@whole
def _nics(root: Root) -> Fact[tuple[HostNic, ...]]:
    addresses, found = sure(root.names(PCI), ()), routed(root)
    return _all(_nic(root, address, found) for address in addresses if _ADDRESS.fullmatch(address))


@whole
def routed(root: Root, also: Iterable[str] = ()) -> frozenset[str]:
    """Interfaces of default routes, ``also`` others, and those below: a bond's members, a VLAN's parent."""
    found, left = set[str](), list(also)
    for path, (destination, mask, interface) in _ROUTES.items():
        text = sure(root.text(path), "")
        rows = (row for row in map(str.split, text.splitlines()) if len(row) > 9)
        left += [row[interface] for row in rows if not (row[destination] + row[mask]).strip("0")]
    while left:
        name = left.pop()
        if name not in found and name != _LOOPBACK:
            found.add(name)
            left += _lowers(known(root.names(f"{_NET}/{name}"), ()))
    return frozenset(found)


def _lowers(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(name.removeprefix("lower_") for name in names if name.startswith("lower_"))


def _all(found: Iterable[Fact[T]]) -> Fact[tuple[T, ...]]:
    """All values without those that have just disappeared. If one cannot be read, return its Unknown: a
    partial list would look complete."""
    facts = tuple(found)
    refused = [fact for fact in facts if isinstance(fact, Unknown) and not fact.missing]
    return refused[0] if refused else tuple(f for f in facts if not isinstance(f, Unknown))


@whole
def _nic(root: Root, address: str, routed: Fact[frozenset[str]]) -> Fact[HostNic]:
    """A NIC; a missing Unknown if the device is not a NIC or is a VF."""
    at = f"{PCI}/{address}"
    if not sure(root.text(f"{at}/class")).startswith(_NETWORK) or root.link(f"{at}/physfn"):
        return Unknown(at, "is no NIC", missing=True)
    uevent = dict(re.findall(r"^(\w+)=(.*)$", sure(root.text(f"{at}/uevent"), ""), re.MULTILINE))
    interfaces, names = sure(_interfaces_of(root, at)), known(root.names(at), ())
    return HostNic(
        address=address,
        node=root.optional(f"{at}/numa_node", lambda text: int(text) if int(text) >= 0 else None),
        driver=uevent.get("DRIVER"),
        device=uevent.get("PCI_ID", "").lower(),
        interfaces=interfaces,
        total_vfs=root.optional(f"{at}/sriov_totalvfs", int),
        vfs=root.optional(f"{at}/sriov_numvfs", int),
        vf_drivers=tuple(root.link(f"{at}/{name}/driver") or "" for name in names if _VF.fullmatch(name)),
        default_route=routed if isinstance(routed, Unknown) else not routed.isdisjoint(interfaces),
    )


@whole
def _interfaces_of(root: Root, at: str) -> tuple[str, ...]:
    """Interfaces of a PCI device, without representors, which are ports of VMs. Those of a virtio NIC are
    below its virtio device."""
    below = [name for name in known(root.names(at), ()) if name.startswith("virtio")]
    named = sure(_all(root.names(f"{place}/net") for place in (at, *(f"{at}/{b}" for b in below))))
    ports = {n: known(root.optional(f"{_NET}/{n}/phys_port_name", str), None) for ns in named for n in ns}
    return tuple(name for name, port in ports.items() if not _REPRESENTOR.fullmatch(port or ""))


@whole
def _interface(root: Root, name: str) -> InterfaceFacts:
    at = f"{_NET}/{name}"
    there = sure(root.names(at))
    queues = sure(root.names(f"{at}/queues"), ())
    # Without link, reading fails with EINVAL, or gives -1 if the driver does not know the speed.
    speed = sure(root.optional(f"{at}/speed", int)) or -1
    index, link, arphrd = (sure(root.optional(f"{at}/{file}", int)) for file in ("ifindex", "iflink", "type"))
    state = sure(root.optional(f"{at}/operstate", str))
    kind = sure(root.optional(f"{at}/uevent", lambda text: _kind(text, there))) or _KINDS.get(arphrd or 0)
    if (kind, state, arphrd) == (None, "unknown", 1) and link is not None and link != index:
        kind = "gretap"  # it has no DEVTYPE, and other Ethernet devices with one below have a carrier
    return InterfaceFacts(
        name=name,
        mtu=root.parsed(f"{at}/mtu", int),
        speed_mbps=speed if speed > 0 else None,
        rx_queues=sum(queue.startswith("rx-") for queue in queues),
        tx_queues=sum(queue.startswith("tx-") for queue in queues),
        master=root.link(f"{at}/master"),
        lowers=_lowers(there),
        kind=kind,
        index=index,
        link=link,
        state=state,
    )


def _kind(uevent: str, there: tuple[str, ...]) -> str | None:
    """What SET_NETDEV_DEVTYPE has set: ``vxlan``, ``bridge``, ``vlan``; a tap or tun has no such name."""
    found = re.search(r"^DEVTYPE=(\S+)$", uevent, re.MULTILINE)
    return found[1] if found else "tun" if "tun_flags" in there else None


def _bond(root: Root, name: str) -> KernelBond:
    """Read a bond; mode and policy files contain a name and a number: ``802.3ad 4``, ``layer2 0``."""
    at = f"{_NET}/{name}/bonding"
    return KernelBond(
        name=name,
        mode=root.parsed(f"{at}/mode", lambda text: text.split()[0]),
        hash_policy=root.parsed(f"{at}/xmit_hash_policy", lambda text: text.split()[0]),
        members=root.parsed(f"{at}/slaves", lambda text: tuple(text.split())),
    )
