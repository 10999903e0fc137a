"""Virtual functions as the kernel has them: one netlink dump to read all, one small step each to write.

A VF's attributes are its PF's to set, by the VF's number; its driver is set by its PCI address, in
sysfs. Nothing here thinks: who calls decides what is right, and reads back that it is.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from netplugin.errors import HostError, NetpluginError, OperationTimeout, Unsupported
from netplugin.host import netlink
from netplugin.host.netlink import attribute, attributes, number, text

SYS = Path("/sys")
NO_MAC = "00:00:00:00:00:00"
VFIO = "vfio-pci"

# include/uapi/linux/rtnetlink.h
_GETLINK, _SETLINK = 18, 19
_IFINFO, _NUMBER = struct.Struct("=BxHiII"), struct.Struct("=I")
# include/uapi/linux/if_link.h
_IFNAME, _MTU, _MASTER, _VFINFO_LIST, _EXT_MASK, _CARRIER = 3, 4, 10, 22, 29, 33
_PERMANENT_ADDRESS, _PARENT, _PARENT_BUS, _VF_INFO = 54, 56, 57, 1
_VF_MAC, _VF_VLAN, _VF_SPOOFCHK, _VF_LINK_STATE, _VF_RATE, _VF_TRUST = 1, 2, 4, 5, 6, 9
_UNKNOWN = 0xFFFFFFFF
# The statistics of 200 VFs do not fit into one attribute of 64 KB beside the rest.
_EXT_VF, _EXT_SKIP_STATISTICS = 1, 8
_IFF_UP = 1

LINK_STATES = ("auto", "enable", "disable")  # IFLA_VF_LINK_STATE_AUTO and following


@dataclass(frozen=True, slots=True)
class VfAttributes:
    """What a PF holds of one of its VFs; rates are in Mbit/s, and 0 is no limit.

    ``spoofchk`` and ``trusted`` are None where the NIC has no such switch.
    """

    mac: str = NO_MAC
    vlan: int = 0
    vlan_qos: int = 0
    spoofchk: bool | None = None
    trusted: bool | None = None
    link_state: str = "auto"
    min_mbps: int = 0
    max_mbps: int = 0


#: What is written together, in the order in which it is written, and the fields it has.
GROUPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "mac": ("mac",),
        "vlan": ("vlan", "vlan_qos"),
        "spoofchk": ("spoofchk",),
        "trust": ("trusted",),
        "rate": ("min_mbps", "max_mbps"),
        "link_state": ("link_state",),
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
    enslaved: bool = False
    permanent_mac: str | None = None
    vfs: Mapping[int, VfAttributes] = field(default_factory=dict)


class VfRefuses(HostError):
    """A VF does not take what others take, so that something is wrong with it."""


class Vfs:
    """The kernel's VFs, in the network namespace of the calling thread."""

    def __init__(self, sys: Path = SYS) -> None:
        self.sys = sys

    # -- reading ---------------------------------------------------------------------------------

    def links(self) -> dict[str, NicLink]:
        """The interfaces of PCI devices by name, in one dump. Raises: HostError, OperationTimeout."""
        body = _IFINFO.pack(0, 0, 0, 0, 0)
        body += attribute(_EXT_MASK, _NUMBER.pack(_EXT_VF | _EXT_SKIP_STATISTICS))
        with _words("list-vfs", "interfaces"):
            found = [parse_link(message) for message in netlink.dump(_GETLINK, body)]
        return {link.name: link for link in found if link is not None}

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

        Raises: Unsupported if the NIC has no such thing, VfRefuses, HostError, OperationTimeout.
        """
        body = _IFINFO.pack(0, 0, pf_index, 0, 0)
        body += attribute(_VFINFO_LIST, attribute(_VF_INFO, _request(vf_number, group, want)))
        with _words("set-vf", f"VF {vf_number}: {group}", group):
            netlink.ask(_SETLINK, body)

    # -- drivers ---------------------------------------------------------------------------------

    def override(self, address: str, driver: str | None) -> None:
        """Name the only driver that may bind to the device, or (None) let the kernel choose."""
        self._write(address, "driver_override", driver or "\n")

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


def is_vfio(driver: str | None) -> bool:
    """Whether a driver gives a device to a process: vfio-pci, or a vendor's variant of it."""
    return driver is not None and "vfio" in driver


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
        case "vlan":
            return words_of(_VF_VLAN, want.vlan, want.vlan_qos)
        case "spoofchk":
            return words_of(_VF_SPOOFCHK, bool(want.spoofchk))
        case "trust":
            return words_of(_VF_TRUST, bool(want.trusted))
        case "rate":
            return words_of(_VF_RATE, want.min_mbps, want.max_mbps)
        case "link_state":
            return words_of(_VF_LINK_STATE, LINK_STATES.index(want.link_state))
    raise AssertionError(group)


_ABSENT = (errno.EOPNOTSUPP, errno.EPROTONOSUPPORT)
# Every NIC with VFs sets a MAC and a VLAN, and a driver binds or not: what else is invalid is what
# the NIC cannot do (igb has no least rate, and says EINVAL).
_OPTIONAL = ("spoofchk", "trust", "rate", "link_state")
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


def _error(step: str, detail: str, code: int, group: str) -> NetpluginError:
    if code in _ABSENT or (group in _OPTIONAL and code in (errno.EINVAL, errno.ERANGE)):
        return Unsupported(
            f"the NIC refuses it: {detail}", step=step, fix=f"ask without {group}, or for less"
        )
    if not group or code in _NOT_ITS_FAULT:
        return HostError(detail, step=step)
    return VfRefuses(detail, step=step)


def parse_link(payload: bytes) -> NicLink | None:
    """A link's message as a value; None if no PCI device is behind it."""
    _, _, index, flags, _ = _IFINFO.unpack_from(payload)
    found = dict(attributes(payload, _IFINFO.size))
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
        enslaved=_MASTER in found,
        permanent_mac=_mac(permanent) if len(permanent) == 6 else None,
        vfs=parse_vfs(found.get(_VFINFO_LIST, b"")),
    )


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
        )
    return vfs


def _words_of(of: Mapping[int, bytes], kind: int, count: int, default: int = 0) -> tuple[int, ...]:
    value = of.get(kind)
    return (default,) * count if value is None else struct.unpack_from(f"={count}I", value)


def _switch(value: int) -> bool | None:
    return None if value == _UNKNOWN else bool(value)


def _mac(data: bytes) -> str:
    return ":".join(f"{byte:02x}" for byte in data)
