"""The changes of VDUSE devices and vDPA devices, as values, and how they are applied."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from drivers.vdpa.vduse_abilities import VduseAbilities
from drivers.vdpa.vduse_devices import VduseDevice, VduseTree
from drivers.vdpa.vduse_processes import DeviceProcesses, DeviceStep
from netplugin.api.errors import HostError, NetpluginError, OperationTimeout
from netplugin.backend import Change
from netplugin.host.links import Links
from netplugin.host.names import VDUSE
from netplugin.host.usability import Usability


class InterfaceSetter(Protocol):
    """See ``netplugin.host.links.Links``."""

    def set(self, name: str, *, mtu: int, address: str) -> None: ...


class DeviceHost(Protocol):
    """What changes are applied to."""

    @property
    def links(self) -> InterfaceSetter: ...
    def device(self, name: str) -> VduseDevice: ...
    def run(self, step: DeviceStep, deadline: float) -> None: ...


@dataclass(frozen=True)
class DeviceChange(Change):
    """A change of the device of this name. ``before_rows``: it comes before the changes of OVS.

    ``verb``: that of its step, if it is one of ``vduse_step``.
    """

    before_rows: ClassVar[bool] = False
    verb: ClassVar[str] = ""

    name: str

    def apply(self, host: DeviceHost, deadline: float) -> None:
        """Raises: Conflict if somebody holds the device, HostError, TryAgain."""
        host.run(DeviceStep(self.verb, self.name), deadline)


@dataclass(frozen=True)
class CreateDevice(DeviceChange):
    """Have the kernel make the vDPA device for a VDUSE device, which OVS has made with its port."""

    verb: ClassVar[str] = "create"

    def apply(self, host: DeviceHost, deadline: float) -> None:
        # Without a VDUSE device OVS could not make it, which is reported as a fault of the port.
        if host.device(self.name).offered:
            super().apply(host, deadline)

    def describe(self) -> str:
        return f"create vDPA device {self.name}"


@dataclass(frozen=True)
class BindDevice(DeviceChange):
    """Bind a driver, which decides who uses the device."""

    verb: ClassVar[str] = "bind"

    driver: str

    def apply(self, host: DeviceHost, deadline: float) -> None:
        if host.device(self.name).on_bus:
            host.run(DeviceStep(self.verb, self.name, self.driver), deadline)

    def describe(self) -> str:
        return f"bind {self.driver} to vDPA device {self.name}"


@dataclass(frozen=True)
class SetInterface(DeviceChange):
    """Give the network interface of a device the MAC and MTU of its port, while it is in our namespace."""

    mac: str
    mtu: int

    def apply(self, host: DeviceHost, deadline: float) -> None:
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

    def describe(self) -> str:
        return f"delete vDPA device {self.name}"


@dataclass(frozen=True)
class DestroyDevice(DeviceChange):
    """Take away a VDUSE device that no vswitchd serves. One that is served goes with its port."""

    verb: ClassVar[str] = "destroy"

    def apply(self, host: DeviceHost, deadline: float) -> None:
        if host.device(self.name).offered:
            super().apply(host, deadline)

    def describe(self) -> str:
        return f"destroy VDUSE device {self.name}"


#: The name of which the kernel is asked. It is never that of a port, which has no hyphen.
_TRIED = f"{VDUSE}-try"


class VduseHost:
    """The devices of this host, and the processes that change them.

    Not thread-safe, but ``device``, ``pairs`` and ``usability`` in both forms.
    """

    def __init__(self, tree: VduseTree | None = None, processes: DeviceProcesses | None = None) -> None:
        """Without arguments: those of the host. A test has its own."""
        self.tree = tree or VduseTree()
        self.processes = processes or DeviceProcesses()
        self.abilities = VduseAbilities(self.tree.control, self._tried)
        self.links: InterfaceSetter = Links()

    @property
    def directory(self) -> Path:
        """Where VDUSE devices are."""
        return self.tree.directory

    def usability(self) -> Usability:
        """Whether the host has what new ports need (any thread)."""
        usable = self.tree.usability()
        if usable.usable and shutil.which("vdpa") is None:
            return Usability(False, "the program vdpa is not installed", "install iproute2", "vduse")
        return self.abilities.usability() if usable.usable else usable

    def usability_for_auto(self) -> Usability:
        """The same for ``auto``, where nobody has chosen this mode."""
        usable = self.usability()
        return self.abilities.usability_for_auto() if usable.usable else usable

    def learn(self, deadline: float) -> None:
        """Ask the kernel and libvirt what is not known of them."""
        self.abilities.learn(deadline)

    @property
    def pairs(self) -> int:
        """The most queue pairs of a device, as far as it is known."""
        return self.abilities.pairs

    def look(self) -> Mapping[str, VduseDevice]:
        """The devices of our names, by name."""
        return self.tree.look()

    def device(self, name: str) -> VduseDevice:
        return self.tree.device(name)

    def pending(self) -> DeviceStep | None:
        """The step that the kernel has not finished."""
        return self.processes.pending()

    def run(self, step: DeviceStep, deadline: float) -> None:
        self.processes.run(step, deadline)

    def close(self) -> None:
        self.processes.close()

    def _tried(self, deadline: float) -> int:
        """Ask the kernel for the most queue pairs. Raises: as ``DeviceProcesses.run``."""
        said = self.processes.run(DeviceStep("try", _TRIED), deadline)
        if not said.isdecimal():
            raise HostError(f"not a number of queue pairs: {said!r}", step="vdpa-device")
        return int(said)


def apply(host: DeviceHost, changes: Iterable[DeviceChange], deadline: float) -> dict[str, NetpluginError]:
    """Apply the changes once each, in order, and return the errors of the ports that failed."""
    failed: dict[str, NetpluginError] = {}
    for change in changes:
        if all(port in failed for port in change.ports):
            continue
        try:
            if time.monotonic() >= deadline:
                raise OperationTimeout("the time for the operation is over", step="vdpa-device")
            change.apply(host, deadline)
        except NetpluginError as error:
            failed.update({port: error.for_port(port) for port in change.ports})
    return failed
