"""A storm of calls while vswitchd is killed: each is answered, and what is left is what was asked for last.

``NETPLUGIN_STORM_CALLS`` calls (1000) by 10 clients, in an order that a seed gives, which is printed.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.bench.process import taken
from tests.functional.conftest import BASE, make_spec
from tests.functional.test_plug_ovs import planned
from tests.lab.agent import PrivateAgent
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import wait_for
from tests.lab.steps import host_state
from tests.lab.steps.matrix import answered

pytestmark = pytest.mark.long

CALLS = int(os.environ.get("NETPLUGIN_STORM_CALLS") or 1000)
CLIENTS, KILLS, DEADLINE_S = 10, 5, 120.0
#: So few that clients ask for the same port at the same time, some for another VLAN.
PORTS, VLANS = 40, (100, 101, 102)
#: Room for the ports' own records and for connections, in MB.
MOST_MB = 64.0


@pytest.fixture(scope="module")
def ovs() -> Iterator[PrivateOvs]:
    with PrivateOvs(BASE / "ovs") as private:
        yield private
    shutil.rmtree(BASE / "ovs")


@pytest.fixture
def options() -> dict[str, dict[str, str]]:
    return {}


@pytest.fixture
def agent(ovs: PrivateOvs, options: dict[str, dict[str, str]]) -> Iterator[PrivateAgent]:
    with PrivateAgent(BASE / "agent", ovs, options) as private:
        yield private
    shutil.rmtree(BASE / "agent")


def seen(ovs: PrivateOvs) -> host_state.State:
    return host_state.compared(host_state.of_ovs(ovs), host_state.of_links())


def test_all_is_answered_and_the_last_word_stands(ovs: PrivateOvs, agent: PrivateAgent) -> None:
    seed = int(os.environ.get("NETPLUGIN_FAULTS_SEED") or random.randrange(1 << 32))
    order = random.Random(seed)
    print(f"\nNETPLUGIN_FAULTS_SEED={seed}")
    empty, memory_mb = seen(ovs), taken(agent.daemon.pid).rss_mb
    calls = [_call(order) for _ in range(CALLS)]
    counted: Counter[int] = Counter()
    most_mb, ended = [memory_mb], threading.Event()

    def ask(call: tuple[str, str, Any]) -> None:
        answer = agent.call(*call, timeout=DEADLINE_S)
        answered(answer)
        counted[answer[0]] += 1
        most_mb.append(taken(agent.daemon.pid).rss_mb)

    def kill_now_and_then() -> int:
        kills = 0
        while not ended.is_set() or kills < KILLS:
            ovs.kill_vswitchd()
            ovs.start_vswitchd()
            wait_for(lambda: agent.get("/readyz")[0] == 200, DEADLINE_S, "the agent has OVS again")
            kills += 1
            ended.wait(2.0)
        return kills

    with ThreadPoolExecutor(CLIENTS) as clients:
        asked = [clients.submit(ask, call) for call in calls]
        closing = threading.Thread(target=lambda: ([each.exception() for each in asked], ended.set()))
        closing.start()
        kills = kill_now_and_then()
        closing.join()
        for each in asked:
            each.result()
    wait_for(lambda: _at_rest(agent), DEADLINE_S, "every port is as it was asked for")
    desired = {entry["port_id"]: entry["spec"]["network"]["vlan_id"] for entry in agent.get("/v1/ports")[1]}
    rows = _tags(ovs)
    assert rows == desired
    print(
        f"{CALLS} calls, {kills} kills of vswitchd: answered {dict(sorted(counted.items()))}; "
        f"{len(desired)} ports at the end; {memory_mb:.0f} MB before, {max(most_mb):.0f} MB at most"
    )
    assert max(most_mb) < memory_mb + MOST_MB
    for port_id in desired:
        assert agent.call("DELETE", f"/v1/ports/{port_id}")[0] == 204
    assert host_state.differences(empty, seen(ovs)) == ""


@pytest.mark.parametrize("options", [{"api": {"max_waiting": "8"}, "agent": {"operation_timeout": "20"}}])
def test_too_many_are_refused_at_once_and_the_others_served(ovs: PrivateOvs, agent: PrivateAgent) -> None:
    """vswitchd stands still, so that nothing leaves the queue; then it goes on."""
    ovs.pause_vswitchd()
    try:
        with ThreadPoolExecutor(60) as clients:
            specs = {f"p{number}": make_spec(number) for number in range(1, 61)}
            asked = [
                clients.submit(agent.call, "PUT", f"/v1/ports/{name}", spec) for name, spec in specs.items()
            ]
            wait_for(lambda: sum(each.done() for each in asked) >= 20, DEADLINE_S, "calls are refused")
            refused = [each.result() for each in asked if each.done()]
            assert {(status, body["code"]) for status, body in refused} == {(503, "overloaded")}
            assert agent.get("/healthz")[0] == 200
            ovs.resume_vswitchd()
            answers = [each.result() for each in asked]
    finally:
        ovs.resume_vswitchd()
    # Some came when the queue had room again.
    codes = Counter(body["code"] for status, body in answers if status != 200)
    served = [body["port_id"] for status, body in answers if status == 200]
    print(f"\n{len(served)} calls served, refused {dict(codes)}")
    assert served and set(codes) == {"overloaded"} and codes["overloaded"] >= len(refused)
    wait_for(lambda: _at_rest(agent), DEADLINE_S, "every port is as it was asked for")
    assert sorted(_tags(ovs)) == sorted(served), "who was refused has left nothing"
    for name in served:
        assert agent.call("DELETE", f"/v1/ports/{name}")[0] == 204


def _call(order: random.Random) -> tuple[str, str, Any]:
    number = order.randrange(PORTS)
    if order.random() < 0.5:
        return "DELETE", f"/v1/ports/p{number}", None
    return "PUT", f"/v1/ports/p{number}", make_spec(number, order.choice(VLANS))


def _at_rest(agent: PrivateAgent) -> bool:
    states = {entry["state"] for entry in agent.get("/v1/ports")[1]}
    return states <= {"active"} and agent.get("/readyz")[0] == 200 and planned(agent) == []


def _tags(ovs: PrivateOvs) -> dict[str, int]:
    """The VLAN of each port with our mark, by the port's id."""
    found = json.loads(ovs.vsctl("-f", "json", "--columns=tag,external_ids", "list", "Port"))
    marked = [(dict(ids[1]).get("netplugin-port"), tag) for tag, ids in found["data"]]
    return {port_id: tag for port_id, tag in marked if port_id}
