"""Read the CPU affinity of IRQs, workqueues and writeback, and irqbalance's settings."""

from __future__ import annotations

import re

from netplugin.host.cpus import from_kernel
from netplugin.tuning.facts import Cpus, InterruptFacts, Irq, IrqbalanceFacts
from netplugin.tuning.read.cpus import cpu_list
from netplugin.tuning.root import Fact, Root, Unknown

DEFAULT_AFFINITY = "/proc/irq/default_smp_affinity"
WORKQUEUES = "/sys/devices/virtual/workqueue/cpumask"
WRITEBACK = "/sys/devices/virtual/workqueue/writeback/cpumask"
#: Environment file on Debian and on Red Hat.
IRQBALANCE = ("/etc/default/irqbalance", "/etc/sysconfig/irqbalance")
#: Files in an IRQ's directory; the other entries are directories of the devices that use it.
_FILES = frozenset(
    (
        "affinity_hint",
        "effective_affinity",
        "effective_affinity_list",
        "node",
        "smp_affinity",
        "smp_affinity_list",
        "spurious",
    )
)


def irq_path(number: int) -> str:
    return f"/proc/irq/{number}/smp_affinity_list"


def read_interrupts(root: Root) -> InterruptFacts:
    return InterruptFacts(
        default_affinity=root.optional(DEFAULT_AFFINITY, from_kernel),
        irqs=_irqs(root),
        workqueues=root.optional(WORKQUEUES, from_kernel),
        writeback=root.optional(WRITEBACK, from_kernel),
        irqbalance=_irqbalance(root),
    )


def _irqbalance(root: Root) -> Fact[IrqbalanceFacts | None]:
    for path in IRQBALANCE:
        text = root.text(path)
        if isinstance(text, Unknown):
            if text.missing:
                continue
            return text
        banned = root.parsed(path, banned_cpus)
        return banned if isinstance(banned, Unknown) else IrqbalanceFacts(path, banned)
    return None


def banned_cpus(text: str) -> Cpus | None:
    """CPUs that the environment file bans from irqbalance. Raises: ValueError.

    The older variable, a mask, overrides the list (setup_banned_cpus in irqbalance's cputree.c).
    """
    mask = masked_cpus(text)
    if mask is not None:
        return mask
    found = _banned("CPULIST", text)
    return cpu_list(found) if found else None


def masked_cpus(text: str) -> Cpus | None:
    """CPUs in the older variable, a mask; None if not set. Raises: ValueError."""
    found = _banned("CPUS", text)
    return from_kernel(found) if found else None


def _banned(name: str, text: str) -> str:
    """Last value of the variable; empty if not set."""
    values = re.findall(rf"^\s*IRQBALANCE_BANNED_{name}=(.*)$", text, re.MULTILINE)
    return values[-1].strip().strip("\"'") if values else ""


def _irqs(root: Root) -> Fact[tuple[Irq, ...]]:
    numbers = root.names("/proc/irq")
    if isinstance(numbers, Unknown):
        return () if numbers.missing else numbers
    return tuple(_irq(root, int(n)) for n in sorted(filter(str.isdigit, numbers), key=int))


def _irq(root: Root, number: int) -> Irq:
    names = root.names(f"/proc/irq/{number}")
    return Irq(
        number=number,
        names=() if isinstance(names, Unknown) else tuple(n for n in names if n not in _FILES),
        affinity=root.parsed(irq_path(number), cpu_list),
        effective=root.optional(f"/proc/irq/{number}/effective_affinity_list", cpu_list),
    )
