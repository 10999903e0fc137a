"""PMD threads of a real OVS-DPDK: measured, proposed, pinned, balanced, and scraped for metrics.

Two threads, on both CPUs of a small machine, where ``PUT /v1/pmd`` itself would refuse to put them.
The ports are of DPDK's net_null driver: ``no-rx=1`` never has a packet, and without it always.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from netplugin.host.names import VHOST, device_name
from tests.functional.conftest import BASE, make_spec
from tests.functional.test_plug_ovs import planned, plug
from tests.lab.agent import PrivateAgent
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import wait_for
from tests.lab.testpmd import Testpmd, TestpmdOptions

WAIT_S = 60
BRIDGE = "br-pmd"
KEYS = (
    "pmd-auto-lb",
    "pmd-auto-lb-load-threshold",
    "pmd-auto-lb-rebal-interval",
    "pmd-rxq-assign",
    "pmd-rxq-isolate",
)


@pytest.fixture(scope="module")
def ovs() -> Iterator[PrivateOvs]:
    """Threads on CPUs 0 and 1, and the ports ``idle0`` with two queues and ``idle1`` with one."""
    directory = BASE / "ovs"
    with PrivateOvs(directory, pmd_mask="0x3") as private:
        private.vsctl("add-br", BRIDGE, "--", "set", "Bridge", BRIDGE, "datapath_type=netdev")
        private.ofctl("del-flows", BRIDGE)
        private.ofctl("add-flow", BRIDGE, "actions=drop")
        for number, queues in ((0, 2), (1, 1)):
            add_null(private, f"idle{number}", f"net_null{number},no-rx=1", queues)
        yield private
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def agent(ovs: PrivateOvs) -> Iterator[PrivateAgent]:
    directory = BASE / "agent"
    with PrivateAgent(directory, ovs) as private:
        yield private
    shutil.rmtree(directory)


@pytest.fixture(autouse=True)
def as_before(ovs: PrivateOvs) -> Iterator[None]:
    yield
    ovs.vsctl("set", "Open_vSwitch", ".", "other_config:pmd-cpu-mask=0x3")
    ovs.vsctl("remove", "Open_vSwitch", ".", "other_config", *KEYS)
    for name in ovs.vsctl("--bare", "--columns=name", "list", "Interface").split():
        ovs.vsctl("remove", "Interface", name, "other_config", "pmd-rxq-affinity")


def add_null(ovs: PrivateOvs, name: str, devargs: str, queues: int) -> None:
    options = [f"options:dpdk-devargs={devargs}", f"options:n_rxq={queues}"]
    ovs.vsctl("add-port", BRIDGE, name, "--", "set", "Interface", name, "type=dpdk", *options)


@contextmanager
def busy_port(ovs: PrivateOvs, *pins: str) -> Iterator[str]:
    """A port whose two queues always have packets. They take all of the CPUs that poll them."""
    add_null(ovs, "busy", "net_null7,size=64", 2)
    try:
        for pin in pins:
            pin_by_hand(ovs, "busy", pin)
        yield "busy"
    finally:
        ovs.vsctl("del-port", BRIDGE, "busy")


def pin_by_hand(ovs: PrivateOvs, port: str, pins: str) -> None:
    ovs.vsctl("set", "Interface", port, f'other_config:pmd-rxq-affinity="{pins}"')


def pins_of(ovs: PrivateOvs, port: str) -> str:
    return ovs.get("Interface", port, "other_config:pmd-rxq-affinity")


def places(ovs: PrivateOvs) -> dict[tuple[str, int], int]:
    """The CPU of each queue, as vswitchd itself says."""
    found: dict[tuple[str, int], int] = {}
    cpu = -1
    for line in ovs.appctl("dpif-netdev/pmd-rxq-show").splitlines():
        if thread := re.match(r"pmd thread numa_id \d+ core_id (\d+)", line):
            cpu = int(thread[1])
        elif queue := re.match(r"\s+port: (\S+)\s+queue-id:\s+(\d+)", line):
            found[queue[1], int(queue[2])] = cpu
    return found


def show(agent: PrivateAgent, path: str = "/v1/pmd") -> dict[str, Any]:
    status, body = agent.get(path)
    assert status == 200, body
    assert isinstance(body, dict)
    return body


def put(agent: PrivateAgent, **request: Any) -> dict[str, Any]:
    status, body = agent.call("PUT", "/v1/pmd", request)
    assert status == 200, body
    assert isinstance(body, dict)
    return body


def queues_of(state: dict[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    return {
        (queue["port"], queue["queue"]): {**queue, "cpu": core["cpu"]}
        for core in state["cores"]
        for queue in core["queues"]
    }


# -- looking -------------------------------------------------------------------------------------


def test_threads_queues_and_settings_are_shown(ovs: PrivateOvs, agent: PrivateAgent) -> None:
    state = show(agent)
    assert (state["cpus"], state["usage_seconds"], state["unpolled"]) == ("0-1", 60, [])
    assert [(c["cpu"], c["numa_node"], c["isolated"]) for c in state["cores"]] == [
        (0, 0, False),
        (1, 0, False),
    ]
    found = queues_of(state)
    assert {key: queue["cpu"] for key, queue in found.items()} == places(ovs)
    assert found.keys() == {("idle0", 0), ("idle0", 1), ("idle1", 0)}
    assert not any(queue["numa_mismatch"] for queue in found.values())
    assert state["settings"]["mask"] == "0x3" and state["settings"]["sleep_max"] == "500"
    assert (state["settings"]["rxq_assign"], state["settings"]["rxq_isolate"]) == ("cycles", True)


def test_a_window_is_measured_and_nothing_is_cleared(ovs: PrivateOvs, agent: PrivateAgent) -> None:
    with busy_port(ovs, "0:0,1:0"):
        wait_for(lambda: show(agent)["cores"][0]["packets"], WAIT_S, "packets are counted")
        before = show(agent)["cores"][0]
        window = show(agent, "/v1/pmd?interval=0.5")
        after = show(agent)["cores"][0]
    assert (window["interval_s"], window["usage_seconds"]) == (0.5, 5)
    busy, idle = window["cores"]
    assert 0 < busy["packets"] <= after["packets"] - before["packets"]
    assert busy["busy_percent"] > idle["busy_percent"] == 0
    assert busy["cycles_per_packet"] >= busy["processing_cycles_per_packet"] > 0
    assert (idle["packets"], idle["cycles_per_packet"]) == (0, None)


# -- pinning -------------------------------------------------------------------------------------


def test_a_pinned_queue_is_where_it_was_pinned_to(ovs: PrivateOvs, agent: PrivateAgent) -> None:
    for cpu in (0, 1):
        state = put(agent, affinity={"idle0": {"1": cpu}, "idle1": {"0": cpu}})
        assert places(ovs)["idle0", 1] == places(ovs)["idle1", 0] == cpu
        assert queues_of(state)["idle0", 1]["pinned_to"] == cpu
        assert [core["isolated"] for core in state["cores"]] == [cpu == 0, cpu == 1]
        assert (pins_of(ovs, "idle0"), pins_of(ovs, "idle1")) == (f"1:{cpu}", f"0:{cpu}")
    state = put(agent, clear_affinity=["idle1"], affinity={"idle0": {"1": None, "0": 0}})
    assert (pins_of(ovs, "idle0"), pins_of(ovs, "idle1")) == ("0:0", "")
    put(agent, clear_all_affinity=True)
    assert pins_of(ovs, "idle0") == ""
    assert not any(core["isolated"] for core in show(agent)["cores"])


def test_what_cannot_be_changes_nothing(ovs: PrivateOvs, agent: PrivateAgent) -> None:
    put(agent, affinity={"idle0": {"1": 1}})
    before = (ovs.get("Open_vSwitch", ".", "next_cfg"), places(ovs))
    for request, field in (
        ({"affinity": {"idle9": {"0": 1}}}, "affinity.idle9"),
        ({"affinity": {BRIDGE: {"0": 1}}}, f"affinity.{BRIDGE}"),
        ({"affinity": {"idle0": {"2": 1}}}, "affinity.idle0.2"),
        ({"affinity": {"idle1": {"0": 2}}}, "affinity.idle1.0"),
        ({"affinity": {"idle0": {"0": 0}}}, "affinity"),
        ({"affinity": {"idle1": {"0": 1}}, "clear_affinity": ["nope"]}, "clear_affinity.0"),
        ({"cpus": "0"}, "cpus"),
        ({"auto_load_balance": {"load_threshold": 101}}, "auto_load_balance.load_threshold"),
        ({"affinity": {"idle1": {"0": 0}}, "cpus": "0-1"}, "cpus"),
    ):
        status, error = agent.call("PUT", "/v1/pmd", request)
        assert (status, error["code"]) == (422, "invalid_request"), request
        assert [wrong["field"] for wrong in error["errors"]] == [field]
    assert (ovs.get("Open_vSwitch", ".", "next_cfg"), places(ovs)) == before
    put(agent, affinity={"idle1": {"0": 1}})
    assert ovs.get("Open_vSwitch", ".", "next_cfg") != before[0], "a write is seen by it"


def test_what_vswitchd_does_otherwise_is_put_back(ovs: PrivateOvs, agent: PrivateAgent) -> None:
    """CPU 9 is in the mask and not in the machine: OVS polls the queue elsewhere without a word."""
    ovs.vsctl("set", "Open_vSwitch", ".", "other_config:pmd-cpu-mask=0x203")
    pin_by_hand(ovs, "idle0", "1:1")
    balance = {"enabled": True}
    status, error = agent.call(
        "PUT", "/v1/pmd", {"affinity": {"idle1": {"0": 9}}, "auto_load_balance": balance}
    )
    assert (status, error["step"]) == (502, "pmd-verify")
    assert "idle1 queue 0 is polled by the PMD thread on CPU" in error["detail"]
    assert (pins_of(ovs, "idle1"), pins_of(ovs, "idle0")) == ("", "1:1")
    assert ovs.get("Open_vSwitch", ".", "other_config:pmd-auto-lb") == ""


def test_the_agents_repairs_leave_pinnings_alone(ovs: PrivateOvs, agent: PrivateAgent) -> None:
    """A VM's port with two queues: through repairs, a changed VLAN and a VM that ends."""
    name = device_name(VHOST, "p1")
    body = plug(agent, "p1", make_spec(1, queues=2))
    try:
        with Testpmd(Path(body["binding"]["socket_path"]), TestpmdOptions(queues=2)):
            ovs.wait_connected(name)
            wait_for(lambda: (name, 1) in places(ovs), WAIT_S, "both queues are polled")
            put(agent, affinity={name: {"0": 1, "1": 1}})
            assert places(ovs)[name, 0] == places(ovs)[name, 1] == 1
            assert planned(agent) == []
            ovs.ofctl("del-flows", "br-phys1")
            status, report = agent.call("POST", "/v1/reconcile", {})
            assert status == 200 and report["errors"] == []
            plug(agent, "p1", make_spec(1, vlan_id=200, queues=2))
            assert pins_of(ovs, name) == "0:1,1:1"
            assert places(ovs)[name, 0] == places(ovs)[name, 1] == 1
        wait_for(lambda: (name, 1) not in places(ovs), WAIT_S, "one queue is left")
        assert planned(agent) == [] and pins_of(ovs, name) == "0:1,1:1"
    finally:
        agent.call("DELETE", "/v1/ports/p1")


# -- proposals -----------------------------------------------------------------------------------


def test_a_proposal_is_made_and_set(ovs: PrivateOvs, agent: PrivateAgent) -> None:
    """Both queues that carry load are on one thread: then each has its own."""
    with busy_port(ovs, "0:0,1:0"):
        status, error = agent.call("PUT", "/v1/pmd", {"proposed": True})
        assert (status, error["code"], error["step"]) == (409, "conflict", "propose"), "too early"
        proposal = wait_for(
            lambda: found if (found := show(agent, "/v1/pmd/proposal"))["moves"] else None,
            WAIT_S,
            "the load is measured and found uneven",
        )
        assert proposal["proposed"]["largest_percent"] < proposal["now"]["largest_percent"]
        assert not proposal["auto_load_balance"]["possible"], "one thread is isolated"
        [(moved, cpu)] = [
            ((q["port"], q["queue"]), q["proposed_cpu"])
            for q in proposal["queues"]
            if q["proposed_cpu"] not in (None, q["cpu"])
        ]
        assert (moved[0], cpu) == ("busy", 1)
        state = put(agent, proposed=True)
        found = places(ovs)
        assert {found["busy", 0], found["busy", 1]} == {0, 1}
        assert found.keys() == queues_of(state).keys() >= {("idle0", 0), ("idle0", 1), ("idle1", 0)}
        assert not any(core["isolated"] for core in state["cores"])
        settings = state["settings"]
        assert (settings["rxq_assign"], settings["rxq_isolate"]) == ("group", False)


def test_ovs_is_configured_to_balance_by_itself(ovs: PrivateOvs, agent: PrivateAgent) -> None:
    desired = {"enabled": True, "load_threshold": 71, "interval_minutes": 2}
    state = put(agent, auto_load_balance=desired)
    assert state["settings"]["auto_load_balance"] == {**desired, "improvement_threshold": 25}
    until_logged(ovs, "PMD auto load balance is enabled, interval 2 mins, pmd load threshold 71%")
    put(agent, auto_load_balance={"enabled": False})
    until_logged(ovs, "PMD auto load balance is disabled")


def until_logged(ovs: PrivateOvs, words: str) -> None:
    """vswitchd writes its log by a thread of its own."""
    log = ovs.directory / "ovs-vswitchd.log"
    wait_for(lambda: words in log.read_text(), WAIT_S, f"vswitchd says {words!r}")


# -- findings and metrics ------------------------------------------------------------------------


def test_queues_that_nobody_polls_are_found(ovs: PrivateOvs, agent: PrivateAgent) -> None:
    assert not [f for f in agent.get("/v1/host/checks")[1] if f["id"] == "pmd-unpolled"]
    pin_by_hand(ovs, "idle0", "0:0,1:1")
    assert ("idle1", 0) not in places(ovs)
    assert show(agent)["unpolled"] == [{"port": "idle1", "queue": 0, "port_id": None, "vm_id": None}]
    [finding] = [f for f in agent.get("/v1/host/checks")[1] if f["id"] == "pmd-unpolled"]
    assert finding["status"] == "fail" and "idle1 queue 0" in finding["found"]
    assert "netplugin_pmd_unpolled_queues 1.0" in metrics(agent)
    assert put(agent, affinity={"idle0": {"1": None}})["unpolled"] == []
    assert places(ovs)["idle1", 0] == 1


def metrics(agent: PrivateAgent) -> list[str]:
    status, text = agent.get("/metrics")
    assert status == 200
    return [line for line in str(text).splitlines() if line.startswith("netplugin_pmd")]


def test_a_scrape_goes_on_without_ovs(ovs: PrivateOvs, agent: PrivateAgent) -> None:
    found = metrics(agent)
    assert "netplugin_pmd_up 1.0" in found and "netplugin_pmd_numa_mismatches 0.0" in found
    for cpu in (0, 1):
        assert any(f'netplugin_pmd_packets_total{{cpu="{cpu}"' in line for line in found)
    ovs.pause_vswitchd()
    try:
        assert metrics(agent) == ["netplugin_pmd_up 0.0"]
    finally:
        ovs.resume_vswitchd()
    wait_for(lambda: "netplugin_pmd_up 1.0" in metrics(agent), WAIT_S, "vswitchd tells again")
    ovs.kill_vswitchd()
    try:
        assert metrics(agent) == ["netplugin_pmd_up 0.0"]
        assert agent.get("/v1/pmd")[0] == 503
    finally:
        ovs.start_vswitchd()
    wait_for(lambda: "netplugin_pmd_up 1.0" in metrics(agent), WAIT_S, "vswitchd is back")
