"""Service ports on OVS: devices of the host, and internal ports.

A device of the host is a port of type system, and keeps its attributes. The userspace datapath opens it
by AF_PACKET. When a device is made again, the port is added again, for the new one
(``OvsInterface.other_ifindex``).

An internal port is a persistent tap, which vswitchd makes and deletes. In another namespace it goes on to
carry frames, but vswitchd can neither read nor change its attributes there, does not report that it was
deleted with its namespace (``netdev_linux_netnsid_is_remote`` in lib/netdev-linux.c), and after a restart
makes another in its own namespace.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

from netplugin.api.errors import Conflict
from netplugin.api.models import PortSpec
from netplugin.backend import Claim, Intent, claim_name
from netplugin.host.links import Links
from netplugin.host.ovs import OvsHost
from netplugin.service_devices import fit_device, refuse_enslaved, refuse_our_name

#: As DPDK's drivers of kernel devices take their names: net_af_packet0,iface=eth1.
_DEVICE_ARGUMENTS = ("iface", "rx_iface", "rx_iface_in", "tx_iface", "remote")


def refuse(ovs: OvsHost, spec: PortSpec, device: str) -> None:
    """Check the device of a service port. Raises: Conflict, InvalidRequest, HostError, OperationTimeout."""
    if spec.internal:
        refuse_our_name(device)
        return  # whether the name is free is looked at when the port is added
    refuse_enslaved(fit_device(device, spec.network.mtu, _uplinks(ovs), Links().get))


def claim(ovs: OvsHost, intent: Intent, taken: Mapping[Claim, str]) -> Claim:
    """Claim the device of a service port. Raises: Conflict if it is of another port."""
    (claimed,) = claim_name(intent, taken)
    row = ovs.view.port(claimed.key)
    if row is not None and (row.owner is None or row.owner[1] != intent.port_id):
        raise Conflict(
            f"device {claimed.key} is a port of bridge {row.bridge}, and not of {intent.port_id}",
            step="claim",
            fix=f"take it off: ovs-vsctl del-port {claimed.key}",
        )
    return claimed


def index_of(device: str) -> int:
    """The index of a device; 0 if there is none."""
    try:
        return socket.if_nametoindex(device)
    except OSError:
        return 0


def _uplinks(ovs: OvsHost) -> dict[str, str]:
    """The kernel devices that DPDK ports of OVS use."""
    found = {}
    for arguments in ovs.caught_up().devices("dpdk-devargs"):
        for argument in arguments.split(","):
            name, _, value = argument.partition("=")
            if name in _DEVICE_ARGUMENTS:
                found[value] = "a DPDK port of OVS"
    return found
