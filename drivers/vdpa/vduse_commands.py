"""The changes of VDUSE devices and vDPA devices, as values, and how they are applied."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from drivers.vdpa.vduse_abilities import VduseAbilities
from drivers.vdpa.vduse_processes import DeviceProcesses, DeviceStep
from netplugin.api.errors import HostError
from netplugin.backend import Change
from netplugin.host.links import Links
from netplugin.host.names import VDUSE
from netplugin.host.usability import Usability


@dataclass(frozen=True)
class DeviceChange(Change):
    """A change of the device of this name. ``before_rows``: it comes before the changes of OVS.

    ``verb``: that of its step, if it is one of ``vduse_step``.
    """

    before_rows: ClassVar[bool] = False
    verb: ClassVar[str] = ""

    name: str

    @property
    def step(self) -> DeviceStep:
        return DeviceStep(self.verb, self.name)

    def apply(self, host: VduseHost, deadline: float) -> None:
        """Raises: Conflict if somebody holds the device, HostError, TryAgain."""
        host.run(self.step, deadline)

    def describe(self) -> str:
        return str(self.step)


@dataclass(frozen=True)
class CreateDevice(DeviceChange):
    """Have the kernel make the vDPA device for a VDUSE device, which OVS has made with its port."""

    verb: ClassVar[str] = "create"

    def apply(self, host: VduseHost, deadline: float) -> None:
        # Without a VDUSE device OVS could not make it, which is reported as a fault of the port.
        if host.device(self.name).offered:
            super().apply(host, deadline)


@dataclass(frozen=True)
class BindDevice(DeviceChange):
    """Bind a driver, which decides who uses the device."""

    verb: ClassVar[str] = "bind"

    driver: str

    @property
    def step(self) -> DeviceStep:
        return DeviceStep(self.verb, self.name, self.driver)

    def apply(self, host: VduseHost, deadline: float) -> None:
        if host.device(self.name).on_bus:
            super().apply(host, deadline)


@dataclass(frozen=True)
class SetInterface(DeviceChange):
    """Give the network interface of a device the MAC and MTU of its port, while it is in our namespace."""

    mac: str
    mtu: int

    def apply(self, host: VduseHost, deadline: float) -> None:
        found = host.device(self.name).interface
        if found is not None:
            host.links.set(found.name, mtu=self.mtu, address=self.mac)

    def describe(self) -> str:
        return f"set MAC {self.mac} and MTU {self.mtu} of the interface of vDPA device {self.name}"


@dataclass(frozen=True)
class DeleteDevice(DeviceChange):
    """Take the vDPA device away, unless somebody holds it. The row of its port goes after it."""

    before_rows: ClassVar[bool] = True
    verb: ClassVar[str] = "delete"


@dataclass(frozen=True)
class DestroyDevice(DeviceChange):
    """Take away a VDUSE device that no vswitchd serves. One that is served goes with its port."""

    verb: ClassVar[str] = "destroy"

    def apply(self, host: VduseHost, deadline: float) -> None:
        if host.device(self.name).offered:
            super().apply(host, deadline)


#: The name of which the kernel is asked. It is never that of a port, which has no hyphen.
_TRIED = f"{VDUSE}-try"


class VduseHost(VduseAbilities):
    """The devices of this host, and the processes that change them.

    Not thread-safe, but ``look``, ``device``, ``pairs`` and ``usability`` in both forms.
    """

    def __init__(
        self, dev: Path = Path("/dev"), sys: Path = Path("/sys"), processes: DeviceProcesses | None = None
    ) -> None:
        """Without arguments: those of the host. A test has its own."""
        super().__init__(dev, sys)
        self.processes = processes or DeviceProcesses()
        self.links = Links()

    def loaded(self) -> Usability:
        loaded = super().loaded()
        if loaded.usable and shutil.which("vdpa") is None:
            return Usability(False, "the program vdpa is not installed", "install iproute2", "vduse")
        return loaded

    def pending(self) -> DeviceStep | None:
        """The step that the kernel has not finished."""
        return self.processes.pending()

    def run(self, step: DeviceStep, deadline: float) -> None:
        self.processes.run(step, deadline)

    def close(self) -> None:
        self.processes.close()

    def _ask_kernel(self, deadline: float) -> int:
        said = self.processes.run(DeviceStep("try", _TRIED), deadline)
        if not said.isdecimal():
            raise HostError(f"not a number of queue pairs: {said!r}", step="vdpa-device")
        return int(said)
