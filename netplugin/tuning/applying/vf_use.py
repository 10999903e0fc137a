"""Users of a PF's VFs: ports of the agent, DPDK or VMs, and the host's own network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from netplugin.host.vfs import HostInterface, host_uses, is_vfio
from netplugin.tuning.planning.nics import DPDK_DRIVERS
from netplugin.tuning.read.network import PCI
from netplugin.tuning.root import Root, known

#: IFF_UP of include/uapi/linux/if.h.
_UP = 1


@dataclass(frozen=True)
class VfUse:
    """``how`` is a clause like ``port nic1 has it``; ``end`` is the action that frees the VF."""

    address: str
    how: str
    end: str


def vf_uses(root: Root, pf: str, number: int, ports: Mapping[str, str]) -> Iterator[VfUse]:
    """Every use of each of the PF's VFs; ``ports`` maps a VF address to the agent's port."""
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
    if driver in DPDK_DRIVERS or is_vfio(driver):
        yield VfUse(address, f"it is bound to {driver}", "stop what uses it and unbind it")
        return
    interfaces = [_interface(root, at, name) for name in known(root.names(f"{at}/net"), ())]
    for use in host_uses(driver, interfaces):
        yield VfUse(address, use.how, use.end)


def _interface(root: Root, device: str, name: str) -> HostInterface:
    at = f"{device}/net/{name}"
    flags = known(root.parsed(f"{at}/flags", lambda text: int(text, 16)), 0)
    return HostInterface(name, bool(flags & _UP), root.link(f"{at}/master") is not None)
