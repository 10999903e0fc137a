"""The counters of an OVS bridge by OpenFlow 1.4: those of its ports, and those of flows (pure).

A port's are in struct ofp_port_stats (OFPMP_PORT_STATS). What is special to a kind of device is in a property
of Intel's, a list of names and values, which OVS adds (``ofputil_append_ofp14_port_stats`` in lib/ofp-port.c,
``struct intel_port_custom_stats`` in include/openflow/intel-ext.h). vswitchd reads them from the device at
the request. Those of flows are as its revalidators last collected them, half a second to a second ago.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from netplugin.host import openflow_messages as m
from netplugin.host.flow import Flow
from netplugin.host.oxm import Malformed

_PORT_STATS = 4  # ofp_multipart_type
#: struct ofp_port_stats: length, number, seconds, nanoseconds; packets, bytes, dropped, errors, rx before tx.
_PORT = struct.Struct(">H2xIII8Q")
_VALUE = struct.Struct(">Q")
_MET = struct.Struct(">H30xQ")  # the length and the packets of ofp_flow_stats
_UNKNOWN = (1 << 64) - 1  # netdev_stats in lib/netdev.h


@dataclass(frozen=True, slots=True)
class PortStats:
    """The counters of one port; ``rx`` is what the bridge receives. ``age_s``: since the port was created.

    None: the device does not count that, or not now: of a vhost-user port all are those of the connection to
    the guest (``netdev_dpdk_vhost_get_stats`` in lib/netdev-dpdk.c, since OVS 3.0).
    """

    ofport: int
    age_s: float
    #: Those of ``CUSTOM`` that the device has and that are not 0.
    custom: Mapping[str, int]
    rx_packets: int | None
    tx_packets: int | None
    rx_bytes: int | None
    tx_bytes: int | None
    rx_dropped: int | None
    tx_dropped: int | None
    rx_errors: int | None
    tx_errors: int | None


@dataclass(frozen=True, slots=True)
class FlowStats:
    """A flow that packets have met."""

    flow: Flow
    packets: int
    age_s: float


#: What is read of the list of a device: ``netdev_dpdk_get_sw_custom_stats`` in lib/netdev-dpdk.c of OVS, and
#: of NICs ``eth_dev_stats_strings`` in lib/ethdev/rte_ethdev.c of DPDK.
CUSTOM = (
    *("ovs_tx_failure_drops", "ovs_tx_mtu_exceeded_drops", "ovs_tx_qos_drops", "ovs_rx_qos_drops"),
    *("ovs_tx_invalid_hwol_drops", "ovs_tx_retries", "rx_missed_errors", "rx_mbuf_allocation_errors"),
)
#: A list has the length of each name before it.
_NAMES = {name: bytes((len(name),)) + name.encode() for name in CUSTOM}


def request_port_stats(xid: int) -> bytes:
    """Ask for the counters of all ports."""
    return m.multipart(_PORT_STATS, xid, struct.pack(">I4x", m.ANY))


def read_port_stats(answers: Sequence[m.OpenFlowMessage], request: int) -> list[PortStats]:
    """The answer to ``request_port_stats`` with this transaction id. Raises: Malformed."""
    found = []
    for part in m.parts(answers, _PORT_STATS, [request], "counter"):
        for (_, number, seconds, nanoseconds, *counted), rest in m.entries(part, _PORT, 0, "counter"):
            age = seconds + nanoseconds / 1e9
            values = (None if value == _UNKNOWN else value for value in counted)
            found.append(PortStats(number & 0xFFFF, age, _custom(rest), *values))
    return found


def _custom(properties: bytes) -> dict[str, int]:
    """Raises: Malformed."""
    found = {}
    for name, listed in _NAMES.items():  # ten times as fast as to go through a list of 60
        at = properties.find(listed) + len(listed)
        if at < len(listed):
            continue
        if at + _VALUE.size > len(properties):
            raise Malformed("a counter without its value")
        if value := _VALUE.unpack_from(properties, at)[0]:
            found[name] = value
    return found


def read_flow_stats(answers: Sequence[m.OpenFlowMessage], requests: Collection[int]) -> list[FlowStats]:
    """The flows with packets of those that ``request_flows`` with these ids asks for. Raises: Malformed."""
    found: list[FlowStats] = []
    for part in m.parts(answers, m.FLOW_STATS, requests, "flow"):
        at = 0
        while at + m.STATS.size <= len(part):  # nearly all flows have met none, and are not taken apart
            length, packets = _MET.unpack_from(part, at)
            if length < m.STATS.size:
                raise Malformed("a part of a flow")
            if packets:
                found += _flows(part[at : at + length])
            at += length
        if at != len(part):
            raise Malformed("a flow that ends behind its message")
    return found


def _flows(part: bytes) -> Iterator[FlowStats]:
    for head, rest in m.entries(part, m.STATS, 0, "flow"):
        _, table, seconds, nanoseconds, priority, *options, cookie, packets, _ = head
        flow = Flow(cookie, priority, *m.read_rule(rest), table, tuple(options))
        yield FlowStats(flow, packets, seconds + nanoseconds / 1e9)
