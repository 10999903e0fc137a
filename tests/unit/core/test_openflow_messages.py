"""OpenFlow as bytes: ovs-ofctl reads what we write, and nothing that comes is taken for what it is not."""

from __future__ import annotations

import re
import struct
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netplugin.host import openflow_messages as m
from netplugin.host.announcement import announcement
from netplugin.host.flow import Flow
from netplugin.host.flow_actions import DROP, NORMAL, output
from netplugin.host.oxm import BY_NAME, Malformed, parse_word
from tests.lab.processes import run
from tests.unit.core.openflow_flows import messages, of_filters, of_tunnels, statistics


def _by_ofctl(directory: Path, data: bytes) -> list[str]:
    """One line for each message, as ovs-ofctl prints it."""
    file = directory / "messages"
    file.write_bytes(data)
    return [line for line in run(["ovs-ofctl", "ofp-parse", file]).splitlines() if line.startswith("OFPT_")]


def test_ovs_ofctl_reads_the_flows_that_we_write(tmp_path: Path) -> None:
    flows = sorted(of_filters() | of_tunnels(), key=str)
    assert len(flows) > 200
    lines = _by_ofctl(tmp_path, b"".join(m.message(14, n, m.add(flow)) for n, flow in enumerate(flows)))
    assert len(lines) == len(flows)
    for line, flow in zip(lines, flows, strict=True):
        shown = re.search(
            r"ADD (?:table:(\d+) )?priority=(\d+)(?:,(\S+))? cookie:0x(\w+) actions=(\S+)$", line
        )
        assert shown, line
        table, priority, match, cookie, actions = shown.groups()
        assert (int(table or 0), int(priority), int(cookie, 16)) == (flow.table, flow.priority, flow.cookie)
        named = (match or "").replace("tp_dst", "tcp_dst" if "tcp6" in (match or "") else "tp_dst")
        assert Flow.make(0, 0, named).fields == flow.fields, line
        assert (actions == "drop", actions == "NORMAL") == (flow.actions == DROP, flow.actions == NORMAL)


def test_ovs_ofctl_reads_the_other_messages_that_we_write(tmp_path: Path) -> None:
    flow = Flow.make(5, 7, "table=3,in_port=2", output(9))
    sent = [
        m.hello(1),
        *m.bundle([m.delete(5), m.delete_strict(flow), m.add(flow)]),
        m.commit(),
        m.request_flows(3, 0x6E70, 0xFFFF),
        m.match_fragments(4),
        m.message(m.GET_CONFIG_REQUEST, 5),
        m.barrier(6),
        m.request_ports(7),
        m.set_port(8, m.OfPortState(5, bytes.fromhex("020000000001"), False), shut=True),
        m.set_port(9, m.OfPortState(5, bytes.fromhex("020000000001"), True), shut=False),
        m.packet_out(10, 7, announcement("52:54:00:00:00:01")),
    ]
    file = tmp_path / "messages"
    file.write_bytes(b"".join(sent))
    shown = run(["ovs-ofctl", "ofp-parse", file])
    assert "error" not in shown and "0x05" in shown
    for text in (
        "bundle_id=0x1 type=OPEN_REQUEST flags=atomic ordered",
        "bundle_id=0x1 type=COMMIT_REQUEST flags=atomic ordered",
        "DEL table:255 priority=0 cookie:0x5/0xffffffffffffffff actions=drop",
        "DEL_STRICT table:3 priority=7,in_port=2 cookie:0x5/0xffffffffffffffff actions=drop",
        "ADD table:3 priority=7,in_port=2 cookie:0x5 actions=output:9",
        "OFPST_FLOW request",
        "frags=nx-match miss_send_len=0",
        "OFPT_GET_CONFIG_REQUEST",
        "OFPT_BARRIER_REQUEST",
        "OFPST_PORT_DESC request",
        "port: 5: addr:02:00:00:00:00:01\n     config: NO_FWD\n     mask:   NO_FWD",
        "port: 5: addr:02:00:00:00:00:01\n     config: 0\n     mask:   NO_FWD",
        "in_port=7 actions=TABLE data_len=60",
        "arp_spa=0.0.0.0,arp_tpa=0.0.0.0,arp_op=3,arp_sha=52:54:00:00:00:01,arp_tha=52:54:00:00:00:01",
    ):
        assert text in shown, shown


def test_ports_are_read_in_parts_and_nothing_else_is_taken_for_them() -> None:
    one = struct.pack(">IH2x6s2x16sII", 3, 48, b"\2\0\0\0\0\3", b"p3", 1 << 5, 0) + bytes(8)
    other = struct.pack(">IH2x6s2x16sII", 4, 40, b"\2\0\0\0\0\4", b"p4", 0, 0)
    first, last = (m.OpenFlowMessage(19, 1, struct.pack(">HH4x", 13, more) + one + other) for more in (1, 0))
    found = [(port.ofport, port.is_shut) for port in m.read_ports([first, last], 1)]
    assert found == [(3, True), (4, False)] * 2
    whole = last.body
    for cut in (*range(1, 8), *range(9, 56), *range(57, len(whole))):
        with pytest.raises(Malformed):
            m.read_ports([m.OpenFlowMessage(19, 1, whole[:cut])], 1)
    for wrong in (m.OpenFlowMessage(18, 1, whole), m.OpenFlowMessage(19, 1, b"\0\1" + whole[2:]), first):
        with pytest.raises(Malformed):
            m.read_ports([wrong], 1)


def test_errors_have_the_names_that_ovs_gives_them(tmp_path: Path) -> None:
    codes = [(kind, code) for kind in (1, 2, 3, 4, 5, 17) for code in range(9)]
    bodies = [struct.pack(">HH", *code) for code in codes]
    lines = _by_ofctl(tmp_path, b"".join(m.message(m.ERROR, n, body) for n, body in enumerate(bodies)))
    assert [line.split()[-1] for line in lines] == [
        m.error_name(m.OpenFlowMessage(m.ERROR, 1, b)) for b in bodies
    ]
    assert m.error_name(m.OpenFlowMessage(m.ERROR, 1, b"\0\2\0\x09data")) == "OFPBAC_BAD_OUT_GROUP"
    for unknown in (b"\0\2\0\x70", b"\xff\xff\0\1"):
        assert m.error_name(m.OpenFlowMessage(m.ERROR, 1, unknown)).startswith("error type ")
    with pytest.raises(Malformed):
        m.error_name(m.OpenFlowMessage(m.ERROR, 1, b"\0\2\0"))


# -- matches ------------------------------------------------------------------------------------------


def test_words_that_mean_the_same_are_the_same_match() -> None:
    for one, other in (
        ("in_port=1,ip,nw_src=10.0.0.0/24", "nw_src=10.0.0.77/24,in_port=1,dl_type=0x800"),
        ("in_port=LOCAL", "in_port=65534"),
        ("dl_src=52:54:00:00:00:0a", "dl_src=52:54:00:00:00:0A/ff:ff:ff:ff:ff:ff"),
        ("ip,nw_src=10.0.0.1", "ip,nw_src=10.0.0.1/32"),
        ("ipv6,ipv6_src=2001:db8::/64", "ipv6,ipv6_src=2001:db8:0::1/64"),
        ("ip,nw_src=0.0.0.0/0", "ip"),
        ("tun_id=5001", "tun_id=0x1389"),
        ("dl_vlan=7", "vlan_tci=0x1007/0x1fff"),
    ):
        assert Flow.make(1, 2, one) == Flow.make(1, 2, other), one
    assert Flow.make(1, 2, "vlan_tci=0/0x1fff") != Flow.make(1, 2, "vlan_tci=0/0x0fff")
    assert Flow.make(1, 2, "table=1,in_port=1").identity != Flow.make(1, 2, "in_port=1").identity


@pytest.mark.parametrize(
    "word",
    "tcp in_port in_port=eth0 in_port=-1 dl_src=52:54 nw_src=10.0.0 nw_src=10.0.0.0/33 ipv6_src=10.0.0.1 "
    "icmp_type=256 dl_vlan=4096 dl_vlan=-1 tun_id=x vlan_tci=0x10000/1 "
    "vlan_tci=0x4000 vlan_tci=0x1007/0x2fff".split(),
)
def test_what_is_not_in_the_vocabulary_is_no_flow(word: str) -> None:
    with pytest.raises(Malformed, match=re.escape(word.partition("=")[0])):
        Flow.make(1, 2, f"in_port=1,{word}")


#: Ports as OVS numbers them, and the reserved ones: what is between has no words of its own (OFPP_MAX).
PORTS = st.integers(0, 0xFEFF) | st.integers(0xFFFFFF00, 0xFFFFFFFF)


@st.composite
def matches(draw: st.DrawFn) -> bytes:
    """Fields with any values and masks; a port has no mask (ovs-fields(7))."""
    fields = draw(st.lists(st.sampled_from(sorted(BY_NAME.keys() - {"dl_vlan"})), unique=True, max_size=8))
    tlvs = []
    for field in (BY_NAME[name] for name in fields):
        if field.name == "in_port":
            tlvs.append(field.tlv(draw(PORTS)))
            continue
        numbers = st.integers(0, 0x1FFF if field.name == "vlan_tci" else 256**field.size - 1)
        tlvs.append(field.tlv(draw(numbers), draw(st.none() | numbers)))
    return b"".join(sorted(tlvs))


@st.composite
def flows(draw: st.DrawFn) -> Flow:
    numbers = [draw(st.integers(0, 256**size - 1)) for size in (8, 2, 1)]
    options = tuple(draw(st.integers(0, 0xFFFF)) for _ in range(4))
    actions = draw(st.sampled_from((DROP, NORMAL, output(5), output(5) + output(0xFFFE))))
    return Flow(numbers[0], numbers[1], draw(matches()), actions, numbers[2], options)  # type: ignore[arg-type]


@given(st.lists(flows(), max_size=5), st.integers(1, 99))
def test_what_is_written_is_read_however_it_comes(made: list[Flow], size: int) -> None:
    first, last = (messages(statistics(*made, more=more), size) for more in (True, False))
    assert m.read_flows([*first, *last], [1]) == made * 2
    with pytest.raises(Malformed):
        m.read_flows(first, [1])


def test_fields_are_read_in_any_order_and_other_instructions_are_no_actions() -> None:
    flow = Flow.make(1, 2, "in_port=1,udp,tp_dst=68", NORMAL)
    tlvs = [parse_word("tp_dst=68")[0], *parse_word("udp"), parse_word("in_port=1")[0]]
    shuffled = replace(flow, fields=b"".join(tlvs))
    assert m.read_flows(messages(statistics(shuffled), 50), [1]) == [flow]
    other = statistics(flow).replace(b"\0\4\0\x18\0\0\0\0\0\0\0\x10", b"\0\3\0\x18\0\0\0\0\0\0\0\x10")
    (read,) = m.read_flows(messages(other, 50), [1])
    assert read.identity == flow.identity and read != flow, "OFPIT_WRITE_ACTIONS"


# -- what is not OpenFlow -----------------------------------------------------------------------------


@given(st.binary(max_size=200), st.integers(1, 50))
def test_garbage_is_no_message(data: bytes, size: int) -> None:
    try:
        for message in messages(data, size):
            assert len(message.body) <= len(data)
    except Malformed:
        pass


@given(st.binary(max_size=200))
def test_garbage_is_no_answer(body: bytes) -> None:
    for kind in (m.ERROR, m.GET_CONFIG_REPLY, 19):
        answer = m.OpenFlowMessage(kind, 1, body)
        for read in (m.fragments_matched, m.error_name, m.read_changes):
            with suppress(Malformed):
                read(answer)
        with suppress(Malformed):
            m.read_flows([answer], [1])
        with suppress(Malformed):
            m.read_counts([answer], [1])


@given(st.lists(flows(), min_size=1, max_size=2), st.data())
def test_a_damaged_answer_is_read_or_refused(made: list[Flow], data: st.DataObject) -> None:
    (message,) = messages(statistics(*made), 1000)
    body = bytearray(message.body)
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(body)))
    for damaged in (bytes(body), bytes(body[:cut])):
        try:
            found = m.read_flows([replace(message, body=damaged)], [1])
        except Malformed:
            continue
        assert all(str(flow) for flow in found)


def test_a_message_that_is_too_long_is_not_sent() -> None:
    with pytest.raises(Malformed):
        m.message(14, 1, bytes(0xFFFF))
