"""Set the scheduling policy and priority of kernel threads."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeAlias

from netplugin.errors import HostError
from netplugin.tuning.applying.place import Raw
from netplugin.tuning.applying.refusals import refusals
from netplugin.tuning.applying.writable import WritableRoot
from netplugin.tuning.facts import KernelThread
from netplugin.tuning.read.kernel import kernel_threads
from netplugin.tuning.root import Unknown
from netplugin.tuning.steps import ThreadPriority

#: (pid, policy, priority) -> None; policy is SCHED_FIFO, SCHED_OTHER and so on. Raises: OSError.
SetScheduler: TypeAlias = Callable[[int, int, int], None]


def set_scheduler(pid: int, policy: int, priority: int) -> None:
    os.sched_setscheduler(pid, policy, os.sched_param(priority))


class Threads:
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
