"""Whether the devices of a physical network have the drivers that their backends need (read only)."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path

from netplugin.api.models import Finding
from netplugin.api.physical_models import PhysicalNetworkSpec
from netplugin.host.nic_models import KEPT_BY_DPDK, dpdk_driver, dpdk_fault
from netplugin.host.vfs import SYS, in_user_space, read_link, read_text

_PCI = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]\Z")


def has_interface(name: str) -> bool:
    """Whether the network namespace of this process has an interface of this name."""
    try:
        socket.if_nametoindex(name)
    except OSError:
        return False
    return True


def device_findings(name: str, spec: PhysicalNetworkSpec, sys: Path = SYS) -> list[Finding]:
    """The devices of a network that are missing or bound to the wrong driver. Nothing is changed."""
    expected = f"the devices of physical network {name} are there, with the drivers that use them"
    return [
        Finding(
            id=f"physical-network-{name}-{device}", status="warn", found=found, expected=expected, fix=fix
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
        found = f"there is no interface {interface}: its NIC may be bound to a driver for DPDK"
        yield interface, found, "driverctl list-overrides; driverctl unset-override <PCI address>"


def _of_pci_device(device: str, sys: Path, *, for_dpdk: bool) -> Iterator[tuple[str, str, str]]:
    place = sys / "bus/pci/devices" / device
    driver = read_link(place / "driver")
    pci_id = ":".join(read_text(place / name).removeprefix("0x") for name in ("vendor", "device"))
    if not place.exists():
        yield device, f"there is no PCI device {device}", "name the address of the NIC (lspci -D)"
    elif for_dpdk and (fault := dpdk_fault(device, driver, pci_id)):
        yield device, *fault
    elif for_dpdk and not in_user_space(driver) and driver not in KEPT_BY_DPDK:
        needed = dpdk_driver(driver)
        found = f"{device} is bound to {driver or 'no driver'}, and OVS-DPDK needs {needed}"
        yield device, found, f"driverctl set-override {device} {needed} (the host loses the NIC's interface)"
    elif in_user_space(driver) and not for_dpdk:
        found = f"{device} is bound to {driver}, and its VFs need its kernel driver"
        yield device, found, f"driverctl unset-override {device}"
