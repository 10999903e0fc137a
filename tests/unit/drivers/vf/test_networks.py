"""NICs of networks that the API made, beside those of [sriov] devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drivers.vf.kernel import VfKernel
from drivers.vf.networks import check_devices, pool_devices
from drivers.vf.options import DEVICES, GROUP
from netplugin import options
from netplugin.api.errors import Conflict, InvalidRequest
from netplugin.api.physical_models import PhysicalNetworkSpec
from netplugin.host.physical_networks import PhysicalNetworks
from tests.unit.drivers.vf.trees import Nic, build


def spec(*devices: str) -> PhysicalNetworkSpec:
    return PhysicalNetworkSpec.model_validate({"sriov": {"devices": devices}})


@pytest.fixture
def conf() -> Any:
    conf = options.load([])
    conf.register_opts([DEVICES], group=GROUP)
    conf.set_override("devices", ["net1:eth0#0-3", "net1:eth7", "net2:8086:10c9"], group=GROUP)
    return conf


def test_they_come_and_go_with_their_network(conf: Any) -> None:
    registry = PhysicalNetworks()
    devices = pool_devices(conf, registry)
    kernel = VfKernel(devices)
    assert [(d.network, d.name) for d in kernel.devices] == [
        ("net1", "eth0"),
        ("net1", "eth7"),
        ("net2", "8086:10c9"),
    ]
    configured = registry.now.configured
    assert configured == {"net1": spec("eth0#0-3", "eth7"), "net2": spec("8086:10c9")}
    registry.replace_stored({"net3": spec("eth3#8-15", "0000:0A:00.0")})
    assert [(d.network, d.name) for d in kernel.devices[3:]] == [("net3", "eth3"), ("net3", "0000:0a:00.0")]
    assert 8 in kernel.devices[3].numbers and 7 not in kernel.devices[3].numbers
    registry.replace_stored({})
    assert len(kernel.devices) == 3


@pytest.mark.parametrize("device", ["eth0#+", "a-name-of-16-char", "0000:03:00.0#3-1"])
def test_what_is_no_device_names_the_field(conf: Any, device: str) -> None:
    kernel = VfKernel(pool_devices(conf, PhysicalNetworks()))
    with pytest.raises(InvalidRequest) as refused:
        check_devices(kernel, "net3", spec(device))
    assert [error.field for error in refused.value.errors] == ["sriov.devices"]
    check_devices(kernel, "net3", PhysicalNetworkSpec.model_validate({"ovs": {}}))


def test_a_nic_under_another_name_is_still_that_of_one_network(conf: Any, tmp_path: Path) -> None:
    nic = Nic()
    build(tmp_path, nic)
    conf.set_override("devices", [f"net1:{nic.address}"], group=GROUP)
    kernel = VfKernel(pool_devices(conf, PhysicalNetworks()), tmp_path)
    with pytest.raises(Conflict, match=f"NIC {nic.address} is that of physical network net1"):
        check_devices(kernel, "net3", spec("8086:10c9"))
    check_devices(kernel, "net1", spec("8086:10c9"))
