"""libvirt XML of the backends' NICs."""

from __future__ import annotations

from lxml import etree

from netplugin.api.models import PortSpec
from netplugin.libvirt.interfaces import tap_interface


def spec(number: int = 1, **fields: object) -> PortSpec:
    return PortSpec.model_validate(
        {
            "vm_id": "vm",
            "mac": f"52:54:00:00:00:0{number}",
            "backend": "x",
            "network": {"type": "flat", "physical_network": "net1"},
            **fields,
        }
    )


def test_a_tap_is_not_libvirt_s_to_manage() -> None:
    nic = etree.fromstring(tap_interface(spec(queues=2), "npt1"))
    assert (nic.get("type"), nic.find("target").get("managed")) == ("ethernet", "no")
    assert nic.find("driver").get("queues") == "2" and nic.find("driver").get("tx_queue_size") is None
