"""Whether the devices of a physical network have the drivers that their backends need (read only)."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path

from netplugin.api.models import Finding
from netplugin.api.physical_models import PhysicalNetworkSpec
from netplugin.host.vfs import SYS, is_uio, is_vfio, read_link

_PCI = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]\Z")
#: Kernel drivers that DPDK uses a NIC with (https://doc.dpdk.org/guides/linux_gsg/linux_drivers.html,
#: "Bifurcated Driver").
SHARED_WITH_DPDK = frozenset({"mlx4_core", "mlx5_core", "mana"})


def has_interface(name: str) -> bool:
    """Whether the network namespace of this process has an interface of this name."""
    try:
        socket.if_nametoindex(name)
    except OSError:
        return False
    return True


def device_findings(name: str, spec: PhysicalNetworkSpec, sys: Path = SYS) -> list[Finding]:
    """The devices of a network that are missing or bound to the wrong driver. Nothing is changed."""
    return [
        Finding(
            id=f"physical-network-{name}-{device}",
            status="warn",
            found=found,
            expected=f"the devices of physical network {name} are there, with the drivers that use them",
            fix=fix,
        )
        for device, found, fix in _problems(spec, sys)
    ]


def _problems(spec: PhysicalNetworkSpec, sys: Path) -> Iterator[tuple[str, str, str]]:
    """Each device with what is wrong, and the fix."""
    for entry in spec.ovs.devices if spec.ovs else ():
        device = entry.partition(",")[0].lower()
        if _PCI.match(device):  # a virtual device of DPDK has no driver
            yield from _of_pci_device(device, sys, for_dpdk=True)
    for entry in spec.sriov.devices if spec.sriov else ():
        device = entry.partition("#")[0]
        if _PCI.match(device.lower()):
            yield from _of_pci_device(device.lower(), sys, for_dpdk=False)
        elif ":" not in device and not has_interface(device):  # else a model, of which there may be none
            yield device, f"there is no interface {device}", "name a NIC (ip link), or its PCI address"
    interface = spec.linuxbridge.interface if spec.linuxbridge else None
    if interface and not has_interface(interface):
        yield (
            interface,
            f"there is no interface {interface}: its NIC may be bound to a driver for DPDK",
            "driverctl list-overrides; driverctl unset-override <PCI address>",
        )


def _of_pci_device(device: str, sys: Path, *, for_dpdk: bool) -> Iterator[tuple[str, str, str]]:
    place = sys / "bus/pci/devices" / device
    driver = read_link(place / "driver")
    in_user_space = is_vfio(driver) or is_uio(driver)
    if not place.exists():
        yield device, f"there is no PCI device {device}", "name the address of the NIC (lspci -D)"
    elif for_dpdk and not in_user_space and driver not in SHARED_WITH_DPDK:
        yield (
            device,
            f"{device} is bound to {driver or 'no driver'}, and OVS-DPDK needs vfio-pci",
            f"driverctl set-override {device} vfio-pci (the host loses the NIC's interface)",
        )
    elif in_user_space and not for_dpdk:
        yield (
            device,
            f"{device} is bound to {driver}, and its VFs need its kernel driver",
            f"driverctl unset-override {device}",
        )
