"""A plan as JSON: all its values and those derived from them."""

from __future__ import annotations

import json

from netplugin.tuning.as_json import as_json
from netplugin.tuning.planning.plan import Plan
from netplugin.tuning.planning.sources import PAGES, PARTITION


def plan_json(plan: Plan) -> str:
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
