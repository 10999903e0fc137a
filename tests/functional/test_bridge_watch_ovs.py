"""What others change on a bridge by OpenFlow is found without a periodic look, and put right."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest

from netplugin.host.names import VHOST, device_name
from tests.functional.conftest import BASE, make_spec
from tests.lab.agent import PrivateAgent
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import wait_for

DEADLINE_S = 60.0
BRIDGE = "br-phys1"
PORT = device_name(VHOST, "p1")
FRAME = f"in_port={PORT},dl_src=52:54:00:00:00:99,ip"
#: Nothing is found by the periodic look.
OPTIONS = {"agent": {"reconcile_interval": "3600"}}
ADDRESSES = {"allowed_addresses": [{"ip": "10.0.0.1"}, {"ip": "2001:db8::1"}]}
#: Each a program of OVS and what it is called with.
CHANGES = {
    "all flows deleted": ("ofctl", "del-flows", BRIDGE),
    "what is dropped admitted": ("ofctl", "mod-flows", BRIDGE, f"in_port={PORT},actions=NORMAL"),
    "a flow with our mark added": (
        "ofctl",
        "add-flow",
        BRIDGE,
        f"cookie=0x6e70123456789abc,priority=65535,in_port={PORT},actions=NORMAL",
    ),
    "first fragments not matched": ("ofctl", "set-frags", BRIDGE, "normal"),
    "nothing forwarded to a port": ("ofctl", "mod-port", BRIDGE, PORT, "no-forward"),
    "frames forwarded to the internal port": ("ofctl", "mod-port", BRIDGE, BRIDGE, "forward"),
    "a controller set": ("vsctl", "set-controller", BRIDGE, "tcp:127.0.0.1:9"),
    "fail_mode cleared": ("vsctl", "del-fail-mode", BRIDGE),
}


@pytest.fixture(scope="module")
def agent(ovs: PrivateOvs) -> Iterator[PrivateAgent]:
    """One with a filtered port."""
    with PrivateAgent(BASE / "agent", ovs, OPTIONS) as private:
        spec = make_spec(port_security=ADDRESSES)
        assert private.call("PUT", "/v1/ports/p1", spec)[0] == 200
        yield private
    shutil.rmtree(BASE / "agent")


def state(ovs: PrivateOvs) -> tuple[Any, ...]:
    """What others can change of the bridge."""
    flows = ovs.ofctl("--no-stats", "dump-flows", BRIDGE).splitlines()
    return (
        sorted(line.strip() for line in flows if "cookie=" in line),
        ovs.ofctl("get-frags", BRIDGE).strip(),
        ovs.vsctl("get-fail-mode", BRIDGE).strip(),
        sorted(re.findall(r"\(([^)]+)\): addr.*\n +config: +(.*)", ovs.ofctl("show", BRIDGE))),
    )


@pytest.mark.parametrize("change", CHANGES)
def test_it_is_put_back_at_once(ovs: PrivateOvs, agent: PrivateAgent, change: str) -> None:
    before, log = state(ovs), len(agent.log.read_text())
    program, *arguments = CHANGES[change]
    start = time.monotonic()
    getattr(ovs, program)(*arguments)
    try:
        wait_for(lambda: "drift: " in agent.log.read_text()[log:], DEADLINE_S, "it is noticed")
        wait_for(lambda: state(ovs) == before, DEADLINE_S, "it is put back")
    finally:
        ovs.vsctl("del-controller", BRIDGE)
    print(f"{change}: put back within {(time.monotonic() - start) * 1e3:.0f} ms")
    wait_for(lambda: state(ovs) == before, DEADLINE_S, "it stays")


def test_a_flow_of_others_admits_nothing_and_is_reported(ovs: PrivateOvs, agent: PrivateAgent) -> None:
    """One without a priority of its own, as it is added by hand."""
    finding = f"flows-of-others-{BRIDGE}"

    def reported() -> list[Any]:
        _, events = agent.get("/v1/events?follow=false&after=0&kind=finding")
        return [line for line in str(events).splitlines() if finding in line]

    ovs.ofctl("add-flow", BRIDGE, "actions=NORMAL")
    traced = ovs.appctl("ofproto/trace", BRIDGE, FRAME)
    assert "Datapath actions: drop" in traced, traced
    wait_for(reported, DEADLINE_S, "an event says so")
    assert finding in {found["id"] for found in agent.get("/v1/host/checks")[1]}
    assert "cookie=0x0," in ovs.ofctl("dump-flows", BRIDGE), "it is not deleted"
    ovs.ofctl("--strict", "del-flows", BRIDGE, "priority=32768")
    assert finding not in {found["id"] for found in agent.get("/v1/host/checks")[1]}


def test_a_bridge_that_was_opened_while_the_agent_was_dead_is_closed_by_its_start(
    ovs: PrivateOvs, agent: PrivateAgent
) -> None:
    before = state(ovs)
    agent.kill()
    saved = agent.directory / "saved.flows"
    saved.write_text(ovs.ofctl("--no-stats", "--no-names", "dump-flows", BRIDGE))
    ovs.vsctl("del-fail-mode", BRIDGE)
    assert "actions=NORMAL" in ovs.ofctl("dump-flows", BRIDGE), "OVS has deleted what drops"
    # As ovs-save does around a restart of OVS.
    ovs.ofctl("add-flows", BRIDGE, saved)
    assert "Datapath actions: drop" in ovs.appctl("ofproto/trace", BRIDGE, FRAME)
    agent.start()
    wait_for(lambda: state(ovs) == before, DEADLINE_S, "it is closed")
