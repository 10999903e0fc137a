"""Choose the NICs that PMD threads serve, and plan the number of VFs of each NIC (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from netplugin.tuning.facts import Facts, HostNic, InterfaceFacts
from netplugin.tuning.intent import HostIntent
from netplugin.tuning.planning import sources
from netplugin.tuning.planning.refused import impossible, needed
from netplugin.tuning.root import Unknown, known
from netplugin.tuning.steps import Effect, Group, Step, VfCount

# -- Choose the NICs that PMD threads serve, and so the nodes of the threads (pure). --------------


#: Drivers of NICs that DPDK uses (mlx5 keeps its kernel driver).
DPDK_DRIVERS = frozenset(("vfio-pci", "igb_uio", "uio_pci_generic"))


def chosen_nics(facts: Facts, intent: HostIntent) -> tuple[HostNic, ...]:
    """NICs of the intent; else those bound to DPDK drivers; else the fastest, or all if no speed is known.

    Raises: InvalidRequest for a NIC that does not exist.
    """
    nics = known(facts.network.nics, ())
    if intent.nics:
        return tuple(dict.fromkeys(named(nics, name, "nics") for name in intent.nics))
    bound = tuple(nic for nic in nics if nic.driver in DPDK_DRIVERS)
    if bound:
        return bound
    interfaces = {i.name: i for i in known(facts.network.interfaces, ())}
    best = max((speed(nic, interfaces) for nic in nics), default=0)
    return tuple(nic for nic in nics if speed(nic, interfaces) == best)


def are_sure(nics: tuple[HostNic, ...], intent: HostIntent) -> bool:
    """True if the NICs are configured or bound to DPDK; else the choice depends on which links are up."""
    return bool(intent.nics) or any(nic.driver in DPDK_DRIVERS for nic in nics)


def speed(nic: HostNic, interfaces: Mapping[str, InterfaceFacts]) -> int:
    """Speed in Mbit/s; 0 without link."""
    return max((interfaces[n].speed_mbps or 0 for n in nic.interfaces if n in interfaces), default=0)


def nodes_of(nics: tuple[HostNic, ...], nodes: tuple[int, ...]) -> tuple[int, ...]:
    """NUMA nodes of these NICs that have CPUs; the first node if the firmware reports none."""
    found = {known(nic.node, None) for nic in nics} & set(nodes)
    return tuple(sorted(node for node in found if node is not None)) or nodes[:1]


def named(nics: tuple[HostNic, ...], name: str, field: str) -> HostNic:
    """The NIC with this PCI address or interface name. Raises: InvalidRequest naming ``field``."""
    for nic in nics:
        if name in (nic.address, *nic.interfaces):
            return nic
    have = ", ".join("/".join((nic.address, *nic.interfaces)) for nic in nics) or "none"
    raise impossible(field, f"there is no NIC {name[:60]}", f"name one of: {have}")


# -- Plan the number of VFs of each NIC in the intent (pure). -------------------------------------


def vf_steps(facts: Facts, intent: HostIntent) -> Iterator[Step]:
    """One step per named NIC; other NICs keep their VFs.

    Raises: InvalidRequest for a NIC that does not exist, supports no or fewer VFs, or is named twice;
    HostError for a missing fact.
    """
    seen = set()
    for entry in intent.vfs:
        name, _, number = entry.rpartition("=")
        nic = named(needed(facts.network.nics), name, "vfs")
        most = needed(nic.total_vfs)
        if nic.address in seen:
            raise impossible("vfs", f"{nic.address} is named twice", "name each NIC once")
        if not most:
            raise impossible(
                "vfs",
                f"{name} has no virtual functions",
                "name another NIC, or switch SR-IOV on in the firmware of NIC and board",
            )
        if int(number) > most:
            raise impossible(
                "vfs",
                f"{name} can have {most} virtual functions and not {int(number)}",
                f"ask for at most {most}",
            )
        seen.add(nic.address)
        yield Step(
            Group.VFS,
            VfCount(nic.address),
            nic.vfs if isinstance(nic.vfs, Unknown) else str(nic.vfs or 0),
            str(int(number)),
            Effect.LIVE,
            "virtual functions for VMs; a boot takes them away",
            sources.SRIOV,
        )
