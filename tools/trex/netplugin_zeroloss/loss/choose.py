"""Selects the components whose counters are read for a cell: from the description and the backend's ports."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, StringConstraints

from netplugin.api.fields import Value, worded
from netplugin.api.models import Binding
from netplugin.data_path import DataPath
from netplugin_zeroloss.loss.contract import DropCounters
from netplugin_zeroloss.loss.host import PROCESSES, HostCounters
from netplugin_zeroloss.loss.links import DriverCounters, LinkCounters
from netplugin_zeroloss.loss.ovs import OvsCounters

_DEVICE = worded(r"^[^\s/]{1,15}$", "must be the name of a network interface")
_Device = Annotated[str, StringConstraints(pattern=_DEVICE, strict=True)]


class NicCounters(Value):
    """A NIC with a kernel driver. ``lost`` names its driver counters that count lost frames."""

    device: _Device
    lost: tuple[str, ...] = ()


class LossDescription(Value):
    """Components to read in addition to the VNF. Bridges and taps of the bindings are added automatically."""

    #: Run directory of OVS with its sockets; null: OVS is not read.
    ovs_rundir: Path | None = Path("/var/run/openvswitch")
    #: OVS bridges on the path, in addition to those of the ports.
    ovs_bridges: tuple[_Device, ...] = ()
    #: Kernel devices on the path that are not members of a port's bridge.
    devices: tuple[_Device, ...] = ()
    nics: tuple[NicCounters, ...] = ()
    #: Processes whose CPU time is measured: name in the report, and prefix of the process name.
    #: Null: OVS, QEMU and vhost.
    processes: Annotated[dict[str, str], Field(max_length=32)] | None = None

    def without(self, hidden: Callable[[str], bool]) -> Self:
        """Return it without the kernel devices that are hidden."""
        devices = tuple(device for device in self.devices if not hidden(device))
        nics = tuple(nic for nic in self.nics if not hidden(nic.device))
        return self.model_copy(update={"devices": devices, "nics": nics})


def make(
    description: LossDescription, ports: Iterable[tuple[DataPath, Binding]], timeout_s: float = 10.0
) -> tuple[DropCounters, ...]:
    """Return the components of a cell with these ports, without the VNF.

    ``timeout_s``: seconds that OVS has to answer with its counters.

    Raises: AttributionError if a device does not exist.
    """
    bridges, devices = set(description.ovs_bridges), set(description.devices)
    vhost_ports: set[str] = set()
    for path, binding in ports:
        named = binding.model_extra or {}
        kinds = ((bridges, (path.ovs_bridge,)), (vhost_ports, (path.ovs_port,)), (devices, path.links))
        for found, fields in kinds:
            found |= {str(named[field]) for field in fields if named.get(field)}
    processes, rundir = description.processes, description.ovs_rundir
    places: list[DropCounters] = [HostCounters(processes=PROCESSES if processes is None else processes)]
    if bridges and rundir is not None:
        places.append(OvsCounters(rundir, sorted(bridges), sorted(vhost_ports), timeout_s))
    if devices:
        places.append(LinkCounters(devices))
    if description.nics:
        places.append(DriverCounters({nic.device: nic.lost for nic in description.nics}))
    return tuple(places)
