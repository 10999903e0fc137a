"""Settings of the kernel: files of /proc and /sys, swap areas, thread priorities, numbers of VFs."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from pyroute2.netlink.rtnl.ifinfmsg import IFF_UP

from netplugin.api.errors import Conflict, HostError
from netplugin.host.cpus import format_list, from_kernel, parse_list, to_kernel
from netplugin.host.nic_errors import OF_VF_NUMBER, Causes
from netplugin.host.vfs import HostInterface, host_uses, in_user_space
from netplugin.tuning.applying.accessor import Raw, SettingAccessor, WritableRoot, WriteIgnored, required
from netplugin.tuning.facts import KernelThread
from netplugin.tuning.read.kernel import kernel_threads, sysctl_path
from netplugin.tuning.read.memory import chosen
from netplugin.tuning.read.network import PCI
from netplugin.tuning.root import Root, Unknown, known
from netplugin.tuning.steps import File, Swap, Sysctl, ThreadPriority, VfCount

_NOT_ROOT = "run it as root, on the host itself and not in a container"
_FIXES = {
    errno.EACCES: _NOT_ROOT,
    errno.EPERM: _NOT_ROOT,
    errno.EROFS: "run it on the host itself: what is read-only here belongs to somebody else",
}


@contextmanager
def refusals(what: str, causes: Causes = MappingProxyType({})) -> Iterator[None]:
    """Convert OSError to HostError with the step ``write``. ``causes``: what the errors mean here."""
    try:
        yield
    except OSError as refused:
        raise refusal(what, refused, causes) from refused


def refusal(what: str, refused: OSError, causes: Causes = MappingProxyType({})) -> HostError:
    words, number = refused.strerror or str(refused), refused.errno or 0
    cause, fix = causes.get(number, ("", _FIXES.get(number)))
    because = f" ({cause})" if cause else ""
    return HostError(f"{what}: {words[:1].lower()}{words[1:]}{because}", step="write", fix=fix)


#: Errors of ``write_irq_affinity`` in kernel/irq/proc.c for a kernel-managed interrupt: EIO before
#: Linux 6.4, EPERM since. Missing permission is EACCES or EROFS instead.
_MANAGED = (errno.EIO, errno.EPERM)


class KernelFiles(SettingAccessor[File | Sysctl]):
    """Raw value: the file's text, or of a choice like ``always [madvise] never`` the word in brackets."""

    def read(self, target: File | Sysctl) -> Raw:
        fact = self._root.text(_path(target))
        if isinstance(fact, Unknown) and fact.missing and _passing(target):
            raise WriteIgnored("it is not there any more")
        text = required(fact)
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

    def write(self, target: File | Sysctl, desired: str | None) -> None:
        super().write(target, desired)
        if _path(target).endswith("/nr_hugepages") and (got := self.read(target)) != desired:
            detail = f"the kernel has {got} pages to give and not {desired}: memory is in use or in pieces"
            fix = "reserve them at boot, with the plan's kernel arguments"
            raise HostError(detail, step="read-back", fix=fix)

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


_PATH = "/proc/swaps"
#: Timeouts in seconds: swapoff may have to read back gigabytes from disk.
_OFF_S, _ON_S = 600.0, 30.0


class Swaps(SettingAccessor[Swap]):
    """Raw value: one line of name and priority per area, as in /proc/swaps, highest priority first."""

    def read(self, target: Swap) -> Raw:
        rows = [row.split() for row in required(self._root.text(_PATH)).splitlines()[1:]]
        rows.sort(key=lambda row: -int(row[-1]))
        return "\n".join(f"{row[0]} {row[-1]}" for row in rows) or None

    def value(self, target: Swap, raw: Raw) -> str | None:
        return ",".join(name for name, _ in _rows(raw)) or None

    def write(self, target: Swap, desired: str | None) -> None:
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


#: (pid, policy, priority) -> None; policy is SCHED_FIFO, SCHED_OTHER and so on. Raises: OSError.
SetScheduler: TypeAlias = Callable[[int, int, int], None]


def set_scheduler(pid: int, policy: int, priority: int) -> None:
    os.sched_setscheduler(pid, policy, os.sched_param(priority))


class KernelThreads(SettingAccessor[ThreadPriority]):
    """Raw value: policy and priority of each thread, ``ksoftirqd/0=0:0,ksoftirqd/1=1:2``."""

    def __init__(self, root: WritableRoot, set_scheduler: SetScheduler) -> None:
        super().__init__(root)
        self._set = set_scheduler

    def read(self, target: ThreadPriority) -> Raw:
        return ",".join(f"{t.name}={t.policy}:{t.priority}" for t in self._threads(target)) or None

    def value(self, target: ThreadPriority, raw: Raw) -> str | None:
        found = {int(entry.rpartition(":")[2]) for entry in raw.split(",")} if raw else set()
        return ",".join(map(str, sorted(found))) or None

    def write(self, target: ThreadPriority, desired: str | None) -> None:
        priority = int(desired or 0)
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

    def _all(self, target: ThreadPriority, desired: dict[str, tuple[int, int]]) -> None:
        for thread in self._threads(target):
            policy, priority = desired.get(thread.name, (thread.policy, thread.priority))
            if (policy, priority) != (thread.policy, thread.priority):
                with refusals(thread.name):
                    self._set(thread.pid, policy, priority)

    def _threads(self, target: ThreadPriority) -> tuple[KernelThread, ...]:
        threads = required(kernel_threads(self._root))
        return tuple(t for t in threads if t.name.partition("/")[0] == target.threads)


@dataclass(frozen=True)
class VfUse:
    """``how`` is a clause like ``port nic1 has it``; ``end`` is the action that frees the VF."""

    address: str
    how: str
    end: str


def vf_uses(root: Root, pf: str, number: int, ports: Mapping[str, str]) -> Iterator[VfUse]:
    """Every use of each of the PF's VFs; ``ports`` maps a VF address to the agent's port."""
    for index in range(number):
        address = root.link(f"{PCI}/{pf}/virtfn{index}")
        if address is None:
            continue
        if address in ports:
            yield VfUse(address, f"port {ports[address]} has it", f"delete port {ports[address]}")
        yield from _by_the_host(root, address)


def _by_the_host(root: Root, address: str) -> Iterator[VfUse]:
    at = f"{PCI}/{address}"
    driver = root.link(f"{at}/driver")
    if driver is None:
        return
    if in_user_space(driver):
        yield VfUse(address, f"it is bound to {driver}", "stop what uses it and unbind it")
        return
    interfaces = []
    for name in known(root.names(f"{at}/net"), ()):
        flags = known(root.parsed(f"{at}/net/{name}/flags", lambda text: int(text, 16)), 0)
        enslaved = root.link(f"{at}/net/{name}/master") is not None
        interfaces.append(HostInterface(name, bool(flags & IFF_UP), enslaved))
    for use in host_uses(driver, interfaces):
        yield VfUse(address, use.how, use.end)


#: Returns the agent's port ids by VF address; empty if no agent runs.
#: Raises: NetpluginError if an agent runs but does not answer.
Ports: TypeAlias = Callable[[], Mapping[str, str]]


class VfCounts(SettingAccessor[VfCount]):
    """Raw value: the number. The kernel requires 0 between two other numbers. New VFs do not inherit the
    settings of the old ones."""

    def __init__(self, root: WritableRoot, ports: Ports) -> None:
        super().__init__(root)
        self._ports = ports

    def read(self, target: VfCount) -> Raw:
        return required(self._root.text(_vf_path(target)))

    def restore(self, target: VfCount, raw: Raw) -> None:
        """Set the number, through 0 if VFs exist. Raises: Conflict if an existing VF is in use."""
        now, desired = self.read(target) or "0", raw or "0"
        if now == desired:
            return
        path = _vf_path(target)
        if now != "0":
            self._refuse_in_use(target, list(vf_uses(self._root, target.address, int(now), self._ports())))
        with refusals(path, OF_VF_NUMBER):
            if now != "0":
                self._root.write(path, "0")
            if desired != "0":
                self._root.write(path, desired)

    def _refuse_in_use(self, target: VfCount, uses: Sequence[VfUse]) -> None:
        if not uses:
            return
        vf = uses[0].address
        same = [use for use in uses if use.address == vf]
        others = ", ".join(sorted({use.address for use in uses} - {vf}))
        how = " and ".join(use.how for use in same) + (f"; so are {others}" if others else "")
        fix = f"free VF {vf}: {', and '.join(use.end for use in same)}; then try again"
        raise Conflict(f"VF {vf} of {target.address} is in use: {how}", step="write", fix=fix)


def _vf_path(target: VfCount) -> str:
    return f"{PCI}/{target.address}/sriov_numvfs"
