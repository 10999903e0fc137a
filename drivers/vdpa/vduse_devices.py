"""The VDUSE devices and vDPA devices that the host has: read from /dev and /sys, and of each only its links.

Nothing is asked by netlink and nothing is opened: both may wait behind a deletion that does not end.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from drivers.vf.inventory import names_in
from netplugin.host.names import VDUSE
from netplugin.host.usability import Usability
from netplugin.host.vfs import read_link, read_text

#: The drivers of the vDPA bus: one for QEMU, one for the network stack of the host.
VHOST_VDPA, VIRTIO_VDPA = "vhost_vdpa", "virtio_vdpa"
#: How the kernel names the character devices of ``vhost_vdpa`` (vhost_vdpa_probe in drivers/vhost/vdpa.c).
_CHARACTER = "vhost-vdpa-"
#: And the virtio devices of ``virtio_vdpa`` (register_virtio_device in drivers/virtio/virtio.c).
_VIRTIO = "virtio"


@dataclass(frozen=True)
class Interface:
    """A network interface."""

    name: str
    mac: str
    mtu: int


@dataclass(frozen=True)
class VduseDevice:
    """What the host has under one name. The default is nothing at all.

    ``offered``: there is a VDUSE device. ``on_bus``: there is a vDPA device, with its ``driver`` and the
    path of the ``character`` device that ``vhost_vdpa`` made for it. ``networked``: by ``virtio_vdpa`` it is
    a network interface, in whichever namespace; ``interface`` if it is in that of the agent.
    """

    offered: bool = False
    on_bus: bool = False
    driver: str | None = None
    character: str | None = None
    networked: bool = False
    interface: Interface | None = None


NO_DEVICE = VduseDevice()


class VduseTree:
    """Reads the devices. ``dev`` and ``sys``: where these file systems are; a test has its own."""

    def __init__(self, dev: Path = Path("/dev"), sys: Path = Path("/sys")) -> None:
        self._dev = dev
        self._bus = sys / "bus/vdpa"
        #: Where VDUSE devices are.
        self.directory = dev / "vduse"
        #: What takes requests for devices; it is there as long as the kernel module vduse is loaded.
        self.control = self.directory / "control"

    def look(self) -> Mapping[str, VduseDevice]:
        """The devices of our names, by name."""
        names = {*names_in(self.directory), *names_in(self._bus / "devices")}
        return {name: self.device(name) for name in sorted(names) if name.startswith(VDUSE)}

    def device(self, name: str) -> VduseDevice:
        """What there is under this name. Quick, from any thread."""
        place = self._bus / "devices" / name
        on_bus = os.path.lexists(place)
        made = names_in(place) if on_bus else []
        characters = [entry for entry in made if entry.startswith(_CHARACTER)]
        virtio = [place / entry for entry in made if entry.startswith(_VIRTIO)]
        return VduseDevice(
            offered=os.path.lexists(self.directory / name),
            on_bus=on_bus,
            driver=read_link(place / "driver"),
            character=str(self._dev / characters[0]) if characters else None,
            networked=any(read_link(each / "driver") is not None for each in virtio),
            interface=next((found for each in virtio if (found := _interface(each / "net"))), None),
        )

    def loaded(self) -> Usability:
        """Whether the kernel has the modules that new ports need. Reads few files; any thread may call it."""
        if not self.control.exists():
            return _lacks(f"there is no {self.control}: the kernel module vduse is not loaded")
        if not (self._bus / "drivers" / VHOST_VDPA).exists():
            return _lacks(f"the driver {VHOST_VDPA} of the vDPA bus is not loaded")
        return Usability(True)


def _lacks(reason: str) -> Usability:
    fix = f"modprobe -a vduse {VHOST_VDPA}, and name both in /etc/modules-load.d"
    return Usability(False, reason, fix, "vduse")


def _interface(directory: Path) -> Interface | None:
    """The interface of a virtio device. /sys shows those of the namespace that it was mounted in only."""
    for name in names_in(directory):
        mac, mtu = (read_text(directory / name / what) for what in ("address", "mtu"))
        if mac and mtu:
            return Interface(name, mac, int(mtu))
    return None
