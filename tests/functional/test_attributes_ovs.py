"""The same promises for every attribute of a port: idempotence, change, drift, foreign objects, crash."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.functional.attributes_ovs import (
    ATTRIBUTES,
    BRIDGE,
    NETWORK,
    PORT_ID,
    VNI,
    Attribute,
)
from tests.functional.hosts_ovs import Host, clean, host
from tests.functional.test_plug_ovs import _transactions
from tests.lab.processes import CommandError, wait_for
from tests.lab.switch import switch

every = pytest.mark.parametrize("attribute", ATTRIBUTES, ids=lambda a: a.name.replace(" ", "-"))


@pytest.fixture(scope="module")
def single() -> Iterator[Host]:
    with switch(), host(1, uplinks=["eth2", "eth3"]) as one:
        yield one


@pytest.fixture
def hypervisor(single: Host) -> Iterator[Host]:
    with clean(single):
        single.network(NETWORK, VNI, "10.9.0.2", "10.9.0.3")
        single.network("red", VNI + 1, "10.9.0.4")
        yield single


@pytest.fixture
def foreign(hypervisor: Host) -> Iterator[None]:
    """Objects of another program, near ours, that nothing of this changes."""
    ovs = hypervisor.ovs
    ovs.vsctl("add-br", "br-theirs", "--", "set", "bridge", "br-theirs", "datapath_type=netdev")
    ovs.vsctl(
        "add-port",
        "br-theirs",
        "t0",
        "tag=5",
        "--",
        "set",
        "interface",
        "t0",
        "type=internal",
        "--",
        "set",
        "port",
        "t0",
        "qos=@q",
        "--",
        "--id=@q",
        "create",
        "qos",
        "type=egress-policer",
        "other_config:cir=7",
    )
    ovs.ofctl("add-flow", "br-theirs", "cookie=0x2,priority=7,in_port=99,actions=drop")
    before = _foreign(hypervisor)
    try:
        yield
        assert _foreign(hypervisor) == before
    finally:
        ovs.vsctl("clear", "port", "t0", "qos")
        ovs.vsctl("--all", "destroy", "qos")
        ovs.vsctl("del-br", "br-theirs")


def _foreign(hypervisor: Host) -> list[str]:
    ovs = hypervisor.ovs
    columns = "--columns=_uuid,name,tag,qos,external_ids,interfaces"
    return (
        [
            ovs.vsctl("list-ports", "br-theirs"),
            ovs.vsctl("get-fail-mode", "br-theirs"),
            ovs.vsctl(columns, "list", "Port", "t0"),
            ovs.vsctl("list", "QoS", ovs.get("Port", "t0", "qos")),
            *hypervisor.flows("br-theirs"),
            *[flow for flow in hypervisor.flows(BRIDGE) if "cookie=0x6e70" not in flow],
        ]
        if BRIDGE in ovs.vsctl("list-br").split()
        else [
            ovs.vsctl(columns, "list", "Port", "t0"),
            *hypervisor.flows("br-theirs"),
        ]
    )


def _read(attribute: Attribute, hypervisor: Host) -> Any:
    """What the host has; None while it has nothing to read."""
    try:
        return attribute.read(hypervisor)
    except CommandError:
        return None


@every
def test_it_is_kept_changed_and_repaired(hypervisor: Host, foreign: None, attribute: Attribute) -> None:
    hypervisor.plug(PORT_ID, attribute.spec())
    value = attribute.read(hypervisor)
    assert value not in (None, "", [], "[]") or attribute.name == "trunk to the tunnels"
    # The same spec again costs no write.
    before = (_transactions(hypervisor.ovs), value)
    hypervisor.plug(PORT_ID, attribute.spec())
    assert (_transactions(hypervisor.ovs), attribute.read(hypervisor)) == before
    assert hypervisor.planned() == []
    # Broken by another program, it is put back.
    attribute.break_it(hypervisor)
    hypervisor.repair()
    wait_for(lambda: _read(attribute, hypervisor) == value, 30, f"{attribute.name} is put back")
    wait_for(lambda: hypervisor.planned() == [], 30, "nothing is left to do")
    # Changed, it is another; changed back, it is as before.
    if attribute.changed_fields is not None:
        hypervisor.plug(PORT_ID, attribute.spec(changed=True))
        assert attribute.read(hypervisor) != value
        hypervisor.plug(PORT_ID, attribute.spec())
        assert _like(attribute.read(hypervisor)) == _like(value)
    # And when the port goes, all goes.
    assert hypervisor.agent.call("DELETE", f"/v1/ports/{PORT_ID}")[0] == 204
    assert hypervisor.ovs.vsctl("list-br").split() == ["br-theirs", "br-underlay"]


def _like(value: Any) -> Any:
    """The numbers that vswitchd gives again (in_port) are not the attribute."""
    return len(value) if isinstance(value, list) else value


@every
def test_a_killed_agent_leaves_what_was_asked(hypervisor: Host, attribute: Attribute) -> None:
    """Killed in the middle of a plug, each attribute at another moment; the next start goes on."""
    agent = hypervisor.agent
    plug = threading.Thread(target=hypervisor.put, args=(PORT_ID, attribute.spec()))
    plug.start()
    time.sleep(0.005 * ATTRIBUTES.index(attribute))
    agent.kill()
    plug.join(60)
    agent.start()
    body = hypervisor.plug(PORT_ID, attribute.spec())
    assert body["state"] == "active"
    value = attribute.read(hypervisor)
    assert hypervisor.planned() == []
    hypervisor.repair()
    assert attribute.read(hypervisor) == value
    assert agent.call("DELETE", f"/v1/ports/{PORT_ID}")[0] == 204
    assert hypervisor.ovs.vsctl("list-br").split() == ["br-underlay"]
    assert hypervisor.ovs.vsctl("list", "QoS") == ""
