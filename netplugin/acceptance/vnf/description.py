"""What a run description says of the VNF, checked: which program, where it runs, and with what."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from netplugin.acceptance.vnf.contract import Attachment, VnfPort
from netplugin.models import Mac, PciAddress, Value

#: A program: a name that is looked up in PATH, or a path. Not an option of what runs it.
Program = Annotated[str, StringConstraints(pattern=r"^[^-\s][^\n]*$", max_length=4096, strict=True)]
_HostName = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9.:_-]*$", max_length=255, strict=True)
]
Seconds = Annotated[float, Field(gt=0, le=3600)]


class LocalMachine(Value):
    """The machine that the tool runs on: the VNF takes the VM's side of the ports itself."""

    type: Literal["local"] = "local"


class SshMachine(Value):
    """A VM that has the ports as its NICs. Log-in is by key: nobody is asked for a password."""

    type: Literal["ssh"]
    host: _HostName
    port: Annotated[int, Field(ge=1, le=65535)] = 22
    user: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")] = "root"
    #: Private key; null: what ssh finds by itself.
    key: str | None = None
    #: File with the VM's host key; null: ssh's own. A key that is not in it is refused.
    known_hosts: str | None = None


class TestpmdDescription(Value):
    """DPDK's testpmd, in forward mode ``mac``."""

    __test__ = False  # the name looks like a test to pytest

    type: Literal["testpmd"]
    binary: Program = "dpdk-testpmd"
    #: Without, its memory is ordinary pages: slower, and VFs cannot be had.
    hugepages: bool = True
    memory_mb: Annotated[int, Field(ge=64, le=1 << 20)] = 256
    #: What it gets until it forwards.
    start_s: Seconds = 60.0


class TapsDescription(Value):
    """A small forwarder over the taps' descriptors: for tests and demonstrations, some ten kpps."""

    type: Literal["taps"]


class VppDescription(Value):
    """FD.io VPP as a router with static neighbours."""

    type: Literal["vpp"]
    binary: Program = "vpp"
    machine: Annotated[LocalMachine | SshMachine, Field(discriminator="type")] = LocalMachine()
    #: PCI addresses of the ports inside the VM, in their order; empty unless it runs in one.
    nics: tuple[PciAddress, ...] = ()
    #: Receive queues of each port; null: as many as the port has.
    rx_queues: Annotated[int, Field(ge=1, le=256)] | None = None
    hugepages: bool = True
    #: Where its plug-ins are, if not where it looks by itself.
    plugin_path: str | None = None
    start_s: Seconds = 60.0


class ExternalDescription(Value):
    """What the operator runs: nothing is started, and it has no counters."""

    type: Literal["external"]
    #: For the report.
    name: str = "external"
    version: str = "unknown"


Description = Annotated[
    TestpmdDescription | TapsDescription | VppDescription | ExternalDescription,
    Field(discriminator="type"),
]


class Port(Value):
    """A port that is there already, for a control without the backend."""

    attachment: Attachment
    #: A socket's path, the name of a tap or of a kernel device, or a PCI address.
    device: Annotated[str, StringConstraints(pattern=r"^[^,\s]+$", max_length=107, strict=True)]
    mac: Mac
    peer_mac: Mac
    queues: Annotated[int, Field(ge=1, le=128)] = 1
    ring: Annotated[int, Field(ge=64, le=4096)] = 1024
    mtu: Annotated[int, Field(ge=576, le=9216)] = 1500

    def vnf_port(self) -> VnfPort:
        return VnfPort(**self.model_dump())
