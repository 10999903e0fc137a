"""Who uses the virtual functions of a NIC: ports of the agent, DPDK or VMs, the host's own network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from netplugin.tuning.planning.nics import DPDK_DRIVERS
from netplugin.tuning.read.network import PCI
from netplugin.tuning.root import Root, known

#: IFF_UP of include/uapi/linux/if.h.
_UP = 1


@dataclass(frozen=True)
class VfUse:
    """``how`` is a clause like ``port nic1 has it``; ``end`` says how that ends."""

    address: str
    how: str
    end: str


def vf_uses(root: Root, pf: str, number: int, ports: Mapping[str, str]) -> Iterator[VfUse]:
    """Every use of each; ``ports`` has the port that the agent gave a VF to, by the VF's address."""
    for index in range(number):
        address = root.link(f"{PCI}/{pf}/virtfn{index}")
        if address is None:
            continue
        if address in ports:
            yield VfUse(address, f"port {ports[address]} has it", f"delete port {ports[address]}")
        yield from _by_the_host(root, address)


def _by_the_host(root: Root, address: str) -> Iterator[VfUse]:
    at = f"{PCI}/{address}"
    driver = root.link(f"{at}/driver")
    if driver is None:
        return
    if driver in DPDK_DRIVERS or "vfio" in driver:
        yield VfUse(address, f"it is bound to {driver}", "stop what uses it and unbind it")
        return
    names = known(root.names(f"{at}/net"), ())
    if not names:
        yield VfUse(
            address, f"{driver} has it and its interface is in another network namespace",
            "bring the interface back",
        )  # fmt: skip
    for name in names:
        if root.link(f"{at}/net/{name}/master"):
            yield VfUse(address, f"its interface {name} is enslaved", f"release {name}")
        elif known(root.parsed(f"{at}/net/{name}/flags", lambda text: int(text, 16)), 0) & _UP:
            yield VfUse(address, f"its interface {name} is up", f"set {name} down")
