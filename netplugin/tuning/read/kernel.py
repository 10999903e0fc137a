"""Read kernel facts: release, command line, PREEMPT_RT, sysctls, tuned, kernel threads."""

from __future__ import annotations

import re
from functools import partial

from netplugin.tuning.command_line import parse_command_line
from netplugin.tuning.facts import Cpus, KernelFacts, KernelThread, Tuned
from netplugin.tuning.read.cpus import cpu_list
from netplugin.tuning.root import Fact, Root, Unknown, known, sure, whole

#: Sysctls to read.
SYSCTLS = (
    *("kernel.nmi_watchdog", "kernel.numa_balancing", "kernel.sched_rt_runtime_us", "kernel.soft_watchdog"),
    *("kernel.timer_migration", "vm.stat_interval"),
)
#: tuned profiles with the variable ``isolated_cores``.
PROFILES = ("cpu-partitioning", "realtime-virtual-host")
TUNED = "/etc/tuned"
SYSTEMD = "/etc/systemd/system.conf"
HALT_POLL = "/sys/module/kvm/parameters/halt_poll_ns"
#: What started the machine, in UTF-16 (systemd.io/BOOT_LOADER_INTERFACE): systemd-boot, grub's module bli,
#: Limine, rEFInd; and the stub of an image that has its command line inside.
_EFI, _VENDOR = "/sys/firmware/efi/efivars", "-4a67b082-0a4c-41cf-b6c7-440b29bb8c4f"
LOADER_INFO, STUB_INFO = (f"{_EFI}/{name}Info{_VENDOR}" for name in ("Loader", "Stub"))
#: What grub puts before a command line (LINUX_IMAGE in its loader/i386/linux.c and loader/efi/linux.c).
BY_GRUB = "BOOT_IMAGE"
#: grub's command for entries in files (/boot/loader/entries), and where its settings are.
READS_ENTRIES = r"(?m)^\s*blscfg\b"
_MENUS, _OF_FIRMWARE = ("/boot/grub2/grub.cfg", "/boot/grub/grub.cfg"), "/boot/efi/EFI"
#: Threads whose priority tuned's realtime-virtual-host sets; which exist depends on the kernel.
_NAMES = "ksoftirqd|ktimers|ktimersoftd|rcuc|rcub"
_THREAD = re.compile(rf"(\d+) \(((?:{_NAMES})/\d+)\) (.+)", re.DOTALL)
#: Indices of the parent, rt_priority and policy in /proc/PID/stat, counted after the name (proc(5)).
_PARENT, _PRIORITY, _POLICY = 1, 37, 38
#: The parent of kernel threads, kthreadd. Any process may have the name of one.
_KTHREADD = "2"


def read_kernel(root: Root) -> KernelFacts:
    return KernelFacts(
        release=root.text("/proc/sys/kernel/osrelease"),
        arguments=root.parsed("/proc/cmdline", parse_command_line),
        boot_loader=_boot_loader(root),
        realtime=_realtime(root),
        sysctls={name: root.optional(sysctl_path(name), str) for name in SYSCTLS},
        tuned=_tuned(root),
        threads=kernel_threads(root),
        service_cpus=_service_cpus(root),
        halt_poll_ns=root.optional(HALT_POLL, int),
    )


@whole
def _boot_loader(root: Root) -> str | None:
    """What started the machine: files of another boot loader may be there too, and are not used then, unless
    the kernel says that grub came after it."""
    # The zeros of UTF-16 are read as blanks.
    started = [sure(root.text(path), "").replace(" ", "") for path in (LOADER_INFO, STUB_INFO)]
    if "systemd-boot" in "".join(started):
        return "systemd-boot"
    by_grub = f"{BY_GRUB}=" in known(root.text("/proc/cmdline"), "")
    if not by_grub and any(name and "GRUB" not in name for name in started):
        return None
    vendors = known(root.names(_OF_FIRMWARE), ())
    paths = (*_MENUS, *(f"{_OF_FIRMWARE}/{vendor}/grub.cfg" for vendor in reversed(vendors)))
    texts = (sure(root.optional(path, str)) for path in paths)
    menu = next((text for text in texts if text is not None), None)
    return None if menu is None else "grub-entries" if re.search(READS_ENTRIES, menu) else "grub"


def sysctl_path(name: str) -> str:
    return "/proc/sys/" + name.replace(".", "/")


def variables_path(profile: str) -> str:
    return f"{TUNED}/{profile}-variables.conf"


def _realtime(root: Root) -> Fact[bool]:
    """True with PREEMPT_RT; kernels without /sys/kernel/realtime show it in /proc/version."""
    reported = root.optional("/sys/kernel/realtime", lambda text: bool(int(text)))
    if reported is not None:
        return reported
    return root.parsed("/proc/version", lambda text: bool(re.search(r"PREEMPT[_ ]RT", text)))


@whole
def _tuned(root: Root) -> Fact[Tuned | None]:
    there = root.names(TUNED)
    if isinstance(there, Unknown):
        return None if there.missing else there
    profile = sure(root.optional(f"{TUNED}/active_profile", str))
    cores = {name: sure(root.optional(variables_path(name), _isolated_cores)) for name in PROFILES}
    return Tuned(profile or None, {name: text for name, text in cores.items() if text is not None})


def _isolated_cores(text: str) -> str | None:
    found = re.findall(r"^isolated_cores\s*=\s*(.*?)\s*$", text, re.MULTILINE)
    return found[-1] if found and found[-1] else None


@whole
def _service_cpus(root: Root) -> Cpus | None:
    """CPUAffinity from system.conf and its drop-ins, in order."""
    folder = sure(root.names(f"{SYSTEMD}.d"), ())
    found: Cpus | None = None
    for path in (SYSTEMD, *(f"{SYSTEMD}.d/{name}" for name in folder if name.endswith(".conf"))):
        cpus = sure(root.optional(path, partial(cpu_affinity, before=found)))
        found = found if isinstance(root.text(path), Unknown) else cpus
    return found


def cpu_affinity(text: str, before: Cpus | None = None) -> Cpus | None:
    """Parse ``CPUAffinity=`` of systemd's manager: lists accumulate, an empty one clears the earlier ones.
    Raises: ValueError."""
    found = before
    for given in re.findall(r"^[ \t]*CPUAffinity[ \t]*=(.*)$", text, re.MULTILINE):
        cpus = cpu_list(",".join(given.replace(",", " ").split()))
        found = (found or frozenset()) | cpus if cpus else None
    return found


@whole
def kernel_threads(root: Root) -> Fact[tuple[KernelThread, ...]]:
    """Kernel threads that may have to preempt a busy CPU."""
    threads = []
    for name in sorted(filter(str.isdecimal, sure(root.names("/proc"))), key=int):
        if match := _THREAD.fullmatch(sure(root.text(f"/proc/{name}/stat"), "")):  # empty if it has ended
            rest = match[3].split()
            if len(rest) <= _POLICY or not (rest[_PRIORITY] + rest[_POLICY]).isdecimal():
                return Unknown(f"/proc/{name}/stat", "has too few fields")
            if rest[_PARENT] == _KTHREADD:
                found = KernelThread(match[2], int(match[1]), int(rest[_PRIORITY]), int(rest[_POLICY]))
                threads.append(found)
    return tuple(threads)
