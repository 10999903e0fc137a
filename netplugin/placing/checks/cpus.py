"""Check that vCPUs and QEMU's emulator threads run on the CPUs that the host's plan reserves for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from netplugin.host.cpus import format_list
from netplugin.models import Finding
from netplugin.placing.checks.case import Case, graded
from netplugin.placing.ground import Ground

_PIN: Final = "render the domain with policy.pin: netplugin domain render --pin"


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
    return graded(
        "vcpu-pinned", wrong, f"all {case.vcpus} vCPUs are pinned",
        "each vCPU on a CPU of its own: isolated CPUs are not balanced", _PIN,
    )  # fmt: skip


def _places(case: Case, ground: Ground) -> Iterator[Finding]:
    used = case.used
    # A thread that may run on all CPUs is not pinned; the scheduler keeps it off isolated CPUs.
    if not used or used >= ground.pmd | ground.cpus | ground.housekeeping:
        return
    often = Counter(cpu for cpus in case.pins.values() if len(cpus) == 1 for cpu in cpus)
    twice = frozenset(cpu for cpu, count in often.items() if count > 1)
    for id, status, wrong, expected, text in (
        ("vcpu-pmd", "fail", used & ground.pmd, "no vCPU beside a PMD thread", "of PMD threads"),
        (
            "vcpu-others", "fail", used & case.others, "CPUs that no other VM has",
            "of other VMs",
        ),
        ("vcpu-twice", "fail", twice, "one vCPU on a CPU", "with several vCPUs"),
        (
            "vcpu-cpus", "warn", used - ground.cpus - ground.pmd,
            f"CPU {format_list(ground.cpus)}, which the plan has for vCPUs", "that are not for vCPUs",
        ),
    ):  # fmt: skip
        yield graded(
            id, f"vCPUs are on CPU {format_list(wrong)}, {text}" if wrong else None,
            f"vCPUs are on CPU {format_list(used)}", expected, _PIN, status,
        )  # fmt: skip


def _one_node(case: Case, ground: Ground) -> Iterator[Finding]:
    for cell in case.cells:
        mine = (cpu for vcpu in cell.vcpus for cpu in case.pins.get(vcpu, ()))
        nodes = sorted({node for cpu in mine if (node := ground.node_of(cpu)) is not None})
        found = (
            f"the vCPUs of cell {cell.number} are on NUMA node {format_list(nodes) or 'unknown'}"
        )
        yield graded(
            "vcpu-node", found if len(nodes) > 1 else None, found,
            "the vCPUs of a guest's NUMA cell on one node", _PIN,
        )  # fmt: skip


def _emulator(case: Case, ground: Ground) -> Finding:
    has = case.emulator
    wrong = None
    if has is None:
        wrong = "QEMU's own threads are not pinned"
    elif has & (ground.cpus | ground.pmd):
        wrong = f"QEMU's own threads may run on CPU {format_list(has & (ground.cpus | ground.pmd))}"
    return graded(
        "emulator", wrong, f"QEMU's own threads are on CPU {format_list(has or ())}",
        f"CPU {format_list(ground.emulator)}, which run neither vCPUs nor PMD threads", _PIN,
    )  # fmt: skip


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
        wrong = (
            f"the agent gave this VM CPU {format_list(mine.values())}, and the domain has others"
        )
    yield graded(
        "placement", wrong, "the domain is as the agent placed it", "the CPUs that the agent gave",
        _PIN,
    )  # fmt: skip
