"""Which NICs give the VF of a relay the multicast frames that its VM may be in the group of.

A relay does not know which groups its VM joins (those of IPv6 neighbour discovery, of VRRP), so that
its VF must get the frames of all. OVS asks for that, and for every other frame, of each DPDK port
(``dpdk_eth_dev_init`` in lib/netdev-dpdk.c); the driver of the PF decides. The functions are those of
Linux 6.18, below drivers/net/ethernet.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from drivers.vf.inventory import Inventory, Pf, Vf
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


def needs_trust(pf: Pf, vf: Vf) -> bool:
    """Whether a relay makes this VF trusted: its NIC asks for that, and can be told."""
    return pf.driver in IF_TRUSTED and _has_switch(vf)


def multicast_findings(inventory: Inventory) -> list[Finding]:
    """One for each NIC through whose VFs multicast may not come."""
    found = []
    for pf in inventory.pfs.values():
        vfs = [vf for vf in inventory.vfs.values() if vf.pf == pf.address and vf.attributes]
        if pf.driver in ALWAYS or (pf.driver in IF_TRUSTED and all(map(_has_switch, vfs))):
            continue
        why = (
            "gives them to trusted VFs alone and has no switch for that here"
            if pf.driver in IF_TRUSTED
            else "is not known to give them to VFs"
        )
        found.append(
            Finding(
                id=f"vf-multicast-{pf.address}", status="warn",
                found=f"a relay on {pf.name} may lose the multicast frames that its VM should get, "
                f"and with them IPv6 and VRRP: {pf.driver or 'its driver'} {why}",
                expected="a VF in OVS gets all multicast frames of its network",
                fix=f"try IPv6 through a port of the backend vdpa on {pf.name}; if it does not work, "
                "use the backends sriov or dpdkvhostuser there, or another NIC",
            )
        )  # fmt: skip
    return found


def _has_switch(vf: Vf) -> bool:
    return vf.attributes is not None and vf.attributes.trusted is not None
