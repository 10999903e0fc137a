"""Many ports on OVS-DPDK in one call: their filters come back after a kill, and one call removes all."""

from __future__ import annotations

import pytest

from tests.functional.conftest import make_spec
from tests.functional.test_plug_ovs import planned, plug_all
from tests.lab.agent import PrivateAgent
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import wait_for

BRIDGE = "br-phys1"
DEADLINE_S = 120.0


def _flows(ovs: PrivateOvs) -> set[str]:
    shown = ovs.ofctl("-O", "OpenFlow14", "--no-stats", "dump-flows", f"unix:{ovs.rundir / BRIDGE}.mgmt")
    return {line.strip() for line in shown.splitlines() if "cookie=" in line}


def _transactions(ovs: PrivateOvs) -> int:
    return int(ovs.get("Open_vSwitch", ".", "next_cfg"))


@pytest.mark.parametrize("count", [40, pytest.param(250, marks=pytest.mark.long)])
def test_many_ports_get_their_filters_back_and_are_removed_in_one_call(
    ovs: PrivateOvs, agent: PrivateAgent, count: int
) -> None:
    ids = [f"p{number}" for number in range(count)]
    plug_all(agent, {port_id: make_spec(number) for number, port_id in enumerate(ids)})
    before = _flows(ovs)
    assert len(before) > 10 * count
    ovs.kill_vswitchd()
    ovs.start_vswitchd()
    wait_for(lambda: len(_flows(ovs)) == len(before), DEADLINE_S, "all ports have their filters again")
    wait_for(lambda: planned(agent) == [], DEADLINE_S, "nothing is left to do")
    made = _transactions(ovs)
    status, body = agent.call("POST", "/v1/ports:batch", {"delete": ids})
    assert status == 200 and {result["status"] for result in body["results"]} == {204}, body
    assert _transactions(ovs) - made > 1, "vswitchd does something else in between"
    assert BRIDGE not in ovs.vsctl("list-br").split()
    assert planned(agent) == [] and agent.get("/v1/ports")[1] == []
