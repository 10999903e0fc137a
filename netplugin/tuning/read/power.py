"""Read CPU power management: frequency governors, turbo, P-states and C-states."""

from __future__ import annotations

from netplugin.tuning.facts import Policy, PowerFacts
from netplugin.tuning.read.cpus import CPU, cpu_list
from netplugin.tuning.root import Fact, Root, Unknown


def read_power(root: Root) -> PowerFacts:
    return PowerFacts(
        policies=_policies(root),
        turbo=_turbo(root),
        intel_pstate=root.optional(f"{CPU}/intel_pstate/status", str),
        amd_pstate=root.optional(f"{CPU}/amd_pstate/status", str),
        idle_driver=root.optional(f"{CPU}/cpuidle/current_driver", str),
        idle_states=_idle_states(root),
    )


def _policies(root: Root) -> Fact[tuple[Policy, ...]]:
    names = root.names(f"{CPU}/cpufreq")
    if isinstance(names, Unknown):
        return () if names.missing else names
    return tuple(
        Policy(
            name=name,
            cpus=root.parsed(f"{CPU}/cpufreq/{name}/affected_cpus", _blanks),
            driver=root.text(f"{CPU}/cpufreq/{name}/scaling_driver"),
            governor=root.text(f"{CPU}/cpufreq/{name}/scaling_governor"),
        )
        for name in sorted(names, key=lambda name: (len(name), name))
        if name.startswith("policy")
    )


def _turbo(root: Root) -> Fact[bool | None]:
    off = root.optional(f"{CPU}/intel_pstate/no_turbo", int)
    if off is None:
        return root.optional(f"{CPU}/cpufreq/boost", lambda text: bool(int(text)))
    return off if isinstance(off, Unknown) else not off


def _idle_states(root: Root) -> Fact[tuple[str, ...]]:
    """Names of CPU 0's C-states."""
    names = root.names(f"{CPU}/cpu0/cpuidle")
    if isinstance(names, Unknown):
        return () if names.missing else names
    found = []
    for state in names:
        name = root.text(f"{CPU}/cpu0/cpuidle/{state}/name")
        if isinstance(name, Unknown):
            return name
        found.append(name)
    return tuple(found)


def _blanks(text: str) -> frozenset[int]:
    return cpu_list(",".join(text.split()))
