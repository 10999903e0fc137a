"""The models of physical networks: by what the ports of each backend leave this host."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)

from netplugin.api.fields import DeviceName, Flag, Value, at_most, worded
from netplugin.api.models import Finding
from netplugin.api.problem import FieldError, Problem

#: The most devices of a network. OVS and the kernel have no limit.
_MOST = 32

#: The MTU in bytes of an uplink without one: what OVS gives a port without ``mtu_request``.
UPLINK_MTU = 1500
_ADDRESS = re.compile(r"[0-9A-Fa-f]+(:[0-9A-Fa-f]+)+(\.[0-7])?\Z")


def identity_of(device: str) -> str:
    """A device as it is compared: a PCI address or vendor:device in lower case, anything else as it is.

    The arguments that DPDK takes after an address do not count.
    """
    address, _, _ = device.partition(",")
    return address.lower() if _ADDRESS.match(address) else device


def _in_lower_case(device: str) -> str:
    """A PCI address in lower case, as the kernel writes it: the names of ports are made from it."""
    address, comma, arguments = device.partition(",")
    return address.lower() + comma + arguments if _ADDRESS.match(address) else device


#: ``dpdk-devargs`` of OVS: a PCI address or a virtual device of DPDK, each with its parameters.
DevArgs = Annotated[
    str,
    StringConstraints(
        pattern=worded(
            r"^([0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:[01][0-9A-Fa-f]\.[0-7]|class=eth|(net_|eth_|virtio_user)"
            r"[a-z0-9_]{1,31})(,[A-Za-z0-9_.,:=/@\[\]+-]{1,200})?$",
            "must be a PCI address or a virtual device of DPDK, such as 0000:03:00.0 or "
            "net_af_packet0,iface=eth0",
        ),
        strict=True,
    ),
    AfterValidator(_in_lower_case),
]

#: An entry of ``[sriov] devices`` without its network; the backend parses it.
VfDevice = Annotated[
    str,
    StringConstraints(
        pattern=worded(
            r"^[A-Za-z0-9][A-Za-z0-9._@:-]{0,31}(#[0-9^+-]{1,200})?$",
            "must be a NIC by its interface, PCI address or vendor:device, such as eth1 or eth1#0-7",
        ),
        strict=True,
    ),
]


def _once(devices: tuple[str, ...]) -> tuple[str, ...]:
    if len({identity_of(device) for device in devices}) != len(devices):
        raise ValueError("a device may be listed once")
    return devices


class OvsUplinkSpec(Value):
    """The DPDK uplink of an OVS bridge: no device, one, or several as a bond.

    ``devices``: values of ``dpdk-devargs``, a PCI address or a virtual device. ``bond``: the mode of
    several devices; ``lacp`` needs LACP on the switch. Default: ``active-backup``.
    """

    devices: Annotated[
        tuple[DevArgs, ...], Field(max_length=_MOST), at_most(_MOST), AfterValidator(_once)
    ] = ()
    bond: Literal["active-backup", "lacp", "balance-slb"] | None = None

    @field_validator("bond")
    @classmethod
    def _of_several(cls, bond: str | None, spec: ValidationInfo) -> str | None:
        if bond is not None and len(spec.data.get("devices", (0, 0))) < 2:
            raise ValueError("a bond has two devices or more")
        return bond


class BridgeUplinkSpec(Value):
    """The uplink of Linux bridges: an interface of the host; None for networks that stay on this host."""

    interface: DeviceName | None = None


class VfPoolSpec(Value):
    """The NICs whose virtual functions ports get, as in ``[sriov] devices``: interface name, PCI address or
    vendor:device, each with the numbers of its functions if not all (``eth1#0-7``)."""

    devices: Annotated[
        tuple[VfDevice, ...], Field(min_length=1, max_length=_MOST), at_most(_MOST), AfterValidator(_once)
    ]


class PhysicalNetworkSpec(Value):
    """A physical network: by what the ports of each backend leave this host.

    ``bridge`` is the name of the OVS bridge, or without ``ovs`` that of the Linux bridge of the flat
    network (VLANs have bridges of their own); the agent derives one if it is not set. ``mtu`` in bytes
    is that of the DPDK uplink, and of what ``keep`` keeps; if it is not set, an existing uplink keeps
    its MTU, and a new one has 1500. ``keep``: bridge and uplink exist while no port does, as the
    destination of a migration needs them.
    """

    ovs: OvsUplinkSpec | None = None
    linuxbridge: BridgeUplinkSpec | None = None
    sriov: VfPoolSpec | None = None
    bridge: DeviceName | None = None
    mtu: Annotated[int, Field(ge=576, le=9216, strict=True)] | None = None
    keep: Flag = False

    @field_validator("bridge")
    @classmethod
    def _of_a_part(cls, bridge: str | None, spec: ValidationInfo) -> str | None:
        if bridge is not None and all(spec.data.get(part, ()) is None for part in ("ovs", "linuxbridge")):
            raise ValueError("it is that of ovs or linuxbridge, one of which is required with it")
        return bridge

    @model_validator(mode="after")
    def _has_a_part(self) -> Self:
        if not self.parts:
            raise ValueError("one of ovs, linuxbridge and sriov is required")
        return self

    @property
    def parts(self) -> frozenset[str]:
        """The names of the fields that are set for some backends."""
        return frozenset(name for name in PARTS if getattr(self, name) is not None)

    def unused(self) -> list[FieldError]:
        """The fields that no part uses."""
        if self.mtu is None or self.linuxbridge or (self.ovs and self.ovs.devices):
            return []
        message = "is that of an uplink in ovs.devices or of linuxbridge, and the network has neither"
        return [FieldError(field="mtu", message=message)]


#: The fields of a physical network that are each for some backends.
PARTS = ("ovs", "linuxbridge", "sriov")
#: Those of which ``keep`` keeps something: virtual functions are there in any case.
KEPT_PARTS = ("ovs", "linuxbridge")


class PhysicalNetworkInfo(Value):
    """A physical network of this host.

    ``origin``: the agent's configuration (``config``), or a PUT (``api``). ``bridge`` is the OVS
    bridge, also if its name was derived, or the Linux bridge if its name was chosen. ``ports`` is the
    number of ports on the network. ``findings`` say what is wrong with its devices and with what it keeps;
    ``errors`` what a PUT could not change.
    """

    name: str
    origin: Literal["config", "api"]
    bridge: str | None = None
    mtu: int | None = None
    keep: bool = False
    ovs: OvsUplinkSpec | None = None
    linuxbridge: BridgeUplinkSpec | None = None
    sriov: VfPoolSpec | None = None
    ports: int = 0
    findings: tuple[Finding, ...] = ()
    errors: tuple[Problem, ...] = ()
