"""The kernel: release, arguments, PREEMPT_RT, sysctls that matter here, tuned, its own threads."""

from __future__ import annotations

import re

from netplugin.tuning import command_line
from netplugin.tuning.facts import KernelFacts, KernelThread, Tuned
from netplugin.tuning.root import Fact, Root, Unknown

#: What is read of sysctl.
SYSCTLS = (
    "kernel.nmi_watchdog",
    "kernel.numa_balancing",
    "kernel.sched_rt_runtime_us",
    "kernel.soft_watchdog",
    "kernel.timer_migration",
    "vm.stat_interval",
)
#: The profiles of tuned that take ``isolated_cores``.
PROFILES = ("cpu-partitioning", "realtime-virtual-host")
TUNED = "/etc/tuned"
_THREAD = re.compile(r"(\d+) \(((?:ksoftirqd|rcuc)/\d+)\) (.+)", re.DOTALL)
#: Of the fields after the name in /proc/PID/stat, those of rt_priority and policy (proc(5)).
_PRIORITY, _POLICY = 37, 38


def read_kernel(root: Root) -> KernelFacts:
    return KernelFacts(
        release=root.text("/proc/sys/kernel/osrelease"),
        arguments=root.parsed("/proc/cmdline", command_line.parse),
        realtime=_realtime(root),
        sysctls={name: root.optional(sysctl_path(name), str) for name in SYSCTLS},
        tuned=_tuned(root),
        threads=kernel_threads(root),
    )


def sysctl_path(name: str) -> str:
    return "/proc/sys/" + name.replace(".", "/")


def variables_path(profile: str) -> str:
    return f"{TUNED}/{profile}-variables.conf"


def _realtime(root: Root) -> Fact[bool]:
    """``/sys/kernel/realtime`` came before PREEMPT_RT was merged, and some kernels lack it."""
    told = root.optional("/sys/kernel/realtime", lambda text: bool(int(text)))
    if told is not None:
        return told
    return root.parsed("/proc/version", lambda text: bool(re.search(r"PREEMPT[_ ]RT", text)))


def _tuned(root: Root) -> Fact[Tuned | None]:
    there = root.names(TUNED)
    if isinstance(there, Unknown):
        return None if there.missing else there
    profile = root.optional(f"{TUNED}/active_profile", str)
    if isinstance(profile, Unknown):
        return profile
    variables = {}
    for name in PROFILES:
        cores = root.optional(variables_path(name), _isolated_cores)
        if isinstance(cores, Unknown):
            return cores
        if cores is not None:
            variables[name] = cores
    return Tuned(profile or None, variables)


def _isolated_cores(text: str) -> str | None:
    found = re.findall(r"^isolated_cores\s*=\s*(.*?)\s*$", text, re.MULTILINE)
    return found[-1] if found and found[-1] else None


def kernel_threads(root: Root) -> Fact[tuple[KernelThread, ...]]:
    """Those that may have to preempt a busy CPU: ksoftirqd, rcuc."""
    names = root.names("/proc")
    if isinstance(names, Unknown):
        return names
    threads = []
    for name in sorted(filter(str.isdigit, names), key=int):
        stat = root.text(f"/proc/{name}/stat")
        if isinstance(stat, Unknown):
            if stat.missing:  # it has ended since
                continue
            return stat
        if match := _THREAD.fullmatch(stat):
            rest = match[3].split()
            if len(rest) <= _POLICY or not (rest[_PRIORITY] + rest[_POLICY]).isdigit():
                return Unknown(f"/proc/{name}/stat", "has too few fields")
            threads.append(
                KernelThread(match[2], int(match[1]), int(rest[_PRIORITY]), int(rest[_POLICY]))
            )
    return tuple(threads)
