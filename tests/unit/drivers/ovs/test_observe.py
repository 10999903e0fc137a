"""What is read of a real Open vSwitch: rows and flows of some ports or of the whole host."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from drivers.ovs import sockets
from drivers.ovs.filters import bridge_flows, port_cookie
from netplugin.api.errors import BackendUnavailable, HostError, OperationTimeout
from netplugin.host.flow import COOKIE_MARK, Flow
from netplugin.host.links import Links
from tests.lab.processes import wait_for
from tests.unit.drivers.ovs.conftest import BRIDGE, Ports, filter_of, vhost
from tests.unit.ovs import PATIENCE_S, bridge, port, soon

#: Time enough for a busy machine to begin: with none at all, nothing is begun.
SHORT_S = 1.0


def test_an_empty_host(ports: Ports) -> None:
    seen = ports.seen()
    assert (seen.rows, seen.flows, seen.bridges, seen.qos) == ({}, {}, {}, ())


def test_ports_in_scope_are_read_and_the_others_counted(ports: Ports) -> None:
    ports.plug(vhost("p1"), vhost("p2"), vhost("p3"))
    some, whole = ports.seen("p1", "nowhere"), ports.seen()
    assert set(some.rows) == set(some.flows) == {"p1"} and set(whole.rows) == {"p1", "p2", "p3"}
    assert some.rows["p1"] == whole.rows["p1"] and some.flows["p1"] == whole.flows["p1"]
    assert {flow.cookie for flow in some.flows["p1"]} == {port_cookie("p1")}
    assert (some.bridges[BRIDGE].neighbours, whole.bridges[BRIDGE].neighbours) == (2, 0)
    assert some.bridges[BRIDGE].ours and some.bridges[BRIDGE].mark == "net1"


def test_some_ports_and_the_whole_host_are_read_the_same(ports: Ports) -> None:
    names = [f"p{n}" for n in range(9)]
    ports.plug(*(vhost(name) for name in names))
    assert (
        ports.seen(*names).flows
        == ports.seen().flows
        == {name: flows for one in names for name, flows in ports.seen(one).flows.items()}
    )


def test_the_directory_of_a_port_whose_row_is_gone_is_found_by_its_claim(
    ports: Ports, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent was killed after the row of a port was deleted, and before its directory was."""
    path = sockets.new_path(ports.ovs.settings, "p1")
    directory = Path(path).parent
    directory.mkdir(parents=True)
    try:
        assert ports.seen().sockets.own == {}
        monkeypatch.setattr(ports.ovs, "claimed", lambda kind: {"p1": (path, {})})
        assert ports.seen().sockets.own == ports.seen("p1").sockets.own == {"p1": (str(directory),)}
    finally:
        directory.rmdir()


def test_flows_that_were_read_with_the_changes_are_not_read_again(
    ports: Ports, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports.plug(vhost("p1"), vhost("p2"))
    read = dict(ports.applier.read)
    scope = ports.reader.scope(["p1", "p2"], soon())
    bridges = ports.reader.bridges(scope)
    dumped = ports.reader.seen(scope, bridges)
    assert dumped.flows["p1"] and dumped.bridges[BRIDGE].flows is not None
    asked: list[object] = []
    dump = ports.ovs.flows.dump

    def noted(*arguments: Any) -> list[Flow]:
        asked.append(arguments)
        return dump(*arguments)

    monkeypatch.setattr(ports.ovs.flows, "dump", noted)
    assert ports.reader.seen(scope, bridges, read=read) == dumped and asked == []
    ports.apply(filter_of(vhost("p1")))
    assert ports.applier.read[BRIDGE].keys() == {port_cookie("p1"), COOKIE_MARK}, "of the last changes only"
    ports.reader.seen(scope, bridges, read=ports.applier.read)
    assert len(asked) == 1, "not all of these flows were read"
    whole = ports.reader.scope(None, soon())
    ports.reader.seen(whole, bridges, read=read)
    assert len(asked) == 2, "a look at the whole host reads all"


def test_flows_that_belong_to_no_port_are_strays_of_the_whole_host(ports: Ports) -> None:
    ports.plug(vhost("p1"))
    stray, theirs = Flow.make(port_cookie("gone"), 100, "in_port=5"), Flow.make(7, 100, "in_port=6")
    ports.ovs.flows.replace(BRIDGE, [], [stray, theirs], soon())
    whole = ports.seen().bridges[BRIDGE]
    assert whole.stray_cookies == {port_cookie("gone")} and whole.flows_of_others == 1
    some = ports.seen("p1").bridges[BRIDGE]
    assert some.stray_cookies == frozenset() and some.matches_fragments is None


def test_flows_of_a_port_that_others_delete_are_missed(ports: Ports) -> None:
    ports.plug(vhost("p1"))
    assert ports.seen("p1").flows["p1"]
    ports.switch.ofctl("-O", "OpenFlow14", "del-flows", f"unix:{ports.switch.rundir / BRIDGE}.mgmt")
    assert ports.seen("p1").flows["p1"] == frozenset()


def test_ports_of_others_are_distinguished(ports: Ports) -> None:
    ports.plug(vhost("p1"))
    assert not ports.seen().bridges[BRIDGE].used_by_others, "the internal port is its own"
    uplink = port(BRIDGE, "npu-x", external_ids={"netplugin-uplink": "net1"})
    ports.ovs.db.write([uplink, port(BRIDGE, "service"), port(BRIDGE, "stranger")], soon())
    found = ports.seen().bridges[BRIDGE]
    assert set(found.uplinks) == {"npu-x"} and found.used_by_others
    assert [p.name for p in found.services] == ["service"]
    assert [p.name for p in found.unmanaged] == ["stranger"]
    interfaces = [p.interface for name in ("npu-x", "service") if (p := ports.ovs.view.port(name))]
    assert found.desired_flows == bridge_flows(i.ofport for i in interfaces if i and i.ofport)


def test_a_bridge_with_an_address_is_used_by_others(ports: Ports, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dummy switch makes no device that could have one."""
    ports.plug(vhost("p1"))

    def unread(self: Links) -> dict[str, tuple[str, ...]]:
        raise HostError("no netlink", step="read-addresses")

    monkeypatch.setattr(Links, "addresses", lambda self: {BRIDGE: ("192.0.2.1/24",)})
    assert ports.seen().bridges[BRIDGE].used_by_others
    monkeypatch.setattr(Links, "addresses", lambda self: {"eth0": ("192.0.2.1/24",)})
    assert not ports.seen().bridges[BRIDGE].used_by_others
    monkeypatch.setattr(Links, "addresses", unread)
    assert ports.seen().bridges[BRIDGE].used_by_others, "it may have one"


def test_a_bridge_of_others_is_known_if_a_network_is_mapped_to_it(ports: Ports) -> None:
    ports.ovs.db.write([bridge(BRIDGE), bridge("br-else")], soon())
    seen = ports.seen()
    assert set(seen.bridges) == {BRIDGE} and not seen.bridges[BRIDGE].ours
    assert seen.bridges[BRIDGE].desired_flows == frozenset()


def test_a_name_that_another_port_has_is_taken(ports: Ports) -> None:
    desired = vhost("p1").name
    ports.ovs.db.write([bridge(BRIDGE), port(BRIDGE, desired), port(BRIDGE, "other")], soon())
    others = {BRIDGE: None, "other": None}
    assert ports.seen("p1").names == ports.seen().names == {desired: None, **others}
    assert ports.seen("p2").names == others


def test_a_silent_vswitchd_hides_flows_of_ports_but_not_of_the_host(ports: Ports) -> None:
    ports.plug(vhost("p1"))
    ports.switch.pause_vswitchd()
    try:
        begin = time.monotonic()
        seen = ports.seen("p1", deadline=begin + SHORT_S)
        assert set(seen.rows) == {"p1"} and seen.bridges[BRIDGE].flows is None
        with pytest.raises(OperationTimeout):
            ports.seen(deadline=time.monotonic() + SHORT_S)
        assert time.monotonic() - begin < PATIENCE_S / 2
    finally:
        ports.switch.resume_vswitchd()
    assert ports.seen("p1").flows["p1"]


def test_rows_that_may_be_about_to_change_are_not_read(ports: Ports) -> None:
    ports.switch.ovsdb.pause()
    try:
        with pytest.raises(OperationTimeout):
            ports.ovs.db.write([bridge("late")], time.monotonic() + SHORT_S)
        with pytest.raises(OperationTimeout, match="outcome unknown"):
            ports.seen()
    finally:
        ports.switch.ovsdb.resume()
    wait_for(lambda: ports.ovs.view.bridge("late"), PATIENCE_S, "the late write")

    def seen() -> bool:
        # The notice of the row comes before the answer that ends the uncertainty.
        try:
            ports.seen()
        except OperationTimeout:
            return False
        return True

    wait_for(seen, PATIENCE_S, "the answer of the late write")
    ports.switch.kill_ovsdb()
    try:
        wait_for(lambda: not ports.ovs.db.online, PATIENCE_S, "the connection is lost")
        with pytest.raises(BackendUnavailable):
            ports.seen()
    finally:
        ports.switch.start_ovsdb()
