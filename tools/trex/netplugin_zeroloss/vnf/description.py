"""VNF descriptions in a run description: program, machine and parameters."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from netplugin.api.fields import Mac, PciAddress, Value
from netplugin_zeroloss.vnf.contract import Attachment, VnfPort

#: Program name, looked up in PATH, or path; must not look like an option.
Program = Annotated[str, StringConstraints(pattern=r"^[^-\s][^\n]*$", max_length=4096, strict=True)]
_HostName = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9.:_-]*$", max_length=255, strict=True)
]
Seconds = Annotated[float, Field(gt=0, le=3600)]


class LocalMachine(Value):
    """This machine: the VNF attaches directly to the VM side of the ports."""

    type: Literal["local"] = "local"


class SshMachine(Value):
    """A VM with the ports as its NICs. Authentication is by key only (BatchMode)."""

    type: Literal["ssh"]
    host: _HostName
    port: Annotated[int, Field(ge=1, le=65535)] = 22
    user: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")] = "root"
    #: Private key file; null: ssh's default.
    key: str | None = None
    #: File with the VM's host key; null: ssh's default. Unknown keys are rejected.
    known_hosts: str | None = None


class TestpmdDescription(Value):
    """DPDK's testpmd, in forward mode ``mac``."""

    __test__ = False  # the name looks like a test to pytest

    type: Literal["testpmd"]
    binary: Program = "dpdk-testpmd"
    #: false: normal pages; slower, and without VFs.
    hugepages: bool = True
    memory_mb: Annotated[int, Field(ge=64, le=1 << 20)] = 256
    #: Seconds until it must forward.
    start_s: Seconds = 60.0


class TapsDescription(Value):
    """A Python forwarder for taps, for tests and demonstrations: about ten kpps."""

    type: Literal["taps"]


class VppDescription(Value):
    """FD.io VPP as a router with static neighbours."""

    type: Literal["vpp"]
    binary: Program = "vpp"
    machine: Annotated[LocalMachine | SshMachine, Field(discriminator="type")] = LocalMachine()
    #: PCI addresses of the ports inside the VM, in port order; empty if VPP runs on this machine.
    nics: tuple[PciAddress, ...] = ()
    #: Receive queues per port; null: those of the port.
    rx_queues: Annotated[int, Field(ge=1, le=256)] | None = None
    hugepages: bool = True
    #: Plug-in directory; null: VPP's default.
    plugin_path: str | None = None
    start_s: Seconds = 60.0


class ExternalDescription(Value):
    """A VNF run by the operator: nothing is started, and it has no counters."""

    type: Literal["external"]
    #: Name and version for the report.
    name: str = "external"
    version: str = "unknown"


Description = Annotated[
    TestpmdDescription | TapsDescription | VppDescription | ExternalDescription,
    Field(discriminator="type"),
]


class PortDescription(Value):
    """An existing port, for a control without the backend."""

    attachment: Attachment
    #: Socket path, name of a tap or kernel device, or PCI address.
    device: Annotated[str, StringConstraints(pattern=r"^[^,\s]+$", max_length=107, strict=True)]
    mac: Mac
    peer_mac: Mac
    queues: Annotated[int, Field(ge=1, le=128)] = 1
    ring: Annotated[int, Field(ge=64, le=4096)] = 1024
    mtu: Annotated[int, Field(ge=576, le=9216)] = 1500

    def vnf_port(self) -> VnfPort:
        return VnfPort(**self.model_dump())
