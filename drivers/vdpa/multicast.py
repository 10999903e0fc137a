"""Which NICs deliver to a relay's VF the multicast frames that its VM may need.

A relay does not know which groups its VM joins (IPv6 neighbour discovery, VRRP), so its VF must receive
all multicast frames. OVS enables promiscuous and all-multicast mode on each DPDK port
(``dpdk_eth_dev_init`` in lib/netdev-dpdk.c); the driver of the PF decides whether a VF may have it. The
functions named below are from Linux 6.18, drivers/net/ethernet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from drivers.vf.inventory import Inventory, Pf, Setting, Vf
from netplugin.api.models import Finding

#: PF drivers that deliver all multicast frames to trusted VFs only, with the source. To an untrusted
#: VF they report success and do nothing.
IF_TRUSTED: Mapping[str, str] = MappingProxyType(
    {
        "ice": "ice_vc_cfg_promiscuous_mode_msg, intel/ice/virt/virtchnl.c",
        "i40e": "i40e_vc_config_promiscuous_mode_msg, intel/i40e/i40e_virtchnl_pf.c",
        "ixgbe": "ixgbe_update_vf_xcast_mode, intel/ixgbe/ixgbe_sriov.c",
        "mlx5_core": "esw_update_vport_rx_mode, mellanox/mlx5/core/eswitch.c",
        "qede": "qed_iov_pre_update_vport, qlogic/qed/qed_sriov.c",
    }
)
#: PF drivers that deliver them to any VF. On bnxt_en, the VF asks the firmware whether or not it is
#: trusted; its driver requires trust only for promiscuous mode (``bnxt_promisc_ok``).
ALWAYS: Mapping[str, str] = MappingProxyType(
    {
        "igb": "igb_set_vf_promisc, intel/igb/igb_main.c",
        "bnxt_en": "bnxt_set_rx_mode, broadcom/bnxt/bnxt.c",
    }
)


#: PF drivers that may deliver frames of other VLANs to a promiscuous VF, which a trusted VF may be, with
#: the source. The VM would get such broadcast and multicast frames untagged. ixgbe does so on an X540 or
#: newer whose PF is promiscuous, before 7bb0fb7c63df ("ixgbe: fix unexpected VLAN Rx in promisc mode on
#: VF", Linux 5.18). ice does so before 4e7f0087b058 ("ice: Restore fix disabling RX VLAN filtering",
#: Linux 6.7) and, by its source, still in double VLAN mode, where ``ice_port_vlan_on`` keeps only the
#: inner filter. The host does not show whether a distribution's kernel has these fixes.
IGNORES_VLAN: Mapping[str, str] = MappingProxyType(
    {
        "ice": "ice_vc_cfg_promiscuous_mode_msg and ice_port_vlan_on, intel/ice/ice_vf_vsi_vlan_ops.c",
        "ixgbe": "ixgbe_update_vf_xcast_mode, intel/ixgbe/ixgbe_sriov.c",
    }
)


def needs_trust(pf: Pf, vf: Vf, vlan_id: int | None) -> bool:
    """Whether to trust a relay's VF: its driver requires trust, can set it, and still filters VLANs.

    A flat network has no VLAN to filter: the relay's flows drop tagged frames.
    """
    is_kept = vlan_id is None or pf.driver not in IGNORES_VLAN
    return pf.driver in IF_TRUSTED and _has_switch(vf) and is_kept


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


def multicast_findings(inventory: Inventory) -> list[Finding]:
    """Return one finding per NIC whose VFs may not receive multicast."""
    found = []
    for pf in inventory.pfs.values():
        vfs = [vf for vf in inventory.vfs.values() if vf.pf == pf.address and vf.attributes]
        is_settable = pf.driver in IF_TRUSTED and all(map(_has_switch, vfs))
        if pf.driver in ALWAYS or (is_settable and pf.driver not in IGNORES_VLAN):
            continue
        why, instead = "is not known to give them to VFs", ""
        if is_settable:
            why = "gives them to trusted VFs alone, and such a VF may get frames of other VLANs"
            instead = "ask for vf.trusted if its driver keeps VFs to their VLAN (docs/nics.md), "
        elif pf.driver in IF_TRUSTED:
            why = "gives them to trusted VFs alone and has no switch for that here"
        found.append(
            Finding(
                id=f"vf-multicast-{pf.address}",
                status="warn",
                found=f"a relay on {pf.name} may lose the multicast frames that its VM should get, "
                f"and with them IPv6 and VRRP: {pf.driver or 'its driver'} {why}",
                expected="a VF in OVS gets all multicast frames of its network",
                fix=f"try IPv6 through a port of the backend vdpa on {pf.name}; if it does not work, "
                f"{instead}use the backends sriov or dpdkvhostuser there, or another NIC",
            )
        )
    return found


def _has_switch(vf: Vf) -> bool:
    return vf.attributes is not None and vf.attributes.trusted is not None
