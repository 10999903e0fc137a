"""Physical networks on a real Open vSwitch: what is refused before, errors that belong to no port."""

from __future__ import annotations

from typing import Any

import pytest

from drivers.ovs import row_changes as c
from drivers.ovs.networks import check_network
from drivers.ovs.uplinks import OvsUplink
from netplugin.api.errors import Conflict, InvalidRequest
from netplugin.api.physical_models import PhysicalNetworkSpec
from netplugin.host.names import device_name
from tests.unit.drivers.ovs.conftest import BRIDGE, Ports, vhost
from tests.unit.ovs import soon

NIC = "0000:07:00.0"
UPLINK = device_name("npu", NIC)


def check(ports: Ports, name: str = "net9", **spec: Any) -> None:
    check_network(ports.ovs.view, name, PhysicalNetworkSpec.model_validate({"ovs": {}, **spec}))


def refused(ports: Ports, field: str, words: str, **spec: Any) -> None:
    with pytest.raises((Conflict, InvalidRequest), match=words) as error:
        check(ports, **spec)
    assert [each.field for each in error.value.errors] == [field]


def test_what_ovs_has_already_is_not_taken(ports: Ports) -> None:
    check(ports, bridge="br9", ovs={"devices": [NIC]})
    ports.plug(vhost("p1"))
    refused(ports, "bridge", f"{BRIDGE} was made for net1", bridge=BRIDGE)
    check(ports, "net1", bridge=BRIDGE, ovs={"devices": [NIC]})
    for name in ("np-overlay", device_name("npv", "p2"), device_name("npo", "net1")):
        refused(ports, "bridge", "a name of the agent's own devices", bridge=name)
    check(ports, "n" * 20, bridge=device_name("npo", "n" * 20))  # as it is shown
    refused(ports, "bridge", "the host has an interface named lo", bridge="lo")
    switch = ports.switch
    switch.vsctl("add-br", "br-theirs", "--", "set", "Bridge", "br-theirs", "datapath_type=netdev")
    switch.vsctl("add-br", "br-kernel")
    nic = ["type=dummy", f"options:dpdk-devargs={NIC}"]
    switch.vsctl("add-port", "br-theirs", "dpdk0", "--", "set", "Interface", "dpdk0", *nic)

    def known() -> bool:
        view = ports.ovs.view
        return view.port("dpdk0") is not None and view.bridge("br-kernel") is not None

    assert ports.ovs.db.wait_for(known, soon())
    refused(ports, "bridge", "OVS has a port named dpdk0", bridge="dpdk0")
    refused(ports, "bridge", "datapath_type 'system'", bridge="br-kernel")
    check(ports, bridge="br-theirs")
    with pytest.raises(Conflict, match="br-theirs, the default for theirs, is there and is not ours"):
        check(ports, "theirs")
    other = {"devices": ["0000:07:00.1"]}
    refused(ports, "ovs.devices", "br-theirs is not ours", bridge="br-theirs", ovs=other)
    refused(ports, "ovs.devices", "is that of port dpdk0", bridge="br9", ovs={"devices": [NIC]})


def test_the_mtu_of_an_uplink_is_set_if_the_api_gave_it(ports: Ports) -> None:
    """Dummy devices are no DPDK devices: the rows are what counts."""
    ports.plug(vhost("p1"))

    def desired(mtu: int, sets_mtu: bool) -> OvsUplink:
        return OvsUplink(UPLINK, BRIDGE, "net1", (NIC,), None, mtu, sets_mtu)

    def asked() -> str:
        return ports.switch.vsctl("get", "Interface", UPLINK, "mtu_request").strip()

    assert ports.apply(c.AddPort((), desired(1500, True))).of_networks == {}
    assert asked() == "1500"
    row = ports.ovs.view.port(UPLINK)
    assert row and not desired(1500, True).differs(row)
    assert desired(9000, True).differs(row) and not desired(9000, False).differs(row)
    assert ports.apply(c.SetPort((), desired(9000, True))).of_networks == {}
    assert asked() == "9000"
    ports.apply(c.SetPort((), desired(1400, False)))
    assert asked() == "9000", "it is the operator's"


def test_the_error_of_a_change_for_no_port_fails_no_port(ports: Ports) -> None:
    """The name of an uplink is taken: the database refuses the transaction as a whole."""
    ports.plug(vhost("p1"))
    ports.switch.vsctl("add-port", BRIDGE, UPLINK, "--", "set", "Interface", UPLINK, "type=dummy")
    uplink = c.AddPort((), OvsUplink(UPLINK, BRIDGE, "net1", (NIC,), None, 1500), physical_network="net1")
    for new in (["p2"], ["p3", "p4"], []):
        applied = ports.apply(uplink, *(c.AddPort((i,), vhost(i)) for i in new))
        assert applied.failed == {}
        assert applied.of_networks.keys() == {"net1"}
        error = applied.of_networks["net1"]
        assert error.code == "host_error" and UPLINK in error.detail
        assert all(ports.ovs.view.port(vhost(i).name) for i in new)


def test_the_error_of_a_network_is_that_of_no_other(ports: Ports) -> None:
    """Each is in a transaction of its own, once the database has refused them together."""
    ports.plug(vhost("p1"))
    ports.switch.vsctl("add-port", BRIDGE, UPLINK, "--", "set", "Interface", UPLINK, "type=dummy")
    broken = c.AddPort((), OvsUplink(UPLINK, BRIDGE, "net1", (NIC,), None, 1500), physical_network="net1")
    good = c.CreateBridge((), "br-net2", "net2", physical_network="net2")
    for changes in ((broken, good), (good, broken)):
        assert ports.apply(*changes).of_networks.keys() == {"net1"}
        assert ports.switch.get("Bridge", "br-net2", "external_ids:netplugin-bridge") == "net2"
        assert ports.apply(c.RemoveBridge((), "br-net2", physical_network="net2")).of_networks == {}
