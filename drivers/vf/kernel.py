"""Access to the host's VFs: check usability, read the inventory and counters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from drivers.vf.commands import KIND, LIBVIRT_STATE, VfHost
from drivers.vf.inventory import Inventory, ambiguous, find_pfs, interface_index, read_again, read_inventory
from drivers.vf.memory import Memory
from drivers.vf.options import PoolDevice
from drivers.vf.usability import usability
from netplugin.api.errors import NetpluginError
from netplugin.api.models import VfCounters
from netplugin.backend import Claim
from netplugin.host.nic_models import max_queues, model_of
from netplugin.host.usability import Usability
from netplugin.host.vf_messages import NicLink
from netplugin.host.vfs import SYS, Vfs, read_link, read_text


class VfKernel(VfHost):
    """The host's VFs. Tests substitute a model."""

    def __init__(
        self,
        devices: Sequence[PoolDevice] | Callable[[], Sequence[PoolDevice]],
        sys: Path = SYS,
        vfs: Vfs | None = None,
        libvirt_state: Path = LIBVIRT_STATE,
    ) -> None:
        """``devices``: those of the pool, or what returns them if they change."""
        self._devices = devices
        super().__init__(vfs or Vfs(sys), libvirt_state)
        self._sys = sys

    @property
    def devices(self) -> tuple[PoolDevice, ...]:
        return tuple(self._devices() if callable(self._devices) else self._devices)

    def usability(self, *, for_dpdk: bool = False) -> Usability:
        """Check whether VFs can be used. Reads few files: it runs for each batch of plugs, on any thread."""
        return usability(self._sys, self.devices, for_dpdk=for_dpdk)

    def nics(self) -> tuple[str, ...]:
        """Return the PCI addresses of the PFs. Reads few files; any thread may call it."""
        return tuple(find_pfs(self._sys, self.devices)[0])

    def ambiguous(self, devices: Sequence[PoolDevice]) -> dict[str, tuple[str, ...]]:
        """Return the PFs (by PCI address) that these devices name for more than one network, with these."""
        return ambiguous(find_pfs(self._sys, devices)[0])

    def max_queues(self) -> int:
        """Return the most queue pairs a VF of any NIC can have. Reads few files; any thread may call it."""
        nics = (self._sys / "bus/pci/devices" / address for address in self.nics())
        found = ((read_link(nic / "driver"), read_text(nic / "sriov_numvfs")) for nic in nics)
        return max((max_queues(driver, int(vfs or 0)) for driver, vfs in found), default=1)

    def look(self) -> Inventory:
        """Read the whole inventory. Raises: HostError, OperationTimeout."""
        return read_inventory(self._sys, self.devices, self._links(self.nics()), self.saved())

    def look_again(self, seen: Inventory, nics: Collection[str]) -> Inventory:
        """Read these PFs (by address) and their VFs again; keep the rest of ``seen``.

        Raises: HostError, OperationTimeout.
        """
        links = self._links(nics)
        if len(links) < len(nics):
            return self.look()  # an interface disappeared
        return read_again(self._sys, seen, nics, links, self.saved())

    def _links(self, nics: Collection[str]) -> dict[str, NicLink]:
        """Read the interfaces of these PFs (by address), one request each, and return them by name."""
        indices = (interface_index(self._sys, self._sys / "bus/pci/devices" / nic) for nic in nics)
        links = (self.vfs.link(index) for index in indices if index is not None)
        return {link.name: link for link in links if link is not None}

    def counters(self, claims: Sequence[Claim]) -> dict[Claim, VfCounters]:
        """Return the NIC counters of the VFs of these claims; omits those that cannot be read now."""
        of_nics: dict[str, list[tuple[int, Claim]]] = {}
        for claim in (each for each in claims if each.kind == KIND):
            memory = Memory.of(claim)
            nic = self._sys / "bus/pci/devices" / memory.pf_address
            if read_link(nic / f"virtfn{memory.number}") == claim.key:  # it still has this PCI address
                of_nics.setdefault(memory.pf_address, []).append((memory.number, claim))
        found: dict[Claim, VfCounters] = {}
        for address, held in of_nics.items():
            device = self._sys / "bus/pci/devices" / address
            index = interface_index(self._sys, device)
            if index is None or not model_of(read_link(device / "driver")).vf.counts:
                continue
            with contextlib.suppress(NetpluginError):
                counted = self.vfs.counters(index)
                found |= {claim: counted[n] for n, claim in held if n in counted}
        return found
