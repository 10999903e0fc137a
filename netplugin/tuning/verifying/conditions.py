"""Host settings that affect the figures, as text by name, to compare between runs (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from netplugin.host.cpus import format_list
from netplugin.tuning.facts import Cpus, Facts
from netplugin.tuning.live import Live
from netplugin.tuning.root import Unknown


def conditions(facts: Facts, live: Live, measured: Cpus) -> Mapping[str, str]:
    """Collect the settings. ``measured`` are the CPUs of the run. Unknown facts give their reason."""
    return {name: _text(value) for name, value in _all(facts, live, measured)}


def _all(facts: Facts, live: Live, measured: Cpus) -> Iterator[tuple[str, object]]:
    yield "CPU model", facts.cpus.model
    yield "CPUs on line", facts.cpus.online
    yield "SMT", facts.cpus.smt
    yield "isolated CPUs", facts.cpus.isolated
    yield "nohz_full CPUs", facts.cpus.nohz_full
    yield "kernel", facts.kernel.release
    yield "kernel in real time", facts.kernel.realtime
    yield from _arguments(facts)
    for name, value in facts.kernel.sysctls.items():
        yield f"sysctl {name}", value
    tuned = facts.kernel.tuned
    yield "tuned profile", tuned if tuned is None or isinstance(tuned, Unknown) else tuned.profile
    yield from _power(facts)
    yield from _memory(facts)
    yield from _interrupts(facts, measured)
    yield from _ovs(live)


def _arguments(facts: Facts) -> Iterator[tuple[str, object]]:
    line = facts.kernel.arguments
    if isinstance(line, Unknown):
        yield "kernel arguments", line
        return
    for name in dict.fromkeys(name for name, _ in line.arguments):
        values = [value for each, value in line.arguments if each == name]
        yield (
            f"kernel argument {name}",
            " ".join("set" if value is None else value for value in values),
        )


def _power(facts: Facts) -> Iterator[tuple[str, object]]:
    policies = facts.power.policies
    if isinstance(policies, Unknown):
        yield "frequency governors", policies
    else:
        governors = sorted({_text(policy.governor) for policy in policies})
        yield "frequency governors", ", ".join(governors) or None
    yield "turbo", facts.power.turbo
    yield "idle driver", facts.power.idle_driver


def _memory(facts: Facts) -> Iterator[tuple[str, object]]:
    pools = facts.memory.pools
    if isinstance(pools, Unknown):
        yield "hugepages", pools
    else:
        for pool in pools:
            yield f"hugepages of {pool.size_kb} KB on node {pool.node}", pool.total
    yield "KSM", facts.memory.ksm
    yield "transparent hugepages", facts.memory.transparent
    swaps = facts.memory.swaps
    yield "swap", swaps if isinstance(swaps, Unknown) else ", ".join(swaps) or None


def _interrupts(facts: Facts, measured: Cpus) -> Iterator[tuple[str, object]]:
    yield "default affinity of interrupts", facts.interrupts.default_affinity
    irqs = facts.interrupts.irqs
    if isinstance(irqs, Unknown):
        yield "interrupts", irqs
    else:
        here = [i for i in irqs if not isinstance(i.affinity, Unknown) and i.affinity & measured]
        yield "interrupts that may come to the measured CPUs", len(here)
    yield "workqueues", facts.interrupts.workqueues
    yield "writeback", facts.interrupts.writeback


def _ovs(live: Live) -> Iterator[tuple[str, object]]:
    if isinstance(live.ovs, Unknown):
        yield "OVS", None if live.ovs.missing else live.ovs
        return
    yield "OVS", live.ovs.version
    yield "DPDK of OVS", live.ovs.dpdk_version
    for key, value in sorted(live.ovs.other_config.items()):
        yield f"OVS other_config:{key}", value


def _text(value: object) -> str:
    match value:
        case None:
            return "none"
        case bool():
            return "on" if value else "off"
        case frozenset():
            return format_list(value) or "none"
        case _:
            return str(value)
