"""Plugging on a real OVS-DPDK: what is written, what is not, and what is left alone."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from netplugin.host.names import SOCKETS, VHOST, device_name
from tests.functional.conftest import BASE, make_spec
from tests.lab.agent import PrivateAgent
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import wait_for


def plug(agent: PrivateAgent, port_id: str, spec: dict[str, Any]) -> dict[str, Any]:
    status, body = agent.call("PUT", f"/v1/ports/{port_id}", spec)
    assert status == 200, body
    assert isinstance(body, dict)
    return body


def until_plugged(agent: PrivateAgent, port_id: str, spec: dict[str, Any]) -> None:
    """As ``plug``, by an agent that gives up early: on a busy machine OVS may be late once or twice."""
    wait_for(
        lambda: agent.call("PUT", f"/v1/ports/{port_id}", spec)[0] == 200,
        60,
        f"{port_id} is plugged",
        lambda: str(agent.call("PUT", f"/v1/ports/{port_id}", spec)),
    )


def plug_all(agent: PrivateAgent, specs: Mapping[str, dict[str, Any]]) -> None:
    """All of them in one batch, and not one refused: a batch's own status says nothing of its ports."""
    puts = [{"port_id": port_id, "spec": spec} for port_id, spec in specs.items()]
    status, body = agent.call("POST", "/v1/ports:batch", {"put": puts})
    assert status == 200, body
    assert [r for r in body["results"] if r["status"] != 200] == []
    assert len(body["results"]) == len(puts)


def planned(agent: PrivateAgent) -> list[dict[str, Any]]:
    status, report = agent.call("POST", "/v1/reconcile", {"dry_run": True})
    assert status == 200 and report["errors"] == [], report
    changes: list[dict[str, Any]] = report["changes"]
    return changes


def ports(ovs: PrivateOvs, bridge: str = "br-phys1") -> list[str]:
    return ovs.vsctl("list-ports", bridge).split()


def rows(ovs: PrivateOvs, table: str, *columns: str) -> list[dict[str, Any]]:
    """Rows as JSON, each column decoded from OVSDB's notation where it is a set or a map."""
    text = ovs.vsctl("--format=json", f"--columns={','.join(columns)}", "list", table)
    found = json.loads(text)
    return [dict(zip(found["headings"], map(_plain, row), strict=True)) for row in found["data"]]


def _plain(value: Any) -> Any:
    if isinstance(value, list) and value[:1] == ["map"]:
        return dict(value[1])
    if isinstance(value, list) and value[:1] == ["set"]:
        return value[1]
    return value


def test_a_plugged_port_has_all_that_was_asked(ovs: PrivateOvs, agent: PrivateAgent) -> None:
    body = plug(agent, "p1", make_spec(1, vlan_id=100, network={"mtu": 2000}, queues=2))
    name = device_name(VHOST, "p1")
    assert body["state"] == "active"
    assert body["binding"]["vif_type"] == "vhostuser"
    directory = Path(body["binding"]["socket_path"]).parent
    assert directory.name == device_name(SOCKETS, "p1") and directory.is_dir()
    port = next(r for r in rows(ovs, "Port", "name", "tag", "vlan_mode", "external_ids") if r["name"] == name)
    assert (port["tag"], port["vlan_mode"]) == (100, "access")
    assert port["external_ids"]["netplugin-port"] == "p1"
    interface = next(
        r
        for r in rows(ovs, "Interface", "name", "type", "options", "mtu_request", "external_ids")
        if r["name"] == name
    )
    assert interface["type"] == "dpdkvhostuserclient"
    assert interface["options"]["vhost-server-path"] == body["binding"]["socket_path"]
    assert interface["mtu_request"] == 2000
    assert interface["external_ids"]["attached-mac"] == "52:54:00:00:00:01"
    assert ovs.vsctl("get-fail-mode", "br-phys1").strip() == "secure"
    assert agent.get("/v1/ports/p1")[1] == body
    assert planned(agent) == []


def test_a_flat_port_is_an_access_port(ovs: PrivateOvs, agent: PrivateAgent) -> None:
    plug(agent, "flat", make_spec(1, vlan_id=None))
    port = next(r for r in rows(ovs, "Port", "name", "tag", "vlan_mode") if r["name"] != "br-phys1")
    assert (port["tag"], port["vlan_mode"]) == (0, "access")


def test_the_same_put_twice_writes_nothing(ovs: PrivateOvs, agent: PrivateAgent) -> None:
    first = plug(agent, "p1", make_spec())
    before = (_transactions(ovs), ovs.ofctl("dump-flows", "br-phys1", "--no-stats"))
    assert plug(agent, "p1", make_spec()) == first
    assert (_transactions(ovs), ovs.ofctl("dump-flows", "br-phys1", "--no-stats")) == before
    plug(agent, "p2", make_spec(2))
    assert _transactions(ovs) > before[0], "the count of transactions does not see a write"


def _transactions(ovs: PrivateOvs) -> int:
    """Transactions in the database's own log (statistics are ephemeral and not in it)."""
    log = subprocess.run(
        ["ovsdb-tool", "show-log", str(ovs.database)], capture_output=True, text=True, check=True
    ).stdout
    return sum(line.startswith("record ") for line in log.splitlines())


def test_a_changed_vlan_or_mtu_converges(ovs: PrivateOvs, agent: PrivateAgent) -> None:
    plug(agent, "p1", make_spec())
    body = plug(agent, "p1", make_spec(vlan_id=200, network={"mtu": 9000}))
    assert body["state"] == "active" and body["observed"]["tag"] == 200
    name = device_name(VHOST, "p1")
    assert ovs.get("Port", name, "tag") == "200"
    assert ovs.get("Interface", name, "mtu_request") == "9000"


def test_a_port_has_the_name_that_was_chosen(ovs: PrivateOvs, agent: PrivateAgent) -> None:
    body = plug(agent, "p1", make_spec(1, port_name="vnic0"))
    assert body["binding"]["device"] == "vnic0" and ports(ovs) == ["vnic0"]
    assert agent.call("PUT", "/v1/ports/p2", make_spec(2, port_name="vnic0"))[0] == 409
    assert agent.call("PUT", "/v1/ports/p1", make_spec(1, port_name="vnic1"))[0] == 409, "not live"
    ovs.vsctl("add-port", "br-phys1", "theirs", "--", "set", "interface", "theirs", "type=internal")
    assert agent.call("PUT", "/v1/ports/p2", make_spec(2, port_name="theirs"))[0] == 409
    assert agent.get("/v1/ports/p2")[0] == 404
    ovs.vsctl("del-port", "theirs")
    agent.restart_with({})
    assert planned(agent) == [] and ports(ovs) == ["vnic0"]
    assert agent.call("DELETE", "/v1/ports/p1")[0] == 204
    assert plug(agent, "p2", make_spec(2, port_name="vnic0"))["state"] == "active", "the name is free again"


def test_a_socket_is_at_the_path_that_was_chosen(ovs: PrivateOvs, agent: PrivateAgent) -> None:
    root = Path(agent.groups["ovs"]["vhost_socket_dir"])
    path, theirs = root / "vm-1" / "vnic0", root / "vm-1" / "theirs"
    body = plug(agent, "p1", make_spec(1, vhost_user_socket=str(path)))
    assert body["binding"]["socket_path"] == str(path) and str(path) in body["binding"]["interface_xml"]
    assert ovs.get("Interface", device_name(VHOST, "p1"), "options:vhost-server-path").strip('"') == str(path)
    assert path.parent.stat().st_mode & 0o7777 == 0o2770
    with socket.socket(socket.AF_UNIX) as qemu:
        qemu.bind(str(path))
    theirs.touch()
    before = sorted(root.rglob("*"))
    for wrong, status in (
        (path, 409),
        (theirs, 409),
        (path / "x", 409),
        (root / "nic", 422),
        ("/etc/vm/nic", 422),
    ):
        answer = agent.call("PUT", "/v1/ports/p2", make_spec(2, vhost_user_socket=str(wrong)))
        assert answer[0] == status and "vhost_user_socket" in answer[1]["detail"], answer
    assert agent.call("PUT", "/v1/ports/p1", make_spec(1))[0] == 409, "not live"
    plug(agent, "p2", make_spec(2, vhost_user_socket=str(root / "vm-1" / "vnic1")))
    agent.restart_with({})
    assert planned(agent) == [] and sorted(root.rglob("*")) == before
    for port_id, left in (("p2", [path.parent, theirs, path]), ("p1", [path.parent, theirs])):
        assert agent.call("DELETE", f"/v1/ports/{port_id}")[0] == 204
        assert sorted(root.rglob("*")) == sorted(left)
    theirs.unlink()
    plug(agent, "p1", make_spec(1, vhost_user_socket=str(root / "a" / "vm-2" / "vnic0")))
    assert agent.call("DELETE", "/v1/ports/p1")[0] == 204
    assert sorted(root.rglob("*")) == [path.parent], "not ours any more"


def test_all_ports_of_a_vlan_change_in_one_transaction(ovs: PrivateOvs, agent: PrivateAgent) -> None:
    """More of them than one batch of calls has."""
    plug_all(
        agent, {f"p{n}": make_spec(n, vlan_id=100) for n in range(80)} | {"other": make_spec(99, vlan_id=7)}
    )
    desired = {"network": "physnet1", "from_vlan": 100, "to_vlan": 200}
    with monitored(ovs) as seen:
        ofports = rows(ovs, "Interface", "name", "ofport")
        flows = ovs.ofctl("dump-flows", "br-phys1", "--no-stats")
        before = _transactions(ovs)
        status, body = agent.call("POST", "/v1/ports:retag", desired)
        assert status == 200 and {r["status"] for r in body["results"]} == {200}
        assert len(body["results"]) == 80
        assert _transactions(ovs) == before + 2, "ours, and vswitchd's that it has it (cur_cfg)"
        tags = {row["name"]: row["tag"] for row in rows(ovs, "Port", "name", "tag")}
        assert {tags[device_name(VHOST, f"p{n}")] for n in range(80)} == {200}
        assert tags[device_name(VHOST, "other")] == 7
        assert rows(ovs, "Interface", "name", "ofport") == ofports
        assert ovs.ofctl("dump-flows", "br-phys1", "--no-stats") == flows, "filters do not depend on the VLAN"
        assert agent.call("POST", "/v1/ports:retag", desired) == (200, {"results": []})
        assert _transactions(ovs) == before + 2 and planned(agent) == []
    assert not [row for row in seen if row["action"] == "delete"], "no port was made again"


def test_what_cannot_change_live_is_a_conflict_that_says_what(ovs: PrivateOvs, agent: PrivateAgent) -> None:
    plug(agent, "p1", make_spec())
    other = make_spec() | {"mac": "52:54:00:aa:aa:aa", "queues": 4}
    status, error = agent.call("PUT", "/v1/ports/p1", other)
    assert (status, error["code"]) == (409, "conflict")
    assert "mac" in error["detail"] and "queues" in error["detail"]
    assert agent.get("/v1/ports/p1")[1]["spec"]["mac"] == make_spec()["mac"]
    status, error = agent.call("PUT", "/v1/ports/p1", make_spec() | {"backend": "linuxbridge"})
    assert status in (409, 422)


def test_delete_leaves_nothing_and_may_be_repeated(ovs: PrivateOvs, agent: PrivateAgent) -> None:
    plug(agent, "p1", make_spec(1))
    plug(agent, "p2", make_spec(2))
    assert agent.call("DELETE", "/v1/ports/p1") == (204, None)
    assert ports(ovs) == [device_name(VHOST, "p2")]
    assert f"in_port={1}" not in ovs.ofctl("dump-flows", "br-phys1")
    assert agent.call("DELETE", "/v1/ports/p2") == (204, None)
    assert ovs.vsctl("list-br").split() == []
    assert agent.call("DELETE", "/v1/ports/p2") == (204, None)
    assert agent.get("/v1/ports/p2")[0] == 404


@contextmanager
def monitored(ovs: PrivateOvs) -> Iterator[list[dict[str, Any]]]:
    """Every state in which a row of Port ever was, as the database reported to a monitor.

    Reports come in the order of the transactions: what went before the last bridge has been seen with it.
    The monitor runs when it has reported the first one, which was there before it.
    """
    seen: list[dict[str, Any]] = []
    ovs.vsctl("add-br", "br-first", "--", "set", "bridge", "br-first", "datapath_type=netdev")
    monitor = subprocess.Popen(
        [
            "ovsdb-client",
            "monitor",
            ovs.connection,
            "Open_vSwitch",
            "Port",
            "name,tag,vlan_mode",
            "--format=json",
            "--no-headings",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )

    def read_until(bridge: str) -> None:
        assert monitor.stdout is not None
        while bridge not in {row["name"] for row in seen}:
            line = monitor.stdout.readline()
            assert line, "the monitor has ended"
            for row in json.loads(line)["data"]:
                _, action, name, tag, mode = row
                seen.append({"action": action, "name": name, "tag": tag, "vlan_mode": mode})

    try:
        read_until("br-first")
        yield seen
        ovs.vsctl("--no-wait", "add-br", "br-last")
        read_until("br-last")
    finally:
        monitor.kill()
        monitor.communicate(timeout=60)


def test_no_port_is_ever_without_its_tag(ovs: PrivateOvs, agent: PrivateAgent) -> None:
    with monitored(ovs) as seen:
        plug_all(
            agent,
            {f"p{n}": make_spec(n, vlan_id=None if n % 3 == 0 else 100 + n) for n in range(100)},
        )
    ours = [row for row in seen if str(row["name"]).startswith(VHOST)]
    inserted = [row for row in ours if row["action"] == "insert"]
    assert len(inserted) == 100
    for row in ours:
        if row["action"] != "old":
            assert row["tag"] != ["set", []] and row["vlan_mode"] == "access", row
    tags = {row["name"]: row["tag"] for row in inserted}
    assert all(tags[device_name(VHOST, f"p{n}")] == (0 if n % 3 == 0 else 100 + n) for n in range(100))


def test_one_bad_port_in_a_batch_hurts_no_other(ovs: PrivateOvs, agent: PrivateAgent) -> None:
    plug(agent, "first", make_spec(200))
    taken = device_name(VHOST, "p7")
    ovs.vsctl("add-br", "br-theirs", "--", "set", "bridge", "br-theirs", "datapath_type=netdev")
    ovs.vsctl("add-port", "br-theirs", taken, "--", "set", "interface", taken, "type=internal")
    batch = [{"port_id": f"p{n}", "spec": make_spec(n)} for n in range(32)]
    status, body = agent.call("POST", "/v1/ports:batch", {"put": batch})
    bad = {r["port_id"]: r for r in body["results"] if r["status"] != 200}
    assert status == 200 and len(body["results"]) == 32
    assert set(bad) == {"p7"}
    assert (bad["p7"]["status"], bad["p7"]["error"]["code"]) == (409, "conflict")
    assert taken in bad["p7"]["error"]["detail"]
    assert agent.get("/v1/ports/p7")[0] == 404
    assert len(ports(ovs)) == 32
    assert ports(ovs, "br-theirs") == [taken]


def test_what_is_not_ours_survives_everything(ovs: PrivateOvs, agent: PrivateAgent) -> None:
    plug(agent, "p1", make_spec(1))
    ovs.vsctl("add-br", "br-theirs", "--", "set", "bridge", "br-theirs", "datapath_type=netdev")
    ovs.vsctl("add-port", "br-theirs", "t0", "--", "set", "interface", "t0", "type=internal")
    ovs.vsctl("add-port", "br-phys1", "t1", "tag=5", "--", "set", "interface", "t1", "type=internal")
    ovs.vsctl("set", "port", device_name(VHOST, "p1"), "external_ids:theirs=1")
    ovs.ofctl("add-flow", "br-phys1", "cookie=0x1,priority=7,in_port=99,actions=drop")
    ovs.ofctl("add-flow", "br-theirs", "cookie=0x2,priority=7,in_port=99,actions=drop")
    assert agent.call("POST", "/v1/reconcile", {})[0] == 200
    plug(agent, "p2", make_spec(2))
    plug(agent, "p1", make_spec(1, vlan_id=300))
    assert "theirs" in ovs.vsctl("get", "port", device_name(VHOST, "p1"), "external_ids")
    for port_id in ("p1", "p2"):
        assert agent.call("DELETE", f"/v1/ports/{port_id}")[0] == 204
    agent.call("POST", "/v1/reconcile", {})
    assert ports(ovs, "br-theirs") == ["t0"]
    assert ports(ovs, "br-phys1") == ["t1"], "a bridge with somebody's port stays"
    assert ovs.get("Port", "t1", "tag") == "5"
    assert "cookie=0x1" in ovs.ofctl("dump-flows", "br-phys1")
    assert "cookie=0x2" in ovs.ofctl("dump-flows", "br-theirs")


def test_a_controller_that_changes_ports_all_the_time(ovs: PrivateOvs, agent: PrivateAgent) -> None:
    """It adds and removes 25 at a time on a bridge of its own: ours come and go, and no notice is a drift."""
    ovs.vsctl("add-br", "br-theirs", "--", "set", "bridge", "br-theirs", "datapath_type=netdev")
    theirs = [f"t{number}" for number in range(25)]
    add = [word for name in theirs for word in _patch(name)]
    remove = [word for name in theirs for word in ("--", "del-port", name)]
    plug(agent, "stays", make_spec(0))
    is_over, turns = threading.Event(), []

    def change() -> None:
        while not is_over.is_set():
            for words in (add, remove):
                ovs.vsctl("--no-wait", *words[1:])
                turns.append(words)
                is_over.wait(0.5)

    with ThreadPoolExecutor(1, "controller") as threads:
        changing = threads.submit(change)
        try:
            for number in range(1, 9):
                until_plugged(agent, f"p{number}", make_spec(number))
                assert agent.call("DELETE", f"/v1/ports/p{number}")[0] == 204
        finally:
            is_over.set()
        changing.result()
    assert len(turns) >= 2 and planned(agent) == []
    assert ports(ovs) == [device_name(VHOST, "stays")] and ports(ovs, "br-theirs") == []

    def drifts() -> bool:
        return "stays" in str(agent.get("/v1/events?follow=false&after=0&kind=drift")[1])

    assert not drifts()
    ovs.vsctl("set", "port", device_name(VHOST, "stays"), "tag=7")
    wait_for(drifts, 30, "a change of a port of ours is one")


def _patch(name: str) -> list[str]:
    added = ["--", "add-port", "br-theirs", name]
    return [*added, "--", "set", "interface", name, "type=patch", f"options:peer=of-{name}"]


def test_a_bridge_that_is_not_ours_is_used_and_kept(ovs: PrivateOvs, agent: PrivateAgent) -> None:
    ovs.vsctl("add-br", "br-phys1", "--", "set", "bridge", "br-phys1", "datapath_type=netdev")
    status, error = agent.call("PUT", "/v1/ports/p1", make_spec(1))
    assert (status, error["code"]) == (409, "unsupported") and "fail_mode" in error["detail"]
    assert ports(ovs) == []
    plug(agent, "p1", make_spec(1, port_security={"enabled": False}))
    ovs.vsctl("set-fail-mode", "br-phys1", "secure")
    plug(agent, "p2", make_spec(2))
    assert agent.call("POST", "/v1/ports:batch", {"delete": ["p1", "p2"]})[0] == 200
    assert ovs.vsctl("list-br").split() == ["br-phys1"]


def test_drift_is_found_and_repaired_at_once(ovs: PrivateOvs, agent: PrivateAgent) -> None:
    plug(agent, "p1", make_spec(1))
    name = device_name(VHOST, "p1")
    ovs.vsctl("set", "port", name, "tag=7")
    wait_for(lambda: ovs.get("Port", name, "tag") == "100", 30, "the tag is put back")
    ovs.vsctl("set", "port", name, "vlan_mode=trunk")
    wait_for(lambda: ovs.get("Port", name, "vlan_mode") == "access", 30, "the mode is put back")
    ovs.vsctl("del-port", name)
    wait_for(lambda: name in ports(ovs), 30, "the port is put back")
    ovs.vsctl("set", "interface", name, "options:vhost-server-path=/tmp/elsewhere")
    path = agent.get("/v1/ports/p1")[1]["binding"]["socket_path"]
    wait_for(
        lambda: ovs.get("Interface", name, "options:vhost-server-path") == path,
        30,
        "the path is put back, by a new port",
    )
    ovs.vsctl("set-fail-mode", "br-phys1", "standalone")
    wait_for(lambda: ovs.vsctl("get-fail-mode", "br-phys1").strip() == "secure", 30, "secure again")
    wait_for(lambda: planned(agent) == [], 30, "nothing is left to do")


def test_marked_ports_without_an_intent(ovs: PrivateOvs, agent: PrivateAgent) -> None:
    """Those that the store does not know stay, unless somebody says that they may go."""
    plug(agent, "p1", make_spec(1))
    plug(agent, "p2", make_spec(2))
    agent.lose_store()
    assert len(ports(ovs)) == 2
    report = agent.call("POST", "/v1/reconcile", {})[1]
    assert report["orphans_kept"] == ["p1", "p2"] and report["changes"] == []
    plug(agent, "p1", make_spec(1))
    report = agent.call("POST", "/v1/reconcile", {"remove_orphans": True})[1]
    assert report["orphans_kept"] == []
    assert ports(ovs) == [device_name(VHOST, "p1")]


def test_pmd_cores_are_shown_and_set(ovs: PrivateOvs, agent: PrivateAgent) -> None:
    plug(agent, "p1", make_spec(1))
    status, state = agent.get("/v1/pmd")
    assert status == 200 and state["cpus"] == "1"
    assert [core["cpu"] for core in state["cores"]] == [1]
    assert state["cores"][0]["queues"][0]["port"] == device_name(VHOST, "p1")
    try:
        status, state = agent.call("PUT", "/v1/pmd", {"cpus": "0"})
        assert status == 200 and [core["cpu"] for core in state["cores"]] == [0]
        assert ovs.get("Open_vSwitch", ".", "other_config:pmd-cpu-mask") == "0x1"
        status, state = agent.call("PUT", "/v1/pmd", {"count": 1})
        assert status == 200 and state["cpus"] == "1"
        [chosen] = state["chosen"]
        assert (chosen["cpus"], chosen["numa_node"]) == ("1", 0) and chosen["reason"]
        assert agent.get("/v1/pmd")[1]["chosen"] == []
        for bad in (
            {"cpus": "0-1"},
            {"cpus": "77"},
            {"count": 2},
            {"count": 99},
            {},
            {"cpus": "1;0"},
        ):
            status, error = agent.call("PUT", "/v1/pmd", bad)
            assert (status, error["code"]) == (422, "invalid_request"), bad
        assert ovs.get("Open_vSwitch", ".", "other_config:pmd-cpu-mask") == "0x2"
    finally:
        ovs.vsctl("set", "Open_vSwitch", ".", "other_config:pmd-cpu-mask=0x2")


def test_the_datapath_log_is_made_quiet_if_asked(ovs: PrivateOvs) -> None:
    def level() -> str:
        lines = ovs.appctl("vlog/list").splitlines()
        return next(line.split()[3] for line in lines if line.startswith("dpif_netdev "))

    assert level() == "INFO"
    options = {"ovs": {"quiet_datapath_log": "true"}}
    with PrivateAgent(BASE / "agent", ovs, options):
        wait_for(lambda: level() == "WARN", 30, "quiet")
        ovs.kill_vswitchd()
        ovs.start_vswitchd()
        wait_for(lambda: level() == "WARN", 30, "quiet again after a restart")
    shutil.rmtree(BASE / "agent")


def test_every_kind_of_filter_reads_back_as_it_was_written(ovs: PrivateOvs, agent: PrivateAgent) -> None:
    """Else a look would find drift without end: OVS prints prefixes and addresses its own way."""
    kinds: list[list[dict[str, str]]] = [
        [{"ip": "10.1.2.128/25"}, {"ip": "10.1.2.129"}],
        [{"ip": "10.0.0.0/8"}, {"ip": "192.0.2.0/31"}],
        [{"ip": "2001:db8::/32"}, {"ip": "2001:db8:0:0:1::1"}, {"ip": "2001:db8:1::/127"}],
        [{"ip": "fe80::5054:ff:fe00:3"}, {"ip": "64:ff9b::10.0.0.1"}, {"ip": "0:0:1::/48"}],
        [{"ip": "10.0.0.9", "mac": "52:54:00:99:99:99"}, {"ip": "10.0.0.9"}],
    ]
    for number, addresses in enumerate(kinds):
        security = {"enabled": True, "allowed_addresses": addresses}
        plug(agent, f"k{number}", make_spec(number, port_security=security))
        assert planned(agent) == []
