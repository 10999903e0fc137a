"""What netplugin-zeroloss knows of a backend: how a program takes the VM's place, and where frames drop."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoints, entry_points
from typing import Literal

#: The entry point group of the backends.
GROUP = "netplugin.backends"


@dataclass(frozen=True, slots=True)
class DataPath:
    """The way of the frames of a port. The strings name fields of its ``Binding``."""

    #: What a test program attaches to in place of the VM: the vhost-user socket that it listens on, a
    #: character device of vhost_vdpa or a tap that it opens, a VF bound to vfio-pci.
    vm_side: Literal["vhostuser", "vhostvdpa", "tap", "vfio"]
    #: The path of socket or character device, the tap's name or the VF's PCI address.
    device: str
    #: OVS bridge and OVS port of the VM's side, whose counters show the drops; empty: there are none.
    ovs_bridge: str = ""
    ovs_port: str = ""
    #: Kernel network devices whose counters show the drops.
    links: tuple[str, ...] = ()
    #: Whether PMD threads forward the frames, so that the rate depends on their number.
    pmd_threads: bool = False

    @property
    def shares_memory(self) -> bool:
        """Whether another process moves the frames out of the VM's memory and into it."""
        return self.vm_side in ("vhostuser", "vhostvdpa")


class NoDataPath(Exception):
    """zeroloss cannot measure a backend or port: not installed here, not loadable, or no data path."""


def data_path(backend: str, vif_type: str) -> DataPath:
    """Return the data path of a port whose binding has this ``vif_type``. Raises: NoDataPath."""
    declared = _declared(backend)
    if isinstance(declared, DataPath):
        return declared
    if vif_type not in declared:
        known = ", ".join(sorted(declared))
        raise NoDataPath(f"a {backend} port with vif_type {vif_type} has no data_path; {known} has")
    return declared[vif_type]


def data_paths(backend: str) -> tuple[DataPath, ...]:
    """Return each data path that a port of a backend may have. Raises: NoDataPath."""
    declared = _declared(backend)
    return (declared,) if isinstance(declared, DataPath) else tuple(declared.values())


def uplink_parts(backend: str, virtual_functions: bool) -> frozenset[str]:
    """Return the fields of a ``PhysicalNetworkSpec`` that name the NICs of a backend's frames.

    ``virtual_functions``: new ports have VFs. Their frames leave by them, also if OVS forwards them.

    Raises: NoDataPath.
    """
    parts = frozenset(getattr(_loaded(backend), "network_parts", ()))
    vfs = parts & {"sriov"}
    return (vfs if virtual_functions else parts - vfs) or parts


def _declared(backend: str) -> DataPath | Mapping[str, DataPath]:
    """Read the attribute of an installed backend, without creating an instance. Raises: NoDataPath."""
    found = getattr(_loaded(backend), "data_path", None)
    if isinstance(found, DataPath):
        return found
    if isinstance(found, Mapping) and found and all(isinstance(path, DataPath) for path in found.values()):
        return found
    raise NoDataPath(f"backend {backend} declares no data_path (docs/writing-a-backend.md)")


def _loaded(backend: str) -> object:
    """Raises: NoDataPath."""
    found = installed()
    if backend not in found.names:
        known = ", ".join(sorted(found.names)) or "none"
        raise NoDataPath(f"no backend {backend!r} is installed with netplugin-zeroloss; there is {known}")
    try:
        loaded: object = found[backend].load()
    except Exception as error:  # whatever another package raises when it is imported
        raise NoDataPath(f"backend {backend} could not be loaded: {error}") from error
    return loaded


def installed() -> EntryPoints:
    """Return the backends of all packages in ``sys.path``, which are read once."""
    return _installed(tuple(sys.path))


@functools.cache
def _installed(_folders: tuple[str, ...]) -> EntryPoints:
    return entry_points(group=GROUP)
