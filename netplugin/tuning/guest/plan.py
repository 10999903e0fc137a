"""Plan a guest (pure): from its domain and options to vCPU roles, hugepages, settings and NICs."""

from __future__ import annotations

from dataclasses import dataclass

from netplugin.tuning.facts import Cpus
from netplugin.tuning.guest.domain import GuestDomain, GuestNic, Kind, read_domain
from netplugin.tuning.guest.doubts import doubts
from netplugin.tuning.guest.hugepages import GuestPages, plan_pages
from netplugin.tuning.guest.options import STEP, UIO, VFIO, GuestOptions
from netplugin.tuning.guest.settings import settings
from netplugin.tuning.planning.refused import impossible
from netplugin.tuning.steps import Step


@dataclass(frozen=True)
class PlannedNic:
    """``driver`` is the DPDK driver to bind to. None leaves the NIC to the kernel, with ``channels`` queue
    pairs and ``mtu`` bytes where these are to be set."""

    nic: GuestNic
    driver: str | None
    channels: int | None
    mtu: int | None


@dataclass(frozen=True)
class GuestPlan:
    """``noiommu``: vfio-pci is used without an IOMMU. ``doubts`` are warnings for the operator."""

    domain: GuestDomain
    options: GuestOptions
    realtime: bool
    housekeeping: Cpus
    isolated: Cpus
    pages: GuestPages
    steps: tuple[Step, ...]
    nics: tuple[PlannedNic, ...]
    doubts: tuple[str, ...]

    @property
    def bound(self) -> tuple[PlannedNic, ...]:
        return tuple(each for each in self.nics if each.driver)

    @property
    def noiommu(self) -> bool:
        return self.domain.iommu is None and any(each.driver == VFIO for each in self.bound)

    @property
    def online(self) -> Cpus:
        return self.housekeeping | self.isolated


def plan_guest(xml: str, options: GuestOptions) -> GuestPlan:
    """Plan a guest from its domain XML. Raises: InvalidRequest naming the option or ``xml``."""
    domain = read_domain(xml)
    # Whole cores: work on a sibling would slow a DPDK thread down.
    kept = -(-options.housekeeping // domain.threads) * domain.threads
    every = frozenset(range(domain.vcpus))
    housekeeping = frozenset(range(min(kept, domain.vcpus)))
    isolated = every - housekeeping
    pages = plan_pages(domain, options)
    realtime = domain.realtime if options.realtime is None else options.realtime
    nics = _nics(domain, options)
    bound = tuple(each.nic for each in nics if each.driver)
    return GuestPlan(
        domain, options, realtime, housekeeping, isolated, pages,
        tuple(settings(domain, pages, housekeeping, isolated, realtime)),
        nics, tuple(doubts(domain, pages, isolated, realtime, bound)),
    )  # fmt: skip


def _nics(domain: GuestDomain, options: GuestOptions) -> tuple[PlannedNic, ...]:
    chosen = _chosen(domain, options)
    for nic in domain.nics:
        if nic.mac in chosen and nic.kind is Kind.VF and options.driver == UIO:
            raise impossible(
                "driver", f"{nic.mac} is a VF, which has no interrupts of the old kind (INTx) for {UIO}",
                f"bind it to {VFIO}", step=STEP,
            )  # fmt: skip
    return tuple(
        PlannedNic(nic, options.driver, None, None)
        if nic.mac in chosen
        else PlannedNic(nic, None, _channels(nic, domain), None if nic.mtu else options.mtu)
        for nic in domain.nics
    )


def _channels(nic: GuestNic, domain: GuestDomain) -> int | None:
    """Queue pairs to enable on a virtio NIC: those of the domain, at most one per vCPU."""
    count = min(nic.queues, domain.vcpus)
    return count if nic.kind is Kind.VIRTIO and count > 1 else None


def _chosen(domain: GuestDomain, options: GuestOptions) -> frozenset[str]:
    """MAC addresses of the NICs for DPDK. Raises: InvalidRequest naming ``dpdk``."""
    if options.no_dpdk and options.dpdk:
        raise impossible(
            "dpdk", "NICs are named, and no_dpdk is given too", "leave one away", step=STEP
        )
    if options.no_dpdk:
        return frozenset()
    if options.dpdk is None:
        return frozenset(nic.mac for nic in domain.nics if nic.vhostuser and not nic.teamed)
    for mac in options.dpdk:
        found = [nic for nic in domain.nics if nic.mac == mac]
        have = ", ".join(nic.mac for nic in domain.nics) or "no NIC"
        if not found:
            raise impossible("dpdk", f"{domain.name} has no NIC {mac}", f"it has {have}", step=STEP)
        if any(nic.teamed for nic in found):
            raise impossible(
                "dpdk", f"{mac} is one of a team, which the guest's kernel joins (net_failover)",
                "name another, or plug the port without teaming", step=STEP,
            )  # fmt: skip
    return frozenset(options.dpdk)
