"""Settings of the kernel: files of /proc and /sys, swap areas, priorities of kernel threads."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from netplugin.api.errors import HostError
from netplugin.host.cpus import format_list, from_kernel, parse_list, to_kernel
from netplugin.tuning.applying.accessor import Raw, Run, WritableRoot, WriteIgnored
from netplugin.tuning.facts import KernelThread
from netplugin.tuning.read.kernel import kernel_threads, sysctl_path
from netplugin.tuning.read.memory import chosen
from netplugin.tuning.root import Unknown
from netplugin.tuning.steps import File, Swap, Sysctl, ThreadPriority

# -- Convert an OSError of a write into a HostError with the kernel's error text and a fix. -------


_NOT_ROOT = "run it as root, on the host itself and not in a container"
_FIXES = {
    errno.EACCES: _NOT_ROOT,
    errno.EPERM: _NOT_ROOT,
    errno.EROFS: "run it on the host itself: what is read-only here belongs to somebody else",
}


@contextmanager
def refusals(what: str) -> Iterator[None]:
    """Convert OSError to HostError with the step ``write``."""
    try:
        yield
    except OSError as refused:
        raise refusal(what, refused) from refused


def refusal(what: str, refused: OSError) -> HostError:
    words = refused.strerror or str(refused)
    return HostError(
        f"{what}: {words[:1].lower()}{words[1:]}", step="write", fix=_FIXES.get(refused.errno or 0)
    )


# -- Read and write files of /proc and /sys, including sysctls. -----------------------------------


#: Errors of ``write_irq_affinity`` in kernel/irq/proc.c for a kernel-managed interrupt: EIO before
#: Linux 6.4, EPERM since. Missing permission is EACCES or EROFS instead.
_MANAGED = (errno.EIO, errno.EPERM)


class KernelFiles:
    """Raw value: the file's text, or of a choice like ``always [madvise] never`` the word in brackets."""

    def __init__(self, root: WritableRoot) -> None:
        self._root = root

    def read(self, target: File | Sysctl) -> Raw:
        path = _path(target)
        text = self._root.text(path)
        if isinstance(text, Unknown):
            if text.missing and _passing(target):
                raise WriteIgnored("it is not there any more")
            raise HostError(f"{path}: {text.reason}", step="read")
        return chosen(text) if "[" in text else text

    def value(self, target: File | Sysctl, raw: Raw) -> str | None:
        path = _path(target)
        try:
            if path.endswith("_list"):
                return format_list(parse_list(raw or ""))
            if path.endswith(("cpumask", "affinity")):
                return to_kernel(from_kernel(raw or "0"))
        except ValueError:
            pass  # not parsable: compare it as text
        return raw

    def write(self, target: File | Sysctl, wanted: str | None) -> None:
        self.restore(target, wanted)
        path = _path(target)
        if path.endswith("/nr_hugepages") and (got := self.read(target)) != wanted:
            raise HostError(
                f"the kernel has {got} pages to give and not {wanted}: memory is in use or in pieces",
                step="read-back",
                fix="reserve them at boot, with the plan's kernel arguments",
            )

    def restore(self, target: File | Sysctl, raw: Raw) -> None:
        path = _path(target)
        try:
            self._root.write(path, raw or "")
        except OSError as refused:
            if _passing(target) and refused.errno == errno.ENOENT:
                raise WriteIgnored("it is not there any more") from refused
            if _passing(target) and refused.errno in _MANAGED:
                raise WriteIgnored("the kernel itself places this interrupt") from refused
            raise refusal(path, refused) from refused


def _path(target: File | Sysctl) -> str:
    return target.path if isinstance(target, File) else sysctl_path(target.name)


def _passing(target: File | Sysctl) -> bool:
    """True for an interrupt's file, which comes and goes with its device."""
    return isinstance(target, File) and not target.lasting


# -- Switch swap areas off and on with swapoff and swapon. ----------------------------------------


_PATH = "/proc/swaps"
#: Timeouts in seconds: swapoff may have to read back gigabytes from disk.
_OFF_S, _ON_S = 600.0, 30.0


class Swaps:
    """Raw value: one line of name and priority per area, as in /proc/swaps, highest priority first."""

    def __init__(self, root: WritableRoot, run: Run) -> None:
        self._root, self._run = root, run

    def read(self, target: Swap) -> Raw:
        text = self._root.text(_PATH)
        if isinstance(text, Unknown):
            raise HostError(f"{_PATH}: {text.reason}", step="read")
        rows = [row.split() for row in text.splitlines()[1:]]
        rows.sort(key=lambda row: -int(row[-1]))
        return "\n".join(f"{row[0]} {row[-1]}" for row in rows) or None

    def value(self, target: Swap, raw: Raw) -> str | None:
        return ",".join(name for name, _ in _rows(raw)) or None

    def write(self, target: Swap, wanted: str | None) -> None:
        """Switch all swap areas off; a plan never wants any."""
        for name, _ in _rows(self.read(target)):
            self._run(["swapoff", _plain(name)], _OFF_S)

    def restore(self, target: Swap, raw: Raw) -> None:
        """Switch areas on again. The kernel assigns negative priorities in order of swapon(2)."""
        there = {name for name, _ in _rows(self.read(target))}
        for name, priority in _rows(raw):
            if name not in there:
                own = [f"--priority={priority}"] if priority >= 0 else []
                self._run(["swapon", *own, _plain(name)], _ON_S)


def _rows(raw: Raw) -> Iterator[tuple[str, int]]:
    for line in (raw or "").splitlines():
        name, _, priority = line.rpartition(" ")
        yield name, int(priority)


def _plain(name: str) -> str:
    r"""Decode octal escapes of /proc/swaps: white space is ``\040``."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), name)


# -- Set the scheduling policy and priority of kernel threads. ------------------------------------


#: (pid, policy, priority) -> None; policy is SCHED_FIFO, SCHED_OTHER and so on. Raises: OSError.
SetScheduler: TypeAlias = Callable[[int, int, int], None]


def set_scheduler(pid: int, policy: int, priority: int) -> None:
    os.sched_setscheduler(pid, policy, os.sched_param(priority))


class KernelThreads:
    """Raw value: policy and priority of each thread, ``ksoftirqd/0=0:0,ksoftirqd/1=1:2``."""

    def __init__(self, root: WritableRoot, set_scheduler: SetScheduler) -> None:
        self._root, self._set = root, set_scheduler

    def read(self, target: ThreadPriority) -> Raw:
        return ",".join(f"{t.name}={t.policy}:{t.priority}" for t in self._threads(target)) or None

    def value(self, target: ThreadPriority, raw: Raw) -> str | None:
        found = {int(entry.rpartition(":")[2]) for entry in raw.split(",")} if raw else set()
        return ",".join(map(str, sorted(found))) or None

    def write(self, target: ThreadPriority, wanted: str | None) -> None:
        priority = int(wanted or 0)
        policy = os.SCHED_FIFO if priority else os.SCHED_OTHER
        self._all(target, {t.name: (policy, priority) for t in self._threads(target)})

    def restore(self, target: ThreadPriority, raw: Raw) -> None:
        """Restore the threads in ``raw``; threads of CPUs that came online since are left unchanged."""
        before = {}
        for entry in raw.split(",") if raw else ():
            name, _, words = entry.partition("=")
            policy, _, priority = words.partition(":")
            before[name] = int(policy), int(priority)
        self._all(target, before)

    def _all(self, target: ThreadPriority, wanted: dict[str, tuple[int, int]]) -> None:
        for thread in self._threads(target):
            policy, priority = wanted.get(thread.name, (thread.policy, thread.priority))
            if (policy, priority) != (thread.policy, thread.priority):
                with refusals(thread.name):
                    self._set(thread.pid, policy, priority)

    def _threads(self, target: ThreadPriority) -> tuple[KernelThread, ...]:
        threads = kernel_threads(self._root)
        if isinstance(threads, Unknown):
            raise HostError(f"{threads.path}: {threads.reason}", step="read")
        return tuple(t for t in threads if t.name.partition("/")[0] == target.threads)
