"""The counters of ports, with one vocabulary for all backends: ``GET /v1/ports/{id}/counters``."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from netplugin.api.fields import PortId, Value


class Traffic(StrEnum):
    """What a NIC or an uplink has carried; ``from_vm`` is what the host receives from it."""

    PACKETS_FROM_VM = "packets_from_vm"
    PACKETS_TO_VM = "packets_to_vm"
    BYTES_FROM_VM = "bytes_from_vm"
    BYTES_TO_VM = "bytes_to_vm"
    #: Attempts to put packets into a full ring of the guest (``ovs_tx_retries``); these are not lost yet.
    RING_RETRIES = "ring_retries"


class Place(StrEnum):
    """Where packets are dropped. docs/operating/monitoring.md has the source of each, for each backend.

    The counters of OVS are those of ``netdev_dpdk_get_sw_custom_stats`` in lib/netdev-dpdk.c and DPDK's basic
    ones (``eth_dev_stats_strings`` in lib/ethdev/rte_ethdev.c). Those of the kernel are columns of
    /proc/net/dev (``dev_seq_printf_stats`` in net/core/net-procfs.c), and those of qdiscs (``struct
    gnet_stats_queue``) and of VFs (IFLA_VF_STATS in include/uapi/linux/if_link.h).
    """

    #: The guest has no free descriptor in its receive ring.
    GUEST_RING_FULL = "guest_ring_full"
    #: Larger than the MTU of the port or uplink that the frame was to leave by.
    TOO_LARGE = "too_large"
    #: Offloads that the guest requests and the way out does not have, or headers that do not fit them.
    BAD_OFFLOAD = "bad_offload"
    #: The rate limits, ``qos.egress_kbps`` and ``qos.ingress_kbps``.
    POLICER_FROM_VM = "policer_from_vm"
    POLICER_TO_VM = "policer_to_vm"
    #: Port security, by its rules.
    FILTER_VLAN_TAG = "filter_vlan_tag"
    FILTER_SWITCH_PROTOCOL = "filter_switch_protocol"
    FILTER_IPV6_HEADER = "filter_ipv6_header"
    FILTER_ROUTER = "filter_router"
    FILTER_DHCP_SERVER = "filter_dhcp_server"
    FILTER_ARP = "filter_arp"
    FILTER_NEIGHBOUR = "filter_neighbour"
    FILTER_SOURCE_MAC = "filter_source_mac"
    FILTER_SOURCE_IP = "filter_source_ip"
    #: Any rule of the guard of a Linux bridge, which has one counter.
    FILTER_GUARD = "filter_guard"
    #: The port is closed: its VM runs on another host, or has not arrived.
    NOT_FORWARDED = "not_forwarded"
    #: By the device of a port, without a reason.
    DEVICE_FROM_VM = "device_from_vm"
    DEVICE_TO_VM = "device_to_vm"
    #: By the NIC, of what the VF sends and receives.
    VF_FROM_VM = "vf_from_vm"
    VF_TO_VM = "vf_to_vm"
    #: The NIC had no free descriptor: its PMD thread, or the kernel, did not take packets in time.
    MISSED = "missed"
    #: OVS has no buffer for what the NIC received.
    NO_BUFFER = "no_buffer"
    #: Damaged frames, or frames that the device could not send.
    RECEIVE_ERROR = "receive_error"
    SEND_ERROR = "send_error"
    #: The device has dropped it on the way out, such as for a full queue.
    SEND_DROPPED = "send_dropped"


class Drop(Value):
    """The packets dropped at one place, counted since ``since``."""

    place: Place
    packets: int
    since: datetime


class Counted(Value):
    """Packets and bytes, counted since ``since``, and the places of drops; a place without drops is left out.

    Of an uplink, ``from_vm`` is what the host receives, and ``to_vm`` what it sends.
    """

    since: datetime
    packets_from_vm: int = 0
    packets_to_vm: int = 0
    bytes_from_vm: int = 0
    bytes_to_vm: int = 0
    ring_retries: int = 0
    drops: tuple[Drop, ...] = ()


class UplinkCounters(Value):
    """The counters of a device by which frames of a port reach its physical network."""

    device: str
    counters: Counted


class PortCounters(Value):
    """The counters of a port and of its uplinks, as they were at ``read_at``; None: none were read yet."""

    port_id: PortId
    backend: str
    read_at: datetime | None = None
    counters: Counted | None = None
    uplinks: tuple[UplinkCounters, ...] = ()
