"""API messages that configure VPP to route between pairs of ports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ipaddress import IPv4Address
from typing import Any

from netplugin.acceptance.vnf.contract import VnfPort

#: Interface addresses (RFC 5737). Each port has a /30: VPP the first host, the far end the second.
_ADDRESSES = IPv4Address("192.0.2.0")
_ADMIN_UP = 1  # IF_STATUS_API_FLAG_ADMIN_UP in vnet/interface_types.api
_STATIC = 1  # IP_API_NEIGHBOR_FLAG_STATIC in vnet/ip-neighbor/ip_neighbor.api
_LABELS = 16  # of fib_path in vnet/fib/fib_types.api


def routing(
    ports: Sequence[VnfPort], interfaces: Sequence[int]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the messages with their fields (pure); ``interfaces``: VPP's interface index per port.

    Each port has its own table with one route to the far end of its partner. The addresses of the test
    frames need not be known, and no ARP is needed.
    """
    for number, (index, port) in enumerate(zip(interfaces, ports, strict=True)):
        table = {"table_id": number + 1, "name": f"port{number}"}
        yield "ip_table_add_del", {"is_add": True, "table": table}
        yield "sw_interface_set_table", {"sw_if_index": index, "vrf_id": number + 1}
        yield "sw_interface_set_mtu", {"sw_if_index": index, "mtu": [port.mtu, 0, 0, 0]}
        yield "sw_interface_set_flags", {"sw_if_index": index, "flags": _ADMIN_UP}
        prefix = f"{_ADDRESSES + 4 * number + 1}/30"
        address = {"sw_if_index": index, "is_add": True, "prefix": prefix}
        yield "sw_interface_add_del_address", address
        neighbour = {
            "sw_if_index": index, "flags": _STATIC, "mac_address": port.peer_mac,
            "ip_address": _far(number),
        }  # fmt: skip
        yield "ip_neighbor_add_del", {"is_add": True, "neighbor": neighbour}
    for number in range(len(ports)):
        partner = number ^ 1
        path = {
            "sw_if_index": interfaces[partner], "weight": 1,
            "nh": {"address": {"ip4": _far(partner)}},
            # A fixed-length array, even if empty.
            "label_stack": [{}] * _LABELS,
        }  # fmt: skip
        route = {"table_id": number + 1, "prefix": "0.0.0.0/0", "n_paths": 1, "paths": [path]}
        yield "ip_route_add_del", {"is_add": True, "route": route}


def _far(number: int) -> str:
    return str(_ADDRESSES + 4 * number + 2)
