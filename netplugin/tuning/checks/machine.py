"""Rules of the host, its control groups and its plan: facts, CPUs, real time, cores for links."""

from __future__ import annotations

import math
from collections.abc import Iterator

from netplugin.api.models import Finding
from netplugin.host.cpus import format_list
from netplugin.tuning.checks.frame import fail, warn
from netplugin.tuning.checks.scopes import Cgroup, Host, StepGroup
from netplugin.tuning.planning.kernel_arguments import AMD
from netplugin.tuning.read.cpus import ARM, CPU
from netplugin.tuning.read.memory import LIMITED_KB
from netplugin.tuning.root import Fact, Unknown, known
from netplugin.tuning.steps import Effect, Step

#: Maximum number of files or steps named in one finding; facts and plan list all.
_SHOWN = 4


def unknown(host: Host) -> Iterator[Finding]:
    """Facts that could not be read, so that a check without data does not look like a passed one.

    One finding per reason, as a container can deny access to hundreds of files. A daemon that runs but does
    not answer counts as an unreadable file.
    """
    paths: dict[tuple[str, str | None], list[str]] = {}
    for fact in host.unread:
        paths.setdefault((fact.reason, fact.fix), []).append(fact.path)
    expected = "files that can be read and made sense of, daemons that answer"
    for (reason, fix), refused in paths.items():
        more = f" and {len(refused) - _SHOWN} more" if len(refused) > _SHOWN else ""
        fix = fix or "run it as root, on the host itself and not in a container"
        yield warn("unknown-fact", f"{', '.join(refused[:_SHOWN])}{more}: {reason}", expected, fix)


def offline(host: Host) -> Iterator[Finding]:
    """Only present CPUs count: hot-pluggable ones have no directory in sysfs, and ``offline`` has them too
    (print_cpus_offline in drivers/base/cpu.c)."""
    offline, present = known(host.cpus.offline, frozenset()), known(host.cpus.present, None)
    if cpus := offline if present is None else offline & present:
        fix = f"echo 1 > {CPU}/cpu{min(cpus)}/online, and so on; or SMT is off: cat {CPU}/smt/control"
        expected = "all CPUs on line; a plan leaves out those that are not"
        yield warn("cpu-offline", f"CPUs {format_list(cpus)} are off line", expected, fix)


def isolation(host: Host) -> Iterator[Finding]:
    isolated, ticks = known(host.cpus.isolated, None), known(host.cpus.nohz_full, None)
    online, line = known(host.cpus.online, frozenset()), known(host.kernel.arguments, None)
    written = line.written_isolcpus(max(online, default=0) + 1) if line else frozenset()
    if online <= written:  # the kernel keeps the one that boots (housekeeping_setup)
        written -= {min(online, default=0)}
    if isolated is not None and (lost := written & online - isolated):
        found = f"isolcpus names CPUs {format_list(lost)}, which the kernel has not isolated"
        fix = "boot with one isolcpus=managed_irq,domain,...: flags without domain isolate nothing, and of "
        fix += "several the first counts"
        yield warn("isolation-argument", found, f"these CPUs in {CPU}/isolated", fix)
    if not isolated:
        return
    cpus = format_list(isolated)
    if ticks is not None and isolated - ticks:  # the kernel takes more of those
        found = f"isolated are CPUs {cpus}, in nohz_full {format_list(ticks) or 'none'}"
        expected, both = "the isolated CPUs in nohz_full and rcu_nocbs too", format_list(isolated | ticks)
        yield warn("isolation-ticks", found, expected, f"boot with nohz_full={both} rcu_nocbs={both}")
    if struck := [irq.number for irq in host.irqs if (known(irq.effective, None) or frozenset()) & isolated]:
        found = f"interrupts {format_list(struck)} go to isolated CPUs"
        fix = "netplugin host plan has their masks; some move only with isolcpus=managed_irq,domain,..."
        yield warn("isolation-irqs", found, "interrupts on housekeeping CPUs alone", fix)
    split = [core.cpus - isolated for core in known(host.cpus.cores, ()) if core.cpus & isolated]
    if shared := frozenset().union(*split):
        found = f"CPUs {format_list(shared)} are not isolated and share their core with one that is"
        fix = "add them to isolcpus, nohz_full and rcu_nocbs"
        yield warn("isolation-siblings", found, "whole cores isolated", fix)


def latency(host: Host) -> Iterator[Finding]:
    if host.intent is None or not host.intent.realtime:
        return
    if known(host.kernel.realtime, None) is False:
        found = f"kernel {known(host.kernel.release, '?')} has no PREEMPT_RT"
        fix = "install one (Debian: linux-image-rt-amd64)"
        yield warn("realtime-kernel", found, "a kernel with PREEMPT_RT", fix)
    if known(host.cpus.smt, None) and not host.intent.idle_siblings:
        fix = f"plan with --idle-siblings, or echo off > {CPU}/smt/control"
        expected = "one thread a core where latency counts"
        yield warn("smt", "SMT is on: two threads share each core", expected, fix)
    if known(host.power.turbo, None):
        fix = f"echo 1 > {CPU}/intel_pstate/no_turbo, or echo 0 > {CPU}/cpufreq/boost"
        found = "turbo is on: the frequency moves with load and heat"
        yield warn("turbo", found, "turbo off where latency counts", fix)


#: Whole cores per 10 Gbit/s, for the switch and again for the guests (SPARC VM Server guide).
CORES_PER_10G = 2


def budget(host: Host) -> Iterator[Finding]:
    intent = host.intent
    if intent is None or not intent.pmd_cores:
        return
    desired = CORES_PER_10G * math.ceil(intent.links * intent.link_gbps / 10)
    expected = f"at least {desired}: {CORES_PER_10G} whole cores for each 10 Gbit/s"
    for what, have in (("PMD", intent.pmd_cores), ("VM", host.vm_cores)):
        found = f"{have} whole {what} cores for {intent.links} x {intent.link_gbps:g} Gbit/s"
        fix = f"plan more {what} cores, or expect less than line rate" if have < desired else None
        yield warn(f"budget-{what.lower()}", found, expected, fix)
    if host.homeless:
        fix = "look into the firmware's settings, or name --nic"
        yield warn("nic-node", "no NIC says which NUMA node it is on", "a NIC of a known node", fix)


def hugepages(host: Host) -> Iterator[Finding]:
    if host.intent is None and host.hugepages == 0:
        expected = "hugepages on each node with PMD threads or VMs"
        yield warn("hugepages", "no hugepages are reserved", expected, "netplugin host plan says how many")


def iommu(host: Host) -> Iterator[Finding]:
    """VFs need an IOMMU before they can be passed to a VM or to DPDK. None if no NIC supports SR-IOV."""
    groups = known(host.iommu.groups, None)
    if host.vf_nics and groups is not None:
        enabled = sum(known(nic.vfs, None) or 0 for nic in host.vf_nics)
        named = ", ".join(nic.address for nic in host.vf_nics)
        found = f"{groups or 'no'} IOMMU groups; {enabled} VFs enabled on {named}"
        yield (fail if enabled else warn)("iommu", found, "IOMMU on", None if groups else _iommu_on(host))


def _iommu_on(host: Host) -> str:
    """AMD and ARM IOMMUs are enabled by default if the firmware reports them (kernel-parameters.txt)."""
    if known(host.cpus.arch, "") == ARM:
        return "switch the SMMU on in the firmware"
    if known(host.cpus.vendor, "") in (AMD, "HygonGenuine"):  # Hygon has it from AMD
        return "switch the IOMMU (AMD-Vi) on in the firmware; boot without amd_iommu=off"
    return "boot with intel_iommu=on iommu=pt; VT-d must be on in the firmware"


def limits(group: Cgroup) -> Iterator[Finding]:
    name, allowed = f"control group {group.limit.group}", known(group.limit.cpus, None)
    if allowed and group.online - allowed:
        short = group.needs_cpus - allowed
        lacks = f", not on {format_list(short)} of the plan" if short else ""
        found = f"{name} may run on CPUs {format_list(allowed)}{lacks}"
        fix = "take AllowedCPUs= out of the unit or slice, or leave the container"
        yield (fail if short else warn)("cgroup-cpus", found, f"CPUs {format_list(group.online)}", fix)
    most = known(group.limit.memory_bytes, None)
    if most is not None and most < group.memory_bytes:
        expected = f"no limit: the machine has {group.memory_bytes >> 20} MB"
        fix = "take MemoryMax= out of the unit or slice, or leave the container"
        yield warn("cgroup-memory", f"{name} may use {most >> 20} MB of memory", expected, fix)
    for size, limit in group.limit.hugepages.items():
        most, need = known(limit, None), group.needs_mb.get(LIMITED_KB[size], 0)
        if most is not None and most >> 20 < need:
            found = f"{name} may use {most >> 20} MB of {size} pages"
            yield fail("cgroup-hugepages", found, f"{need} MB", f"set hugetlb.{size}.max of the group to max")


_FIX = {
    Effect.LIVE: "netplugin host apply shows the steps, and takes them with --yes",
    Effect.OVS_RESTART: "set them and restart OVS when its VMs can spare it",
    Effect.REBOOT: "set them and boot again",
}


def planned(group: StepGroup) -> Iterator[Finding]:
    left = [step for step in group.steps if not step.done]
    slowest = max((step.effect for step in left), key=list(Effect).index, default=Effect.LIVE)
    yield warn(
        f"plan-{group.group}",
        _some(left, desired=False) if left else f"all {len(group.steps)} as planned",
        _some(left, desired=True) if left else "as planned",
        _FIX[slowest] if left else None,
    )


def _some(steps: list[Step], desired: bool) -> str:
    """The first steps as text; values unknown for a common reason give that reason once."""
    reasons = {step.now for step in steps if isinstance(step.now, Unknown)}
    if not desired and len(reasons) == 1 and all(isinstance(s.now, Unknown) for s in steps):
        return str(reasons.pop())
    parts = [_text(step, step.desired if desired else step.now) for step in steps[:_SHOWN]]
    more = len(steps) - _SHOWN
    return "; ".join(parts) + (f"; and {more} more" if more > 0 else "")


def _text(step: Step, value: Fact[str | None]) -> str:
    if isinstance(value, Unknown):
        return f"{step.target} is unknown: {value.reason}"
    return f"{step.target} is {'not set' if value is None else value}"
