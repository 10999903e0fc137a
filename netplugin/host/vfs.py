"""VFs of the kernel: read with one netlink dump, written one attribute group at a time.

The attributes of a VF are set through its PF, by VF number; its driver is bound by PCI address, in
sysfs. This module makes no decisions: callers decide what to set and verify it by reading back.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from netplugin.api.errors import Conflict, HostError, NetpluginError, OperationTimeout, Unsupported
from netplugin.api.models import VfCounters
from netplugin.host import netlink
from netplugin.host.netlink import attribute, attributes, number, text

SYS = Path("/sys")
NO_MAC = "00:00:00:00:00:00"
VFIO = "vfio-pci"

# include/uapi/linux/rtnetlink.h
_GETLINK, _SETLINK = 18, 19
_IFINFO, _NUMBER = struct.Struct("=BxHiII"), struct.Struct("=I")
_ATTRIBUTE, _VF_START = struct.Struct("=HH"), struct.Struct("=HHHH")
# include/uapi/linux/if_link.h
_IFNAME, _MTU, _VFINFO_LIST, _EXT_MASK, _CARRIER = 3, 4, 22, 29, 33
_PERMANENT_ADDRESS, _PARENT, _PARENT_BUS, _VF_INFO = 54, 56, 57, 1
_VF_MAC, _VF_VLAN, _VF_SPOOFCHK, _VF_LINK_STATE, _VF_RATE, _VF_RSS_QUERY = 1, 2, 4, 5, 6, 7
_VF_TRUST, _VF_NODE_GUID, _VF_PORT_GUID, _VF_VLAN_LIST, _VF_VLAN_INFO = 9, 10, 11, 12, 1
_VF_STATS = 8
_COUNTERS = {
    "rx_packets": 0,
    "tx_packets": 1,
    "rx_bytes": 2,
    "tx_bytes": 3,
    "rx_dropped": 7,
    "tx_dropped": 8,
}
_UNKNOWN = 0xFFFFFFFF
#: The size of the attribute with struct ifla_vf_mac, in bytes.
_VF_MAC_BYTES = 40
# Older kernels apply it only to the interface's own statistics, not to those of its VFs.
_EXT_VF, _EXT_SKIP_STATISTICS = 1, 8
_IFF_UP = 1
# include/uapi/linux/if_ether.h
_ETH_P_8021AD = 0x88A8
# include/uapi/linux/capability.h
_CAP_NET_ADMIN = 12
# include/linux/errno.h: internal to the kernel, but some drivers return it to user space.
_ENOTSUPP = 524

LINK_STATES = ("auto", "enable", "disable")  # IFLA_VF_LINK_STATE_AUTO and following


@dataclass(frozen=True, slots=True)
class VfAttributes:
    """The attributes of a VF that its PF holds. Rates are in Mbit/s, and 0 is no limit.

    ``spoofchk``, ``trusted`` and ``rss_query`` are None if the NIC does not support them. GUIDs are
    empty if it has none (they belong to InfiniBand). ``vlan_stacked``: the VLAN is 802.1ad (QinQ).
    """

    mac: str = NO_MAC
    vlan: int = 0
    vlan_qos: int = 0
    spoofchk: bool | None = None
    trusted: bool | None = None
    link_state: str = "auto"
    min_mbps: int = 0
    max_mbps: int = 0
    vlan_stacked: bool = False
    rss_query: bool | None = None
    node_guid: str = ""
    port_guid: str = ""


#: Groups of attributes that are written together, in the order of writing, with their fields.
GROUPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "mac": ("mac",),
        "vlan": ("vlan", "vlan_qos", "vlan_stacked"),
        "spoofchk": ("spoofchk",),
        "trust": ("trusted",),
        "rate": ("min_mbps", "max_mbps"),
        "link_state": ("link_state",),
        "rss_query": ("rss_query",),
        "node_guid": ("node_guid",),
        "port_guid": ("port_guid",),
    }
)


def differing(have: VfAttributes, want: VfAttributes) -> tuple[str, ...]:
    """The groups to write so that a VF becomes ``want``; an unsupported switch counts as off."""
    return tuple(
        group
        for group, names in GROUPS.items()
        if any((getattr(have, n) or 0) != (getattr(want, n) or 0) for n in names)
    )


@dataclass(frozen=True, slots=True)
class NicLink:
    """The network interface of a PCI device. A PF's also has the attributes of its VFs by number."""

    index: int
    name: str
    #: The PCI address of its device.
    parent: str = ""
    mtu: int = 0
    up: bool = False
    carrier: bool = False
    permanent_mac: str | None = None
    vfs: Mapping[int, VfAttributes] = field(default_factory=dict)


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


def host_uses(driver: str | None, interfaces: Sequence[HostInterface]) -> Iterator[HostUse]:
    """All uses of a VF through a network driver of the host.

    sysfs shows only interfaces of the reader's network namespace (``net_namespace`` of class net in
    net/core/net-sysfs.c). If the driver has no interface here, it may be in the namespace of a
    container.
    """
    if driver is None:
        return
    if not interfaces:
        yield HostUse(
            f"{driver} has it, and its interface is in another network namespace, or it has none",
            f"bring the interface back, or unbind the VF from {driver}",
        )
    for interface in interfaces:
        if interface.enslaved:
            yield HostUse(f"its interface {interface.name} is enslaved", f"release {interface.name}")
        elif interface.up:
            yield HostUse(f"its interface {interface.name} is up", f"set {interface.name} down")


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
    """VF access in the network namespace of the calling thread."""

    def __init__(self, sys: Path = SYS) -> None:
        self.sys = sys

    # -- reading ---------------------------------------------------------------------------------

    def links(self) -> dict[str, NicLink]:
        """The interfaces of PCI devices by name, in one dump.

        The kernel fails with EMSGSIZE if the VFs of one NIC do not fit into a message
        (``rtnl_vfinfo_size`` in net/core/rtnetlink.c does not count GUIDs). Then each NIC with VFs
        is requested separately, and a NIC that still fails is returned without VFs.

        Raises: HostError, OperationTimeout.
        """
        with _words("list-vfs", "interfaces"):
            try:
                found = self._dump(_EXT_VF | _EXT_SKIP_STATISTICS)
            except OSError as refused:
                if refused.errno != errno.EMSGSIZE:
                    raise
                found = [self._with_vfs(link) for link in self._dump(0)]
        return {link.name: link for link in found}

    def _dump(self, mask: int) -> list[NicLink]:
        body = _IFINFO.pack(0, 0, 0, 0, 0) + attribute(_EXT_MASK, _NUMBER.pack(mask))
        found = (parse_link(message) for message in netlink.dump(_GETLINK, body))
        return [link for link in found if link is not None]

    def _with_vfs(self, link: NicLink) -> NicLink:
        if read_text(self._device(link.parent) / "sriov_numvfs") in ("", "0"):
            return link
        try:
            return self.link(link.index) or link
        except HostError:
            return link

    def link(self, index: int) -> NicLink | None:
        """One interface, without a dump; None if it does not exist or belongs to no PCI device.

        Raises: HostError, OperationTimeout.
        """
        body = _IFINFO.pack(0, 0, index, 0, 0)
        body += attribute(_EXT_MASK, _NUMBER.pack(_EXT_VF | _EXT_SKIP_STATISTICS))
        with _words("list-vfs", f"interface {index}"):
            try:
                answers = netlink.ask(_GETLINK, body)
            except OSError as refused:
                if refused.errno != errno.ENODEV:
                    raise
                return None
        return parse_link(answers[0]) if answers else None

    def counters(self, index: int) -> dict[int, VfCounters]:
        """The counters of a PF's VFs, by VF number. Raises: HostError, OperationTimeout."""
        body = _IFINFO.pack(0, 0, index, 0, 0) + attribute(_EXT_MASK, _NUMBER.pack(_EXT_VF))
        with _words("count-vfs", f"interface {index}"):
            answers = netlink.ask(_GETLINK, body)
        listed = dict(_link_attributes(answers[0])).get(_VFINFO_LIST, b"") if answers else b""
        return parse_counters(listed)

    def is_open(self, address: str) -> bool:
        """Whether a process (a VM's) has the device open through vfio.

        vfio enables a device when it is opened and disables it at the last close
        (``vfio_pci_core_enable`` and ``_disable`` in drivers/vfio/pci/vfio_pci_core.c).
        """
        device = self._device(address)
        return is_vfio(read_link(device / "driver")) and read_text(device / "enable") not in (
            "",
            "0",
        )

    # -- attributes ------------------------------------------------------------------------------

    def set(self, pf_index: int, vf_number: int, group: str, want: VfAttributes) -> None:
        """Write one of ``GROUPS`` of one VF.

        Raises: Unsupported if the NIC lacks the feature, VfBusy, VfInvalid, VfRefuses, HostError,
        OperationTimeout.
        """
        body = _IFINFO.pack(0, 0, pf_index, 0, 0)
        body += attribute(_VFINFO_LIST, attribute(_VF_INFO, _request(vf_number, group, want)))
        with _words("set-vf", f"VF {vf_number}: {group}", group):
            netlink.ask(_SETLINK, body)

    # -- drivers ---------------------------------------------------------------------------------

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


def host_use(
    driver: str | None, interfaces: Sequence[HostInterface], *, may_be_up: bool = False
) -> HostUse | None:
    """How the host's network uses a VF; None if it can be given to a VM or OVS.

    ``may_be_up``: an interface that is merely up does not count as a use; DPDK may have left it so.
    """
    if is_vfio(driver) or is_uio(driver):
        return None
    seen = [replace(i, up=False) for i in interfaces] if may_be_up else interfaces
    return next(host_uses(driver, seen), None)


def is_vfio(driver: str | None) -> bool:
    """Whether the driver gives user space access through vfio: vfio-pci or a vendor's variant."""
    return driver is not None and "vfio" in driver


def is_uio(driver: str | None) -> bool:
    """Whether the driver gives user space access without an IOMMU: uio_pci_generic, igb_uio."""
    return driver is not None and "uio" in driver


def read_interfaces(device: Path | str) -> tuple[HostInterface, ...]:
    """The network interfaces of a PCI device in this network namespace, from sysfs."""
    try:
        names = sorted(os.listdir(f"{device}/net"))
    except OSError:
        return ()
    return tuple(
        HostInterface(
            name=name,
            up=bool(int(read_text(f"{device}/net/{name}/flags") or "0", 16) & _IFF_UP),
            enslaved=os.path.islink(f"{device}/net/{name}/master"),
            own_mac=read_text(f"{device}/net/{name}/addr_assign_type") not in ("", "0"),
            mac=read_text(f"{device}/net/{name}/address"),
        )
        for name in names
    )


def read_text(path: Path | str) -> str:
    """The text of a sysfs attribute; empty if it is missing or unreadable."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(descriptor, 4096).decode(errors="replace").strip()
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def read_link(path: Path | str) -> str | None:
    """The last component of the target of a sysfs link; None if there is no such link."""
    try:
        return os.readlink(path).rpartition("/")[2]
    except OSError:
        return None


# -- messages and errors of the kernel ---------------------------------------------------------------


def _request(vf_number: int, group: str, want: VfAttributes) -> bytes:
    """Build the structures of include/uapi/linux/if_link.h: the VF number, then the values."""

    def words_of(kind: int, *values: int) -> bytes:
        return attribute(kind, struct.pack(f"={1 + len(values)}I", vf_number, *values))

    match group:
        case "mac":
            mac = bytes.fromhex(want.mac.replace(":", ""))
            return attribute(_VF_MAC, struct.pack("=I32s", vf_number, mac))
        case "vlan" if want.vlan_stacked:
            tag = struct.pack("=III", vf_number, want.vlan, want.vlan_qos)
            info = attribute(_VF_VLAN_INFO, tag + struct.pack(">H2x", _ETH_P_8021AD))
            return attribute(_VF_VLAN_LIST, info)
        case "vlan":  # 802.1Q (do_setvfinfo in net/core/rtnetlink.c)
            return words_of(_VF_VLAN, want.vlan, want.vlan_qos)
        case "spoofchk":
            return words_of(_VF_SPOOFCHK, bool(want.spoofchk))
        case "trust":
            return words_of(_VF_TRUST, bool(want.trusted))
        case "rate":
            return words_of(_VF_RATE, want.min_mbps, want.max_mbps)
        case "link_state":
            return words_of(_VF_LINK_STATE, LINK_STATES.index(want.link_state))
        case "rss_query":
            return words_of(_VF_RSS_QUERY, bool(want.rss_query))
        case "node_guid" | "port_guid":
            kind = _VF_NODE_GUID if group == "node_guid" else _VF_PORT_GUID
            guid = int(getattr(want, group).replace(":", ""), 16)
            return attribute(kind, struct.pack("=I4xQ", vf_number, guid))
    raise AssertionError(group)


# ENOTSUPP: bnxt (bnxt_set_vf_vlan and bnxt_set_vf_spoofchk with an old firmware).
_ABSENT = (errno.EOPNOTSUPP, errno.EPROTONOSUPPORT, _ENOTSUPP)
# EAGAIN: i40e, another operation or a reset of the VF is in progress (i40e_check_vf_init_timeout).
# EBUSY: ice, the VF is not initialized (ice_check_vf_ready_for_cfg).
_BUSY = (errno.EAGAIN, errno.EBUSY, errno.EINTR)
# Also returned for a VF that is being reset: ice_is_vf_disabled, i40e_validate_vf.
_INVALID = (errno.EINVAL, errno.ERANGE)
# Not a fault of the VF: missing permission, or the VF was removed meanwhile.
_NOT_ITS_FAULT = (errno.EPERM, errno.EACCES, errno.EROFS, errno.ENODEV, errno.ENOENT)


@contextlib.contextmanager
def _words(step: str, what: str, group: str = "") -> Iterator[None]:
    """Translate errors of the kernel into typed errors with its error text."""
    try:
        yield
    except NetpluginError:
        raise
    except TimeoutError as late:
        raise OperationTimeout(f"{what}: the kernel did not answer in time", step=step) from late
    except netlink.Interrupted as moving:
        raise HostError(f"{what} kept changing while they were read", step=step) from moving
    except OSError as refused:
        said = f"{what}: {refused.strerror or refused}"
        raise _error(step, said, refused.errno or 0, group) from refused


def refusal(group: str, code: int) -> NetpluginError:
    """Translate the errno of a driver for this setting into a typed error."""
    return _error("set-vf", f"{group}: {os.strerror(code)}", code, group)


def _error(step: str, detail: str, code: int, group: str) -> NetpluginError:
    is_setting = group in GROUPS
    if is_setting and (code in _ABSENT or (code == errno.EPERM and _administers_networks())):
        return unsupported(detail, group)
    if not group or code in _NOT_ITS_FAULT:
        return HostError(detail, step=step)
    if code in _BUSY:
        return VfBusy(detail, step=step)
    return (VfInvalid if code in _INVALID else VfRefuses)(detail, step=step)


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
_OPTIONAL = ("spoofchk", "trust", "rate", "link_state", "rss_query", "node_guid", "port_guid")


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


def parse_link(payload: bytes) -> NicLink | None:
    """Parse a link message; None if the interface belongs to no PCI device."""
    _, _, index, flags, _ = _IFINFO.unpack_from(payload)
    found = dict(_link_attributes(payload))
    of_pci = text(found.get(_PARENT_BUS, b"")) == "pci"
    if not of_pci and _VFINFO_LIST not in found:
        return None
    permanent = found.get(_PERMANENT_ADDRESS, b"")
    return NicLink(
        index=index,
        name=text(found[_IFNAME]),
        parent=text(found.get(_PARENT, b"")) if of_pci else "",
        mtu=number(found.get(_MTU)),
        up=bool(flags & _IFF_UP),
        carrier=number(found.get(_CARRIER)) == 1,
        permanent_mac=_mac(permanent) if len(permanent) == 6 else None,
        vfs=parse_vfs(found.get(_VFINFO_LIST, b"")),
    )


def _link_attributes(payload: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield type and value of a link's attributes, with the whole list of its VFs.

    The length of an attribute has 16 bits, and the kernel truncates a larger one (``nla_nest_end``
    in include/net/netlink.h). 222 VFs with statistics exceed it, and older kernels always send
    statistics. The lengths of the individual VFs in the list are correct.
    """
    offset = _IFINFO.size
    while offset + 4 <= len(payload):
        length, kind = _ATTRIBUTE.unpack_from(payload, offset)
        if kind & 0x3FFF == _VFINFO_LIST:
            length = _end_of_vfs(payload, offset + 4) - offset
        if length < 4:
            return
        yield kind & 0x3FFF, payload[offset + 4 : offset + length]
        offset += (length + 3) & ~3


def _end_of_vfs(payload: bytes, offset: int) -> int:
    """The end of the list of VFs that begins at ``offset``: after the last entry with a VF's MAC."""
    while offset + _VF_START.size <= len(payload):
        length, kind, mac_length, mac_kind = _VF_START.unpack_from(payload, offset)
        if (kind, mac_length, mac_kind) != (_VF_INFO, _VF_MAC_BYTES, _VF_MAC):
            break
        offset += (length + 3) & ~3
    return offset


def parse_vfs(data: bytes) -> dict[int, VfAttributes]:
    """Parse IFLA_VFINFO_LIST: for each VF, attributes that begin with its number."""
    vfs: dict[int, VfAttributes] = {}
    for _, info in attributes(data):
        of = dict(attributes(info))
        vf_number, mac = struct.unpack_from("=I6s", of[_VF_MAC])
        _, vlan, qos = _words_of(of, _VF_VLAN, 3)
        _, least, most = _words_of(of, _VF_RATE, 3)
        link_state = _words_of(of, _VF_LINK_STATE, 2)[1]
        vfs[vf_number] = VfAttributes(
            mac=_mac(mac),
            vlan=vlan,
            vlan_qos=qos,
            spoofchk=_switch(_words_of(of, _VF_SPOOFCHK, 2, _UNKNOWN)[1]),
            trusted=_switch(_words_of(of, _VF_TRUST, 2, _UNKNOWN)[1]),
            link_state=LINK_STATES[link_state] if link_state < len(LINK_STATES) else "auto",
            min_mbps=least,
            max_mbps=most,
            vlan_stacked=_vlan_protocol(of.get(_VF_VLAN_LIST, b"")) == _ETH_P_8021AD,
            rss_query=_switch(_words_of(of, _VF_RSS_QUERY, 2, _UNKNOWN)[1]),
            node_guid=_guid(of.get(_VF_NODE_GUID)),
            port_guid=_guid(of.get(_VF_PORT_GUID)),
        )
    return vfs


def parse_counters(data: bytes) -> dict[int, VfCounters]:
    """Parse the statistics in IFLA_VFINFO_LIST, by VF number."""
    found: dict[int, VfCounters] = {}
    for _, info in attributes(data):
        of = dict(attributes(info))
        counted = {kind: number(value) for kind, value in attributes(of.get(_VF_STATS, b""))}
        values = {name: counted.get(kind, 0) for name, kind in _COUNTERS.items()}
        found[struct.unpack_from("=I", of[_VF_MAC])[0]] = VfCounters.model_validate(values)
    return found


def _vlan_protocol(data: bytes) -> int:
    """The protocol in the struct ifla_vf_vlan_info of the list; 0 if the driver reports none (mlx5)."""
    info = dict(attributes(data)).get(_VF_VLAN_INFO, b"")
    return int(struct.unpack_from(">H", info, 12)[0]) if len(info) >= 14 else 0


def _guid(data: bytes | None) -> str:
    """Format a struct ifla_vf_guid like ``ip link``."""
    return "" if data is None else struct.unpack_from("=I4xQ", data)[1].to_bytes(8, "big").hex(":")


def _words_of(of: Mapping[int, bytes], kind: int, count: int, default: int = 0) -> tuple[int, ...]:
    value = of.get(kind)
    return (default,) * count if value is None else struct.unpack_from(f"={count}I", value)


def _switch(value: int) -> bool | None:
    return None if value == _UNKNOWN else bool(value)


def _mac(data: bytes) -> str:
    return ":".join(f"{byte:02x}" for byte in data)
