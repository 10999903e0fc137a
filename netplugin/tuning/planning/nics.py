"""Which NICs the PMD threads serve, and so on which nodes they run (pure)."""

from __future__ import annotations

from collections.abc import Mapping

from netplugin.tuning.facts import Facts, Interface, Nic
from netplugin.tuning.intent import Intent
from netplugin.tuning.planning.refused import impossible
from netplugin.tuning.root import known

#: Drivers that a NIC has while DPDK has it (mlx5 keeps its own).
DPDK_DRIVERS = frozenset(("vfio-pci", "igb_uio", "uio_pci_generic"))


def chosen_nics(facts: Facts, intent: Intent) -> tuple[Nic, ...]:
    """Those of the intent; else those that DPDK has; else the fastest, or all if no speed is known.

    Raises: InvalidRequest for one that is not there.
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


def are_sure(nics: tuple[Nic, ...], intent: Intent) -> bool:
    """Whether somebody chose these NICs. Otherwise they change with the links that are up."""
    return bool(intent.nics) or any(nic.driver in DPDK_DRIVERS for nic in nics)


def speed(nic: Nic, interfaces: Mapping[str, Interface]) -> int:
    """Mbit/s; 0 where there is no link."""
    return max(
        (interfaces[n].speed_mbps or 0 for n in nic.interfaces if n in interfaces), default=0
    )


def nodes_of(nics: tuple[Nic, ...], nodes: tuple[int, ...]) -> tuple[int, ...]:
    """The nodes of these NICs that have CPUs; the first node where the firmware names none."""
    found = {known(nic.node, None) for nic in nics} & set(nodes)
    return tuple(sorted(node for node in found if node is not None)) or nodes[:1]


def named(nics: tuple[Nic, ...], name: str, field: str) -> Nic:
    """The NIC of this PCI address or interface. Raises: InvalidRequest naming the intent's field."""
    for nic in nics:
        if name in (nic.address, *nic.interfaces):
            return nic
    have = ", ".join("/".join((nic.address, *nic.interfaces)) for nic in nics) or "none"
    raise impossible(field, f"there is no NIC {name[:60]}", f"name one of: {have}")
