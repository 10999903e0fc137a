"""Virtual functions as the kernel has them: one netlink dump to read all, one small step each to write.

A VF's attributes are its PF's to set, by the VF's number; its driver is set by its PCI address, in
sysfs. Nothing here thinks: who calls decides what is right, and reads back that it is.
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

from netplugin.errors import Conflict, HostError, NetpluginError, OperationTimeout, Unsupported
from netplugin.host import netlink
from netplugin.host.netlink import attribute, attributes, number, text
from netplugin.models import VfCounters

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
    "rx_packets": 0, "tx_packets": 1, "rx_bytes": 2, "tx_bytes": 3, "rx_dropped": 7, "tx_dropped": 8,
}  # fmt: skip
_UNKNOWN = 0xFFFFFFFF
#: An attribute with struct ifla_vf_mac.
_VF_MAC_BYTES = 40
# Older kernels heed it for the interface's own statistics only, not for those of its VFs.
_EXT_VF, _EXT_SKIP_STATISTICS = 1, 8
_IFF_UP = 1
# include/uapi/linux/if_ether.h
_ETH_P_8021AD = 0x88A8
# include/uapi/linux/capability.h
_CAP_NET_ADMIN = 12
# include/linux/errno.h: the kernel's own, which drivers give to user space all the same.
_ENOTSUPP = 524

LINK_STATES = ("auto", "enable", "disable")  # IFLA_VF_LINK_STATE_AUTO and following


@dataclass(frozen=True, slots=True)
class VfAttributes:
    """What a PF holds of one of its VFs; rates are in Mbit/s, and 0 is no limit.

    ``spoofchk``, ``trusted`` and ``rss_query`` are None where the NIC has no such switch; GUIDs are
    empty where it has none (they are of InfiniBand). ``vlan_stacked`` is a VLAN of 802.1ad (QinQ).
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


#: What is written together, in the order in which it is written, and the fields it has.
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
    """The groups to write so that a VF becomes ``want``; a switch that is not there is off."""
    return tuple(
        group
        for group, names in GROUPS.items()
        if any((getattr(have, n) or 0) != (getattr(want, n) or 0) for n in names)
    )


@dataclass(frozen=True, slots=True)
class NicLink:
    """The network interface of a PCI device; of a PF, with the attributes of its VFs by number."""

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
    #: Whether its driver or the host chose its MAC, and not the PF (``addr_assign_type`` is not
    #: NET_ADDR_PERM, include/uapi/linux/netdevice.h: VF drivers call eth_hw_addr_random).
    own_mac: bool = False
    #: Its MAC; empty if that cannot be read.
    mac: str = ""


@dataclass(frozen=True, slots=True)
class HostUse:
    """How the host uses a VF itself: ``how`` is a clause; ``end`` says how to end that."""

    how: str
    end: str

    def conflict(self, address: str, step: str) -> Conflict:
        """The error for a VF that is to be taken from the host while it uses it."""
        return Conflict(f"VF {address} is in use by the host: {self.how}", step=step, fix=self.end)


def host_uses(driver: str | None, interfaces: Sequence[HostInterface]) -> Iterator[HostUse]:
    """Every use of a VF that a network driver of the host has.

    sysfs shows the interfaces of the reader's network namespace only (``net_namespace`` of class
    net in net/core/net-sysfs.c): a driver without one has it in another namespace, which is a
    container's.
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
            yield HostUse(
                f"its interface {interface.name} is enslaved", f"release {interface.name}"
            )
        elif interface.up:
            yield HostUse(f"its interface {interface.name} is up", f"set {interface.name} down")


class VfRefuses(HostError):
    """A VF does not take what others take, so that something is wrong with it."""


class VfInvalid(VfRefuses):
    """The driver calls a setting invalid: it cannot do it, or the VF or its NIC is being reset."""


class VfBusy(HostError):
    """The driver asks to try again: the VF or its NIC is being reset."""

    retryable = True


class VfStuck(VfBusy):
    """The same, while the NIC is up and reports the VF: if it lasts, the VF is not fit for use."""


class Vfs:
    """The kernel's VFs, in the network namespace of the calling thread."""

    def __init__(self, sys: Path = SYS) -> None:
        self.sys = sys

    # -- reading ---------------------------------------------------------------------------------

    def links(self) -> dict[str, NicLink]:
        """The interfaces of PCI devices by name, in one dump.

        If the kernel cannot put the VFs of one NIC into a message (it does not reckon with GUIDs in
        ``rtnl_vfinfo_size``, net/core/rtnetlink.c), a request is sent for each NIC with VFs, and the
        answer for that one has no VFs.

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
        """One of these interfaces, without a dump; None if it is no more, or no PCI device's.

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
        """What a PF's driver counts for its VFs, by number. Raises: HostError, OperationTimeout."""
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

        Raises: Unsupported if the NIC has no such thing, VfBusy, VfInvalid, VfRefuses, HostError,
        OperationTimeout.
        """
        body = _IFINFO.pack(0, 0, pf_index, 0, 0)
        body += attribute(_VFINFO_LIST, attribute(_VF_INFO, _request(vf_number, group, want)))
        with _words("set-vf", f"VF {vf_number}: {group}", group):
            netlink.ask(_SETLINK, body)

    # -- drivers ---------------------------------------------------------------------------------

    def override(self, address: str, driver: str | None) -> None:
        """Name the only driver that may bind to the device, or (None) let the kernel choose."""
        self._write(address, "driver_override", driver or "\n")

    def host_use(self, address: str, *, may_be_up: bool = False) -> HostUse | None:
        """How the host's network uses the device now, see ``host_use``."""
        device = self._device(address)
        return host_use(read_link(device / "driver"), read_interfaces(device), may_be_up=may_be_up)

    def unbind(self, address: str) -> None:
        """Take the device from its driver, if it has one.

        Raises: HostError; also if a process has it open, for then the kernel would wait for it.
        """
        if self.is_open(address):
            raise HostError(f"{address} is in use: its vfio device is open", step="unbind-vf")
        if read_link(self._device(address) / "driver"):
            self._write(address, "driver/unbind", address)

    def reset(self, address: str) -> None:
        """Reset the function, where it can be: whoever has it next finds nothing of the last one."""
        if (self._device(address) / "reset").exists():
            self._write(address, "reset", "1")

    def probe(self, address: str) -> None:
        """Let the driver bind that ``driver_override`` names, or else that the kernel chooses.

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
    """How the host's network uses a VF; None if a process may have it instead.

    ``may_be_up``: an interface that is only up is no use, as it may be left of DPDK's.
    """
    if is_vfio(driver) or is_uio(driver):
        return None
    seen = [replace(i, up=False) for i in interfaces] if may_be_up else interfaces
    return next(host_uses(driver, seen), None)


def is_vfio(driver: str | None) -> bool:
    """Whether a driver gives a device to a process: vfio-pci, or a vendor's variant of it."""
    return driver is not None and "vfio" in driver


def is_uio(driver: str | None) -> bool:
    """Whether a driver gives a device to a process without an IOMMU: uio_pci_generic, igb_uio."""
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
    """A sysfs attribute's text; empty if there is none, or none to read."""
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
    """The name that a sysfs link leads to; None if there is no such link."""
    try:
        return os.readlink(path).rpartition("/")[2]
    except OSError:
        return None


# -- what is asked of the kernel, and what it says ---------------------------------------------------


def _request(vf_number: int, group: str, want: VfAttributes) -> bytes:
    """The structures of include/uapi/linux/if_link.h: the VF's number, then the values."""

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
        case "vlan":  # of 802.1Q (do_setvfinfo in net/core/rtnetlink.c)
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
# EAGAIN: i40e, another operation or a reset of the VF is under way (i40e_check_vf_init_timeout).
# EBUSY: ice, the VF is not initialized (ice_check_vf_ready_for_cfg).
_BUSY = (errno.EAGAIN, errno.EBUSY, errno.EINTR)
# Also of a VF that is being reset: ice_is_vf_disabled, i40e_validate_vf.
_INVALID = (errno.EINVAL, errno.ERANGE)
# Not the VF's fault: we may not, or it has gone meanwhile.
_NOT_ITS_FAULT = (errno.EPERM, errno.EACCES, errno.EROFS, errno.ENODEV, errno.ENOENT)


@contextlib.contextmanager
def _words(step: str, what: str, group: str = "") -> Iterator[None]:
    """The kernel's refusal as an error with its own words."""
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
    """What the errno of a driver for this setting becomes."""
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
    """Whether this process has CAP_NET_ADMIN, so that it is not the kernel that forbids a setting.

    mlx5 forbids them where the host does not manage the NIC's switch, as beside a DPU that does
    (``mlx5_esw_allowed`` in drivers/net/ethernet/mellanox/mlx5/core/eswitch.c).
    """
    for line in read_text("/proc/thread-self/status").splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            return bool(int(value, 16) >> _CAP_NET_ADMIN & 1)
    return False


#: What to ask for instead, by group.
_FIXES: Mapping[str, str] = MappingProxyType(
    {
        "vlan": "ask without vf.vlan_qos and with vf.vlan_proto 802.1Q",
        # i40e_ndo_set_vf_trust in MFP mode: its VFs get no multicast either.
        "trust": "ask without vf.trusted; a relay of vdpa needs it on this NIC: use another backend",
    }
)


def unsupported(detail: str, group: str) -> Unsupported:
    """The error for a setting that a NIC does not have."""
    fix = _FIXES.get(group, f"ask without {group}, or for less")
    return Unsupported(f"the NIC refuses it: {detail}", step="set-vf", fix=fix)


# Every NIC with VFs sets a MAC and a VLAN; what else is invalid is what the NIC cannot do (igb and
# i40e have no least rate, and say EINVAL).
_OPTIONAL = ("spoofchk", "trust", "rate", "link_state", "rss_query", "node_guid", "port_guid")


def is_beyond(group: str, want: VfAttributes) -> bool:
    """Whether a NIC in order may call this setting invalid because it cannot do it.

    A VLAN priority: bnxt (bnxt_set_vf_vlan of Linux 5.15; 6.18 takes it). A MAC of zeros: qede
    (qede_set_vf_mac) and cxgb4 (cxgb4_mgmt_set_vf_mac).
    """
    return (
        group in _OPTIONAL
        or (group == "vlan" and (want.vlan_qos != 0 or want.vlan_stacked))
        or (group == "mac" and want.mac == NO_MAC)
    )


def parse_link(payload: bytes) -> NicLink | None:
    """A link's message as a value; None if no PCI device is behind it."""
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
    """Type and value of a link's attributes, with the whole list of its VFs.

    The length of an attribute has 16 bits, and the kernel stores what is left of a longer one
    (``nla_nest_end`` in include/net/netlink.h). 222 VFs are longer with their statistics, which
    older kernels always send. Each VF in the list has a right length of its own.
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
    """Where the list of VFs ends that begins here: after the last that begins with a VF's MAC."""
    while offset + _VF_START.size <= len(payload):
        length, kind, mac_length, mac_kind = _VF_START.unpack_from(payload, offset)
        if (kind, mac_length, mac_kind) != (_VF_INFO, _VF_MAC_BYTES, _VF_MAC):
            break
        offset += (length + 3) & ~3
    return offset


def parse_vfs(data: bytes) -> dict[int, VfAttributes]:
    """The attribute IFLA_VFINFO_LIST: for each VF, attributes that begin with its number."""
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
    """The statistics in IFLA_VFINFO_LIST, by the VF's number."""
    found: dict[int, VfCounters] = {}
    for _, info in attributes(data):
        of = dict(attributes(info))
        counted = {kind: number(value) for kind, value in attributes(of.get(_VF_STATS, b""))}
        values = {name: counted.get(kind, 0) for name, kind in _COUNTERS.items()}
        found[struct.unpack_from("=I", of[_VF_MAC])[0]] = VfCounters.model_validate(values)
    return found


def _vlan_protocol(data: bytes) -> int:
    """Of the one VLAN in the list: struct ifla_vf_vlan_info; 0 if the driver does not say (mlx5)."""
    info = dict(attributes(data)).get(_VF_VLAN_INFO, b"")
    return int(struct.unpack_from(">H", info, 12)[0]) if len(info) >= 14 else 0


def _guid(data: bytes | None) -> str:
    """Of struct ifla_vf_guid, as ``ip link`` writes it."""
    return "" if data is None else struct.unpack_from("=I4xQ", data)[1].to_bytes(8, "big").hex(":")


def _words_of(of: Mapping[int, bytes], kind: int, count: int, default: int = 0) -> tuple[int, ...]:
    value = of.get(kind)
    return (default,) * count if value is None else struct.unpack_from(f"={count}I", value)


def _switch(value: int) -> bool | None:
    return None if value == _UNKNOWN else bool(value)


def _mac(data: bytes) -> str:
    return ":".join(f"{byte:02x}" for byte in data)
