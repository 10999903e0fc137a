"""The bodies of ZStack's calls, with the names of ZStack; fields that the agent does not use are ignored."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from netplugin.api.fields import Mac, Name, PciAddress, at_most
from netplugin.api.models import Finding


def _number(value: Any) -> Any:
    """ZStack sends numbers as numbers or as text, and 4.0 for 4; empty text is none."""
    if value in (None, ""):
        return None
    try:
        number = math.nan if isinstance(value, bool) else float(value)
        if number.is_integer():
            return int(number)
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError("must be a whole number")


_Number = Annotated[Annotated[int, Field(ge=0, lt=1 << 53)] | None, BeforeValidator(_number)]
#: An interface or a bond of the host, or a PCI address, in no path of sysfs but its own.
_Interface = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,63}$", strict=True)]
_Text = Annotated[str, StringConstraints(max_length=255, strict=True)]


class Command(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class BridgeCommand(Command):
    """A bridge and its uplink. ``mtu`` in bytes; none or 0: the option."""

    bridgeName: Name
    physicalInterfaceName: _Interface
    mtu: _Number = None


class BridgeName(Command):
    bridgeName: Name


class VhostAddOn(Command):
    """The queues of a NIC and the sizes of their rings, in descriptors."""

    queueNum: _Number = None
    rxBufferSize: _Number = None
    txBufferSize: _Number = None


class Nic(Command):
    """A NIC of a VM; docs/zstack.md says what each field becomes."""

    nicInternalName: Name
    mac: Mac
    type: _Text
    bridgeName: Name
    vlanId: _Number = None
    mtu: _Number = None
    driverType: _Text | None = None
    vHostAddOn: VhostAddOn | None = None
    pciDeviceAddress: PciAddress | None = None
    ips: Annotated[tuple[_Text, ...], Field(max_length=64), at_most(64)] | None = None
    cleanTraffic: bool | None = None


class NicsCommand(Command):
    vmUuid: Name
    nics: Annotated[tuple[Nic, ...], Field(max_length=64), at_most(64)]


class NicName(Command):
    """One NIC of a VM, or all of them."""

    vmUuid: Name
    nicInternalName: Name | None = None


class NicOfVm(Nic):
    vmUuid: Name


class BridgeToSync(Command):
    name: Name
    physicalInterface: _Interface
    ports: Annotated[tuple[NicOfVm, ...], Field(max_length=4096, fail_fast=True), at_most(4096)] | None = None


class SyncCommand(Command):
    # A million NICs in one body would be millions of errors: the first one is enough.
    ovsBridgeInfo: Annotated[tuple[BridgeToSync, ...], Field(max_length=256, fail_fast=True), at_most(256)]


class ResourceCommand(Command):
    """``reserveSize`` is the memory in hugepages of any size, in kB."""

    reserveSize: _Number = None


class VfsCommand(Command):
    """A NIC and the number of its virtual functions."""

    physicalInterfaceName: _Interface
    virtPartNum: _Number = None


class CpuCommand(Command):
    """The CPUs of the PMD threads, as a hexadecimal mask."""

    ovsCpuPinning: _Text


class InterfacesCommand(Command):
    interfaceNames: Annotated[tuple[_Interface, ...], Field(max_length=256), at_most(256)]


class Answer(BaseModel):
    """The answer that ZStack expects; ``error`` is a sentence."""

    success: bool = True
    error: str = ""


class VdpaAnswer(Answer):
    vdpaPaths: list[str]


class VfsAnswer(Answer):
    """kvmagent's own answer is an empty list too: nothing is changed."""

    vfsInfo: list[str] = []


class InterfacesAnswer(Answer):
    failedInterfaceNames: list[str] = []


class ChecksAnswer(Answer):
    """What `GET /v1/host/checks` has found and is not ``ok``."""

    findings: list[Finding]


class SyncAnswer(Answer):
    """``changes``: repairs, as sentences; ``removed`` and ``kept``: NICs of ZStack that it does not list."""

    changes: list[str]
    removed: list[str]
    kept: list[str]
