"""Check for offline CPUs, cgroup CPU limits and partial isolation; for real time SMT, turbo and kernel."""

from __future__ import annotations

from collections.abc import Iterator

from netplugin.host.cpus import format_list
from netplugin.models import Finding
from netplugin.tuning.checks.scene import Scene
from netplugin.tuning.facts import Cpus, Irq
from netplugin.tuning.read.cpus import CPU
from netplugin.tuning.root import known


def cpus(scene: Scene) -> Iterator[Finding]:
    yield from _offline(scene)
    yield from _limited(scene)
    yield from _isolation(scene)
    if scene.realtime:
        yield from _latency(scene)


def _offline(scene: Scene) -> Iterator[Finding]:
    offline = known(scene.facts.cpus.offline, frozenset())
    # Only present CPUs count: hot-pluggable ones have no directory in sysfs.
    if offline:
        yield Finding(
            id="cpu-offline", status="warn", found=f"CPUs {format_list(offline)} are off line",
            expected="all CPUs on line; a plan leaves out those that are not",
            fix=f"echo 1 > {CPU}/cpu{min(offline)}/online, and so on; or SMT is off: "
            f"cat {CPU}/smt/control",
        )  # fmt: skip


def _limited(scene: Scene) -> Iterator[Finding]:
    online = known(scene.facts.cpus.online, frozenset())
    for limit in scene.facts.limits:
        allowed = known(limit.cpus, None)
        if allowed and online - allowed:
            short = scene.cpus_of(limit.group) - allowed
            lacks = f", not on {format_list(short)} of the plan" if short else ""
            yield Finding(
                id="cgroup-cpus", status="fail" if short else "warn",
                found=f"control group {limit.group} may run on CPUs {format_list(allowed)}{lacks}",
                expected=f"CPUs {format_list(online)}",
                fix="take AllowedCPUs= out of the unit or slice, or leave the container",
            )  # fmt: skip


def _isolation(scene: Scene) -> Iterator[Finding]:
    isolated = known(scene.facts.cpus.isolated, None)
    ticks = known(scene.facts.cpus.nohz_full, None)
    cores = known(scene.facts.cpus.cores, ())
    if not isolated:
        return
    if ticks is not None and ticks != isolated:
        yield Finding(
            id="isolation-ticks", status="warn",
            found=f"isolcpus has CPUs {format_list(isolated)}, nohz_full {format_list(ticks) or 'none'}",
            expected="the same CPUs in isolcpus, nohz_full and rcu_nocbs",
            fix=f"boot with nohz_full={format_list(isolated)} rcu_nocbs={format_list(isolated)}",
        )  # fmt: skip
    split = [core for core in cores if core.cpus & isolated and core.cpus - isolated]
    struck = [irq for irq in known(scene.facts.interrupts.irqs, ()) if _goes_to(irq, isolated)]
    if struck:
        yield Finding(
            id="isolation-irqs", status="warn",
            found=f"interrupts {format_list(irq.number for irq in struck)} go to isolated CPUs",
            expected="interrupts on housekeeping CPUs alone",
            fix="netplugin host plan has their masks; some the kernel moves only with "
            "isolcpus=managed_irq,domain,...",
        )  # fmt: skip
    if split:
        beside = format_list(cpu for core in split for cpu in core.cpus - isolated)
        yield Finding(
            id="isolation-siblings", status="warn",
            found=f"CPUs {beside} are not isolated and share their core with one that is",
            expected="whole cores isolated", fix="add them to isolcpus, nohz_full and rcu_nocbs",
        )  # fmt: skip


def _goes_to(irq: Irq, cpus: Cpus) -> bool:
    return bool((known(irq.effective, None) or frozenset()) & cpus)


def _latency(scene: Scene) -> Iterator[Finding]:
    facts = scene.facts
    assert scene.plan is not None
    if known(facts.kernel.realtime, None) is False:
        yield Finding(
            id="realtime-kernel", status="warn", found=f"kernel {known(facts.kernel.release, '?')} "
            "has no PREEMPT_RT", expected="a kernel with PREEMPT_RT",
            fix="install one (Debian: linux-image-rt-amd64)",
        )  # fmt: skip
    both = known(facts.cpus.smt, None) and not scene.plan.intent.idle_siblings
    if both:
        yield Finding(
            id="smt", status="warn", found="SMT is on: two threads share each core",
            expected="one thread a core where latency counts",
            fix=f"plan with --idle-siblings, or echo off > {CPU}/smt/control",
        )  # fmt: skip
    if known(facts.power.turbo, None):
        yield Finding(
            id="turbo", status="warn", found="turbo is on: the frequency moves with load and heat",
            expected="turbo off where latency counts",
            fix=f"echo 1 > {CPU}/intel_pstate/no_turbo, or echo 0 > {CPU}/cpufreq/boost",
        )  # fmt: skip
