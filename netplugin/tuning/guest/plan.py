"""Plan a guest (pure): vCPU roles, hugepages, settings and NICs, with warnings; render it as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from netplugin.host.cpus import format_list
from netplugin.host.nic_models import KEPT_BY_DPDK
from netplugin.libvirt.guest import STEP, GuestDomain, GuestNic, NicKind, read_domain
from netplugin.tuning.facts import Cpus
from netplugin.tuning.guest.settings import UIO, VFIO, GuestOptions, GuestPages, plan_pages, settings
from netplugin.tuning.steps import Effect, Step, impossible


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
    """``noiommu``: vfio-pci is used without an IOMMU."""

    domain: GuestDomain
    options: GuestOptions
    realtime: bool
    housekeeping: Cpus
    isolated: Cpus
    pages: GuestPages
    steps: tuple[Step, ...]
    nics: tuple[PlannedNic, ...]

    @property
    def bound(self) -> tuple[PlannedNic, ...]:
        return tuple(each for each in self.nics if each.driver)

    @property
    def noiommu(self) -> bool:
        return self.domain.iommu is None and any(each.driver == VFIO for each in self.bound)

    @property
    def doubts(self) -> tuple[str, ...]:
        """Warnings for the operator, a sentence each."""
        return tuple(_doubts(self))

    @property
    def online(self) -> Cpus:
        return self.housekeeping | self.isolated


def plan_guest(xml: str, options: GuestOptions) -> GuestPlan:
    """Plan a guest from its domain XML. Raises: InvalidRequest naming the option or ``xml``."""
    domain = read_domain(xml)
    # Whole cores: work on a sibling would slow a DPDK thread down.
    kept = -(-options.housekeeping // domain.threads) * domain.threads
    housekeeping = frozenset(range(min(kept, domain.vcpus)))
    isolated = frozenset(range(domain.vcpus)) - housekeeping
    pages = plan_pages(domain, options)
    realtime = domain.realtime if options.realtime is None else options.realtime
    steps = tuple(settings(domain, pages, housekeeping, isolated, realtime))
    nics = _nics(domain, options)
    return GuestPlan(domain, options, realtime, housekeeping, isolated, pages, steps, nics)


def _nics(domain: GuestDomain, options: GuestOptions) -> tuple[PlannedNic, ...]:
    chosen, planned = _chosen(domain, options), []
    for nic in domain.nics:
        if nic.mac not in chosen:  # on a virtio NIC the queue pairs of the domain, at most one per vCPU
            pairs = min(nic.queues, domain.vcpus) if nic.kind is NicKind.VIRTIO else 1
            mtu = None if nic.mtu else options.mtu
            planned.append(PlannedNic(nic, None, pairs if pairs > 1 else None, mtu))
            continue
        if nic.kind is NicKind.VF and options.driver == UIO:
            what = f"{nic.mac} is a VF, which has no interrupts of the old kind (INTx) for {UIO}"
            raise impossible("driver", what, f"bind it to {VFIO}", step=STEP)
        planned.append(PlannedNic(nic, options.driver, None, None))
    return tuple(planned)


def _chosen(domain: GuestDomain, options: GuestOptions) -> frozenset[str]:
    """MAC addresses of the NICs for DPDK. Raises: InvalidRequest naming ``dpdk``."""
    if options.no_dpdk and options.dpdk:
        raise impossible("dpdk", "NICs are named, and no_dpdk is given too", "leave one away", step=STEP)
    if options.no_dpdk:
        return frozenset()
    if options.dpdk is None:
        return frozenset(nic.mac for nic in domain.nics if nic.vhostuser and not nic.teamed)
    for mac in options.dpdk:
        found = [nic for nic in domain.nics if nic.mac == mac]
        if not found:
            have = ", ".join(nic.mac for nic in domain.nics) or "no NIC"
            raise impossible("dpdk", f"{domain.name} has no NIC {mac}", f"it has {have}", step=STEP)
        if any(nic.teamed for nic in found):
            what = f"{mac} is one of a team, which the guest's kernel joins (net_failover)"
            raise impossible("dpdk", what, "name another, or plug the port without teaming", step=STEP)
    return frozenset(options.dpdk)


def _doubts(plan: GuestPlan) -> Iterator[str]:
    domain, bound = plan.domain, [each.nic for each in plan.bound]
    if not plan.isolated:
        yield (
            f"{counted(domain.vcpus, 'vCPU')}, all for housekeeping: "
            "there is nothing to isolate, and DPDK shares with the rest"
        )
    if plan.realtime and domain.kvmclock:
        yield "latency counts and the domain has kvmclock: render it with policy.realtime"
    if not plan.pages.pages:
        yield f"{domain.memory_kb // 1024} MB leave no room for the hugepages of DPDK in addition to Linux"
    if not any(nic.ours for nic in domain.nics):
        yield "the domain has no NIC that netplugin plugs: was it rendered?"
    for nic in domain.nics:
        yield from _nic(nic, domain, plan.isolated, nic in bound)
    loose = [nic.mac for nic in bound if not nic.translated]
    if loose and domain.iommu and plan.options.driver == VFIO:
        yield (
            f"the emulated IOMMU does not translate for {', '.join(loose)} (no <driver iommu='on'>), which "
            f"{VFIO} assumes: add iommu='on' to the domain, or plan with --driver {UIO}"
        )
    if domain.iommu == "intel" and not domain.pcie:
        yield "the emulated IOMMU is Intel's, which needs the machine q35"


def _nic(nic: GuestNic, domain: GuestDomain, isolated: Cpus, bound: bool) -> Iterator[str]:
    if nic.queues > domain.vcpus:
        yield f"{nic.mac} has {nic.queues} queues, and the guest {counted(domain.vcpus, 'vCPU')}"
    elif bound and isolated and nic.queues > len(isolated):
        yield (
            f"{nic.mac} has {nic.queues} queues, and {counted(len(isolated), 'vCPU')} for DPDK: "
            "some has to poll more than one"
        )
    if nic.kind is NicKind.VF and not domain.pcie:
        yield (
            f"{nic.mac} is a VF in a machine without PCI Express ({domain.machine}), where its driver "
            "lacks the extended configuration space: take q35"
        )
    if nic.kind is NicKind.EMULATED:
        yield f"{nic.mac} is a NIC that QEMU emulates: a virtio NIC passes many times as many packets"


def counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def guest_text(plan: GuestPlan) -> str:
    return "\n".join(_lines(plan)) + "\n"


def _lines(plan: GuestPlan) -> Iterator[str]:
    domain, pages = plan.domain, plan.pages
    clock = "" if domain.kvmclock else ", clock: TSC"
    yield (
        f"{domain.name}: {counted(domain.vcpus, 'vCPU')}, {domain.memory_kb // 1024} MB in "
        f"{counted(len(domain.cells_kb), 'NUMA cell')}, "
        f"IOMMU: {domain.iommu or 'none'}{clock}{', real time' if plan.realtime else ''}"
    )
    isolated = format_list(plan.isolated) or "none"
    yield f"vCPUs: housekeeping {format_list(plan.housekeeping)}, isolated {isolated}"
    yield f"hugepages: {pages.pages} of {pages.size_kb} KB ({pages.mb} MB)"
    for sentence in plan.doubts:
        yield f"note: {sentence}"
    for effect, head in ((Effect.LIVE, "Now"), (Effect.REBOOT, "With a reboot")):
        steps = [step for step in plan.steps if step.effect is effect]
        if steps:
            yield f"\n{head}"
        for step in steps:
            yield f"  [{step.group}] {step.target} = {'off' if step.desired is None else step.desired}"
            yield f"      {step.why}"
    if plan.isolated:
        yield "\nInterrupts"
        yield f"  queues of virtio NICs go to {format_list(plan.housekeeping)}, and irqbalance is off"
        yield "      it would bring them back"
    yield "\nNICs"
    for nic in plan.nics:
        yield from _nic_line(nic)
    yield from _binding(plan)


def _nic_line(planned: PlannedNic) -> Iterator[str]:
    nic = planned.nic
    where = nic.address or "PCI address not in the domain"
    more = ", one of a team" * nic.teamed + ", behind the IOMMU" * nic.translated
    yield f"  {nic.mac}  {nic.kind}, {where}, {counted(nic.queues, 'queue')}{more}"
    if planned.driver:
        yield f"      for DPDK: driverctl set-override {nic.address or 'ADDRESS'} {planned.driver}"
        return
    yield "      stays with the kernel" + ("" if nic.mtu is None else f", MTU {nic.mtu} from the host")
    if planned.channels:
        yield f"      ethtool -L INTERFACE combined {planned.channels}"
    if planned.mtu:
        yield f"      MTU {planned.mtu}"


def _binding(plan: GuestPlan) -> Iterator[str]:
    """Notes on DPDK drivers."""
    if not plan.bound:
        return
    yield "\nDrivers for DPDK"
    if plan.noiommu:
        yield "  no emulated IOMMU: options vfio enable_unsafe_noiommu_mode=1 (/etc/modprobe.d)"
        yield "      a program with such a NIC can write all of the guest's memory"
        yield f"      a kernel without it, as Debian's, has {UIO} instead: --driver {UIO}"
    elif plan.options.driver == VFIO and all(each.nic.translated for each in plan.bound):
        yield f"  the emulated IOMMU keeps DPDK's memory apart: {VFIO} as it is"
    elif plan.options.driver == VFIO:
        yield f"  the emulated IOMMU does not translate for all NICs: {UIO} is right for the others"
    else:
        yield f"  {UIO} gives DPDK all of the guest's memory; VFs cannot be bound to it"
    yield "  addresses are as libvirt numbers them; the playbook finds each NIC by its MAC in the guest"
    yield f"  a NIC of {', '.join(sorted(KEPT_BY_DPDK))} stays with that driver, which DPDK uses too"
