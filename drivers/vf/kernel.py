"""The host's VFs behind three calls: can they be used, how are they, and carry out one change."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from drivers.vf.changes import BindVf, SetVf, UnbindVf, VfChange
from drivers.vf.inventory import Inventory, find_pfs, read_again, read_inventory
from drivers.vf.options import Device
from drivers.vf.usability import usability
from netplugin.backend import Usability
from netplugin.host.vfs import SYS, Vfs


class Kernel:
    """What the driver knows of the host; a model of it can stand in its place."""

    def __init__(self, devices: Sequence[Device], sys: Path = SYS, vfs: Vfs | None = None) -> None:
        self.devices = tuple(devices)
        self._sys = sys
        self._vfs = vfs or Vfs(sys)

    def usability(self) -> Usability:
        """From a few files: it is asked for each batch of plugs, from any thread."""
        return usability(self._sys, self.devices)

    def nics(self) -> tuple[str, ...]:
        """The PCI addresses of the PFs, from a few files, from any thread."""
        return tuple(find_pfs(self._sys, self.devices)[0])

    def look(self) -> Inventory:
        """Everything, in one netlink dump. Raises: HostError, OperationTimeout."""
        return read_inventory(self._sys, self.devices, self._vfs.links())

    def look_again(self, seen: Inventory, nics: Collection[str]) -> Inventory:
        """These PFs (by address) and their VFs anew, by one request for each; the rest as ``seen``.

        Raises: HostError, OperationTimeout.
        """
        known = {address: seen.pfs[address].link for address in nics}
        links = {a: self._vfs.link(link.index) for a, link in known.items() if link}
        if len(links) < len(nics) or None in links.values():
            return self.look()  # an interface has come or gone
        return read_again(self._sys, seen, {a: link for a, link in links.items() if link})

    def carry_out(self, change: VfChange) -> None:
        """Raises: Unsupported, VfRefuses, HostError, OperationTimeout."""
        vfs = self._vfs
        match change:
            case SetVf():
                for group in change.groups:
                    vfs.set(change.pf_index, change.number, group, change.attributes)
            case UnbindVf():
                vfs.unbind(change.address)
            case BindVf():
                if change.rebind:
                    self._bind(change)
                vfs.override(change.address, change.override)

    def _bind(self, change: BindVf) -> None:
        vfs = self._vfs
        vfs.unbind(change.address)
        vfs.reset(change.address)  # whoever had it, the VM or the host, leaves nothing in it
        if change.driver is not None:
            vfs.override(change.address, change.driver or None)
            vfs.probe(change.address)
