"""State that only running daemons know, as values; an ``Unknown`` if one was not queried or is silent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from netplugin.api.pmd_models import PmdCore, UnpolledQueue
from netplugin.tuning.facts import Cpus
from netplugin.tuning.root import Fact, Unknown

_OVS_NOT_ASKED = Unknown("ovs-vswitchd", "was not asked", missing=True)
_LIBVIRT_NOT_ASKED = Unknown("libvirtd", "was not asked", missing=True)


@dataclass(frozen=True)
class OvsPortLive:
    """An OVS interface that PMD threads poll; a ``port`` with several interfaces is a bond."""

    name: str
    port: str
    type: str
    mtu: int | None
    bond_mode: str | None = None


@dataclass(frozen=True)
class OvsLive:
    """``pmds`` is empty if no port needs polling, or if vswitchd is ``silent``: the database answers, but
    vswitchd, which reports the threads, does not."""

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
    """A running VM: the effective CPU affinity of each vCPU thread, each IO thread and QEMU's other threads.
    ``memory_nodes`` is empty if its memory is not bound to nodes."""

    name: str
    vcpus: tuple[Cpus, ...]
    emulator: Cpus
    memory_nodes: frozenset[int]
    iothreads: tuple[Cpus, ...] = ()

    @property
    def pinned(self) -> Cpus:
        """CPUs of the vCPUs that are pinned to a single CPU."""
        return frozenset(cpu for cpus in self.vcpus if len(cpus) == 1 for cpu in cpus)


@dataclass(frozen=True)
class Live:
    """``versions`` has the keys ``qemu`` and ``libvirt``. An ``Unknown`` with ``missing`` means that the
    daemon does not run here or was not queried."""

    ovs: Fact[OvsLive] = _OVS_NOT_ASKED
    domains: Fact[tuple[DomainLive, ...]] = _LIBVIRT_NOT_ASKED
    versions: Mapping[str, str] = field(default_factory=dict)

    def unanswered(self) -> tuple[Unknown, ...]:
        """Daemons that run but did not answer."""
        silent = None if isinstance(self.ovs, Unknown) else self.ovs.silent
        asked = (self.ovs, self.domains, silent)
        return tuple(fact for fact in asked if isinstance(fact, Unknown) and not fact.missing)
