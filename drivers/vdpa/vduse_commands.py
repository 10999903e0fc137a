"""The changes of VDUSE devices and vDPA devices, as values, and how they are applied."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from drivers.vdpa.vduse_host import VduseHost
from drivers.vdpa.vduse_processes import DeviceStep
from netplugin.backend import Change


@dataclass(frozen=True)
class VduseChange(Change, ABC):
    """A change of a device."""

    @property
    def before_rows(self) -> bool:
        """Whether it comes before the changes of OVS."""
        return False

    @abstractmethod
    def apply(self, host: VduseHost, deadline: float) -> None:
        """Raises: Conflict if somebody holds the device, HostError, TryAgain."""


@dataclass(frozen=True)
class RunStep(VduseChange):
    """Create a vDPA device for the VDUSE device that OVS has made with its port, bind its driver, delete it
    unless somebody holds it, or destroy a VDUSE device that no vswitchd serves."""

    described_as = "{self.step}"

    step: DeviceStep

    @property
    def before_rows(self) -> bool:
        """The row of a port goes after its vDPA device."""
        return self.step.verb == "delete"

    def apply(self, host: VduseHost, deadline: float) -> None:
        device = host.device(self.step.name)
        # Without a VDUSE device OVS could not make it, which is reported as a fault of the port; or it went
        # with the port.
        there = {"create": device.offered, "bind": device.on_bus, "destroy": device.offered}
        if there.get(self.step.verb, True):
            host.run(self.step, deadline)


@dataclass(frozen=True)
class SetInterface(VduseChange):
    """Give the network interface of a device the MAC and MTU of its port, while it is in our namespace."""

    described_as = "set MAC {self.mac} and MTU {self.mtu} of the interface of vDPA device {self.name}"

    name: str
    mac: str
    mtu: int

    def apply(self, host: VduseHost, deadline: float) -> None:
        found = host.device(self.name).interface
        if found is not None:
            host.links.set(found.name, mtu=self.mtu, address=self.mac)
