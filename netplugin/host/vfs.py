"""VFs of the kernel: read by one request for each NIC, written one attribute group each; their drivers.

The attributes of a VF are set through its PF, by VF number; its driver is bound by PCI address, in
sysfs. This module makes no decisions: callers decide what to set and verify it by reading back.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from pyroute2.netlink.rtnl import RTM_GETLINK, RTM_SETLINK
from pyroute2.netlink.rtnl.ifinfmsg import IFF_UP

from netplugin.api.errors import Conflict, HostError, NetpluginError, Unsupported
from netplugin.api.models import VfCounters
from netplugin.host import netlink, vf_messages
from netplugin.host.link_messages import SKIP_STATISTICS
from netplugin.host.nic_errors import OF_BINDING
from netplugin.host.rtnetlink import Rtnetlink, about_link
from netplugin.host.rtnetlink_messages import Message
from netplugin.host.safe_files import opened
from netplugin.host.vf_messages import GROUPS, NO_MAC, NicLink, VfAttributes, setting

SYS = Path("/sys")
VFIO = "vfio-pci"

# RTEXT_FILTER_VF of include/uapi/linux/rtnetlink.h. Older kernels apply SKIP_STATISTICS only to the
# interface's own statistics, not to those of its VFs.
_WITH_VFS = 1
# include/uapi/linux/capability.h
_CAP_NET_ADMIN = 12
# include/linux/errno.h: internal to the kernel, but some drivers return it to user space.
_ENOTSUPP = 524


@dataclass(frozen=True, slots=True)
class HostInterface:
    """The host's network interface of a VF, in this network namespace."""

    name: str
    up: bool
    enslaved: bool
    #: Whether its MAC was set by the VF driver or the host and not by the PF (``addr_assign_type``
    #: is not NET_ADDR_PERM, include/uapi/linux/netdevice.h: VF drivers call eth_hw_addr_random).
    own_mac: bool = False
    #: Its MAC; empty if it cannot be read.
    mac: str = ""


@dataclass(frozen=True, slots=True)
class HostUse:
    """A use of a VF by the host itself: ``how`` is a clause, ``end`` tells the operator how to end it."""

    how: str
    end: str

    def conflict(self, address: str, step: str) -> Conflict:
        """The error for a VF that cannot be allocated because the host uses it."""
        return Conflict(f"VF {address} is in use by the host: {self.how}", step=step, fix=self.end)


def host_uses(
    driver: str | None, interfaces: Sequence[HostInterface], *, may_be_up: bool = False
) -> Iterator[HostUse]:
    """All uses of a VF through a network driver of the host.

    ``may_be_up``: an interface that is merely up does not count as a use; DPDK may have left it so.

    sysfs shows only interfaces of the reader's network namespace (``net_namespace`` of class net in
    net/core/net-sysfs.c). If the driver has no interface here, it may be in the namespace of a container.
    """
    if driver is None or in_user_space(driver):
        return
    if not interfaces:
        how = f"{driver} has it, and its interface is in another network namespace, or it has none"
        yield HostUse(how, f"bring the interface back, or unbind the VF from {driver}")
    for interface in interfaces:
        if interface.enslaved:
            yield HostUse(f"its interface {interface.name} is enslaved", f"release {interface.name}")
        elif interface.up and not may_be_up:
            yield HostUse(f"its interface {interface.name} is up", f"set {interface.name} down")


def host_use(
    driver: str | None, interfaces: Sequence[HostInterface], *, may_be_up: bool = False
) -> HostUse | None:
    """The first of ``host_uses``; None if the VF can be given to a VM or OVS."""
    return next(host_uses(driver, interfaces, may_be_up=may_be_up), None)


class VfRefuses(HostError):
    """The VF rejects a setting that other VFs accept, so it is faulty."""


class VfInvalid(VfRefuses):
    """The driver returned EINVAL or ERANGE: unsupported, or the VF or its NIC is being reset."""


class VfBusy(HostError):
    """The driver asks to try again: the VF or its NIC is being reset."""

    retryable = True


class VfStuck(VfBusy):
    """``VfBusy`` although the NIC is up and reports the VF. If it lasts, the VF is unusable."""


class Vfs:
    """VF access in the network namespace of the calling thread.

    All methods raise HostError and OperationTimeout, besides what they name.
    """

    def __init__(self, sys: Path = SYS) -> None:
        self.sys = sys
        self._kernel = Rtnetlink()

    def link(self, index: int) -> NicLink | None:
        """One interface, with its VFs if it is a PF's; None if it does not exist.

        The kernel fails with EMSGSIZE if the VFs do not fit into a message (``rtnl_vfinfo_size`` in
        net/core/rtnetlink.c does not count GUIDs). Then it is returned without them.
        """
        with _words("list-vfs", f"interface {index}"), netlink.ignored(errno.ENODEV):
            with netlink.ignored(errno.EMSGSIZE):
                return vf_messages.parse_link(self._read(index, _WITH_VFS | SKIP_STATISTICS))
            return vf_messages.parse_link(self._read(index, SKIP_STATISTICS))
        return None

    def counters(self, index: int) -> dict[int, VfCounters]:
        """The counters of a PF's VFs, by VF number."""
        with _words("count-vfs", f"interface {index}"):
            return vf_messages.parse_counters(self._read(index, _WITH_VFS))

    def _read(self, index: int, mask: int) -> Message:
        return self._kernel.ask(RTM_GETLINK, about_link(("IFLA_EXT_MASK", mask), index=index))[0]

    def is_open(self, address: str) -> bool:
        """Whether a process (a VM's) has the device open through vfio; see the function ``is_open``."""
        device = self._device(address)
        return is_open(device, read_link(device / "driver"))

    def set(self, pf_index: int, vf_number: int, group: str, want: VfAttributes) -> None:
        """Write one of ``GROUPS`` of one VF.

        Raises: Unsupported if the NIC lacks the feature, VfBusy, VfInvalid, VfRefuses, HostError,
        OperationTimeout.
        """
        with _words("set-vf", f"VF {vf_number}: {group}", group):
            self._kernel.ask(RTM_SETLINK, about_link(setting(vf_number, group, want), index=pf_index))

    def override(self, address: str, driver: str | None) -> None:
        """Set the only driver that may bind to the device (``driver_override``); None: no restriction."""
        self._write(address, "driver_override", driver or "\n")

    def host_use(self, address: str, *, may_be_up: bool = False) -> HostUse | None:
        """How the host's network uses the device now; see the function ``host_use``."""
        device = self._device(address)
        return host_use(read_link(device / "driver"), read_interfaces(device), may_be_up=may_be_up)

    def unbind(self, address: str) -> None:
        """Unbind the device from its driver, if it has one.

        Raises: HostError; also if a process has the device open, because the kernel would block
        until it closes.
        """
        if self.is_open(address):
            raise HostError(f"{address} is in use: its vfio device is open", step="unbind-vf")
        if read_link(self._device(address) / "driver"):
            self._write(address, "driver/unbind", address)

    def reset(self, address: str) -> None:
        """Reset the function if it supports that, so the next user finds no state of the previous one."""
        if (self._device(address) / "reset").exists():
            self._write(address, "reset", "1")

    def probe(self, address: str) -> None:
        """Bind the driver that ``driver_override`` names, or else the one that the kernel chooses.

        Without the override the kernel binds nothing while ``sriov_drivers_autoprobe`` is 0
        (``pci_device_can_probe`` in drivers/pci/pci-driver.c).
        """
        with _words("bind-vf", address, "driver"):
            (self.sys / "bus/pci/drivers_probe").write_text(address)

    def _write(self, address: str, name: str, value: str) -> None:
        with _words("bind-vf", f"{address}: {name}", "driver"):
            (self._device(address) / name).write_text(value)

    def _device(self, address: str) -> Path:
        return self.sys / "bus/pci/devices" / address


def is_vfio(driver: str | None) -> bool:
    """Whether the driver gives user space access through vfio: vfio-pci or a vendor's variant."""
    return driver is not None and "vfio" in driver


def is_uio(driver: str | None) -> bool:
    """Whether the driver gives user space access without an IOMMU: uio_pci_generic, igb_uio."""
    return driver is not None and "uio" in driver


def in_user_space(driver: str | None) -> bool:
    """Whether a program has the device through this driver: QEMU or DPDK."""
    return is_vfio(driver) or is_uio(driver)


def is_open(device: Path | str, driver: str | None) -> bool:
    """Whether a process has the device open through vfio, which enables it at the first open and disables
    it at the last close (``vfio_pci_core_enable`` in drivers/vfio/pci/vfio_pci_core.c)."""
    return is_vfio(driver) and read_text(f"{device}/enable") not in ("", "0")


def read_interfaces(device: Path | str) -> tuple[HostInterface, ...]:
    """The network interfaces of a PCI device in this network namespace, from sysfs."""
    try:
        names = sorted(os.listdir(f"{device}/net"))
    except OSError:
        return ()
    return tuple(
        HostInterface(
            name=name,
            up=bool(int(read_text(f"{device}/net/{name}/flags") or "0", 16) & IFF_UP),
            enslaved=os.path.islink(f"{device}/net/{name}/master"),
            own_mac=read_text(f"{device}/net/{name}/addr_assign_type") not in ("", "0"),
            mac=read_text(f"{device}/net/{name}/address"),
        )
        for name in names
    )


def read_text(path: Path | str) -> str:
    """The text of a sysfs attribute; empty if it is missing or unreadable."""
    try:
        with opened(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as descriptor:
            return os.read(descriptor, 4096).decode(errors="replace").strip()
    except OSError:
        return ""


def read_link(path: Path | str) -> str | None:
    """The last component of the target of a sysfs link; None if there is no such link."""
    try:
        return os.readlink(path).rpartition("/")[2]
    except OSError:
        return None


# ENOTSUPP: bnxt (bnxt_set_vf_vlan and bnxt_set_vf_spoofchk with an old firmware).
_ABSENT = (errno.EOPNOTSUPP, errno.EPROTONOSUPPORT, _ENOTSUPP)
# EAGAIN: i40e, another operation or a reset of the VF is in progress (i40e_check_vf_init_timeout).
# EBUSY: ice, the VF is not initialized (ice_check_vf_ready_for_cfg).
_BUSY = (errno.EAGAIN, errno.EBUSY, errno.EINTR)
# Also returned for a VF that is being reset: ice_is_vf_disabled, i40e_validate_vf.
_INVALID = (errno.EINVAL, errno.ERANGE)
# Not a fault of the VF: missing permission, or the VF was removed meanwhile.
_NOT_ITS_FAULT = (errno.EPERM, errno.EACCES, errno.EROFS, errno.ENODEV, errno.ENOENT)


def _words(step: str, what: str, group: str = "") -> AbstractContextManager[None]:
    """Translate errors of the kernel into typed errors with its error text."""
    return netlink.translated(step, what, lambda words, code: _error(step, f"{what}: {words}", code, group))


def _error(step: str, detail: str, code: int, group: str) -> NetpluginError:
    is_setting = group in GROUPS
    if is_setting and (code in _ABSENT or (code == errno.EPERM and _administers_networks())):
        return unsupported(detail, group)
    cause, fix = ("", None) if is_setting or not group else OF_BINDING.get(code, ("", None))
    detail += f" ({cause})" if cause else ""
    if not group or code in _NOT_ITS_FAULT:
        return HostError(detail, step=step, fix=fix)
    if code in _BUSY:
        return VfBusy(detail, step=step, fix=fix)
    return (VfInvalid if code in _INVALID else VfRefuses)(detail, step=step, fix=fix)


def _administers_networks() -> bool:
    """Whether this process has CAP_NET_ADMIN, so that EPERM comes from the driver.

    mlx5 returns EPERM where the host does not manage the NIC's eswitch, as with a DPU that does
    (``mlx5_esw_allowed`` in drivers/net/ethernet/mellanox/mlx5/core/eswitch.c).
    """
    for line in read_text("/proc/thread-self/status").splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            return bool(int(value, 16) >> _CAP_NET_ADMIN & 1)
    return False


#: Suggested changes of the request, by group.
_FIXES: Mapping[str, str] = MappingProxyType(
    {
        "vlan": "ask without vf.vlan_qos and with vf.vlan_proto 802.1Q",
        # i40e_ndo_set_vf_trust in MFP mode, in which its VFs get no multicast either.
        "trust": "ask without vf.trusted; a relay of vdpa needs it on this NIC: use another backend",
    }
)


def unsupported(detail: str, group: str) -> Unsupported:
    """The error for a setting that a NIC does not support."""
    fix = _FIXES.get(group, f"ask without {group}, or for less")
    return Unsupported(f"the NIC refuses it: {detail}", step="set-vf", fix=fix)


# Every NIC with VFs can set a MAC and a VLAN. EINVAL for another setting means that the NIC does
# not support it (igb and i40e have no minimum rate and return EINVAL).
_OPTIONAL = ("spoofchk", "trust", "rate", "link_state")


def is_beyond(group: str, want: VfAttributes) -> bool:
    """Whether a healthy NIC may return EINVAL for this setting because it does not support it.

    VLAN priority: bnxt (bnxt_set_vf_vlan in Linux 5.15; 6.18 supports it). An all-zero MAC: qede
    (qede_set_vf_mac) and cxgb4 (cxgb4_mgmt_set_vf_mac).
    """
    return (
        group in _OPTIONAL
        or (group == "vlan" and (want.vlan_qos != 0 or want.vlan_stacked))
        or (group == "mac" and want.mac == NO_MAC)
    )
