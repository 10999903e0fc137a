"""Facts, plans and steps as JSON: CPU sets as lists like ``0-3,8``, unknown facts with the reason."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from pydantic import BaseModel

from netplugin.host.cpus import format_list
from netplugin.tuning.command_line import CommandLine
from netplugin.tuning.planning.plan import TuningPlan
from netplugin.tuning.planning.sources import PAGES, PARTITION
from netplugin.tuning.root import Unknown

# -- Convert facts, plans and steps to JSON: CPU sets as lists like ``0-3,8``, unknown facts with reason.


def as_json(value: Any) -> Any:
    """Convert to dicts, lists, strings, numbers, booleans and None."""
    if isinstance(value, Unknown):
        return {"unknown": value.reason, "path": value.path}
    if isinstance(value, CommandLine):
        return [name if given is None else f"{name}={given}" for name, given in value.arguments]
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
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


# -- A plan as JSON: all its values and those derived from them. ----------------------------------


def plan_json(plan: TuningPlan) -> str:
    """Render the plan. ``partition`` adds the CPUs of each role, each step adds ``done``.
    ``sources`` are the sources of partition and pages; each step has its own.
    """
    shown = as_json(plan)
    for name in ("housekeeping", "pmd", "emulator", "vm", "isolated"):
        shown["partition"][name] = as_json(getattr(plan.partition, name))
    shown["sources"] = {**PARTITION, "hugepages": PAGES}
    for step, row in zip(plan.steps, shown["steps"], strict=True):
        row["done"] = step.done
    return json.dumps(shown, indent=2) + "\n"
