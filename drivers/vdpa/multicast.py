"""Which NICs deliver to a relay's VF the multicast frames that its VM may need.

A relay does not know which groups its VM joins (IPv6 neighbour discovery, VRRP), so its VF must receive
all multicast frames. OVS enables promiscuous and all-multicast mode on each DPDK port
(``dpdk_eth_dev_init`` in lib/netdev-dpdk.c); the driver of the PF decides whether a VF may have it
(``VfModel.trust_for_multicast``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from drivers.vf.inventory import Inventory, Pf, Setting, Vf
from netplugin.api.models import Finding
from netplugin.host.nic_models import model_of


def needs_trust(pf: Pf, vf: Vf, vlan_id: int | None) -> bool:
    """Whether to trust a relay's VF: its driver requires trust, can set it, and still filters VLANs.

    A flat network has no VLAN to filter: the relay's flows drop tagged frames.
    """
    able = model_of(pf.driver).vf
    is_kept = vlan_id is None or able.keeps_to_vlan
    return bool(able.trust_for_multicast) and _has_switch(vf) and is_kept


def lost_by(pf: Pf, vf: Vf, vlan_id: int | None) -> str | None:
    """Return what the VM may lose because the NIC refused to trust the VF; None if it did not refuse."""
    have = vf.attributes
    if have is None or have.trusted or not needs_trust(pf, vf, vlan_id):
        return None
    if Setting.of("trust", replace(have, trusted=True)) not in vf.unsupported:
        return None
    return (
        f"{pf.name} refuses to trust VF {vf.number}, and {pf.driver} gives multicast frames to trusted "
        "VFs alone: the VM may lose them, and with them IPv6 and VRRP"
    )


def multicast_findings(inventory: Inventory) -> Iterator[Finding]:
    """Yield one finding per NIC whose VFs may not receive multicast."""
    for pf in inventory.pfs.values():
        vfs = [vf for vf in inventory.vfs.values() if vf.pf == pf.address and vf.attributes]
        able = model_of(pf.driver).vf
        is_settable = able.trust_for_multicast and all(map(_has_switch, vfs))
        if able.trust_for_multicast is False or (is_settable and able.keeps_to_vlan):
            continue
        why, instead = "is not known to give them to VFs", ""
        if is_settable:
            why = "gives them to trusted VFs alone, and such a VF may get frames of other VLANs"
            instead = "ask for vf.trusted if its driver keeps VFs to their VLAN (docs/nics.md), "
        elif able.trust_for_multicast:
            why = "gives them to trusted VFs alone and has no switch for that here"
        yield Finding(
            id=f"vf-multicast-{pf.address}",
            status="warn",
            found=f"a relay on {pf.name} may lose the multicast frames that its VM should get, "
            f"and with them IPv6 and VRRP: {pf.driver or 'its driver'} {why}",
            expected="a VF in OVS gets all multicast frames of its network",
            fix=f"try IPv6 through a port of the backend vdpa on {pf.name}; if it does not work, "
            f"{instead}use the backends sriov or dpdkvhostuser there, or another NIC",
        )


def _has_switch(vf: Vf) -> bool:
    return vf.attributes is not None and vf.attributes.trusted is not None
