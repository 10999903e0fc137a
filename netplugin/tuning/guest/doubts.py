"""Warnings for the operator about a guest before it is tuned (pure), one sentence each."""

from __future__ import annotations

from collections.abc import Iterator

from netplugin.tuning.facts import Cpus
from netplugin.tuning.guest.domain import GuestDomain, GuestNic, Kind
from netplugin.tuning.guest.hugepages import GuestPages


def doubts(
    domain: GuestDomain,
    pages: GuestPages,
    isolated: Cpus,
    realtime: bool,
    bound: tuple[GuestNic, ...],
) -> Iterator[str]:
    """Yield the warnings. ``bound`` are the NICs for DPDK."""
    yield from _vcpus(domain, isolated, realtime)
    if not pages.pages:
        yield (
            f"{domain.memory_kb // 1024} MB leave no room for hugepages beside Linux, and DPDK wants some"
        )
    if not any(nic.ours for nic in domain.nics):
        yield "the domain has no NIC that netplugin plugs: was it rendered?"
    for nic in domain.nics:
        yield from _nic(nic, domain, isolated, nic in bound)
    if domain.iommu == "intel" and not domain.pcie:
        yield "the emulated IOMMU is Intel's, which needs the machine q35"


def _vcpus(domain: GuestDomain, isolated: Cpus, realtime: bool) -> Iterator[str]:
    if not isolated:
        yield (
            f"{counted(domain.vcpus, 'vCPU')}, all for housekeeping: "
            "there is nothing to isolate, and DPDK shares with the rest"
        )
    if realtime and domain.kvmclock:
        yield "latency counts and the domain has kvmclock: render it with policy.realtime"


def _nic(nic: GuestNic, domain: GuestDomain, isolated: Cpus, bound: bool) -> Iterator[str]:
    if nic.queues > domain.vcpus:
        yield f"{nic.mac} has {nic.queues} queues, and the guest {counted(domain.vcpus, 'vCPU')}"
    elif bound and isolated and nic.queues > len(isolated):
        yield (
            f"{nic.mac} has {nic.queues} queues, and {counted(len(isolated), 'vCPU')} for DPDK: "
            "some has to poll more than one"
        )
    if nic.kind is Kind.VF and not domain.pcie:
        yield (
            f"{nic.mac} is a VF in a machine without PCI Express ({domain.machine}), where its driver "
            "lacks the extended configuration space: take q35"
        )
    if nic.kind is Kind.EMULATED:
        yield f"{nic.mac} is a NIC that QEMU emulates: a virtio NIC passes many times as many packets"


def counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
