"""The VDUSE devices and vDPA devices of this host, what its kernel can make, and who changes them.

Devices are read from /dev and /sys, and of each only its links. Nothing is asked by netlink and nothing is
opened: both may wait behind a deletion that does not end.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from drivers.vdpa.vduse_processes import DeviceProcesses, DeviceStep
from drivers.vf.inventory import names_in
from netplugin.api.errors import HostError, NetpluginError, TryAgain
from netplugin.host.links import Links
from netplugin.host.names import VDUSE
from netplugin.host.usability import Usability
from netplugin.host.vfs import read_link, read_text

LOG = logging.getLogger(__name__)
#: The drivers of the vDPA bus: one for QEMU, one for the network stack of the host.
VHOST_VDPA, VIRTIO_VDPA = "vhost_vdpa", "virtio_vdpa"
#: How the kernel names the character devices of ``vhost_vdpa`` (vhost_vdpa_probe in drivers/vhost/vdpa.c).
_CHARACTER = "vhost-vdpa-"
#: And the virtio devices of ``virtio_vdpa`` (register_virtio_device in drivers/virtio/virtio.c).
_VIRTIO = "virtio"


@dataclass(frozen=True)
class VduseInterface:
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
    interface: VduseInterface | None = None


NO_DEVICE = VduseDevice()


#: The name of which the kernel is asked. It is never that of a port, which has no hyphen.
_TRIED = f"{VDUSE}-try"


@dataclass(frozen=True)
class _Answer:
    """What the kernel answered while this module was loaded. ``failure``: why it did not answer."""

    module: tuple[int, int]
    pairs: int = 1
    failure: str | None = None


class VduseHost:
    """The devices, and what may change them.

    Not thread-safe, but ``look``, ``device``, ``pairs`` and ``usability`` in both forms, which wait for
    nothing.
    """

    def __init__(
        self, dev: Path = Path("/dev"), sys: Path = Path("/sys"), processes: DeviceProcesses | None = None
    ) -> None:
        """``dev`` and ``sys``: where these file systems are; a test has its own."""
        self._dev = dev
        self._bus = sys / "bus/vdpa"
        #: Where VDUSE devices are.
        self.directory = dev / "vduse"
        #: What takes requests for devices; it is there as long as the kernel module vduse is loaded.
        self.control = self.directory / "control"
        self.processes = processes or DeviceProcesses()
        self.links = Links()
        self._answer: _Answer | None = None

    # -- devices ---------------------------------------------------------------------------------

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

    def pending(self) -> DeviceStep | None:
        """The step that the kernel has not finished."""
        return self.processes.pending()

    def run(self, step: DeviceStep, deadline: float) -> None:
        """Raises: Conflict if somebody holds the device, HostError, TryAgain."""
        self.processes.run(step, deadline)

    def close(self) -> None:
        self.processes.close()

    # -- what the kernel can make ------------------------------------------------------------------

    def learn(self, deadline: float) -> None:
        """Ask the kernel, unless it has answered since the kernel module was loaded."""
        module = _identity(self.control)
        if module is None or self._known:
            return
        try:
            self._answer = _Answer(module, self._ask_kernel(deadline))
        except TryAgain:
            pass  # with the next look
        except NetpluginError as error:
            LOG.warning("the kernel does not say what VDUSE devices it makes: %s", error.detail)
            self._answer = _Answer(module, failure=error.detail)

    def _ask_kernel(self, deadline: float) -> int:
        """The most queue pairs of a device. Raises: HostError, TryAgain."""
        answer = self.processes.run(DeviceStep("try", _TRIED), deadline)
        if not answer.isdecimal():
            raise HostError(f"not a number of queue pairs: {answer!r}", step="vdpa-device")
        return int(answer)

    @property
    def _known(self) -> _Answer | None:
        """The answer, if it is of the module that is loaded now."""
        known = self._answer
        return known if known and known.module == _identity(self.control) else None

    @property
    def pairs(self) -> int:
        """The most queue pairs of a VDUSE device that the kernel makes for a network; 0: it makes none.

        1 as long as that is not known.
        """
        known = self._known
        return known.pairs if known else 1

    def usability(self) -> Usability:
        """Whether the host has what new ports need, as far as it is known."""
        modules = f"modprobe -a vduse {VHOST_VDPA}, and name both in /etc/modules-load.d"
        if not self.control.exists():
            return _lacks(f"there is no {self.control}: the kernel module vduse is not loaded", modules)
        if not (self._bus / "drivers" / VHOST_VDPA).exists():
            return _lacks(f"the driver {VHOST_VDPA} of the vDPA bus is not loaded", modules)
        if not self._has_program():
            return _lacks("the program vdpa is not installed", "install iproute2")
        if not self.pairs:
            return _lacks(
                "the kernel module vduse makes no network devices",
                "boot Linux 6.10 or newer (Debian: 6.12); or, for new ports, set [vdpa] mode = relay",
            )
        return Usability(True)

    def _has_program(self) -> bool:
        return shutil.which("vdpa") is not None

    def usability_for_auto(self) -> Usability:
        """The same for ``auto``, where nobody has chosen this mode: a kernel that did not answer has none."""
        usable, known = self.usability(), self._known
        if usable.usable and known and known.failure:
            return _lacks(
                f"the kernel does not say what it has: {known.failure}",
                "restart the agent, after the modules are loaded; or set [vdpa] mode",
            )
        return usable


def _lacks(reason: str, fix: str) -> Usability:
    return Usability(False, reason, fix, "vduse")


def _identity(file: Path) -> tuple[int, int] | None:
    """What tells the file from one of before: that of a kernel module is new when the module is loaded."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_ino, found.st_ctime_ns


def _interface(directory: Path) -> VduseInterface | None:
    """The interface of a virtio device. /sys shows those of the namespace that it was mounted in only."""
    for name in names_in(directory):
        mac, mtu = (read_text(directory / name / what) for what in ("address", "mtu"))
        if mac and mtu:
            return VduseInterface(name, mac, int(mtu))
    return None
