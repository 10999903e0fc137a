"""Render a guest's plan as human-readable text."""

from __future__ import annotations

from collections.abc import Iterator

from netplugin.host.cpus import format_list
from netplugin.tuning.guest.options import UIO, VFIO
from netplugin.tuning.guest.plan import GuestPlan, PlannedNic, counted
from netplugin.tuning.steps import Effect


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
            yield ""
            yield head
        for step in steps:
            wanted = "off" if step.wanted is None else step.wanted
            yield f"  [{step.group}] {step.target} = {wanted}"
            yield f"      {step.why}"
    if plan.isolated:
        yield ""
        yield "Interrupts"
        yield f"  queues of virtio NICs go to {format_list(plan.housekeeping)}, and irqbalance is off"
        yield "      it would bring them back"
    yield ""
    yield "NICs"
    for nic in plan.nics:
        yield from _nic(nic)
    yield from _binding(plan)


def _nic(planned: PlannedNic) -> Iterator[str]:
    nic = planned.nic
    where = nic.address or "PCI address not in the domain"
    team = ", one of a team" if nic.teamed else ""
    yield f"  {nic.mac}  {nic.kind}, {where}, {counted(nic.queues, 'queue')}{team}"
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
    yield ""
    yield "Drivers for DPDK"
    if plan.noiommu:
        yield "  no emulated IOMMU: options vfio enable_unsafe_noiommu_mode=1 (/etc/modprobe.d)"
        yield "      a program with such a NIC can write all of the guest's memory"
        yield f"      a kernel without it, as Debian's cloud kernel, has {UIO} instead: --driver {UIO}"
    elif plan.options.driver == VFIO:
        yield f"  the emulated IOMMU keeps DPDK's memory apart: {VFIO} as it is"
    else:
        yield f"  {UIO} gives DPDK all of the guest's memory; VFs cannot be bound to it"
    yield "  addresses are as libvirt numbers them; the playbook finds each NIC by its MAC in the guest"
    yield "  a VF of an mlx5 NIC stays with mlx5_core, which DPDK uses too"
