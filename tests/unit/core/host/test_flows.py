"""Flows of a real bridge: written in bundles, read back, and looked at by ovs-ofctl."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from drivers.ovs.filters import port_cookie, port_flows
from drivers.ovs.tunnels import network_cookie, network_flows, stale, with_learned
from netplugin.api.errors import BackendUnavailable, HostError, OperationTimeout
from netplugin.api.models import NetworkSpec
from netplugin.backend import Overlay
from netplugin.host.flow import COOKIE_MARK, Flow
from netplugin.host.flow_actions import DROP, output
from netplugin.host.openflow import OpenFlow
from netplugin.host.openflow_messages import Changed
from netplugin.host.ovs import OvsHost
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import PATIENCE, wait_for
from tests.unit.core.openflow_flows import of_filters, of_tunnels, spec_of
from tests.unit.ovs import PATIENCE_S, bridge, port, soon

BRIDGE = "flows"
SHORT_S = 0.3
ONE, TWO, LEARNED = COOKIE_MARK | 1, COOKIE_MARK | 2, COOKIE_MARK | 1 << 40 | 2
BASE = Flow.make(COOKIE_MARK, 100, "in_port=LOCAL")
FIRST = Flow.make(ONE, 100, "in_port=1,ip,nw_src=10.0.0.0/24")
SECOND = Flow.make(TWO, 120, "in_port=2,udp,tp_dst=68", DROP)


@pytest.fixture
def table(switch: PrivateOvs, ovs: OvsHost) -> Iterator[OvsHost]:
    """A bridge with the flow of another program."""
    ovs.db.write([bridge(BRIDGE), port(BRIDGE, "flows-p")], soon())
    switch.ofctl("-O", "OpenFlow14", "add-flow", _socket(switch), "cookie=7,priority=1,actions=drop")
    yield ovs
    switch.vsctl("del-br", BRIDGE)


def _socket(switch: PrivateOvs, name: str = BRIDGE) -> str:
    return f"unix:{switch.rundir / name}.mgmt"


def _shown(switch: PrivateOvs) -> set[str]:
    """The flows that are not the stranger's, by ovs-ofctl."""
    text = switch.ofctl("-O", "OpenFlow14", "--no-stats", "--no-names", "dump-flows", _socket(switch))
    lines = {line.strip() for line in text.splitlines() if "cookie=" in line}
    assert "cookie=0x7, priority=1 actions=drop" in lines, "the stranger's flow is untouched"
    return {line for line in lines if not line.startswith("cookie=0x7,")}


def test_a_bundle_is_read_back(switch: PrivateOvs, table: OvsHost) -> None:
    table.flows.replace(BRIDGE, [], [BASE, FIRST, SECOND], soon())
    assert _shown(switch) == {
        "cookie=0x6e70000000000000, priority=100,in_port=LOCAL actions=NORMAL",
        "cookie=0x6e70000000000001, priority=100,ip,in_port=1,nw_src=10.0.0.0/24 actions=NORMAL",
        "cookie=0x6e70000000000002, priority=120,udp,in_port=2,tp_dst=68 actions=drop",
    }
    assert {*table.flows.dump(BRIDGE, None, soon())} == {BASE, FIRST, SECOND}


def test_a_dump_is_of_all_or_of_some_cookies(table: OvsHost) -> None:
    learned = Flow.make(LEARNED, 90, "in_port=3")
    table.flows.replace(BRIDGE, [], [BASE, FIRST, SECOND, learned], soon())
    found = lambda cookies, without=0: sorted(  # noqa: E731
        flow.cookie for flow in table.flows.dump(BRIDGE, cookies, soon(), without)
    )
    assert found(None) == [COOKIE_MARK, ONE, TWO, LEARNED]
    assert found([ONE]) == [ONE]
    assert found([TWO, COOKIE_MARK, TWO]) == [COOKIE_MARK, TWO]
    assert found([ONE | TWO]) == found([]) == []
    assert found(None, 1 << 40) == [COOKIE_MARK, ONE, TWO]


def test_what_is_replaced_is_of_its_cookies_alone(switch: PrivateOvs, table: OvsHost) -> None:
    table.flows.replace(BRIDGE, [], [FIRST, SECOND], soon())
    changed = Flow.make(ONE, 100, "in_port=9")
    table.flows.replace(BRIDGE, [ONE], [changed], soon())
    assert {*table.flows.dump(BRIDGE, None, soon())} == {changed, SECOND}
    table.flows.replace(BRIDGE, [], [], soon(), gone=[SECOND])
    assert {*table.flows.dump(BRIDGE, None, soon())} == {changed}
    table.flows.replace(BRIDGE, [ONE, TWO], [], soon())
    assert _shown(switch) == set()


def test_a_bundle_with_a_flow_that_is_refused_changes_nothing(switch: PrivateOvs, table: OvsHost) -> None:
    table.flows.replace(BRIDGE, [], [FIRST], soon())
    before = _shown(switch)
    nowhere, without_ip = output(70000), "in_port=2,tp_dst=68"
    for match, actions, name in (
        ("in_port=2", nowhere, "OFPBAC_BAD_OUT_PORT"),
        (without_ip, DROP, "OFPBMC_BAD_PREREQ"),
        ("in_port=2", b"\0\x16\0\x08\0\0\0\x05", "OFPBAC_BAD_OUT_GROUP"),
    ):
        with pytest.raises(HostError, match=rf"refused the flow .*priority=9,{match}: {name}") as error:
            table.flows.replace(BRIDGE, [ONE], [SECOND, Flow.make(TWO, 9, match, actions)], soon())
        assert error.value.step == "openflow"
        assert _shown(switch) == before
    table.flows.replace(BRIDGE, [ONE], [SECOND], soon())
    assert {*table.flows.dump(BRIDGE, None, soon())} == {SECOND}, "the connection goes on"


def test_first_fragments_are_matched_until_the_bridge_goes(switch: PrivateOvs, table: OvsHost) -> None:
    assert not table.flows.settings(BRIDGE, soon()).matches_fragments
    table.flows.match_fragments(BRIDGE, soon())
    assert table.flows.settings(BRIDGE, soon()).matches_fragments
    assert "nx-match" in switch.ofctl("get-frags", _socket(switch))


def test_no_bridge_and_a_stopped_vswitchd(switch: PrivateOvs, table: OvsHost) -> None:
    with pytest.raises(HostError, match=r"nowhere\.mgmt"):
        table.flows.dump("nowhere", None, soon())
    switch.pause_vswitchd()
    try:
        begin = time.monotonic()
        with pytest.raises(OperationTimeout):
            table.flows.dump(BRIDGE, None, begin + SHORT_S)
        assert SHORT_S <= time.monotonic() - begin < PATIENCE_S / 2
    finally:
        switch.resume_vswitchd()
    assert table.flows.dump(BRIDGE, None, soon()) == []


def test_without_vswitchd_the_error_names_it(switch: PrivateOvs, table: OvsHost) -> None:
    switch.kill_vswitchd()
    try:
        wait_for(lambda: not table.vswitchd.alive(), PATIENCE_S, "its end is noticed")
        with pytest.raises(BackendUnavailable, match="ovs-vswitchd does not run") as error:
            table.flows.replace(BRIDGE, [ONE], [FIRST], soon())
        assert error.value.fix, "and not only what ovs-ofctl says"
    finally:
        switch.start_vswitchd()


def test_a_secure_bridge_is_empty_after_a_restart(switch: PrivateOvs, table: OvsHost) -> None:
    table.flows.replace(BRIDGE, [], [FIRST], soon())
    switch.vsctl("add-br", "open")
    switch.kill_vswitchd()
    switch.start_vswitchd()
    assert table.flows.dump(BRIDGE, None, soon()) == []
    shown = switch.ofctl("-O", "OpenFlow14", "--no-stats", "dump-flows", _socket(switch))
    assert "actions=NORMAL" not in shown, "nothing is open until its filter is back"
    standalone = switch.ofctl("-O", "OpenFlow14", "--no-stats", "dump-flows", _socket(switch, "open"))
    assert "actions=NORMAL" in standalone, "that can be seen"


# -- the kept connection ------------------------------------------------------------------------------


def test_all_that_the_product_writes_is_read_back(switch: PrivateOvs, table: OvsHost) -> None:
    desired = of_filters() | of_tunnels()
    table.flows.replace(BRIDGE, [], desired, soon())
    assert {*table.flows.dump(BRIDGE, None, soon())} == desired
    shown = _shown(switch)
    assert len(shown) == len(desired)
    cookies = {flow.cookie for flow in desired}
    table.flows.replace(BRIDGE, cookies, [], soon())
    assert _shown(switch) == set()
    # And the same flows as ovs-ofctl writes them.
    lines = "\n".join(line.replace(", ", ",").replace(" actions=", ",actions=") for line in shown)
    file = switch.directory / "shown.flows"
    file.write_text(lines)
    switch.ofctl("-O", "OpenFlow14", "--bundle", "add-flows", _socket(switch), file)
    assert {*table.flows.dump(BRIDGE, cookies, soon())} == desired


def test_flows_with_our_cookie_that_are_no_flows_of_ours_differ_from_them(
    switch: PrivateOvs, table: OvsHost
) -> None:
    plain = "in_port=1,priority=100,"
    others = [
        "idle_timeout=9,actions=NORMAL",
        "send_flow_rem,actions=NORMAL",
        "importance=3,actions=NORMAL",
        "ct_state=+trk,ip,actions=NORMAL",
        "tcp,tcp_flags=+syn,actions=NORMAL",
        "reg3=7/0xf,metadata=5,actions=NORMAL",
        "actions=goto_table:5",
        "actions=write_actions(output:1)",
        "actions=load:1->NXM_NX_REG0[],NORMAL",
        "actions=group:4",
        "actions=resubmit(1,3),controller(max_len=9)",
    ]
    switch.ofctl("-O", "OpenFlow14", "add-group", _socket(switch), "group_id=4,type=all")
    ours = Flow.make(ONE, 100, "in_port=1")
    for other in others:
        table.flows.replace(BRIDGE, [ONE], [], soon())
        line = f"cookie={ONE:#x},{plain}{other}"
        switch.ofctl("-O", "OpenFlow14", "add-flow", _socket(switch), line)
        (found,) = table.flows.dump(BRIDGE, [ONE], soon())
        assert found != ours and ours.fields in found.fields, other
        table.flows.replace(BRIDGE, [ONE], [ours], soon())
        assert table.flows.dump(BRIDGE, [ONE], soon()) == [ours], other


def test_a_bridge_that_is_made_again_and_many_that_are_deleted(switch: PrivateOvs, table: OvsHost) -> None:
    open_files = lambda: len(list(Path("/proc/self/fd").iterdir()))  # noqa: E731
    table.flows.replace(BRIDGE, [], [FIRST], soon())
    before = open_files()
    for _ in range(3):
        switch.vsctl("del-br", BRIDGE)
        switch.vsctl("add-br", BRIDGE, "--", "set-fail-mode", BRIDGE, "secure")
        assert table.flows.dump(BRIDGE, None, soon()) == []
        table.flows.replace(BRIDGE, [], [FIRST], soon())
        assert table.flows.dump(BRIDGE, None, soon()) == [FIRST]
    assert open_files() == before
    for number in range(5):
        switch.vsctl("add-br", f"more{number}")
        assert table.flows.dump(f"more{number}", None, soon()) == []
        switch.vsctl("del-br", f"more{number}")
    assert open_files() <= before + 1, "a connection to a bridge that is gone is closed"
    table.flows.close()
    assert open_files() < before
    assert table.flows.dump(BRIDGE, None, soon()) == [FIRST], "as after a restart"


def test_a_second_writer_and_many_threads(switch: PrivateOvs, table: OvsHost) -> None:
    """Another connection changes flows between; and what one thread reads is never another's."""
    other = OpenFlow(switch.sockets)
    wrong: list[object] = []

    def work(number: int) -> None:
        flows = other if number % 2 else table.flows
        cookie = COOKIE_MARK | number
        for port_number in range(1, 40):
            mine = [Flow.make(cookie, 50 + n, f"in_port={number}") for n in range(port_number % 5)]
            flows.replace(BRIDGE, [cookie], mine, soon())
            found = flows.dump(BRIDGE, [cookie], soon())
            if sorted(found, key=str) != mine:
                wrong.append((number, found))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4 * PATIENCE_S)
    assert wrong == [] and not any(thread.is_alive() for thread in threads)
    assert len(table.flows.dump(BRIDGE, None, soon())) == 8 * (39 % 5)
    other.close()


def test_a_bridge_that_is_limited_to_older_versions(switch: PrivateOvs, table: OvsHost) -> None:
    switch.vsctl("set", "bridge", BRIDGE, "protocols=OpenFlow10,OpenFlow13")
    try:
        with pytest.raises(HostError, match="protocols OpenFlow14"):
            table.flows.dump(BRIDGE, None, soon())
        switch.vsctl("add", "bridge", BRIDGE, "protocols", "OpenFlow14")
        assert table.flows.dump(BRIDGE, None, soon()) == []
    finally:
        switch.vsctl("clear", "bridge", BRIDGE, "protocols")


def test_a_large_bundle_and_its_flows_are_one_exchange_each(table: OvsHost) -> None:
    """More than sockets hold, in many parts of an answer."""
    many = {Flow.make(ONE, 100, f"in_port=1,ip,nw_src=10.{n >> 8}.{n & 255}.0/24") for n in range(9000)}
    table.flows.replace(BRIDGE, [], [*many, SECOND], soon())
    assert {*table.flows.dump(BRIDGE, [ONE], soon())} == many
    assert table.flows.dump(BRIDGE, [TWO], soon()) == [SECOND]


def test_the_most_peers_of_a_network_fit_into_one_flow(table: OvsHost) -> None:
    """A message of OpenFlow has 65,535 bytes at most."""
    peers = tuple(f"fd00:1:2:3:4:5:{n >> 8:x}:{n & 255:x}" for n in range(1, 1025))
    overlay = Overlay("wide", NetworkSpec(type="vxlan", vni=5001, peers=peers), 7)
    desired = network_flows(overlay, "fd00::1", 1, 2)
    assert max(len(flow.actions) for flow in desired) > 1 << 15
    table.flows.replace(BRIDGE, [], desired, soon())
    assert {*table.flows.dump(BRIDGE, None, soon())} == desired


def test_what_is_read_with_a_commit_is_what_is_there_after_it(table: OvsHost) -> None:
    cookies = [ONE, TWO, COOKIE_MARK]
    assert table.flows.replace(BRIDGE, [], [BASE, FIRST], soon(), read=cookies) == [FIRST, BASE]
    found = table.flows.replace(BRIDGE, [ONE], [SECOND], soon(), read=cookies)
    assert {*found} == {SECOND, BASE} == {*table.flows.dump(BRIDGE, cookies, soon())}
    many = [Flow.make(ONE, 9, f"in_port={number}", DROP) for number in range(1, 3000)]
    found = table.flows.replace(BRIDGE, [], many, soon(), read=[ONE])
    assert {*found} == {*many} and len(found) == len(many), "in several parts"
    assert table.flows.replace(BRIDGE, [ONE], [], soon(), read=[ONE]) == []


@pytest.mark.long
def test_a_thousand_ports_with_64_addresses_each_are_read_within_a_look(table: OvsHost) -> None:
    """206 flows a port, as the check of a whole host reads them (``Scope`` in drivers/ovs/observe.py)."""
    desired: set[Flow] = set()
    for number in range(1000):
        ips = [{"ip": f"10.{number >> 8}.{number & 255}.{n}"} for n in range(1, 65)]
        flows = port_flows(f"p{number}", number + 1, spec_of(allowed_addresses=ips))
        table.flows.replace(BRIDGE, [port_cookie(f"p{number}")], flows, soon())
        desired |= flows
    found = table.flows.dump(BRIDGE, None, time.monotonic() + 15 * PATIENCE)
    assert len(found) == 206_000 and {*found} == desired
    one = port_cookie("p500")
    assert {*table.flows.dump(BRIDGE, [one], soon())} == {flow for flow in desired if flow.cookie == one}


def test_what_vswitchd_learns_is_read_and_leads_to_a_host(switch: PrivateOvs, table: OvsHost) -> None:
    for local_ip, peer in (("10.9.0.1", "10.9.0.2"), ("fd00::1", "fd00::2")):
        overlay = Overlay("blue", NetworkSpec(type="vxlan", vni=5001, peers=(local_ip, peer)), 7)
        desired = network_flows(overlay, local_ip, 1, 0xFFFE)
        table.flows.replace(BRIDGE, [], desired, soon())
        source = f"tun_{'ipv6_' if ':' in peer else ''}src={peer}"
        frame = f"tun_id=0x1389,{source},in_port=1,dl_src=52:54:00:00:00:0a,dl_dst=52:54:00:00:00:0b"
        switch.appctl("ofproto/trace", BRIDGE, frame, "-generate")
        own, of_learned = with_learned(network_cookie("blue"))
        (learned,) = table.flows.dump(BRIDGE, [of_learned], soon())
        match = "dl_dst=52:54:00:00:00:0a,table=10,tun_id=0x1389"
        assert learned.identity == Flow.make(of_learned, learned.priority, match).identity
        assert stale([learned], overlay, local_ip, 1) == []
        assert stale([learned], overlay, local_ip, 2) == [learned], "another tunnel port"
        alone = Overlay("blue", NetworkSpec(type="vxlan", vni=5001, peers=(local_ip,)), 7)
        assert stale([learned], alone, local_ip, 1) == [learned]
        table.flows.replace(BRIDGE, [], [], soon(), gone=[learned])
        assert {*table.flows.dump(BRIDGE, [own, of_learned], soon())} == desired
        table.flows.replace(BRIDGE, [own], [], soon())


def test_what_others_change_is_noticed_and_what_we_change_is_not(switch: PrivateOvs, table: OvsHost) -> None:
    noticed: list[Changed] = []
    watching = OpenFlow(switch.sockets)
    watching.changed = lambda bridge, changed: noticed.append(changed)
    with closing(watching):
        watching.compare_settings(BRIDGE, soon())

        def after(*command: str) -> set[Changed]:
            """What is noticed of a command of ovs-ofctl, and of changes of our own before it."""
            noticed.clear()
            watching.replace(BRIDGE, [COOKIE_MARK], [FIRST, SECOND], soon())
            watching.match_fragments(BRIDGE, soon())
            for on in (False, True):
                watching.forward(BRIDGE, [1], on, soon())
            watching.compare_settings(BRIDGE, soon())
            assert not {*noticed} & {Changed.OURS, Changed.OTHERS}, "these are ours"
            program, *arguments = command
            switch.ofctl("-O", "OpenFlow14", program, _socket(switch), *arguments)
            watching.compare_settings(BRIDGE, soon())
            return {*noticed} - {Changed.NOTHING}

        assert after("add-flow", "cookie=7,priority=2,in_port=3,actions=drop") == {Changed.OTHERS}
        assert after("add-flow", f"cookie={ONE:#x},priority=3,actions=NORMAL") == {Changed.OURS}
        assert after("del-flows", f"cookie={ONE:#x}/-1") == {Changed.OURS}
        assert after("set-frags", "drop") == {Changed.OURS}
        assert after("mod-port", "1", "no-forward") == {Changed.OURS}
        learned = f"cookie={LEARNED:#x},table=10,hard_timeout=9,in_port=5,actions=drop"
        assert after("add-flow", learned) == set(), "vswitchd makes such flows by itself"
        switch.ofctl("-O", "OpenFlow14", "add-flow", _socket(switch), "cookie=7,priority=1,actions=drop")
