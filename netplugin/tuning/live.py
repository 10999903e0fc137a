"""What only running daemons know, as values; each is an ``Unknown`` where nobody asked or answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from netplugin.models import PmdCore
from netplugin.tuning.facts import Cpus
from netplugin.tuning.root import Fact, Unknown

_OVS_NOT_ASKED = Unknown("ovs-vswitchd", "was not asked")
_LIBVIRT_NOT_ASKED = Unknown("libvirtd", "was not asked")


@dataclass(frozen=True)
class OvsPortLive:
    """An interface of OVS that PMD threads poll; a port of several is a bond."""

    name: str
    port: str
    type: str
    mtu: int | None
    bond_mode: str | None = None


@dataclass(frozen=True)
class OvsLive:
    """``pmds`` is empty as long as OVS has no port that needs polling."""

    version: str | None
    dpdk_version: str | None
    dpdk_initialized: bool
    other_config: Mapping[str, str]
    ports: tuple[OvsPortLive, ...] = ()
    pmds: tuple[PmdCore, ...] = ()


@dataclass(frozen=True)
class DomainLive:
    """A VM as libvirt runs it: the CPUs of each vCPU and of QEMU's other threads, its memory's nodes."""

    name: str
    vcpus: tuple[Cpus, ...]
    emulator: Cpus
    memory_nodes: frozenset[int]


@dataclass(frozen=True)
class Live:
    """``versions`` are of programs: ``qemu``, ``libvirt``."""

    ovs: Fact[OvsLive] = _OVS_NOT_ASKED
    domains: Fact[tuple[DomainLive, ...]] = _LIBVIRT_NOT_ASKED
    versions: Mapping[str, str] = field(default_factory=dict)
