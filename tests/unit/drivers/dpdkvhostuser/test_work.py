"""What a port costs does not depend on how many there are: steps of the interpreter are counted, not time."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, cast

import pytest

from drivers.dpdkvhostuser.findings import with_ports
from drivers.dpdkvhostuser.plan import LAYOUT, make_plan
from drivers.ovs.observe import OvsReader
from drivers.ovs.row_changes import AddPort, RemovePort
from netplugin.api.models import PortSpec
from netplugin.backend import Intent
from netplugin.host.names import UPLINK, device_name
from netplugin.host.openflow import BridgeSettings
from netplugin.host.ovs import OvsHost, OvsSettings
from netplugin.host.ovs_rows import UPLINK_MARK
from netplugin.host.ovs_sockets import OvsSockets
from netplugin.host.ovs_view import OvsView
from netplugin.host.ovsdb_replica import Transaction, root
from netplugin.host.physical_networks import PhysicalNetworks
from tests.unit.ovs_rows import (
    Replica,
    bridge_row,
    inserted,
    references,
    replica_of,
    text_map,
    vhost_rows,
)

FEW, MANY = 10, 1000
NETWORKS = ("net0", "net1", "net2")
DEVICES = {network: f"0000:0{n}:00.0" for n, network in enumerate(NETWORKS)}
NEW = "new"
#: Nothing is read or made there. Its path is not of the length that the checkout has.
SOCKETS = Path("/run/of-no-host")


def _steps(work: Callable[[], object]) -> int:
    """The number of bytecode instructions of our functions, and of those that they call."""
    found = 0

    def count(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal found
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        found += event == "opcode"
        return count

    # A collection may run functions of others here: finalizers, Hypothesis's callback.
    gc.disable()
    before = sys.gettrace()
    sys.settrace(count)
    try:
        work()
    finally:
        sys.settrace(before)
        gc.enable()
    return found


def _host(ports: int) -> Replica:
    """Three networks with an uplink each, and their ports."""
    tables: dict[str, dict[str, Any]] = {"Port": {}, "Interface": {}, "Bridge": {}}
    on: dict[str, list[str]] = {network: [] for network in NETWORKS}
    for number in range(ports):
        for table, rows in vhost_rows(str(number), number + 1).items():
            tables[table] |= rows
        on[NETWORKS[number % len(NETWORKS)]].append(f"p-{number}")
    for network, there in on.items():
        name, options = device_name(UPLINK, DEVICES[network]), text_map({"dpdk-devargs": DEVICES[network]})
        works = {"ofport": ports + 9, "mtu": 1500, "mtu_request": 1500}
        tables["Interface"][f"i-{name}"] = {"name": name, "type": "dpdk", "options": options, **works}
        mark = text_map({UPLINK_MARK: network})
        tables["Port"][name] = {"name": name, "interfaces": ["uuid", f"i-{name}"], "external_ids": mark}
        tables["Bridge"][network] = bridge_row(f"br-{network}", name, *there, network=network)
    tables["Open_vSwitch"] = {"root": {"bridges": references(*NETWORKS), "ovs_version": "3.1.0"}}
    return replica_of(tables)


def _observer(view: OvsView, settings: OvsSettings) -> OvsReader:
    """With flows that are read at once: they are those of a real bridge elsewhere."""
    ovs = SimpleNamespace(
        db=SimpleNamespace(require_certain=lambda: None),
        view=view,
        settings=settings,
        flows=SimpleNamespace(
            dump=lambda *_: [],
            count_of_others=lambda *_: 0,
            settings=lambda *_: BridgeSettings(True, frozenset()),
        ),
        claimed=lambda kind: {},
        purge_failed=False,
    )
    return OvsReader(cast(OvsHost, ovs), LAYOUT)


def _settings() -> OvsSettings:
    made = PhysicalNetworks()
    settings = OvsSettings(
        sockets=OvsSockets("unix:/nowhere", SOCKETS),
        vhost_socket_dir=SOCKETS,
        vhost_socket_group="root",
        bridge_mappings={network: f"br-{network}" for network in NETWORKS},
        uplinks={network: (device,) for network, device in DEVICES.items()},
    )
    made.configure(settings.networks())
    return settings


def _intent(port_id: str) -> Intent:
    network = {"type": "vlan", "physical_network": NETWORKS[0], "vlan_id": 100}
    spec = {"vm_id": "vm", "mac": "52:54:00:00:00:01", "backend": "dpdkvhostuser", "network": network}
    return Intent(port_id, PortSpec.model_validate(spec))


def _arrives(replica: Replica) -> None:
    """The notice of a port that is added, and that of what vswitchd writes then."""
    replica.update(
        {**inserted(vhost_rows(NEW, 5)), "Bridge": {"net0": {"modify": {"ports": references(f"p-{NEW}")}}}}
    )
    replica.update(
        {
            "Interface": {f"i-{NEW}": {"modify": {"ofport": 7}}},
            "Open_vSwitch": {"root": {"modify": {"cur_cfg": 2}}},
        }
    )


def _leaves(replica: Replica) -> None:
    gone = {"Port": {f"p-{NEW}": {"delete": None}}, "Interface": {f"i-{NEW}": {"delete": None}}}
    replica.update({**gone, "Bridge": {"net0": {"modify": {"ports": references(f"p-{NEW}")}}}})


def _plugged(ports: int) -> dict[str, int]:
    """The steps of each part of the plug and the unplug of one port beside so many."""
    replica, settings = _host(ports), _settings()
    observer, found = _observer(replica.view, settings), {}
    intent, deadline = _intent(NEW), time.monotonic() + 600

    def look() -> None:
        make_plan(settings, [intent], with_ports(observer.observe([NEW], deadline)))

    def write() -> None:
        plan = make_plan(settings, [intent], with_ports(observer.observe([NEW], deadline)))
        txn = Transaction(replica.api.idl)
        for change in plan.changes:
            if isinstance(change, AddPort | RemovePort):
                change.write(replica.api, txn)
        root(replica.api).increment("next_cfg")
        assert txn.commit() == txn.INCOMPLETE

    look()  # what is only done once
    found["look before"], found["write"] = _steps(look), _steps(write)
    found["arrives"] = _steps(lambda: _arrives(replica))
    found["look after"] = _steps(look)
    assert replica.view.owned("dpdkvhostuser", NEW)
    intent = Intent(NEW, None)
    found["look to remove"], found["write to remove"] = _steps(look), _steps(write)
    found["leaves"] = _steps(lambda: _leaves(replica))
    assert replica.view.port(f"npv{NEW}") is None
    return found


@pytest.mark.usefixtures("_no_addresses")
def test_a_port_costs_the_same_with_ten_as_with_a_thousand_others() -> None:
    few, many = _plugged(FEW), _plugged(MANY)
    # Sets are in another order, so that what looks for the first of its elements may find it later.
    assert {part: few[part] for part in few if many[part] > few[part] * 1.1} == {}, many
    assert min(few.values()) > 100, "each part was counted"


@pytest.fixture
def _no_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the machine that the test runs on."""
    monkeypatch.setattr("netplugin.host.links.Links.addresses", lambda _: {})
