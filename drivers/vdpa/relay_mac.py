"""Which MAC the VF of a relay has on its NIC, and whether OVS must open the VF again for another one. Pure.

The switch of a NIC delivers by MAC, so a VF has the VM's MAC only while the VM runs here: a VF that is
prepared for a VM would take the frames that others on this NIC send to it, and the VF that it left would keep
them.
"""

from __future__ import annotations

from drivers.ovs.model import OvsObservation
from drivers.ovs.ports import VhostPort
from drivers.vdpa.multicast import needs_trust
from drivers.vf.inventory import Pf, Vf
from drivers.vf.memory import provisional_mac
from netplugin.api.models import PortSpec
from netplugin.backend import Intent
from netplugin.host.nic_models import model_of


def opens_again(pf: Pf, vf: Vf, spec: PortSpec) -> bool:
    """Whether OVS must open a relay's VF again when its MAC changes, as it must unless this is known.

    A trusted VF may set its MAC itself (``ixgbe_set_vf_mac_addr``), and does when its DPDK port restarts: to
    the one with which it was opened (``eth_dev_mac_restore`` in DPDK's lib/ethdev/rte_ethdev.c).
    """
    is_trusted = spec.vf.trusted or needs_trust(pf, vf, spec.network.vlan_id)
    return is_trusted or not model_of(pf.driver).vf.takes_mac_at_once


def mac_of(intent: Intent) -> str:
    """Return the MAC that the VF of a relay should have."""
    assert intent.spec is not None
    return provisional_mac(intent.spec.mac) if intent.closed else intent.spec.mac


def opened_with(intent: Intent, pf: Pf, vf: Vf) -> str:
    """Return ``RelayVfPort.opened_with`` of a relay."""
    assert intent.spec is not None
    return mac_of(intent) if intent.closed and opens_again(pf, vf, intent.spec) else ""


def mac_for_now(intent: Intent, vf: Vf, desired: VhostPort, seen: OvsObservation) -> str:
    """Return the MAC that a relay's VF gets now: another one not before OVS has closed the VF, if it must."""
    row = seen.vf_ports.get(intent.port_id)
    assert vf.attributes is not None
    is_to_be_closed = row is not None and desired.vf_port is not None and desired.vf_port.must_be_remade(row)
    return vf.attributes.mac if is_to_be_closed else mac_of(intent)
