"""Why the kernel refuses VFs, or another driver of a device, by errno: the cause and what to do about it.

Sources: ``sriov_numvfs_store`` and ``sriov_enable`` in drivers/pci/iov.c; ``igb_disable_sriov``,
``ice_check_sriov_allowed``, ``ice_set_per_vf_res`` and ``i40e_pci_sriov_configure``; ``unbind_store`` and
``drivers_probe_store`` in drivers/base/bus.c, ``reset_store`` in drivers/pci/pci-sysfs.c;
``vfio_group_find_or_alloc`` in drivers/vfio/group.c. docs/nics.md has these, and those of a program that
opens the device (QEMU, DPDK).
"""

from __future__ import annotations

import errno
from collections.abc import Mapping

#: The cause and the fix, by errno.
Causes = Mapping[int, tuple[str, str]]

_SLOW = "the NIC is being reset, or another program changes its VFs"
_NO_PF = (
    "the kernel or this device is not able to have VFs (CONFIG_PCI_IOV)",
    "switch SR-IOV on in the firmware of NIC and board; name another NIC",
)
_GONE = ("the device or its driver has gone", "see lspci -k; modprobe vfio-pci")
#: Of a write to ``sriov_numvfs``.
OF_VF_NUMBER: Causes = {
    errno.ENOMEM: (
        "the firmware left too few addresses (MMIO) or bus numbers for so many VFs",
        "switch SR-IOV, Above 4G Decoding and ARI on in the firmware of the board, boot with pci=realloc "
        "(bus numbers: pci=assign-busses), take another slot, or ask for fewer (dmesg names which it is)",
    ),
    errno.EBUSY: (
        f"{_SLOW}, or it has VFs in another number",
        "write 0 to sriov_numvfs first, when no VM has a VF; then try again",
    ),
    errno.EAGAIN: (_SLOW, "try again"),
    errno.ENOENT: (
        "the NIC has no driver, or one that makes no VFs (vfio-pci without enable_sriov, uio)",
        "bind it to its kernel driver: driverctl unset-override ADDRESS",
    ),
    **dict.fromkeys((errno.ENOSYS, errno.ENOTTY, errno.ENODEV), _NO_PF),
    errno.EOPNOTSUPP: (
        "the NIC's firmware has SR-IOV off or fewer VFs, or ice is in safe mode, without its DDP package",
        "switch SR-IOV on in the firmware of the NIC; install its DDP package; ask for fewer",
    ),
    errno.ENOSPC: (
        "the NIC has too few interrupts (MSI-X) left: its driver, and that of RDMA, took one for each CPU",
        "keep irdma from loading, lower devlink's msix_vec_per_pf_max, or ask for fewer (dmesg)",
    ),
    errno.ERANGE: ("it is more than sriov_totalvfs", "ask for fewer, or raise it in the NIC's firmware"),
    errno.EIO: (
        "its SR-IOV capability contradicts itself (initial and total VFs, offset), or ice before Linux 6.4 "
        "has too few interrupts or queues",
        "update the NIC's firmware, or switch the machine off and on; ask for fewer (dmesg)",
    ),
    errno.EPERM: (
        "the driver keeps its VFs while VMs have them, or another host manages the NIC (a DPU)",
        "detach the VFs from their VMs; make VFs of a DPU from its own system",
    ),
    errno.EINVAL: (
        "the driver makes no such number of VFs in the NIC's mode (XDP, DCB, MFP, too few queues)",
        "ask for fewer, or end that mode (dmesg names it)",
    ),
}
#: Of writes that change the driver of a device: unbind, ``driver_override``, ``reset``, ``drivers_probe``.
OF_BINDING: Causes = {
    errno.EBUSY: (
        "the device is being reset, or a program has a device of its IOMMU group open",
        "stop what has it open (fuser /dev/vfio/*), and try again",
    ),
    errno.EAGAIN: ("the device is locked or being reset", "try again"),
    errno.EINVAL: (
        "it has no IOMMU group, or its IOMMU does not keep caches coherent",
        "switch VT-d or AMD-Vi on in the firmware; with VT-d, boot with intel_iommu=on",
    ),
    **dict.fromkeys((errno.ENODEV, errno.ENOENT), _GONE),
    errno.ENOTTY: ("it has no working way to be reset", "update the NIC's firmware; use another VF or NIC"),
    errno.EPERM: (
        "the kernel is locked down, or this process has no CAP_SYS_ADMIN",
        "run it on the host itself, as the unit of the package does",
    ),
    errno.ENOMEM: ("the kernel has no memory left for it", "free memory, and try again"),
}
