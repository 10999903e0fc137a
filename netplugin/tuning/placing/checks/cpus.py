"""Check a domain's CPUs: pins within the plan, whole cores, a CPU model for DPDK, real time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from netplugin.api.models import Finding
from netplugin.host.cpus import format_list
from netplugin.libvirt.interfaces import Element
from netplugin.libvirt.pins import INVARIANT_TSC, TIMERS, is_kvm, is_marked_realtime, is_x86
from netplugin.libvirt.values import content, parse_cpuset
from netplugin.tuning.checks.frame import fail, graded, warn
from netplugin.tuning.placing.capacity import HostCapacity
from netplugin.tuning.placing.checks.case import Case

_PIN: Final = 'render the domain again: POST /v1/vms/VM:render-domain {"policy": {"pin": true}}'


def cpus(case: Case) -> Iterator[Finding]:
    """CPU findings; none if the host has no plan."""
    ground = case.ground
    if ground is None:
        return
    yield _pinned(case)
    yield from _places(case, ground)
    if case.pins:
        yield from _one_node(case, ground)
    yield _emulator(case, ground)
    yield from _remembered(case)


def _pinned(case: Case) -> Finding:
    loose = [n for n in range(case.vcpus) if len(case.pins.get(n, ())) != 1]
    wrong = f"vCPU {format_list(loose)} of {case.vcpus} has no CPU of its own" if loose else None
    expected = "each vCPU on a CPU of its own: isolated CPUs are not balanced"
    return graded("vcpu-pinned", wrong, f"all {case.vcpus} vCPUs are pinned", expected, _PIN)


def _places(case: Case, ground: HostCapacity) -> Iterator[Finding]:
    used = case.used
    # A thread that may run on all CPUs is not pinned; the scheduler keeps it off isolated CPUs.
    if not used or used >= ground.pmd | ground.cpus | ground.housekeeping:
        return
    often = Counter(cpu for cpus in case.pins.values() if len(cpus) == 1 for cpu in cpus)
    twice = frozenset(cpu for cpu, count in often.items() if count > 1)
    strange, planned = used - ground.cpus - ground.pmd, format_list(ground.cpus)
    for_them = f"CPU {planned}, which the plan has for vCPUs"
    for id, say, cpus, expected, text in (
        ("vcpu-pmd", fail, used & ground.pmd, "no vCPU on the CPU of a PMD thread", "of PMD threads"),
        ("vcpu-others", fail, used & case.others, "CPUs that no other VM has", "of other VMs"),
        ("vcpu-twice", fail, twice, "one vCPU on a CPU", "with several vCPUs"),
        ("vcpu-cpus", warn, strange, for_them, "that are not for vCPUs"),
    ):
        wrong = f"vCPUs are on CPU {format_list(cpus)}, {text}" if cpus else None
        yield graded(id, wrong, f"vCPUs are on CPU {format_list(used)}", expected, _PIN, say)


def _one_node(case: Case, ground: HostCapacity) -> Iterator[Finding]:
    for cell in case.cells:
        mine = (cpu for vcpu in cell.vcpus for cpu in case.pins.get(vcpu, ()))
        nodes = sorted({node for cpu in mine if (node := ground.node_of(cpu)) is not None})
        found = f"the vCPUs of cell {cell.number} are on NUMA node {format_list(nodes) or 'unknown'}"
        wrong = found if len(nodes) > 1 else None
        yield graded("vcpu-node", wrong, found, "the vCPUs of a guest's NUMA cell on one node", _PIN)


def _emulator(case: Case, ground: HostCapacity) -> Finding:
    wrong = None if case.emulator is not None else "QEMU's own threads are not pinned"
    has = case.emulator or frozenset()
    if taken := has & (ground.cpus | ground.pmd):
        wrong = f"QEMU's own threads may run on CPU {format_list(taken)}"
    expected = f"CPU {format_list(ground.emulator)}, which run neither vCPUs nor PMD threads"
    return graded("emulator", wrong, f"QEMU's own threads are on CPU {format_list(has)}", expected, _PIN)


def _remembered(case: Case) -> Iterator[Finding]:
    """Compare the pins with the stored placement. CPUs pinned without one look free to the agent."""
    used = {n: next(iter(cpus)) for n, cpus in case.pins.items() if len(cpus) == 1}
    if not used:
        return
    mine = case.mine.pins if case.mine else None
    wrong = None
    if mine is None:
        wrong = "the agent gave this VM no CPUs, and may give these to another"
    elif mine != used:
        wrong = f"the agent gave this VM CPU {format_list(mine.values())}, and the domain has others"
    expected = "the CPUs that the agent gave"
    yield graded("placement", wrong, "the domain is as the agent placed it", expected, _PIN)


def siblings(case: Case) -> Iterator[Finding]:
    """Sibling findings; none without SMT or if a vCPU is not pinned to exactly one CPU."""
    if case.ground is None or any(len(cpus) != 1 for cpus in case.pins.values()):
        return
    cores = [core for node in case.ground.nodes for core in node.cores]
    homes = {cpu: core for core in cores for cpu in core}
    on = {vcpu: homes.get(next(iter(cpus))) for vcpu, cpus in case.pins.items()}
    if not on or any(core is None for core in on.values()) or all(len(c) == 1 for c in cores):
        return
    groups: dict[tuple[int, ...], list[int]] = {}
    for vcpu, core in sorted(on.items()):
        assert core is not None
        groups.setdefault(core, []).append(vcpu)
    shared = frozenset(cpu for core in groups for cpu in core) & case.others
    split = [vcpus for vcpus in groups.values() if vcpus[-1] - vcpus[0] != len(vcpus) - 1]
    half = [core for core, vcpus in groups.items() if len(vcpus) < len(core)]
    wrong = None
    if shared:
        wrong = f"siblings of its CPUs, {format_list(shared)}, are of other VMs"
    elif split:
        wrong = f"vCPU {', '.join(map(str, split[0]))} share a core"
    elif len(half) > len(case.cells):  # the last core of each cell may be half used
        wrong = f"{len(half)} cores have a sibling idle, as that of CPU {half[0][0]}"
    found = f"the vCPUs have {len(groups)} cores to themselves"
    yield graded("siblings", wrong, found, "whole cores, and vCPUs that follow each other on siblings", _PIN)
    yield _topology(case, groups)


def _topology(case: Case, groups: dict[tuple[int, ...], list[int]]) -> Finding:
    widths = {len(core) for core in groups}
    width = min(widths)
    full = len(widths) == 1 and all(len(cell.vcpus) % width == 0 for cell in case.cells)
    desired = str(width if full else 1)
    topology = case.domain.find("cpu/topology")
    has = "1" if topology is None else topology.get("threads", "1")
    found = f"the guest sees {has} CPUs a core"
    fix = f"set threads='{desired}' in <cpu><topology>, or render the domain with policy.pin"
    wrong = found if has != desired else None
    return graded("topology", wrong, found, f"{desired}, as its vCPUs are on the host", fix)


#: QEMU CPU models without SSE4.2, which DPDK requires; ``qemu64`` is QEMU's default on x86.
_POOR: Final = frozenset(
    (
        "qemu64 qemu32 kvm64 kvm32 pentium pentium2 pentium3 486 core2duo coreduo n270 athlon "
        "phenom Conroe Penryn Opteron_G1 Opteron_G2 Opteron_G3"
    ).split()
)


def model(case: Case) -> Iterator[Finding]:
    cpu = case.domain.find("cpu")
    name = _name(cpu)
    poor = name is None or name in _POOR
    desired = f"<cpu mode='{'host-passthrough' if is_kvm(case.domain) else 'maximum'}'>"
    wrong = f"the CPU is {name or 'the least that QEMU has'}" if poor else None
    expected = f"a CPU with all that DPDK uses, as {desired}"
    fix = f"write {desired}, or render the domain with policy.pin"
    yield graded("cpu-mode", wrong, f"the CPU is {name}", expected, fix)
    vcpu = case.domain.find("vcpu")
    now = str(case.vcpus) if vcpu is None else vcpu.get("current", str(case.vcpus))
    late = f"{now} of {case.vcpus} vCPUs from the start" if now != str(case.vcpus) else None
    if case.ground is not None:
        found = f"all {case.vcpus} vCPUs from the start"
        expected = "all vCPUs from the start: one that comes later is not placed"
        yield graded("vcpu-hotplug", late, found, expected, "remove current from <vcpu>")


def _name(cpu: Element | None) -> str | None:
    if cpu is None:
        return None
    named = content(cpu.find("model")) or None
    return cpu.get("mode") if cpu.get("mode") not in (None, "custom") else named


_REALTIME: Final = 'render the domain again: POST /v1/vms/VM:render-domain {"policy": {"realtime": true}}'
#: What a real-time domain has, and the element for it.
_HAS: Final = {
    "scheduler": ("all vCPUs have a real-time scheduler", "<vcpusched> with fifo for all vCPUs"),
    "memory": ("the memory is locked", "<memoryBacking><locked/>: a page fault stops a vCPU"),
    "balloon": ("there is no balloon", "<memballoon model='none'/>: a balloon takes memory from the guest"),
    "clock": ("the guest reads the TSC", "no kvmclock, and the host's own TSC"),
    "tsc": (
        "the guest learns that the TSC is invariant",
        "<feature policy='require' name='invtsc'/>, and migratable='off' with host-passthrough: it takes "
        "another clock otherwise",
    ),
    "pmu": ("no performance counters", "<pmu state='off'/>: each use of a counter leaves the guest"),
}


def realtime(case: Case) -> Iterator[Finding]:
    """Real-time findings; none for a domain without the real-time mark and without a real-time vCPU."""
    scheduled = _scheduled(case)
    if not (scheduled or is_marked_realtime(case.domain)):
        return
    if case.ground is not None:
        wrong = None if case.ground.realtime else "the host is not planned for real time"
        found, fix = "the host is planned for real time", "set [host] realtime = true, and take the steps of "
        yield graded("realtime-host", wrong, found, "[host] realtime", f"{fix}netplugin host plan", fail)
    for about, lacks in _lacking(case.domain, format_list(set(range(case.vcpus)) - scheduled)):
        yield graded(f"realtime-{about}", lacks, *_HAS[about], _REALTIME)


def _lacking(domain: Element, left: str) -> Iterator[tuple[str, str | None]]:
    """By the keys of ``_HAS``, what is wrong, or None. ``left``: the vCPUs without a real-time scheduler."""
    yield "scheduler", f"vCPU {left} runs as any other thread" if left else None
    locked, balloon = domain.find("memoryBacking/locked"), domain.find("devices/memballoon")
    yield "memory", "memory may be taken away" if locked is None else None
    yield "balloon", "there is a balloon" if balloon is None or balloon.get("model") != "none" else None
    if not (is_kvm(domain) and is_x86(domain)):
        return
    timers = {each.get("name"): each for each in domain.iterfind("clock/timer")}
    wrong = [
        f"{name} {attribute} is not {value}"
        for name, (attribute, value) in TIMERS.items()
        if (timer := timers.get(name)) is None or timer.get(attribute) != value
    ]
    yield "clock", "; ".join(wrong) or None
    cpu, pmu = domain.find("cpu"), domain.find("features/pmu")
    feature = None if cpu is None else cpu.find(f"feature[@name='{INVARIANT_TSC}']")
    hidden = cpu is not None and (cpu.get("mode"), cpu.get("migratable", "on")) == ("host-passthrough", "on")
    unsure = feature is None or feature.get("policy") not in ("require", "force") or hidden
    yield "tsc", "the guest does not learn that the TSC is invariant" if unsure else None
    yield "pmu", "the guest has performance counters" if pmu is None or pmu.get("state") != "off" else None


def _scheduled(case: Case) -> set[int]:
    found: set[int] = set()
    for each in case.domain.iterfind("cputune/vcpusched"):
        try:
            if each.get("scheduler") in ("fifo", "rr"):
                found |= parse_cpuset(each.get("vcpus", ""))
        except ValueError:
            continue
    return found & set(range(case.vcpus))
