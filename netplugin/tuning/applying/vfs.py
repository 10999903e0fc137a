"""Set the number of VFs of a PF, unless its VFs are in use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from netplugin.api.errors import Conflict, HostError
from netplugin.host.vfs import HostInterface, host_uses, is_vfio
from netplugin.tuning.applying.accessor import Raw, WritableRoot
from netplugin.tuning.applying.kernel import refusals
from netplugin.tuning.planning.nics import DPDK_DRIVERS
from netplugin.tuning.read.network import PCI
from netplugin.tuning.root import Root, Unknown, known
from netplugin.tuning.steps import VfCount

# -- Users of a PF's VFs: ports of the agent, DPDK or VMs, and the host's own network. ------------


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


# -- Set the number of VFs of a PF. The kernel requires 0 VFs between two other numbers. ----------


#: Returns the agent's port ids by VF address; empty if no agent runs.
#: Raises: NetpluginError if an agent runs but does not answer.
Ports: TypeAlias = Callable[[], Mapping[str, str]]


class VfCounts:
    """Raw value: the number. New VFs do not inherit the settings of the old ones."""

    def __init__(self, root: WritableRoot, ports: Ports) -> None:
        self._root, self._ports = root, ports

    def read(self, target: VfCount) -> Raw:
        text = self._root.text(_path(target))
        if isinstance(text, Unknown):
            raise HostError(f"{text.path}: {text.reason}", step="read")
        return text

    def value(self, target: VfCount, raw: Raw) -> str | None:
        return raw

    def write(self, target: VfCount, wanted: str | None) -> None:
        self.restore(target, wanted)

    def restore(self, target: VfCount, raw: Raw) -> None:
        """Set the number, through 0 if VFs exist. Raises: Conflict if an existing VF is in use."""
        now, wanted = self.read(target) or "0", raw or "0"
        if now == wanted:
            return
        path = _path(target)
        if now != "0":
            self._refuse_in_use(target, int(now))
            with refusals(path):
                self._root.write(path, "0")
        if wanted != "0":
            with refusals(path):
                self._root.write(path, wanted)

    def _refuse_in_use(self, target: VfCount, number: int) -> None:
        uses = list(vf_uses(self._root, target.address, number, self._ports()))
        if uses:
            first = uses[0]
            others = {use.address for use in uses} - {first.address}
            also = f"; so are {', '.join(sorted(others))}" if others else ""
            same = [use for use in uses if use.address == first.address]
            raise Conflict(
                f"VF {first.address} of {target.address} is in use: "
                f"{' and '.join(use.how for use in same)}{also}",
                step="write",
                fix=f"free VF {first.address}: {', and '.join(use.end for use in same)}; then try again",
            )


def _path(target: VfCount) -> str:
    return f"{PCI}/{target.address}/sriov_numvfs"
