"""Each daemon of OVS stands still or loses all it has: the agent answers in time, and puts all back."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator

import pytest

from tests.functional.conftest import BASE, make_spec
from tests.functional.test_plug_ovs import planned, until_plugged
from tests.lab.agent import PrivateAgent
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import run, wait_for
from tests.lab.steps import host_state

#: Far more than [agent] operation_timeout and what comes on top of it to clean up, in seconds.
ANSWER_S, OPERATION_S, SOON_S = 180.0, 6, 60.0
#: What is put back only by the periodic look would not be put back in time.
AGENT = {"operation_timeout": str(OPERATION_S), "reconcile_interval": "3600"}
FILTERED = {"port_security": {"allowed_addresses": [{"ip": "10.0.0.5"}]}}


@pytest.fixture
def hasty(ovs: PrivateOvs) -> Iterator[PrivateAgent]:
    options = {"ovs": {"timeout": "3"}, "agent": AGENT}
    with PrivateAgent(BASE / "agent", ovs, options) as private:
        yield private
    for name in ovs.vsctl("list-br").split():
        ovs.vsctl("del-br", name)
    shutil.rmtree(BASE / "agent")


def missing(agent: PrivateAgent) -> list[str]:
    """The ports that OVS has not, as a dry run sees it."""
    status, report = agent.call("POST", "/v1/reconcile", {"dry_run": True})
    return ["?"] if status != 200 or report["errors"] else [str(each) for each in report["changes"]]


def at_rest(agent: PrivateAgent) -> bool:
    states = {entry["state"] for entry in agent.get("/v1/ports")[1]}
    return states <= {"active"} and agent.get("/readyz")[0] == 200 and planned(agent) == []


@pytest.mark.parametrize("name", ["ovsdb", "vswitchd"])
def test_a_daemon_that_is_stopped_never_hangs_the_agent(
    ovs: PrivateOvs, hasty: PrivateAgent, name: str
) -> None:
    """SIGSTOP under calls of each kind: all are answered, and health, lists and refusals at once."""
    until_plugged(hasty, "p0", make_spec(9, **FILTERED))
    daemon = ovs.ovsdb if name == "ovsdb" else ovs.vswitchd
    calls = [
        ("PUT", "/v1/ports/p1", make_spec(1, **FILTERED)),
        ("PUT", "/v1/ports/p0", make_spec(9, vlan_id=101, **FILTERED)),
        ("DELETE", "/v1/ports/p0", None),
        ("POST", "/v1/reconcile", {}),
        ("GET", "/v1/host/checks", None),
        ("GET", "/v1/pmd", None),
    ]
    statuses: list[int] = []
    daemon.pause()
    try:
        asked = [
            threading.Thread(target=lambda call=call: statuses.append(hasty.call(*call, timeout=ANSWER_S)[0]))
            for call in calls
        ]
        for each in asked:
            each.start()
        slowest = 0.0
        while any(each.is_alive() for each in asked):
            start = time.monotonic()
            assert hasty.get("/healthz")[0] == 200
            assert hasty.get("/v1/ports")[0] == 200
            assert hasty.call("PUT", "/v1/ports/p2", {"no": "spec"})[0] == 422
            slowest = max(slowest, time.monotonic() - start)
            asked[0].join(0.2)
        assert len(statuses) == len(calls) and 0 not in statuses, statuses
    finally:
        daemon.resume()
    print(f"{name}: health, list and refusal within {slowest:.2f} s; answers {sorted(statuses)}")
    wait_for(lambda: at_rest(hasty), SOON_S, "all is as it was asked for")


def test_a_database_that_is_empty_after_a_restart(ovs: PrivateOvs, hasty: PrivateAgent) -> None:
    """Both daemons start on a database without a row: every port, flow and bridge of ours comes back."""
    for number in range(1, 4):
        until_plugged(hasty, f"p{number}", make_spec(number, **FILTERED))
    before = host_state.compared(host_state.of_ovs(ovs))
    ovs.kill_vswitchd()
    ovs.stop_ovsdb()
    ovs.database.unlink()
    run(["ovsdb-tool", "create", ovs.database, ovs.programs.schema])
    ovs.start_ovsdb()
    ovs.vsctl("--no-wait", "init")
    ovs.set_other_config(ovs.other_config, wait=False)
    ovs.start_vswitchd()
    wait_for(lambda: not missing(hasty), SOON_S, "the agent has put all back by itself")
    wait_for(lambda: at_rest(hasty), SOON_S, "and nothing is left to do")
    after = host_state.compared(host_state.of_ovs(ovs))
    ours = {line for line in before if "netplugin" in line or line.startswith("flow br-phys1")}
    assert ours and ours <= after, host_state.differences(frozenset(ours), after)
