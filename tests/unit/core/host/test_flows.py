"""Flows of a real bridge: written in bundles, read back, and looked at by ovs-ofctl."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

from netplugin.api.errors import BackendUnavailable, HostError, OperationTimeout
from netplugin.host.openflow import COOKIE_MARK, Flow
from netplugin.host.ovs import OvsHost
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import wait_for
from tests.unit.ovs import PATIENCE_S, bridge, port, soon

BRIDGE = "flows"
SHORT_S = 0.3
ONE, TWO, LEARNED = COOKIE_MARK | 1, COOKIE_MARK | 2, COOKIE_MARK | 1 << 40 | 2
BASE = Flow.make(COOKIE_MARK, 100, "in_port=LOCAL")
FIRST = Flow.make(ONE, 100, "in_port=1,ip,nw_src=10.0.0.0/24")
SECOND = Flow.make(TWO, 120, "in_port=2,udp,tp_dst=68", "drop")


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


def test_a_dump_is_of_all_or_of_one_owner(table: OvsHost) -> None:
    learned = Flow.make(LEARNED, 90, "in_port=3")
    table.flows.replace(BRIDGE, [], [BASE, FIRST, SECOND, learned], soon())
    cookies = lambda owner, without=0: {  # noqa: E731
        flow.cookie for flow in table.flows.dump(BRIDGE, owner, soon(), without)
    }
    assert cookies(None) == {COOKIE_MARK, ONE, TWO, LEARNED}
    assert cookies(ONE) == {COOKIE_MARK, ONE}
    assert cookies(TWO) == {COOKIE_MARK, TWO}
    assert cookies(None, 1 << 40) == {COOKIE_MARK, ONE, TWO}


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
    refused = Flow.make(TWO, 100, "in_port=2", "output:70000")
    with pytest.raises(HostError) as error:
        table.flows.replace(BRIDGE, [ONE], [SECOND, refused], soon())
    assert error.value.step == "openflow"
    assert _shown(switch) == before
    with pytest.raises(HostError, match="OFPBAC_BAD_OUT_GROUP"):  # vswitchd refuses it, not ovs-ofctl
        table.flows.replace(BRIDGE, [ONE], [SECOND, Flow.make(TWO, 1, "in_port=2", "group:5")], soon())
    assert _shown(switch) == before


def test_first_fragments_are_matched_until_the_bridge_goes(switch: PrivateOvs, table: OvsHost) -> None:
    assert not table.flows.matches_fragments(BRIDGE, soon())
    table.flows.match_fragments(BRIDGE, soon())
    assert table.flows.matches_fragments(BRIDGE, soon())
    assert "nx-match" in switch.ofctl("get-frags", _socket(switch))


def test_counters_have_the_names_of_ports(table: OvsHost) -> None:
    shown = table.flows.dump_ports(BRIDGE, soon())
    assert re.search(r'port +"flows-p": rx pkts=\d+', shown), shown


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


def test_without_vswitchd_the_error_says_so(switch: PrivateOvs, table: OvsHost) -> None:
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
