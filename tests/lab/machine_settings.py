"""What a tuning changes of this machine: read, made as after a boot for a test, and given back after a kill.

A test that is killed leaves what it has changed, and nobody could tell it from what the machine had: the
next tests of the tuning find nothing left to do. So the values of before are in a file for as long as a test
runs, and whoever starts next puts them back.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.lab.processes import CommandError, LabError, run

PAGES = Path("/sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages")
DEFAULT_AFFINITY = Path("/proc/irq/default_smp_affinity")
WORKQUEUES = Path("/sys/devices/virtual/workqueue/cpumask")
WRITEBACK = Path("/sys/devices/virtual/workqueue/writeback/cpumask")
KSM = Path("/sys/kernel/mm/ksm/run")
THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SYSCTLS = Path("/proc/sys")
#: The kernel's defaults (Documentation/admin-guide) of what plans change on any machine; of huge pages, what
#: no plan wants.
DEFAULTS = {
    KSM: "0",
    THP: "madvise",
    SYSCTLS / "kernel/sched_rt_runtime_us": "950000",
    SYSCTLS / "kernel/timer_migration": "1",
    SYSCTLS / "vm/stat_interval": "1",
}
_OTHERS = (
    PAGES,
    DEFAULT_AFFINITY,
    WORKQUEUES,
    WRITEBACK,
    Path("/sys/module/kvm/parameters/halt_poll_ns"),
    SYSCTLS / "kernel/nmi_watchdog",
    SYSCTLS / "kernel/numa_balancing",
    SYSCTLS / "kernel/soft_watchdog",
)
#: Pages of 2 MB that a plan with one PMD core and small frames has for OVS.
PLANNED = 280
# Not under /run, of which a sandbox has its own: what it leaves must be found outside it. Root alone writes
# there: what is read from it is written to the kernel.
LEDGER = Path("/var/lib/netplugin-lab-machine.json")


def values() -> dict[str, str]:
    """Everything of this machine that an apply may change, as text by file, thread or swap."""
    governors = Path("/sys/devices/system/cpu/cpufreq").glob("policy*/scaling_governor")
    found = {str(p): p.read_text() for p in (*DEFAULTS, *_OTHERS, *governors, *_irqs()) if p.exists()}
    found |= {f"thread {pid}": shown for pid, shown in threads().items()}
    swaps = (row.split() for row in Path("/proc/swaps").read_text().splitlines()[1:])
    return found | {f"swap {row[0]}": row[-1] for row in swaps}


def threads() -> dict[int, str]:
    """Policy and priority of ksoftirqd and rcuc by pid; none in a sandbox, which has its own /proc."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*/comm"):
        try:
            name, pid = entry.read_text(), int(entry.parent.name)
            if re.match(r"(ksoftirqd|ktimers|rcuc|rcub)/", name):
                priority = os.sched_getparam(pid).sched_priority
                found[pid] = f"{os.sched_getscheduler(pid)} {priority}"
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
    return found


def requested_pages(before: Mapping[str, str]) -> tuple[int, int]:
    """Some tens of hugepages more than there are, and the memory of VMs that makes a plan of it, MB."""
    vm_mb = max(0, int(before[str(PAGES)]) + 24 - PLANNED) * 2
    return PLANNED + vm_mb // 2, vm_mb


def changed(before: Mapping[str, str]) -> set[str]:
    """What is not as it was, but for hugepages that others borrow."""
    now = values()
    left = {name for name, text in before.items() if now.get(name) != text}
    if int(PAGES.read_text()) != requested_pages(before)[0]:
        left.discard(str(PAGES))  # not what a test's apply sets
    return left


def put_back(before: Mapping[str, str]) -> None:
    """Raises: LabError about what the kernel refuses, when all else is put back."""
    refused = []
    for name in sorted(changed(before)):
        try:
            _put(name, before[name])
        except (FileNotFoundError, ProcessLookupError):
            continue  # there is no such interrupt or thread any more
        except (OSError, CommandError) as error:
            refused.append(f"{name} cannot be put back to {before[name]!r}: {error}")
    if refused:
        raise LabError("\n".join(refused))


def _put(name: str, text: str) -> None:
    if name.startswith("swap "):
        run(["swapon", name.split()[1]])
    elif name.startswith("thread "):
        policy, priority = map(int, text.split())
        os.sched_setscheduler(int(name.split()[1]), policy, os.sched_param(priority))
    else:
        choice = re.search(r"\[(\w+)\]", text)
        Path(name).write_text(choice[1] if choice else text)


@contextmanager
def untuned() -> Iterator[None]:
    """This machine as after a boot for the time of the block, and as it was found afterwards."""
    with _locked() as locked:
        assert locked
        _settle()
        found = values()
        LEDGER.write_text(json.dumps({"boot": _boot(), "values": found}))
        try:
            _reset()
            yield
        finally:
            _settle()


def release() -> None:
    """Put back what a killed `untuned` has left; nothing while one is alive."""
    with _locked(fcntl.LOCK_NB) as locked:
        if locked:
            _settle()


def _settle() -> None:
    if not LEDGER.exists():
        return
    try:
        kept = json.loads(LEDGER.read_text())
    except ValueError:
        kept = {"boot": None}  # killed as it was written, and before anything was changed
    try:
        if kept["boot"] == _boot():
            put_back(kept["values"])
    finally:
        LEDGER.unlink()  # what is refused is told once: the next would fail by it as well


def _reset() -> None:
    every = f"{(1 << (os.cpu_count() or 1)) - 1:x}"
    for mask in (DEFAULT_AFFINITY, WORKQUEUES, WRITEBACK):
        mask.write_text(every)
    for path, value in DEFAULTS.items():
        if path.exists():
            path.write_text(value)
    for irq in _irqs():
        try:
            irq.write_text(f"0-{(os.cpu_count() or 1) - 1}")
        except OSError:
            pass  # the kernel keeps it where it is
    for pid in threads():
        os.sched_setscheduler(pid, os.SCHED_OTHER, os.sched_param(0))


def _irqs() -> list[Path]:
    return sorted(Path("/proc/irq").glob("[0-9]*/smp_affinity_list"))


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text()


@contextmanager
def _locked(how: int = 0) -> Iterator[bool]:
    # The directory that is always there is the lock: a lock file would have to be deleted.
    handle = os.open(LEDGER.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | how)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(handle)
