"""What only running daemons know, as values; each is an ``Unknown`` where nobody asked or answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from netplugin.models import PmdCore, UnpolledQueue
from netplugin.tuning.facts import Cpus
from netplugin.tuning.root import Fact, Unknown

_OVS_NOT_ASKED = Unknown("ovs-vswitchd", "was not asked", missing=True)
_LIBVIRT_NOT_ASKED = Unknown("libvirtd", "was not asked", missing=True)


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
    """``pmds`` is empty as long as OVS has no port that needs polling, or vswitchd is ``silent``: the
    database answers and vswitchd, which knows its threads, does not."""

    version: str | None
    dpdk_version: str | None
    dpdk_initialized: bool
    other_config: Mapping[str, str]
    ports: tuple[OvsPortLive, ...] = ()
    pmds: tuple[PmdCore, ...] = ()
    unpolled: tuple[UnpolledQueue, ...] = ()
    silent: Unknown | None = None


@dataclass(frozen=True)
class DomainLive:
    """A VM that runs: the CPUs that the thread of each vCPU, each IO thread and QEMU's other threads
    may run on now. ``memory_nodes`` is empty where nothing binds its memory to a node."""

    name: str
    vcpus: tuple[Cpus, ...]
    emulator: Cpus
    memory_nodes: frozenset[int]
    iothreads: tuple[Cpus, ...] = ()

    @property
    def pinned(self) -> Cpus:
        """The CPUs that are one vCPU's only choice: what they should have for themselves."""
        return frozenset(cpu for cpus in self.vcpus if len(cpus) == 1 for cpu in cpus)


@dataclass(frozen=True)
class Live:
    """``versions`` are of programs: ``qemu``, ``libvirt``. Of an ``Unknown``, ``missing`` means that
    nothing of the kind runs here, as far as one can see."""

    ovs: Fact[OvsLive] = _OVS_NOT_ASKED
    domains: Fact[tuple[DomainLive, ...]] = _LIBVIRT_NOT_ASKED
    versions: Mapping[str, str] = field(default_factory=dict)

    def unanswered(self) -> tuple[Unknown, ...]:
        """Daemons that run here and do not say what they are asked."""
        silent = None if isinstance(self.ovs, Unknown) else self.ovs.silent
        asked = (self.ovs, self.domains, silent)
        return tuple(fact for fact in asked if isinstance(fact, Unknown) and not fact.missing)
