"""Plan one port in mode ``vduse`` after the table in docs/vduse.md, its observed state and its binding. Pure.

The port of OVS comes first and the vDPA device last, and the vDPA device goes first. Each state between two
steps is a row of the table, so a crash there needs no special handling.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from drivers.ovs import findings
from drivers.ovs.placing import place_port
from drivers.ovs.ports import VhostPort, access_vlan, port_name
from drivers.ovs.usability import tso_enabled
from drivers.vdpa.model import BACKEND, Mode, Steps, VdpaObservation
from drivers.vdpa.vduse_commands import RunStep, SetInterface
from drivers.vdpa.vduse_host import NO_DEVICE, VHOST_VDPA, VIRTIO_VDPA, VduseDevice, VduseInterface
from drivers.vdpa.vduse_processes import DeviceStep, waits
from netplugin.api.errors import HostError, NetpluginError
from netplugin.api.models import Binding, DomainRequirements, PortSpec
from netplugin.backend import Change, Intent, ObservedPort
from netplugin.host.names import VDUSE, device_name
from netplugin.host.ovs import OvsSettings
from netplugin.host.ovs_rows import OvsPort
from netplugin.libvirt.interfaces import vdpa_interface

#: Read when OVS makes the device (netdev_dpdk_vhost_client_set_config in lib/netdev-dpdk.c, since 3.5).
_MAX_PAIRS = "vhost-max-queue-pairs"


def vduse_name(port_id: str) -> str:
    """The name of a port's VDUSE device and vDPA device."""
    return device_name(VDUSE, port_id)


def _port_on(intent: Intent, seen: VdpaObservation, bridge: str) -> VhostPort:
    """The desired rows: of a vhost-user port whose path is that of the VDUSE device."""
    assert intent.spec is not None
    path = f"{seen.vduse_directory}/{vduse_name(intent.port_id)}"
    vlan, tso = access_vlan(intent), tso_enabled(seen.ovs.root)
    port = VhostPort.of(BACKEND, intent, bridge, vlan, socket=path, tso=tso)
    if (queues := intent.spec.queues) > 1:  # with one, OVS has it without the option
        port = replace(port, options={**port.options, _MAX_PAIRS: str(queues)})
    return port


def make_steps(settings: OvsSettings, intent: Intent, seen: VdpaObservation, room: int) -> Steps:
    """What the port needs next. ``room``: the number of free vhost sockets."""
    row, device = seen.ovs.rows.get(intent.port_id), device_of(intent.port_id, seen)
    try:
        if intent.spec is None:
            steps = _away(intent.port_id, device)
        else:
            desired, kept = place_port(settings, intent, seen.ovs, room, partial(_port_on, intent, seen))
            steps = _repair(intent.port_id, row, device) or replace(
                _addition(desired, row, device), kept=kept
            )
        _refuse_while_pending(intent.port_id, steps, seen)
        return steps
    except NetpluginError as error:
        return Steps(refused=error)


def _addition(desired: VhostPort, row: OvsPort | None, device: VduseDevice) -> Steps:
    """The rows, and after them the vDPA device with its driver."""
    ids, name = (desired.port_id,), vduse_name(desired.port_id)
    changes: list[Change] = []
    # OVS finds a device of before again, or refuses the port: the next look shows which.
    waits_for_row = row is None and device.offered
    is_lost = row is not None and not device.offered
    if not device.on_bus and not waits_for_row and not is_lost:
        changes.append(RunStep(ids, DeviceStep("create", name)))
    driver = driver_of(desired.spec)
    if device.driver != driver and (device.on_bus or changes):
        changes.append(RunStep(ids, DeviceStep("bind", name, driver)))
    if driver == VIRTIO_VDPA and (changes or _differs(desired, device.interface)):
        changes.append(SetInterface(ids, name, desired.spec.mac, desired.mtu))
    return Steps(desired=desired, after=tuple(changes))


def driver_of(spec: PortSpec) -> str:
    """The driver of the vDPA bus for who uses the port."""
    return VIRTIO_VDPA if spec.attachment == "netdev" else VHOST_VDPA


def _differs(desired: VhostPort, found: VduseInterface | None) -> bool:
    """Whether an interface in our namespace differs. One that was moved away is its owner's."""
    return found is not None and (found.mac, found.mtu) != (desired.spec.mac, desired.mtu)


def _repair(port_id: str, row: OvsPort | None, device: VduseDevice) -> Steps | None:
    """Delete and make all again if OVS refuses the port for the device of before; None if it does not.

    It does after a restart if its record of the device below /var/run/vduse is lost.
    """
    broken = row is not None and row.interface is not None and findings.of_interface(row.interface)
    if not broken or not device.offered or device.networked:
        return None  # a container would lose its interface: its owner decides, see ``_fault``
    return _away(port_id, device)


def _away(port_id: str, device: VduseDevice) -> Steps:
    ids, name = (port_id,), vduse_name(port_id)
    if device.on_bus:
        return Steps(before=(RunStep(ids, DeviceStep("delete", name)),))
    # With its port OVS destroys the device, unless it does not serve it.
    destroys = (RunStep(ids, DeviceStep("destroy", name)),) if device.offered else ()
    return Steps(leaves=True, after=destroys)


def _refuse_while_pending(port_id: str, steps: Steps, seen: VdpaObservation) -> None:
    """Another step would wait in the kernel behind one that has not ended. Raises: TryAgain.

    Of its own device that one is waited for in any case: a device that is deleted is not seen below
    /sys/bus/vdpa, although OVS must go on to serve it; one that gets a driver is seen with it before it has
    its interface.
    """
    pending = seen.vduse_pending
    if pending is not None and (pending.name == vduse_name(port_id) or steps.before or steps.after):
        raise waits(pending)


# -- observed state ----------------------------------------------------------------------------------


def device_of(port_id: str, seen: VdpaObservation) -> VduseDevice:
    """The devices of a port."""
    return seen.vduse.get(vduse_name(port_id), NO_DEVICE)


def observed(intent: Intent, seen: VdpaObservation) -> ObservedPort:
    """The state of a port in this mode on the host."""
    row, device = seen.ovs.rows.get(intent.port_id), device_of(intent.port_id, seen)
    details: dict[str, Any] = {
        "mode": "vduse",
        "vdpa_device": vduse_name(intent.port_id),
        "vhost_vdpa_device": device.character,
        "driver": device.driver,
        "interface": device.interface.name if device.interface else None,
        **(findings.details(row) if row else {}),
    }
    fault = _fault(row, device, seen)
    if fault is None and device.driver == VIRTIO_VDPA and not device.networked:
        fault = "the kernel has made no network interface of the device: modprobe virtio_net"
    return ObservedPort(fault, details, passes=fault is not None and seen.vduse_pending is not None)


def _fault(row: OvsPort | None, device: VduseDevice, seen: VdpaObservation) -> str | None:
    if row is None:
        return None  # planned
    broken = findings.of_port(row, seen.ovs)
    if not device.offered:
        why = f" ({broken})" if broken else ""
        return (
            f"OVS has made no VDUSE device for {row.name}{why}: it needs OVS 3.5 or newer and the kernel "
            "module vduse, loaded before the port was added (see ovs-vswitchd.log)"
        )
    if broken and device.networked:
        return f"{broken}; if it does not end: DELETE the port and PUT it again, for a new interface"
    return broken or findings.of_path(row, seen.ovs)


# -- how a VM or a container uses the port -----------------------------------------------------------


def make_binding(intent: Intent, device: VduseDevice, bridge: str | None, *, hugepages: bool) -> Binding:
    """The binding of a port whose device is as observed now.

    Raises: HostError if the device is not there, or has another driver.
    """
    assert intent.spec is not None
    spec, name = intent.spec, vduse_name(intent.port_id)
    driver = driver_of(spec)
    if device.driver != driver or (driver == VHOST_VDPA and device.character is None):
        raise HostError(
            f"vDPA device {name} is not there, or not bound to {driver}",
            step="vdpa-device",
            fix=f"see the error of the port: GET /v1/ports/{intent.port_id}",
        )
    how: dict[str, Any]
    if driver == VHOST_VDPA:
        how = {
            "interface_xml": vdpa_interface(spec, str(device.character)),
            "domain_requirements": DomainRequirements(
                shared_memory=True, hugepages=hugepages, numa_node=spec.numa_node
            ),
            "vhost_vdpa_device": device.character,
        }
    else:  # there is no interface here once it was moved into another namespace
        how = {"interface_xml": "", "interface": device.interface.name if device.interface else None}
    places = {"vdpa_device": name, "bridge": bridge, "device": port_name(intent.port_id, spec)}
    return Binding.model_validate({"vif_type": driver, "mode": Mode.VDUSE.value, **how, **places})
