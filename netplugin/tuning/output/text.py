"""Render a plan as text (CPU map, memory, steps by effect), and facts, plans and steps as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from itertools import groupby
from typing import Any

from pydantic import BaseModel

from netplugin.host.cpus import format_list
from netplugin.tuning.command_line import CommandLine
from netplugin.tuning.facts import Core
from netplugin.tuning.planning.partition import NodeShare, Partition
from netplugin.tuning.planning.plan import TuningPlan
from netplugin.tuning.root import Unknown, known
from netplugin.tuning.steps import PAGES, PARTITION, Effect, Step, Target

LEGEND = "H housekeeping  P PMD  V VM  E emulator  - idle sibling"
_COLUMNS = 16


def cpu_map(partition: Partition) -> Iterator[str]:
    """Yield the lines, ``H0 P1 P2 V3`` above ``H32 P33 P34 V35``; cores are ordered by their first CPU."""
    yield LEGEND
    for share in partition.nodes:
        yield f"node {share.node}"
        letters = _letters(share)
        cores = sorted(letters, key=lambda core: core.first)
        for begin in range(0, len(cores), _COLUMNS):
            yield from _rows(cores[begin : begin + _COLUMNS], letters, partition)


def _letters(share: NodeShare) -> dict[Core, str]:
    roles = {"H": share.housekeeping, "P": share.pmd, "E": share.emulator, "V": share.vm}
    return {core: letter for letter, cores in roles.items() for core in cores}


def _rows(cores: list[Core], letters: dict[Core, str], partition: Partition) -> Iterator[str]:
    for thread in range(max(len(core.cpus) for core in cores)):
        cells = [_cell(core, thread, letters[core], partition) for core in cores]
        yield "  " + " ".join(f"{cell:<4}" for cell in cells).rstrip()


def _cell(core: Core, thread: int, letter: str, partition: Partition) -> str:
    cpus = sorted(core.cpus)
    if thread >= len(cpus):
        return ""
    idle = letter in "PV" and cpus[thread] not in partition.polling | partition.vcpus
    return f"{'-' if idle else letter}{cpus[thread]}"


_HEADS = {
    Effect.LIVE: "Now, while everything runs",
    Effect.OVS_RESTART: "With a restart of OVS (VMs lose their network meanwhile)",
    Effect.REBOOT: "With a reboot",
}


def plan_text(plan: TuningPlan, explain: bool = False) -> str:
    """Render the plan; ``explain`` adds the source of each line."""
    return "\n".join(_lines(plan, explain)) + "\n"


def _lines(plan: TuningPlan, explain: bool) -> Iterator[str]:
    for nic in plan.nics:
        node = known(nic.node, None)
        names = " ".join((nic.address, *nic.interfaces))
        yield f"NIC {names}: {nic.driver or 'no driver'}, NUMA node {'not known' if node is None else node}"
    yield from cpu_map(plan.partition)
    if explain:
        yield from (f"  source of {what}: {source}" for what, source in PARTITION.items())
    for pages in plan.pages:
        more = f", and {pages.beyond} more that are there" if pages.beyond else ""
        yield (
            f"node {pages.node}: {pages.pages} pages of {pages.size_kb} KB "
            f"({pages.ovs_mb} MB for OVS, {pages.vm_mb} MB for VMs){more}"
        )
    if explain:
        yield f"  source: {PAGES}"
    for effect in Effect:
        steps = plan.left(effect)
        if steps:
            yield ""
            yield _HEADS[effect]
            yield from _steps(steps, explain)
    done = sum(step.done for step in plan.steps)
    yield ""
    yield f"{done} of {len(plan.steps)} settings are as planned already."


def _steps(steps: tuple[Step, ...], explain: bool) -> Iterator[str]:
    """Render steps; consecutive steps with the same change and reason become one entry."""
    for (group, now, desired, why, source), same in groupby(steps, key=_alike):
        targets = [str(step.target) for step in same]
        more = f" and {len(targets) - 1} more like it" if len(targets) > 1 else ""
        yield f"  [{group}] {targets[0]}{more}"
        yield f"      {now} -> {desired}"
        yield f"      {why}"
        if explain:
            yield f"      source: {source}"


def _alike(step: Step) -> tuple[str, str, str, str, str]:
    now, desired = ("not set" if value is None else str(value) for value in (step.now, step.desired))
    return step.group, now, desired, step.why, step.source


def as_json(value: Any) -> Any:
    """Convert facts, plans and steps: CPU sets to lists like ``0-3,8``, unknown facts to their reason."""
    if isinstance(value, Unknown):
        return {"unknown": value.reason, "path": value.path}
    if isinstance(value, CommandLine):
        return [name if given is None else f"{name}={given}" for name, given in value.arguments]
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Target):
        return {**vars(value), "kind": value.kind}
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, frozenset):
        return format_list(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [as_json(inner) for inner in value]
    if isinstance(value, Mapping):
        return {name: as_json(inner) for name, inner in value.items()}
    return value


def plan_json(plan: TuningPlan) -> str:
    """Render the plan. ``partition`` adds the CPUs of each role, each step adds ``done``.
    ``sources`` are the sources of partition and pages; each step has its own."""
    shown = as_json(plan)
    for name in ("housekeeping", "pmd", "emulator", "vm", "isolated"):
        shown["partition"][name] = as_json(getattr(plan.partition, name))
    shown["sources"] = {**PARTITION, "hugepages": PAGES}
    for step, row in zip(plan.steps, shown["steps"], strict=True):
        row["done"] = step.done
    return json.dumps(shown, indent=2) + "\n"
