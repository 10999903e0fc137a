"""Creates a VNF from its description, and maps port bindings to VNF ports."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ValidationError

from netplugin.api.field_errors import message
from netplugin.api.models import Binding, PortSpec
from netplugin.data_path import DataPath
from netplugin_zeroloss.loss.contract import DropCounters
from netplugin_zeroloss.vnf import contract
from netplugin_zeroloss.vnf.contract import (
    Attachment,
    Description,
    Forwarded,
    Vnf,
    VnfCores,
    VnfError,
    VnfInfo,
    VnfPort,
)
from netplugin_zeroloss.vnf.taps import Taps
from netplugin_zeroloss.vnf.testpmd import Testpmd
from netplugin_zeroloss.vnf.vpp import Vpp

__all__ = ["Description", "make", "vnf_port"]

#: Ring size of a vDPA device in a VM: its interface XML names none, and this is QEMU's default.
_VDPA_RING = 256


def make(description: Description, ports: Sequence[VnfPort], cores: VnfCores) -> Vnf:
    """Create a VNF without starting it. Raises: VnfError if it does not support the ports."""
    if len(ports) < 2 or len(ports) % 2:
        raise VnfError(f"a VNF forwards between pairs of ports; there are {len(ports)}")
    match description:
        case contract.TestpmdDescription():
            return Testpmd(description, tuple(ports), cores)
        case contract.TapsDescription():
            return Taps(tuple(ports), cores)
        case contract.VppDescription():
            return Vpp(description, tuple(ports), cores)
        case contract.ExternalDescription():
            return External(description, tuple(ports))


def vnf_port(path: DataPath, binding: Binding, spec: PortSpec, peer_mac: str) -> VnfPort:
    """Return the VNF port for a port of the agent; ``peer_mac`` is the destination of its frames.

    Raises: VnfError if the binding does not name the device.
    """
    device = (binding.model_extra or {}).get(path.device)
    if not device:
        raise VnfError(f"the binding of a {spec.backend} port has no {path.device}")
    attachment = Attachment(path.vm_side)
    # The VM's tx ring is OVS's rx ring and vice versa.
    of_spec = min(spec.rx_queue_size, spec.tx_queue_size)
    ring = _VDPA_RING if attachment is Attachment.VHOST_VDPA else of_spec
    try:
        return VnfPort(attachment, str(device), spec.mac, peer_mac, spec.queues, ring, spec.network.mtu)
    except ValidationError as error:
        raise VnfError(f"{device}: no VNF can have this port: {message(error.errors()[0])}") from error


# -- The VNF ``external``, run by the operator: not checked, and without counters. ----------------


class External(Vnf):
    """Starts, checks and stops nothing. It has no counters: loss in it stays unexplained."""

    def __init__(self, description: contract.ExternalDescription, ports: tuple[VnfPort, ...]) -> None:
        self._description, self._ports = description, ports

    def start(self) -> VnfInfo:
        queues = tuple(port.queues for port in self._ports)
        return VnfInfo(self._description.name, self._description.version, queues, {})

    def check(self) -> None:
        """Do nothing: there is no way to check it."""

    @property
    def place(self) -> DropCounters:
        return Forwarded(lambda: [])
