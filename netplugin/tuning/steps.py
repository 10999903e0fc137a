"""A plan's steps as values: where, the value now, the value wanted, when it counts, why, by which source."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from netplugin.tuning.root import Fact, Unknown


class Effect(StrEnum):
    """What it takes for the new value to count."""

    LIVE = "live"
    OVS_RESTART = "ovs-restart"
    REBOOT = "reboot"


class Group(StrEnum):
    """What steps are about; those of one group are shown together."""

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
    """A file of /proc or /sys. ``lasting``: it has the same name and meaning after a boot."""

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
    """A key of ``other_config`` in the one row of the table Open_vSwitch."""

    key: str
    kind: str = field(default="ovs-other-config", init=False)

    def __str__(self) -> str:
        return f"other_config:{self.key}"


@dataclass(frozen=True)
class TunedProfile:
    """The profile that tuned has active."""

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
    """The SCHED_FIFO priority of all threads of the kernel with this name, 0 for none."""

    threads: str
    kind: str = field(default="thread-priority", init=False)

    def __str__(self) -> str:
        return f"priority of {self.threads}"


@dataclass(frozen=True)
class Swap:
    """The devices and files in use for swapping."""

    kind: str = field(default="swap", init=False)

    def __str__(self) -> str:
        return "swap"


@dataclass(frozen=True)
class BannedCpus:
    """The CPUs that irqbalance leaves alone (``IRQBALANCE_BANNED_CPULIST``); ``path`` is its file."""

    path: str
    kind: str = field(default="irqbalance-banned-cpus", init=False)

    def __str__(self) -> str:
        return f"IRQBALANCE_BANNED_CPULIST in {self.path}"


@dataclass(frozen=True)
class ServiceCpus:
    """The CPUs that services start on: ``CPUAffinity`` of systemd's manager."""

    kind: str = field(default="service-cpus", init=False)

    def __str__(self) -> str:
        return "CPUAffinity of systemd"


@dataclass(frozen=True)
class BootPages:
    """The hugepages of one size that a unit reserves at boot, node by node, before OVS starts."""

    size_kb: int
    kind: str = field(default="boot-pages", init=False)

    def __str__(self) -> str:
        return f"pages of {self.size_kb} KB by netplugin-hugepages.service"


@dataclass(frozen=True)
class VfCount:
    """How many virtual functions the NIC at this PCI address has."""

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
    """``now`` and ``wanted`` are as the target has them; None: not set. ``source`` is what says so: a
    document, or that it is the project's own choice."""

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
