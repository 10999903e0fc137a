"""What a run description says of the hypervisor: its agent, the two ends, the VNF's CPUs and its VM."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator

from netplugin.acceptance.matrix.axes import Section, cpu_list
from netplugin.acceptance.vnf import description as vnfs
from netplugin.acceptance.vnf.contract import VnfCores
from netplugin.host.cpus import parse_list
from netplugin.models import DomainPolicy, Mac, Name, Network


class Cores(Section):
    """CPUs of this machine for the VNF: ``main`` does no packets. Empty: wherever it may run."""

    main: Annotated[int, Field(ge=0)] | None = None
    #: A list like ``2-5,8``.
    workers: str = ""

    @field_validator("workers")
    @classmethod
    def _are_cpus(cls, value: str) -> str:
        if value:
            cpu_list(value)
        return value

    def vnf_cores(self) -> VnfCores:
        return VnfCores(self.main, parse_list(self.workers))


class Agent(Section):
    """The agent that sets up each cell. What is not here is taken from NETPLUGIN_URL and its like."""

    url: str | None = None
    token_file: Path | None = None
    #: CA certificates, and our own certificate with its key, as PEM files.
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None


class End(Section):
    """One of the two ends: the port of the VNF there, and the network on which frames come and go."""

    network: Network
    #: For a backend whose network here is another one.
    networks: dict[Name, Network] = Field(default_factory=dict)
    port_id: Name
    #: Of the VNF's port.
    mac: Mac
    #: To which the VNF sends; the generator sends from it unless its own description says otherwise.
    peer_mac: Mac

    def network_of(self, backend: str) -> Network:
        return self.networks.get(backend, self.network)


class Vm(Section):
    """A VM for the VNF, started for each cell: its domain without NICs, which the agent adds."""

    #: Libvirt's XML. Name and UUID are replaced.
    domain: Path
    uri: str = "qemu:///system"
    policy: DomainPolicy = DomainPolicy()


def ssh_of(vnf: vnfs.Description) -> vnfs.SshMachine | None:
    """How the VM is reached in which this VNF runs, if it does."""
    machine = vnf.machine if isinstance(vnf, vnfs.VppDescription) else None
    return machine if isinstance(machine, vnfs.SshMachine) else None
