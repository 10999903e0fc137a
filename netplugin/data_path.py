"""What netplugin-zeroloss knows of a backend: how a program takes the VM's place, and where frames drop."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Literal

#: The entry point group of the backends.
GROUP = "netplugin.backends"


@dataclass(frozen=True, slots=True)
class DataPath:
    """The way of the frames of a backend's ports. The strings name fields of a port's ``Binding``."""

    #: What a test program attaches to in place of the VM: the vhost-user socket that it listens on, a tap
    #: that it opens, a VF bound to vfio-pci.
    vm_side: Literal["vhostuser", "tap", "vfio"]
    #: The socket's path, the tap's name or the VF's PCI address.
    device: str
    #: OVS bridge and OVS port of the VM's side, whose counters show the drops; empty: there are none.
    ovs_bridge: str = ""
    ovs_port: str = ""
    #: Kernel network devices whose counters show the drops.
    links: tuple[str, ...] = ()
    #: Whether PMD threads forward the frames, so that the rate depends on their number.
    pmd_threads: bool = False


class NoDataPath(Exception):
    """zeroloss cannot measure a backend: not installed here, not loadable, or without a data path."""


def data_path(backend: str) -> DataPath:
    """Return what an installed backend declares, without creating an instance. Raises: NoDataPath."""
    found = getattr(_loaded(backend), "data_path", None)
    if not isinstance(found, DataPath):
        raise NoDataPath(f"backend {backend} declares no data_path (docs/writing-a-backend.md)")
    return found


def uplink_parts(backend: str) -> frozenset[str]:
    """Return the fields of a ``PhysicalNetworkSpec`` that name the NICs of a backend's frames.

    Where a backend uses VFs, its frames leave by them, also if OVS forwards them. Raises: NoDataPath.
    """
    parts = frozenset(getattr(_loaded(backend), "network_parts", ()))
    return parts & {"sriov"} or parts


def _loaded(backend: str) -> object:
    """Raises: NoDataPath."""
    installed = entry_points(group=GROUP)
    if backend not in installed.names:
        known = ", ".join(sorted(installed.names)) or "none"
        raise NoDataPath(f"no backend {backend!r} is installed with netplugin-zeroloss; there is {known}")
    try:
        loaded: object = installed[backend].load()
    except Exception as error:  # whatever another package raises when it is imported
        raise NoDataPath(f"backend {backend} could not be loaded: {error}") from error
    return loaded
