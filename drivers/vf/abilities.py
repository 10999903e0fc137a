"""What a NIC can do for a port on one of its VFs, by the driver of its PF: pure.

The kernel has no request that tells, so it is read in the sources of the drivers (Linux 6.18, below
drivers/net/ethernet). docs/nics.md has the same as a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from drivers.vf.inventory import Pf
from netplugin.errors import FieldError, Unsupported
from netplugin.models import PortSpec

#: As many as the API takes (``PortSpec.queues``): the driver has no bound, or one above it.
_UNBOUNDED = 128
#: The pairs of queues that a VF can have at most, by the driver of its PF. It may get fewer: what the
#: NIC has left is divided among its VFs, and the guest's driver opens as many of them as it likes.
QUEUES: Mapping[str, int] = MappingProxyType(
    {
        # Of an 82576; an i350 has one (igb_get_max_rss_queues, intel/igb/igb_main.c).
        "igb": 2,
        # See ``max_queues``.
        "ixgbe": 4,
        # I40E_MAX_VF_QUEUES, intel/i40e/i40e.h: 4, and more if the VF's driver requests them.
        "i40e": 16,
        # ICE_MAX_RSS_QS_PER_VF, intel/ice/ice_vf_lib.h: fewer of many VFs (ice_set_per_vf_res).
        "ice": 16,
        # MLX5E_MAX_NUM_CHANNELS is 256 (mellanox/mlx5/core/en.h): one for each vector of the VF.
        "mlx5_core": _UNBOUNDED,
        # The rings that the PF leaves, divided (bnxt_hwrm_func_vf_resc_cfg, broadcom/bnxt/bnxt_sriov.c).
        "bnxt_en": _UNBOUNDED,
        # qed_sriov_enable, qlogic/qed/qed_sriov.c.
        "qede": 16,
        # MAX_PORT_QSETS, chelsio/cxgb4vf/adapter.h.
        "cxgb4": 8,
    }
)
_INTEL = "drivers/net/ethernet/intel"
#: What the driver of a PF does with VLANs that the VM of a VF without a VLAN asks for, and where it
#: is read. Of other drivers it is not known, so that they have no trunks.
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
#: Drivers whose NICs put a tag of 802.1ad around a VF's frames, and that report it:
#: ice_set_vf_port_vlan and ice_get_vf_cfg, intel/ice/ice_sriov.c. In single VLAN mode it refuses it.
_STACK = frozenset({"ice"})
#: Drivers that would take it, and report it as 802.1Q (bnxt_get_vf_config), so that it cannot be
#: verified; nor do they change a VLAN from one to the other (bnxt_set_vf_vlan).
_STACK_UNREPORTED = frozenset({"bnxt_en"})
#: Drivers that take a VLAN priority without an error and drop it (qede_set_vf_vlan).
_DROP_PRIORITY = frozenset({"qede"})


def max_queues(driver: str | None, vfs: int) -> int:
    """The pairs of queues that each of so many VFs can have at most: 1 where that is not known.

    ixgbe has 64 pools of 2 instead of 32 of 4 if VFs and PF need more than 32 of them
    (``ixgbe_set_sriov_queues``, intel/ixgbe/ixgbe_lib.c).
    """
    if driver == "ixgbe" and vfs >= 32:
        return 2
    return QUEUES.get(driver or "", 1)


def refusal(pf: Pf, spec: PortSpec, *, queues: bool) -> Unsupported | None:
    """Why a VF of this NIC cannot serve such a port; None if it can.

    ``queues``: whether those of the port are to be those of the VF.
    """
    most = max_queues(pf.driver, pf.wanted_vfs)
    if queues and spec.queues > most:
        return _refuse(
            pf, "queues", f"{spec.queues} are requested, and a VF has {most} at most",
            f"ask for {most} or fewer",
        )  # fmt: skip
    if spec.vf.vlan_qos and pf.driver in _DROP_PRIORITY:
        return _refuse(pf, "vf.vlan_qos", "its driver drops it", "ask without vf.vlan_qos")
    if spec.vf.vlan_proto == "802.1ad" and pf.driver not in _STACK:
        unreported = pf.driver in _STACK_UNREPORTED
        why = "its driver does not report 802.1ad" if unreported else "its driver has 802.1Q alone"
        return _refuse(pf, "vf.vlan_proto", why, "ask for 802.1Q, or use a NIC of ice")
    if spec.vf.trunk and pf.driver not in TAGS:
        return _refuse(
            pf, "vf.trunk", "what the NIC does with a VM's tags is not known",
            "ask for a VLAN, or use a NIC of " + ", ".join(sorted(TAGS)),
        )  # fmt: skip
    return None


def _refuse(pf: Pf, field: str, why: str, fix: str) -> Unsupported:
    message = f"{pf.name} ({pf.driver or 'without a driver'}): {why}"
    return Unsupported(
        f"{field}: {message}", step="vf", fix=fix, errors=[FieldError(field=field, message=message)]
    )
