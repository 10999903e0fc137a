"""Which NICs give the VF of a relay the multicast frames that its VM may be in the group of.

A relay does not know which groups its VM joins (those of IPv6 neighbour discovery, of VRRP), so that
its VF must get the frames of all. OVS asks for that, and for every other frame, of each DPDK port
(``dpdk_eth_dev_init`` in lib/netdev-dpdk.c); the driver of the PF decides. The functions are those of
Linux 6.18, below drivers/net/ethernet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from drivers.vf.inventory import Inventory, Pf, Setting, Vf
from netplugin.models import Finding

#: Drivers of PFs that give all multicast frames to a trusted VF alone, and where: to another VF they
#: say yes and do nothing.
IF_TRUSTED: Mapping[str, str] = MappingProxyType(
    {
        "ice": "ice_vc_cfg_promiscuous_mode_msg, intel/ice/virt/virtchnl.c",
        "i40e": "i40e_vc_config_promiscuous_mode_msg, intel/i40e/i40e_virtchnl_pf.c",
        "ixgbe": "ixgbe_update_vf_xcast_mode, intel/ixgbe/ixgbe_sriov.c",
        "mlx5_core": "esw_update_vport_rx_mode, mellanox/mlx5/core/eswitch.c",
        "qede": "qed_iov_pre_update_vport, qlogic/qed/qed_sriov.c",
    }
)
#: Those that give them to any VF. With bnxt_en the VF asks the firmware, trusted or not: only for
#: other VMs' frames does its driver look at that (``bnxt_promisc_ok``).
ALWAYS: Mapping[str, str] = MappingProxyType(
    {
        "igb": "igb_set_vf_promisc, intel/igb/igb_main.c",
        "bnxt_en": "bnxt_set_rx_mode, broadcom/bnxt/bnxt.c",
    }
)


#: Drivers that let a promiscuous VF, which a trusted one may be, get frames of other VLANs than its
#: own, and where: broadcast and multicast would come to the VM without a tag. ixgbe on an X540 or newer
#: whose PF is promiscuous, before 7bb0fb7c63df ("ixgbe: fix unexpected VLAN Rx in promisc mode on VF",
#: Linux 5.18); ice before 4e7f0087b058 ("ice: Restore fix disabling RX VLAN filtering", Linux 6.7), and
#: by its source in double VLAN mode since, where ``ice_port_vlan_on`` keeps the inner filter and not
#: the outer one. Whether a distribution's kernel has these is not to be seen on the host.
IGNORES_VLAN: Mapping[str, str] = MappingProxyType(
    {
        "ice": "ice_vc_cfg_promiscuous_mode_msg and ice_port_vlan_on, intel/ice/ice_vf_vsi_vlan_ops.c",
        "ixgbe": "ixgbe_update_vf_xcast_mode, intel/ixgbe/ixgbe_sriov.c",
    }
)


def needs_trust(pf: Pf, vf: Vf, vlan_id: int | None) -> bool:
    """Whether a relay makes this VF trusted: its NIC asks for that, can be told, and keeps it to its VLAN.

    On a flat network there is no VLAN to keep to: the relay's flows stop what comes with a tag.
    """
    is_kept = vlan_id is None or pf.driver not in IGNORES_VLAN
    return pf.driver in IF_TRUSTED and _has_switch(vf) and is_kept


def lost_by(pf: Pf, vf: Vf, vlan_id: int | None) -> str | None:
    """What a relay lacks whose NIC refused to trust its VF; None if it did not."""
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
    """One for each NIC through whose VFs multicast may not come."""
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
                id=f"vf-multicast-{pf.address}", status="warn",
                found=f"a relay on {pf.name} may lose the multicast frames that its VM should get, "
                f"and with them IPv6 and VRRP: {pf.driver or 'its driver'} {why}",
                expected="a VF in OVS gets all multicast frames of its network",
                fix=f"try IPv6 through a port of the backend vdpa on {pf.name}; if it does not work, "
                f"{instead}use the backends sriov or dpdkvhostuser there, or another NIC",
            )
        )  # fmt: skip
    return found


def _has_switch(vf: Vf) -> bool:
    return vf.attributes is not None and vf.attributes.trusted is not None
