"""What is known of a NIC by its kernel driver: how DPDK drives it, and what its VFs can do. Pure.

How DPDK drives it: the pages of https://doc.dpdk.org/guides/nics, the RTE_PMD_REGISTER_KMOD_DEP of its
drivers (26.07), and guides/linux_gsg/linux_drivers.html ("Bifurcated Driver"). No kernel reports what VFs can
do: that is from the functions named here, of Linux 6.18, drivers/net/ethernet. docs/nics.md lists it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType

from netplugin.host.vfs import VFIO


class Binding(Enum):
    """The kernel driver with which DPDK drives a NIC. A PF on vfio-pci or uio has no VFs of the kernel's."""

    VFIO = "vfio-pci, or uio_pci_generic without an IOMMU"
    #: DPDK uses verbs of the kernel's driver, which stays, and with it the interface and the VFs.
    KEPT = "the NIC's own kernel driver"
    UIO = "uio_pci_generic or igb_uio"
    NONE = "none: DPDK has no driver for it"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class VfModel:
    """What VFs can do, by the driver of their PF. The defaults are those of an unknown driver."""

    #: The most queue pairs of a VF. It may get fewer: the NIC divides what it has among its VFs, and the
    #: guest's driver decides how many it opens.
    queues: int = 1
    #: How the driver treats the VLANs that a guest requests on a VF without a VLAN; empty: unknown.
    tags: str = ""
    #: The spoof check of a new VF; None: unknown.
    spoofchk: bool | None = None
    #: Whether only trusted VFs may receive all multicast frames; None: unknown. To others such a PF reports
    #: success and does nothing.
    trust_for_multicast: bool | None = None
    #: Whether the PF counts a VF's frames (``ndo_get_vf_stats``); the kernel reports zeros for others.
    counts: bool = True
    #: Whether a VF can have an 802.1ad VLAN, and the PF reports it; None: it can, and reports 802.1Q.
    stacks: bool | None = False
    #: Whether the NIC keeps a VLAN priority. Others accept and ignore it.
    keeps_priority: bool = True
    #: Whether it accepts a zero MAC for a VF.
    takes_no_mac: bool = True
    #: Whether a promiscuous VF, which a trusted one may be, gets no frames of other VLANs.
    keeps_to_vlan: bool = True
    #: Whether an open VF has another MAC at once: the PF writes its receive address, and neither resets the
    #: VF nor informs its driver.
    takes_mac_at_once: bool = False


@dataclass(frozen=True, slots=True)
class NicModel:
    """``ids``: how its PCI ids begin, where a NIC without its driver must be known. ``of_vm``: made by a
    hypervisor, so it has VFs only if that gives it some. ``needs``: what else DPDK needs."""

    binding: Binding = Binding.VFIO
    ids: tuple[str, ...] = ()
    of_vm: bool = False
    is_vf: bool = False
    needs: str = ""
    vf: VfModel = VfModel()


_INTEL = "drivers/net/ethernet/intel"
_ASKED = "VLANs that such a VM asks for, more if it is trusted"
_TAGS = {
    "igb": f"takes any VLAN that such a VM asks for (igb_set_vf_vlan_msg, {_INTEL}/igb/igb_main.c)",
    "ixgbe": f"takes any VLAN that such a VM asks for (ixgbe_set_vf_vlan_msg, {_INTEL}/ixgbe/ixgbe_sriov.c)",
    "i40e": f"takes up to 16 {_ASKED} (i40e_vc_add_vlan_msg, {_INTEL}/i40e/i40e_virtchnl_pf.c)",
    "ice": f"takes up to 8 {_ASKED} (ice_vc_process_vlan_msg, {_INTEL}/ice)",
    "mlx5_core": "looks at the tags that such a VM sends not at all (esw_acl_ingress_lgcy_setup, "
    "drivers/net/ethernet/mellanox/mlx5/core/esw/acl/ingress_lgcy.c)",
}
# Where the values are from:
# igb: igb_get_max_rss_queues (82576; 1 of an i350), igb_vf_configure, igb_set_vf_promisc, igb_set_vf_mac.
# ixgbe: see max_queues; __ixgbe_enable_sriov, ixgbe_update_vf_xcast_mode, ixgbe_set_vf_mac. An X540 or newer
#   whose PF is promiscuous ignored VLANs before 7bb0fb7c63df (Linux 5.18).
# i40e: I40E_MAX_VF_QUEUES, 4 unless requested; i40e_alloc_vfs, i40e_vc_config_promiscuous_mode_msg. A VF is
#   reset for another MAC (i40e_ndo_set_vf_mac, ice_set_vf_mac).
# ice: ICE_MAX_RSS_QS_PER_VF, ice_set_per_vf_res; ice_initialize_vf_entry, ice_vc_cfg_promiscuous_mode_msg,
#   ice_set_vf_port_vlan (in double VLAN mode). It ignored VLANs before 4e7f0087b058 (Linux 6.7), and does in
#   double VLAN mode, where ice_port_vlan_on keeps only the inner filter. A host does not show which it has.
# mlx5_core: MLX5E_MAX_NUM_CHANNELS is above the API's 128; mlx5_esw_vport_alloc, esw_update_vport_rx_mode.
#   The switch has the MAC addresses that the VF's driver requests (esw_update_vport_addr_list).
# bnxt_en: an equal share of what the PF leaves (bnxt_hwrm_func_vf_resc_cfg); bnxt_set_vf_attr. A VF asks the
#   firmware for multicast, trusted or not (bnxt_promisc_ok). bnxt_get_vf_config reports no protocol.
# qede: qed_sriov_enable, req_spoofchk_val, qed_iov_pre_update_vport, qede_set_vf_vlan, qede_set_vf_mac.
# cxgb4: MAX_PORT_QSETS of cxgb4vf/adapter.h, cxgb4_mgmt_set_vf_mac.
_VFS = {
    "igb": VfModel(2, spoofchk=True, trust_for_multicast=False, counts=False, takes_mac_at_once=True),
    "ixgbe": VfModel(4, spoofchk=True, trust_for_multicast=True, keeps_to_vlan=False, takes_mac_at_once=True),
    "i40e": VfModel(16, spoofchk=True, trust_for_multicast=True),
    "ice": VfModel(16, spoofchk=True, trust_for_multicast=True, stacks=True, keeps_to_vlan=False),
    "mlx5_core": VfModel(128, spoofchk=False, trust_for_multicast=True),
    "bnxt_en": VfModel(128, spoofchk=False, trust_for_multicast=False, counts=False, stacks=None),
    "qede": VfModel(
        16, spoofchk=False, trust_for_multicast=True, counts=False, keeps_priority=False, takes_no_mac=False
    ),
    "cxgb4": VfModel(8, counts=False, takes_no_mac=False),
}
_IOMMU = "an IOMMU in the VM, or vfio's enable_unsafe_noiommu_mode=1"
_WC = "write combining for its low latency queues: igb_uio with wc_activate=1, or a vfio-pci that has it"
_DDP = "the DDP package, ice.pkg in /lib/firmware/intel/ice/ddp: without it there is no RSS"
_VERBS = "rdma-core and the kernel modules {0}_ib and ib_uverbs"
#: NICs with VFs first. Those that need more than vfio-pci follow again, with it.
_OF_PFS = {name: NicModel(vf=replace(vf, tags=_TAGS.get(name, ""))) for name, vf in _VFS.items()}
MODELS: Mapping[str, NicModel] = MappingProxyType(
    {
        **_OF_PFS,
        "ice": replace(_OF_PFS["ice"], needs=_DDP),
        "qede": replace(_OF_PFS["qede"], needs="one kind of driver for all PFs of the adapter"),
        "mlx5_core": replace(
            _OF_PFS["mlx5_core"], binding=Binding.KEPT, ids=("15b3:",), needs=_VERBS.format("mlx5")
        ),
        "mlx4_core": NicModel(Binding.KEPT, needs=_VERBS.format("mlx4")),
        "mana": NicModel(Binding.KEPT, ("1414:00b",), of_vm=True, needs="rdma-core 44, Linux 6.2, mana_ib"),
        "virtio-pci": NicModel(ids=("1af4:",), of_vm=True, needs=_IOMMU),
        "vmxnet3": NicModel(ids=("15ad:07b0",), of_vm=True, needs=_IOMMU),
        "ena": NicModel(ids=("1d0f:",), of_vm=True, needs=f"{_IOMMU}; {_WC}"),
        "gve": NicModel(ids=("1ae0:0042",), of_vm=True, needs=_IOMMU),
        # Hyper-V's own NIC is on the bus vmbus and not on PCI.
        "hv_netvsc": NicModel(Binding.UIO, of_vm=True, needs="uio_hv_generic"),
        "atlantic": NicModel(Binding.UIO, ("1d6a:",)),
        "r8169": NicModel(needs="DPDK 24.11 or newer"),
        **dict.fromkeys("e1000 e1000e igc fm10k idpf sfc enic nfp bnx2x hns3 ionic".split(), NicModel()),
        **dict.fromkeys("hinic amd-xgbe ngbe txgbe".split(), NicModel()),
        **dict.fromkeys("igbvf ixgbevf iavf cxgb4vf hclgevf nfp_netvf".split(), NicModel(is_vf=True)),
        **dict.fromkeys("tg3 bnx2 be2net 8139cp 8139too pcnet32 sky2".split(), NicModel(Binding.NONE)),
    }
)
_UNKNOWN = NicModel(Binding.UNKNOWN)
#: Drivers that stay bound while DPDK uses the NIC or the VF. A VM that gets such a VF has it on vfio-pci.
KEPT_BY_DPDK = frozenset(name for name, model in MODELS.items() if model.binding is Binding.KEPT)


def model_of(driver: str | None, pci_id: str = "") -> NicModel:
    """What is known of a NIC: by its driver or, bound to one that takes any NIC, by ``vendor:device``."""
    by_id = (model for model in MODELS.values() if any(map(pci_id.startswith, model.ids)))
    return MODELS.get(driver or "") or next(by_id, _UNKNOWN)


def dpdk_driver(driver: str | None) -> str:
    """The driver to bind a NIC to for DPDK, if it is not to stay."""
    return "uio_pci_generic" if model_of(driver).binding is Binding.UIO else VFIO


def dpdk_fault(address: str, driver: str | None, pci_id: str) -> tuple[str, str] | None:
    """Why DPDK cannot use this NIC with this driver, and the fix; None if it can, or that is unknown."""
    binding = model_of(driver, pci_id).binding
    if binding is Binding.NONE:
        fix = "name another NIC, or use this one with the backend linuxbridge"
        return f"{address} is a NIC of {driver}, and DPDK has no driver for it", fix
    if binding is Binding.KEPT and driver not in KEPT_BY_DPDK:
        found = f"{address} is bound to {driver or 'no driver'}, and DPDK uses it with {binding.value}"
        return found, f"driverctl unset-override {address}"
    return None


def lacks_vfs(driver: str | None, pci_id: str) -> str:
    """Why such a NIC has no VFs of its own; empty if its model is no reason."""
    model = model_of(driver, pci_id)
    if model.is_vf:
        return "it is a virtual function itself, whose PF is outside this VM"
    return f"a hypervisor made this NIC ({driver})" if model.of_vm else ""


def max_queues(driver: str | None, vfs: int) -> int:
    """The most queue pairs of a VF if the PF has ``vfs`` VFs.

    ixgbe switches from 32 pools of 4 queues to 64 pools of 2 when PF and VFs need more than 32 pools
    (``ixgbe_set_sriov_queues``, intel/ixgbe/ixgbe_lib.c).
    """
    return 2 if driver == "ixgbe" and vfs >= 32 else model_of(driver).vf.queues
