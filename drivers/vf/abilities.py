"""Capabilities of a VF by the kernel driver of its PF: queues, guest VLANs, VLAN protocol. Pure.

The kernel reports none of these, so the tables are taken from the driver sources (Linux 6.18,
drivers/net/ethernet). docs/nics.md lists them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from drivers.vf.inventory import Pf
from netplugin.api.errors import Unsupported
from netplugin.api.models import PortSpec

#: The API's maximum (``PortSpec.queues``), for drivers without a limit or with a higher one.
_UNBOUNDED = 128
#: The maximum number of queue pairs of a VF, by the driver of its PF. A VF may get fewer: the NIC divides
#: the remaining queues among its VFs, and the guest driver decides how many of them it opens.
QUEUES: Mapping[str, int] = MappingProxyType(
    {
        # For the 82576; the i350 has one (igb_get_max_rss_queues, intel/igb/igb_main.c).
        "igb": 2,
        # See ``max_queues``.
        "ixgbe": 4,
        # I40E_MAX_VF_QUEUES, intel/i40e/i40e.h: 4 by default, more if the VF driver requests them.
        "i40e": 16,
        # ICE_MAX_RSS_QS_PER_VF, intel/ice/ice_vf_lib.h: fewer if there are many VFs (ice_set_per_vf_res).
        "ice": 16,
        # MLX5E_MAX_NUM_CHANNELS is 256 (mellanox/mlx5/core/en.h): one per interrupt vector of the VF.
        "mlx5_core": _UNBOUNDED,
        # An equal share of the rings the PF leaves (bnxt_hwrm_func_vf_resc_cfg, broadcom/bnxt/bnxt_sriov.c).
        "bnxt_en": _UNBOUNDED,
        # qed_sriov_enable, qlogic/qed/qed_sriov.c.
        "qede": 16,
        # MAX_PORT_QSETS, chelsio/cxgb4vf/adapter.h.
        "cxgb4": 8,
    }
)
_INTEL = "drivers/net/ethernet/intel"
#: How each PF driver treats the VLANs that a guest requests on a VF without a VLAN, with the source.
#: VF trunks are refused on drivers that are not listed, because their behaviour is unknown.
TAGS: Mapping[str, str] = MappingProxyType(
    {
        "igb": f"takes any VLAN that such a VM asks for (igb_set_vf_vlan_msg, {_INTEL}/igb/igb_main.c)",
        "ixgbe": "takes any VLAN that such a VM asks for "
        f"(ixgbe_set_vf_vlan_msg, {_INTEL}/ixgbe/ixgbe_sriov.c)",
        "i40e": "takes up to 16 VLANs that such a VM asks for, more if it is trusted "
        f"(i40e_vc_add_vlan_msg, {_INTEL}/i40e/i40e_virtchnl_pf.c)",
        "ice": "takes up to 8 VLANs that such a VM asks for, more if it is trusted "
        f"(ice_vc_process_vlan_msg, {_INTEL}/ice)",
        "mlx5_core": "looks at the tags that such a VM sends not at all (esw_acl_ingress_lgcy_setup, "
        "drivers/net/ethernet/mellanox/mlx5/core/esw/acl/ingress_lgcy.c)",
    }
)
#: Drivers that support an 802.1ad VLAN on a VF and report it back: ice_set_vf_port_vlan and
#: ice_get_vf_cfg, intel/ice/ice_sriov.c. In single VLAN mode, ice refuses 802.1ad.
_STACK = frozenset({"ice"})
#: Drivers that accept 802.1ad but report 802.1Q (bnxt_get_vf_config), so the setting cannot be verified.
#: They also cannot change a VLAN from one protocol to the other (bnxt_set_vf_vlan).
_STACK_UNREPORTED = frozenset({"bnxt_en"})
#: Drivers that accept a VLAN priority and silently ignore it (qede_set_vf_vlan).
_DROP_PRIORITY = frozenset({"qede"})


def max_queues(driver: str | None, vfs: int) -> int:
    """Return the maximum number of queue pairs of a VF if the PF has ``vfs`` VFs: 1 if unknown.

    ixgbe switches from 32 pools of 4 queues to 64 pools of 2 when PF and VFs need more than 32 pools
    (``ixgbe_set_sriov_queues``, intel/ixgbe/ixgbe_lib.c).
    """
    if driver == "ixgbe" and vfs >= 32:
        return 2
    return QUEUES.get(driver or "", 1)


def refusal(pf: Pf, spec: PortSpec, *, queues: bool) -> Unsupported | None:
    """Return why a VF of this NIC cannot serve the port; None if it can.

    ``queues``: check the port's queue count too. Pass False if the VF's queues are not the port's.
    """
    most = max_queues(pf.driver, pf.desired_vfs)
    if queues and spec.queues > most:
        return _refuse(
            pf,
            "queues",
            f"{spec.queues} are requested, and a VF has {most} at most",
            f"ask for {most} or fewer",
        )
    if spec.vf.vlan_qos and pf.driver in _DROP_PRIORITY:
        return _refuse(pf, "vf.vlan_qos", "its driver drops it", "ask without vf.vlan_qos")
    if spec.vf.vlan_proto == "802.1ad" and pf.driver not in _STACK:
        unreported = pf.driver in _STACK_UNREPORTED
        why = "its driver does not report 802.1ad" if unreported else "its driver has 802.1Q alone"
        return _refuse(pf, "vf.vlan_proto", why, "ask for 802.1Q, or use a NIC of ice")
    if spec.vf.trunk and pf.driver not in TAGS:
        return _refuse(
            pf,
            "vf.trunk",
            "what the NIC does with a VM's tags is not known",
            "ask for a VLAN, or use a NIC of " + ", ".join(sorted(TAGS)),
        )
    return None


def _refuse(pf: Pf, field: str, why: str, fix: str) -> Unsupported:
    message = f"{pf.name} ({pf.driver or 'without a driver'}): {why}"
    return Unsupported.of_field(field, message, step="vf", fix=fix)
