"""The MACs that the VFs of this host have: frames for them go to the NIC.

The NICs with VFs are looked for now and then, as it takes a message for each interface of the host. In
between each of them is asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from netplugin.host.vf_messages import NO_MAC, NicLink
from netplugin.host.vfs import Vfs


class VfMac(NamedTuple):
    """``vlan``: the VLAN ID of the VF; 0: none."""

    mac: str
    vlan: int


class VfMacs:
    """Reads the MACs in the network namespace of the calling thread. Not thread-safe."""

    def __init__(self, vfs: Vfs | None = None) -> None:
        self._vfs = vfs or Vfs()
        #: The indices of the NICs with VFs by their names, as they were found last. Any thread may read it.
        self.nics: Mapping[str, int] = MappingProxyType({})

    def read(self, *, anew: bool) -> frozenset[VfMac]:
        """The MACs of all VFs. ``anew``: look for the NICs, too. Raises: HostError, OperationTimeout."""
        if anew:
            links = [link for link in self._vfs.links().values() if link.vfs]
            self.nics = MappingProxyType({link.name: link.index for link in links})
            return _macs(links)
        return self.of(self.nics.values())

    def of(self, nics: Iterable[int]) -> frozenset[VfMac]:
        """The MACs of the VFs of these NICs, by their indices. Raises: HostError, OperationTimeout."""
        return _macs(link for index in nics if (link := self._vfs.link(index)))


def _macs(links: Iterable[NicLink]) -> frozenset[VfMac]:
    vfs = (vf for link in links for vf in link.vfs.values())
    return frozenset(VfMac(vf.mac, vf.vlan) for vf in vfs if vf.mac != NO_MAC)
