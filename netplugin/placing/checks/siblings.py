"""Check that vCPUs own whole cores, and that the guest topology shows which vCPUs are siblings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from netplugin.host.cpus import format_list
from netplugin.models import Finding
from netplugin.placing.checks.case import Case, graded

_PIN: Final = "render the domain with policy.pin: netplugin domain render --pin"


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
    yield graded(
        "siblings", wrong, f"the vCPUs have {len(groups)} cores to themselves",
        "whole cores, and vCPUs that follow each other on siblings", _PIN,
    )  # fmt: skip
    yield _topology(case, groups)


def _topology(case: Case, groups: dict[tuple[int, ...], list[int]]) -> Finding:
    widths = {len(core) for core in groups}
    width = min(widths)
    full = len(widths) == 1 and all(len(cell.vcpus) % width == 0 for cell in case.cells)
    wanted = str(width if full else 1)
    topology = case.domain.find("cpu/topology")
    has = "1" if topology is None else topology.get("threads", "1")
    found = f"the guest sees {has} CPUs a core"
    return graded(
        "topology", found if has != wanted else None, found, f"{wanted}, as its vCPUs are on the host",
        f"set threads='{wanted}' in <cpu><topology>, or render the domain with policy.pin",
    )  # fmt: skip
