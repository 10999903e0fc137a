"""Ports of VMs on dummy devices: what the tests of changes and of reading start from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from drivers.ovs import row_changes as r
from drivers.ovs.apply import Applier
from drivers.ovs.flow_changes import SetBridgeFlows, SetFilter
from drivers.ovs.model import Layout, OvsObservation
from drivers.ovs.observe import OvsReader
from drivers.ovs.ports import VhostPort
from netplugin.api.models import PortSpec
from netplugin.backend import Applied, Change, Intent
from netplugin.host.ovs import OvsHost
from tests.lab.ovs import PrivateOvs
from tests.unit.ovs import soon, usable

BACKEND = "dpdkvhostuser"
BRIDGE = "br-net1"


@dataclass
class Ports:
    """A backend's ports on an Open vSwitch."""

    switch: PrivateOvs
    ovs: OvsHost
    applier: Applier
    reader: OvsReader

    def apply(self, *changes: Change) -> Applied:
        return self.applier.apply(changes, soon())

    def plug(self, *ports: VhostPort, **spec: Any) -> None:
        """The bridge and these ports, as a plan has them."""
        ids = tuple(port.port_id for port in ports)
        applied = self.apply(
            r.CreateBridge(ids, BRIDGE, "net1"),
            *(r.AddPort((port.port_id,), port) for port in ports),
            SetBridgeFlows(ids, BRIDGE),
            *(filter_of(port, **spec) for port in ports),
        )
        assert applied.failed == {}

    def seen(self, *ports: str, deadline: float | None = None) -> OvsObservation:
        """These ports, or the whole host."""
        scope = self.reader.scope(ports or None, deadline or soon())
        return self.reader.seen(scope, self.reader.bridges(scope))

    def flows(self) -> set[str]:
        """The flows of the bridge, by ovs-ofctl."""
        socket = f"unix:{self.switch.rundir / BRIDGE}.mgmt"
        shown = self.switch.ofctl("-O", "OpenFlow14", "--no-stats", "--no-names", "dump-flows", socket)
        return {line.strip() for line in shown.splitlines() if "cookie=" in line}


@pytest.fixture
def ports(switch: PrivateOvs, ovs: OvsHost) -> Iterator[Ports]:
    """No port yet, and no bridge."""
    usable(ovs)
    yield Ports(switch, ovs, Applier(ovs), OvsReader(ovs, Layout(BACKEND)))
    for name in switch.vsctl("list-br").split():
        switch.vsctl("del-br", name)
    switch.vsctl("--all", "destroy", "QoS")


def vhost(port_id: str, bridge: str = BRIDGE, tag: int = 7, **spec: Any) -> VhostPort:
    """The rows of a port, with a dummy device for the socket, which needs DPDK."""
    made = VhostPort.of(BACKEND, Intent(port_id, spec_of(**spec)), bridge, tag, socket="", tso=False)
    return replace(made, type="dummy", options={})


def spec_of(**changed: Any) -> PortSpec:
    return PortSpec.model_validate(
        {
            "vm_id": "vm",
            "mac": "52:54:00:00:00:01",
            "backend": BACKEND,
            "network": {"type": "vlan", "physical_network": "net1", "vlan_id": 7, "mtu": 1400},
            **changed,
        }
    )


def filter_of(port: VhostPort, **spec: Any) -> SetFilter:
    return SetFilter((port.port_id,), port.bridge, replace(port, spec=spec_of(**spec)))
