"""A plan for programs: all its values, and what follows from them."""

from __future__ import annotations

import json

from netplugin.tuning.as_json import as_json
from netplugin.tuning.planning.plan import Plan
from netplugin.tuning.planning.sources import PAGES, PARTITION


def plan_json(plan: Plan) -> str:
    """``partition`` has the CPUs of each use beside the cores of each node, each step whether it is done.
    ``sources`` are those of partition and pages; a step has its own.
    """
    shown = as_json(plan)
    for name in ("housekeeping", "pmd", "emulator", "vm", "isolated"):
        shown["partition"][name] = as_json(getattr(plan.partition, name))
    shown["sources"] = {**PARTITION, "hugepages": PAGES}
    for step, row in zip(plan.steps, shown["steps"], strict=True):
        row["done"] = step.done
    return json.dumps(shown, indent=2) + "\n"
