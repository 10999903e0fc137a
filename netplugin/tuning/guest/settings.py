"""Guest kernel settings as steps (pure): command line arguments, CPU masks and sysctls.
Sources: Documentation/admin-guide/kernel-parameters.txt; for real time tuned's realtime-virtual-guest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from netplugin.api.fields import MAC_PATTERN
from netplugin.host.cpus import format_list, to_kernel
from netplugin.libvirt.guest import STEP, GuestDomain
from netplugin.tuning import steps
from netplugin.tuning.command_line import page_name
from netplugin.tuning.facts import Cpus
from netplugin.tuning.intent import PAGE_1G, PAGE_2M
from netplugin.tuning.planning.hugepages import usable_kb
from netplugin.tuning.planning.kernel_work import PRIORITIES, QUIET, REALTIME, THP, WHY_IN_GUEST
from netplugin.tuning.read.cpus import DEFAULT_AFFINITY, WORKQUEUES, WRITEBACK
from netplugin.tuning.root import Unknown
from netplugin.tuning.steps import Effect, File, Group, KernelArgument, Step, Sysctl, Target, impossible

_NOT_ASKED = Unknown("the guest", "was not asked")


def settings(
    domain: GuestDomain, pages: GuestPages, housekeeping: Cpus, isolated: Cpus, realtime: bool
) -> Iterator[Step]:
    if isolated:
        source = f"{steps.TUNED_GUEST} and those that it includes"
        for group, target, desired, about in _live(len(domain.cells_kb), to_kernel(housekeeping), realtime):
            yield Step(group, target, _NOT_ASKED, desired, Effect.LIVE, WHY_IN_GUEST[about], source)
    for name, desired, why in _arguments(domain, pages, housekeeping, isolated, realtime):
        target, source = KernelArgument(name), steps.of_argument(name)
        yield Step(Group.KERNEL_ARGUMENTS, target, _NOT_ASKED, desired, Effect.REBOOT, why, source)


def _live(cells: int, mask: str, realtime: bool) -> Iterator[tuple[Group, Target, str | None, str]]:
    """Group, target, value, and what ``WHY_IN_GUEST`` has the reason by."""
    yield Group.INTERRUPTS, File(DEFAULT_AFFINITY), mask, DEFAULT_AFFINITY
    for path in (WORKQUEUES, WRITEBACK):
        yield Group.WORKQUEUES, File(path), mask, path
    for group, name, desired, _ in sorted(QUIET, key=lambda row: row[0] is Group.MEMORY):
        if cells > 1 or group is not Group.MEMORY:  # without cells, nothing to balance
            yield group, Sysctl(name), desired, name
    if realtime:
        for group, name, desired, _ in REALTIME:
            yield group, Sysctl(name), desired, name
        yield Group.MEMORY, File(THP), "never", THP
        yield Group.MEMORY, steps.Swap(), None, "swap"
        for name, desired in PRIORITIES:
            yield Group.SCHEDULING, steps.ThreadPriority(name), desired, name


def _arguments(
    domain: GuestDomain, pages: GuestPages, housekeeping: Cpus, isolated: Cpus, realtime: bool
) -> Iterator[tuple[str, str, str]]:
    if pages.pages:
        size = page_name(pages.size_kb)
        spread = ", evenly over the cells" if len(domain.cells_kb) > 1 else ""
        yield "default_hugepagesz", size, "what a mount of hugetlbfs has without a size"
        yield "hugepagesz", size, "the size that the next argument counts"
        yield "hugepages", str(pages.pages), f"reserved before memory is in pieces{spread}"
    if domain.iommu:
        why = "devices that the kernel keeps pass the emulated IOMMU untranslated"
        yield ("iommu", "pt", why) if domain.x86 else ("iommu.passthrough", "1", why)
        if domain.iommu == "intel":
            yield "intel_iommu", "on", "vfio-pci gives NICs to DPDK through the emulated IOMMU"
    if isolated:
        cpus = format_list(isolated)
        yield "isolcpus", f"managed_irq,domain,{cpus}", "threads of DPDK or VPP alone run there"
        yield "nohz_full", cpus, "no timer tick while one thread runs on a vCPU: each leaves the guest"
        yield "rcu_nocbs", cpus, "RCU's callbacks run elsewhere"
        yield "irqaffinity", format_list(housekeeping), "interrupts start on housekeeping"
    if domain.x86 and not domain.kvmclock:
        why = "the domain has no kvmclock, and the TSC is read without leaving the guest"
        yield "clocksource", "tsc", why
        yield "tsc", "reliable", "no watchdog that checks the clock"
    if realtime and isolated and domain.x86:
        yield "mce", "ignore_ce", "no polling for errors that were corrected, which the host does"
        if domain.threads == 1:  # with SMT, a polling vCPU slows its sibling down
            why = "a vCPU that halts leaves the guest, and comes back late; it has its own CPU"
            yield "idle", "poll", why


@dataclass(frozen=True)
class GuestPages:
    """``pages`` is the total number, spread evenly over the NUMA cells, which any kernel can reserve."""

    size_kb: int
    pages: int

    @property
    def mb(self) -> int:
        return self.pages * self.size_kb // 1024


def plan_pages(domain: GuestDomain, options: GuestOptions) -> GuestPages:
    """Plan the pages; by default half of the memory, or 0 pages without room. Raises: InvalidRequest."""
    cells = len(domain.cells_kb)
    for size in _sizes(domain, options):
        room = usable_kb(min(domain.cells_kb)) // size * cells
        if options.hugepage_mb is None:
            pages = min(min(domain.cells_kb) // 2 // size * cells, room)
        else:
            pages = -(-options.hugepage_mb * 1024 // (size * cells)) * cells
        if pages <= room and (pages or options.hugepage_mb is not None):
            return GuestPages(size, pages)
    if options.hugepage_mb is None:
        return GuestPages(size, 0)
    what = (
        f"{options.hugepage_mb} MB in pages of {size} KB, but {domain.name} has room for "
        f"{room * size // 1024} in addition to Linux ({domain.memory_kb // 1024} MB in "
        f"{'one cell' if cells == 1 else f'{cells} cells'})"
    )
    raise impossible("hugepage_mb", what, "ask for less, or give the VM more memory", step=STEP)


def _sizes(domain: GuestDomain, options: GuestOptions) -> tuple[int, ...]:
    """Page sizes in KB, best first. 1 GB helps only if the host backs the VM with 1 GB pages."""
    if options.hugepage_kb is not None:
        return (options.hugepage_kb,)
    return (PAGE_1G, PAGE_2M) if domain.backing_kb == PAGE_1G and domain.whole_cpu else (PAGE_2M,)


VFIO: Final = "vfio-pci"
UIO: Final = "uio_pci_generic"
_Mac = Annotated[str, StringConstraints(pattern=MAC_PATTERN), AfterValidator(str.lower)]


def _page_size(kb: int) -> int:
    if kb not in (PAGE_2M, PAGE_1G):
        raise ValueError(f"pages have {PAGE_2M} or {PAGE_1G} KB")
    return kb


class GuestOptions(BaseModel):
    """Options of a guest plan; each field is a command line option."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    housekeeping: Annotated[int, Field(ge=1, le=4096)] = Field(
        1,
        description="number of vCPUs for everything but DPDK, the lowest; rounded up to whole "
        "cores if the guest has SMT siblings",
    )
    hugepage_mb: Annotated[int, Field(ge=0, le=1 << 26)] | None = Field(
        None, description="memory in hugepages, MB; not given: half of the guest's memory"
    )
    hugepage_kb: Annotated[int, AfterValidator(_page_size)] | None = Field(
        None,
        description="hugepage size, KB: 2048 or 1048576; not given: 1 GB if the host backs "
        "the VM with 1 GB pages",
    )
    dpdk: tuple[_Mac, ...] | None = Field(
        None, description="MAC address of a NIC for a DPDK program; not given: the vhost-user NICs"
    )
    no_dpdk: bool = Field(False, description="leave all NICs to the kernel")
    driver: Literal["vfio-pci", "uio_pci_generic"] = Field(
        "vfio-pci", description="driver for the DPDK NICs: vfio-pci or uio_pci_generic"
    )
    mtu: Annotated[int, Field(ge=68, le=65535)] | None = Field(
        None, description="MTU of the NICs that stay with the kernel, bytes, if the domain sets none"
    )
    realtime: bool | None = Field(
        None, description="prefer low latency to throughput; not given: as the domain is configured"
    )
