"""Check that a real-time domain has a real-time scheduler, locked memory, no balloon and a TSC clock."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from netplugin.api.models import Finding
from netplugin.host.cpus import format_list
from netplugin.libvirt.pins import (
    INVARIANT_TSC,
    TIMERS,
    is_kvm,
    is_marked_realtime,
    is_x86,
    parse_cpuset,
)
from netplugin.tuning.placing.checks.case import Case, graded

_REALTIME: Final = "render the domain with policy.realtime: netplugin domain render --realtime"


def realtime(case: Case) -> Iterator[Finding]:
    """Real-time findings; none for a domain without the real-time mark and without a real-time vCPU."""
    domain = case.domain
    scheduled = _scheduled(case)
    if not (scheduled or is_marked_realtime(domain)):
        return
    if case.ground is not None:
        yield graded(
            "realtime-host",
            None if case.ground.realtime else "the host is not planned for real time",
            "the host is planned for real time",
            "[host] realtime",
            "set [host] realtime = true, and take the steps of netplugin host plan",
            "fail",
        )
    left = sorted(set(range(case.vcpus)) - scheduled)
    balloon = domain.find("devices/memballoon")
    for id, wrong, found, expected in (
        (
            "realtime-scheduler",
            f"vCPU {format_list(left)} runs as any other thread" if left else None,
            "all vCPUs have a real-time scheduler",
            "<vcpusched> with fifo for all vCPUs",
        ),
        (
            "realtime-memory",
            "memory may be taken away" if domain.find("memoryBacking/locked") is None else None,
            "the memory is locked",
            "<memoryBacking><locked/>: a page fault stops a vCPU",
        ),
        (
            "realtime-balloon",
            "there is a balloon" if balloon is None or balloon.get("model") != "none" else None,
            "there is no balloon",
            "<memballoon model='none'/>: a balloon takes memory from the guest",
        ),
    ):
        yield graded(id, wrong, found, expected, _REALTIME)
    if is_kvm(domain) and is_x86(domain):
        yield from _clock(case)


def _clock(case: Case) -> Iterator[Finding]:
    timers = {each.get("name"): each for each in case.domain.iterfind("clock/timer")}
    wrong = [
        f"{name} {attribute} is not {value}"
        for name, (attribute, value) in TIMERS.items()
        if (timer := timers.get(name)) is None or timer.get(attribute) != value
    ]
    yield graded(
        "realtime-clock",
        "; ".join(wrong) or None,
        "the guest reads the TSC",
        "no kvmclock, and the host's own TSC",
        _REALTIME,
    )
    cpu = case.domain.find("cpu")
    feature = None if cpu is None else cpu.find(f"feature[@name='{INVARIANT_TSC}']")
    hidden = cpu is not None and (cpu.get("mode"), cpu.get("migratable", "on")) == (
        "host-passthrough",
        "on",
    )
    unsure = feature is None or feature.get("policy") not in ("require", "force") or hidden
    yield graded(
        "realtime-tsc",
        "the guest does not learn that the TSC is invariant" if unsure else None,
        "the guest learns that the TSC is invariant",
        "<feature policy='require' name='invtsc'/>, and "
        "migratable='off' with host-passthrough: it takes another clock otherwise",
        _REALTIME,
    )
    pmu = case.domain.find("features/pmu")
    off = pmu is not None and pmu.get("state") == "off"
    yield graded(
        "realtime-pmu",
        None if off else "the guest has performance counters",
        "no performance counters",
        "<pmu state='off'/>: each use of a counter leaves the guest",
        _REALTIME,
    )


def _scheduled(case: Case) -> set[int]:
    found: set[int] = set()
    for each in case.domain.iterfind("cputune/vcpusched"):
        try:
            if each.get("scheduler") in ("fifo", "rr"):
                found |= parse_cpuset(each.get("vcpus", ""))
        except ValueError:
            continue
    return found & set(range(case.vcpus))
