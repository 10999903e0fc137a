"""What is wrong with the devices of a physical network, on trees of sysfs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from netplugin.api.physical_models import PhysicalNetworkSpec
from netplugin.host.uplink_devices import device_findings

NIC = "0000:03:00.0"


def bound(sys: Path, driver: str | None, address: str = NIC) -> None:
    device = sys / "bus/pci/devices" / address
    device.mkdir(parents=True)
    if driver:
        target = sys / "bus/pci/drivers" / driver
        target.mkdir(parents=True)
        (device / "driver").symlink_to(target)


def found(sys: Path, **spec: Any) -> list[str]:
    findings = device_findings("net-1", PhysicalNetworkSpec.model_validate(spec), sys)
    assert all(finding.status == "warn" and finding.fix for finding in findings)
    return [finding.found for finding in findings]


@pytest.mark.parametrize(
    ("driver", "of_ovs", "of_vfs"),
    [
        ("vfio-pci", None, "is bound to vfio-pci, and its VFs need its kernel driver"),
        ("uio_pci_generic", None, "is bound to uio_pci_generic, and its VFs need its kernel driver"),
        ("mlx5_core", None, None),
        ("ixgbe", "is bound to ixgbe, and OVS-DPDK needs vfio-pci", None),
        (None, "is bound to no driver, and OVS-DPDK needs vfio-pci", None),
    ],
)
def test_each_backend_has_drivers_of_its_own(
    tmp_path: Path, driver: str | None, of_ovs: str | None, of_vfs: str | None
) -> None:
    bound(tmp_path, driver)
    assert found(tmp_path, ovs={"devices": [NIC]}) == ([f"{NIC} {of_ovs}"] if of_ovs else [])
    assert found(tmp_path, ovs={"devices": [f"{NIC},representor=[0]"]}) == (
        [f"{NIC} {of_ovs}"] if of_ovs else []
    )
    assert found(tmp_path, sriov={"devices": [f"{NIC}#0-7"]}) == ([f"{NIC} {of_vfs}"] if of_vfs else [])


def test_what_is_not_there(tmp_path: Path) -> None:
    bound(tmp_path, "vfio-pci", "0000:0a:00.0")
    assert found(tmp_path, ovs={"devices": [NIC, "0000:0A:00.0", "net_af_packet0,iface=eth0"]}) == [
        f"there is no PCI device {NIC}"
    ]
    assert found(
        tmp_path, sriov={"devices": [f"{NIC}#0-7", "0000:0A:00.1", "lo", "none.of.them", "8086:1592"]}
    ) == [
        f"there is no PCI device {NIC}",
        "there is no PCI device 0000:0a:00.1",
        "there is no interface none.of.them",
    ]
    assert found(tmp_path, linuxbridge={"interface": "lo"}) == []
    assert found(tmp_path, linuxbridge={}) == []
    [missing] = found(tmp_path, linuxbridge={"interface": "none.of.them"})
    assert "there is no interface none.of.them" in missing


@pytest.mark.parametrize(
    ("driver", "pci_id", "words", "fix"),
    [
        (
            "vfio-pci",
            "15b3:101d",
            "DPDK uses it with the NIC's own kernel driver",
            "driverctl unset-override",
        ),
        (
            "uio_pci_generic",
            "15b3:1003",
            "DPDK uses it with the NIC's own kernel",
            "driverctl unset-override",
        ),
        (
            "vfio-pci",
            "1414:00ba",
            "DPDK uses it with the NIC's own kernel driver",
            "driverctl unset-override",
        ),
        (None, "15b3:101d", "is bound to no driver, and DPDK uses it with", "driverctl unset-override"),
        ("tg3", "14e4:165f", "DPDK has no driver for it", "name another NIC"),
        (
            "atlantic",
            "1d6a:07b1",
            "OVS-DPDK needs uio_pci_generic",
            "set-override 0000:03:00.0 uio_pci_generic",
        ),
        ("e1000e", "8086:10d3", "OVS-DPDK needs vfio-pci", "set-override 0000:03:00.0 vfio-pci"),
        ("mana", "1414:00ba", None, None),
        ("vfio-pci", "8086:1592", None, None),
    ],
)
def test_dpdk_has_a_nic_with_the_driver_of_its_model(
    tmp_path: Path, driver: str | None, pci_id: str, words: str | None, fix: str | None
) -> None:
    bound(tmp_path, driver)
    for name, value in zip(("vendor", "device"), pci_id.split(":"), strict=True):
        (tmp_path / "bus/pci/devices" / NIC / name).write_text(f"0x{value}\n")
    spec = PhysicalNetworkSpec.model_validate({"ovs": {"devices": [NIC]}})
    seen = device_findings("net-1", spec, tmp_path)
    assert len(seen) == (words is not None)
    for finding in seen:
        assert str(words) in finding.found and str(fix) in str(finding.fix)
