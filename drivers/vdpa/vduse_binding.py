"""How a VM or a container uses a port in mode ``vduse`` (pure)."""

from __future__ import annotations

from drivers.ovs.ports import port_name
from drivers.vdpa.model import Mode
from drivers.vdpa.vduse_devices import VHOST_VDPA, VIRTIO_VDPA, VduseDevice
from drivers.vdpa.vduse_plan import driver_of, vduse_name
from netplugin.api.errors import HostError
from netplugin.api.models import Binding, DomainRequirements, PortSpec
from netplugin.backend import Intent
from netplugin.libvirt.interfaces import vdpa_interface


def vduse_binding(intent: Intent, device: VduseDevice, bridge: str | None, *, hugepages: bool) -> Binding:
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
    how = _of_interface(device) if driver == VIRTIO_VDPA else _of_vm(spec, device, hugepages)
    places = {"bridge": bridge, "device": port_name(intent.port_id, spec)}
    return Binding.model_validate({**how, "mode": Mode.VDUSE.value, "vdpa_device": name, **places})


def _of_vm(spec: PortSpec, device: VduseDevice, hugepages: bool) -> dict[str, object]:
    needs = DomainRequirements(shared_memory=True, hugepages=hugepages, numa_node=spec.numa_node)
    return {
        "vif_type": VHOST_VDPA,
        "interface_xml": vdpa_interface(spec, str(device.character)),
        "domain_requirements": needs,
        "vhost_vdpa_device": device.character,
    }


def _of_interface(device: VduseDevice) -> dict[str, object]:
    """``interface`` is None once it was moved into another namespace."""
    interface = device.interface.name if device.interface else None
    return {"vif_type": VIRTIO_VDPA, "interface_xml": "", "interface": interface}
