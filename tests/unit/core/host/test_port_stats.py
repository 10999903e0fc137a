"""Counters of ports and flows, as the bytes that OVS sends."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netplugin.host import openflow_messages as m
from netplugin.host.oxm import Malformed
from netplugin.host.port_stats import CUSTOM, read_flow_stats, read_port_stats, request_port_stats
from tests.lab.processes import run
from tests.unit.core.openflow_flows import of_filters, statistics

INTEL, CUSTOM_STATS, EXPERIMENTER = 0xAA01, 3, 0xFFFF
#: OVS has it for what a device does not count.
UNKNOWN = (1 << 64) - 1


def custom(counters: dict[str, int]) -> bytes:
    """``struct intel_port_custom_stats`` in include/openflow/intel-ext.h of OVS."""
    listed = b"".join(bytes((len(n),)) + n.encode() + v.to_bytes(8) for n, v in counters.items())
    body = (
        struct.pack(">HHII2xH", EXPERIMENTER, 16 + len(listed), INTEL, CUSTOM_STATS, len(counters)) + listed
    )
    return body + bytes(-len(body) % 8)


def entry(number: int, counted: list[int], properties: bytes = b"") -> bytes:
    length = 80 + len(properties)
    return struct.pack(">H2xIII8Q", length, number, 12, 500_000_000, *counted) + properties


def reply(*entries: bytes, xid: int = 1) -> m.OpenFlowMessage:
    return m.OpenFlowMessage(19, xid, struct.pack(">HH4x", 4, 0) + b"".join(entries))


def test_the_counters_of_ports_are_read() -> None:
    others = {f"rx_q{n}_good_packets": n for n in range(50)}
    properties = custom({**others, "ovs_tx_qos_drops": 7, "ovs_tx_retries": 0, "rx_missed_errors": 1 << 40})
    entries = entry(3, [1, 2, 3, 4, 5, 6, 7, UNKNOWN], properties), entry(0xFFFFFFFE, [0] * 8)
    found = read_port_stats([reply(*entries)], 1)
    assert [each.ofport for each in found] == [3, 0xFFFE]
    assert (found[0].age_s, found[0].rx_packets, found[0].rx_errors, found[0].tx_errors) == (12.5, 1, 7, None)
    assert found[0].custom == {"ovs_tx_qos_drops": 7, "rx_missed_errors": 1 << 40}


def test_ovs_ofctl_reads_the_request(tmp_path: Path) -> None:
    file = tmp_path / "messages"
    file.write_bytes(request_port_stats(5))
    assert "OFPST_PORT request (OF1.4) (xid=0x5): port_no=ANY" in run(["ovs-ofctl", "ofp-parse", file])


def test_flows_without_packets_are_left_out() -> None:
    flows = sorted(of_filters(), key=str)[:6]
    counts = [0, 5, 0, 0, 9, 0]
    data = b""
    for flow, count in zip(flows, counts, strict=True):
        one = bytearray(statistics(flow)[16:])
        struct.pack_into(">Q", one, 32, count)
        data += one
    answer = m.OpenFlowMessage(19, 2, struct.pack(">HH4x", 1, 0) + data)
    found = read_flow_stats([answer], [2])
    assert [(each.flow.identity, each.packets) for each in found] == [
        (flows[1].identity, 5),
        (flows[4].identity, 9),
    ]


@given(st.binary(max_size=200))
def test_nothing_else_is_taken_for_flows(data: bytes) -> None:
    for body in (data, bytes(len(data))):
        try:
            read_flow_stats([m.OpenFlowMessage(19, 2, struct.pack(">HH4x", 1, 0) + body)], [2])
        except Malformed:
            continue


@given(st.binary(max_size=300), st.sampled_from(CUSTOM))
def test_nothing_else_is_taken_for_counters(data: bytes, name: str) -> None:
    for body in (data, entry(1, [0] * 8, custom({name: 1}))[: len(data)]):
        try:
            read_port_stats([reply(body)], 1)
        except Malformed:
            continue


@pytest.mark.parametrize("cut", [1, 8])
def test_a_counter_that_is_cut_off_is_malformed(cut: int) -> None:
    whole = custom({CUSTOM[0]: 1})[: 16 + 1 + len(CUSTOM[0]) + 8 - cut]
    with pytest.raises(Malformed):
        read_port_stats([reply(entry(1, [0] * 8, whole))], 1)
