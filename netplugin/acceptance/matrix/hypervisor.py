"""Sections of a run description about the hypervisor: agent, ends, CPUs of the VNF, VM."""

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
    """CPUs of this machine for the VNF; ``main`` handles no packets. Empty: no pinning."""

    main: Annotated[int, Field(ge=0)] | None = None
    #: CPU list such as ``2-5,8``.
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
    """The agent that sets up each cell. Absent fields default to NETPLUGIN_URL and related variables."""

    url: str | None = None
    token_file: Path | None = None
    #: PEM files: CA certificates, client certificate and its key.
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None


class End(Section):
    """One of the two ends: a port of the VNF, and the network on which its frames arrive and leave."""

    network: Network
    #: Network per backend, where it differs.
    networks: dict[Name, Network] = Field(default_factory=dict)
    port_id: Name
    #: MAC address of the VNF's port.
    mac: Mac
    #: Destination of the VNF's frames; by default the generator's source address.
    peer_mac: Mac

    def network_of(self, backend: str) -> Network:
        return self.networks.get(backend, self.network)


class Vm(Section):
    """A VM for the VNF, started for each cell from a domain without NICs; the agent adds them."""

    #: Libvirt domain XML. Name and UUID are replaced.
    domain: Path
    uri: str = "qemu:///system"
    policy: DomainPolicy = DomainPolicy()


def ssh_of(vnf: vnfs.Description) -> vnfs.SshMachine | None:
    """Return the SSH access to the VM of this VNF, if it runs in one."""
    machine = vnf.machine if isinstance(vnf, vnfs.VppDescription) else None
    return machine if isinstance(machine, vnfs.SshMachine) else None
