"""Steps of a plan: target, current value, desired value, effect, reason and source."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from netplugin.tuning.root import Fact, Unknown


class Effect(StrEnum):
    """What is needed for the new value to take effect."""

    LIVE = "live"
    OVS_RESTART = "ovs-restart"
    REBOOT = "reboot"


class Group(StrEnum):
    """Subject of a step; the check reports one finding per group."""

    HUGEPAGES = "hugepages"
    OVS = "ovs"
    INTERRUPTS = "interrupts"
    WORKQUEUES = "workqueues"
    POWER = "power"
    WATCHDOG = "watchdog"
    MEMORY = "memory"
    SCHEDULING = "scheduling"
    TUNED = "tuned"
    VFS = "vfs"
    KERNEL_ARGUMENTS = "kernel-arguments"


@dataclass(frozen=True)
class File:
    """A file of /proc or /sys. ``lasting``: its name and meaning survive a reboot."""

    path: str
    lasting: bool = True
    kind: str = field(default="file", init=False)

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True)
class Sysctl:
    name: str
    kind: str = field(default="sysctl", init=False)

    def __str__(self) -> str:
        return f"sysctl {self.name}"


@dataclass(frozen=True)
class KernelArgument:
    name: str
    kind: str = field(default="kernel-argument", init=False)

    def __str__(self) -> str:
        return f"kernel argument {self.name}"


@dataclass(frozen=True)
class OtherConfig:
    """A key of ``other_config`` in the Open_vSwitch table."""

    key: str
    kind: str = field(default="ovs-other-config", init=False)

    def __str__(self) -> str:
        return f"other_config:{self.key}"


@dataclass(frozen=True)
class TunedProfile:
    """The active profile of tuned."""

    kind: str = field(default="tuned-profile", init=False)

    def __str__(self) -> str:
        return "tuned profile"


@dataclass(frozen=True)
class TunedVariable:
    profile: str
    name: str
    kind: str = field(default="tuned-variable", init=False)

    def __str__(self) -> str:
        return f"{self.name} of tuned's {self.profile}"


@dataclass(frozen=True)
class ThreadPriority:
    """The SCHED_FIFO priority of all kernel threads with this name; 0 is SCHED_OTHER."""

    threads: str
    kind: str = field(default="thread-priority", init=False)

    def __str__(self) -> str:
        return f"priority of {self.threads}"


@dataclass(frozen=True)
class Swap:
    """The active swap areas."""

    kind: str = field(default="swap", init=False)

    def __str__(self) -> str:
        return "swap"


@dataclass(frozen=True)
class BannedCpus:
    """CPUs banned from irqbalance (``IRQBALANCE_BANNED_CPULIST``); ``path`` is its environment file."""

    path: str
    kind: str = field(default="irqbalance-banned-cpus", init=False)

    def __str__(self) -> str:
        return f"IRQBALANCE_BANNED_CPULIST in {self.path}"


@dataclass(frozen=True)
class ServiceCpus:
    """CPUs of services: ``CPUAffinity`` of systemd's manager."""

    kind: str = field(default="service-cpus", init=False)

    def __str__(self) -> str:
        return "CPUAffinity of systemd"


@dataclass(frozen=True)
class BootPages:
    """Hugepages of one size that a systemd unit reserves on each node at boot, before OVS starts."""

    size_kb: int
    kind: str = field(default="boot-pages", init=False)

    def __str__(self) -> str:
        return f"pages of {self.size_kb} KB by netplugin-hugepages.service"


@dataclass(frozen=True)
class VfCount:
    """Number of VFs of the PF at this PCI address."""

    address: str
    kind: str = field(default="vf-count", init=False)

    def __str__(self) -> str:
        return f"virtual functions of {self.address}"


Target: TypeAlias = (
    File
    | Sysctl
    | KernelArgument
    | OtherConfig
    | TunedProfile
    | TunedVariable
    | ThreadPriority
    | Swap
    | BannedCpus
    | ServiceCpus
    | BootPages
    | VfCount
)


@dataclass(frozen=True)
class Step:
    """``now`` and ``wanted`` are plan values; None: not set. ``source`` is the document with the rule, or
    states that it is the project's choice."""

    group: Group
    target: Target
    now: Fact[str | None]
    wanted: str | None
    effect: Effect
    why: str
    source: str

    @property
    def done(self) -> bool:
        return not isinstance(self.now, Unknown) and self.now == self.wanted
