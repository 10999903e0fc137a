"""Plans of the machines, and those kept as text: ``python -m tests.unit.tuning.golden`` writes them again."""

from __future__ import annotations

from functools import cache
from typing import Any

from netplugin.tuning.facts import Facts, Live, OvsLive
from netplugin.tuning.intent import HostIntent
from netplugin.tuning.output.playbook import playbook
from netplugin.tuning.output.text import plan_text
from netplugin.tuning.planning.plan import TuningPlan, make_plan
from netplugin.tuning.read import read_facts
from netplugin.tuning.steps import KernelArgument, Step, Target
from tests.unit.tuning.machines import DATA, MemoryRoot, load
from tests.unit.tuning.trees import tree

_VMS = {"vm_memory_mb": 64 * 1024}
PLANS: dict[str, tuple[str, HostIntent]] = {
    **{
        f"published-pmd-{cores}": ("published", HostIntent(pmd_cores=cores, **_VMS)) for cores in (2, 4, 6, 8)
    },
    "published-realtime": (
        "published",
        HostIntent(
            pmd_cores=2,
            vm_cores=8,
            realtime=True,
            idle_siblings=True,
            mtus=(1500, 9000),
            vfs=("ens1f0np0=8",),
            **_VMS,
        ),
    ),
    "amd-4-nodes": (
        "amd-4-nodes",
        HostIntent(pmd_cores=3, vm_cores=6, links=2, link_gbps=25, mtus=(9000,), **_VMS),
    ),
    "small": ("small", HostIntent(pmd_cores=1)),
    "intel-snc": (
        "intel-snc",
        HostIntent(pmd_cores=4, vm_cores=24, link_gbps=100, vm_memory_mb=128 * 1024, vm_size_mb=16 * 1024),
    ),
    "amd-nps4": ("amd-nps4", HostIntent(pmd_cores=4, vm_cores=12, link_gbps=100, **_VMS)),
    "arm": ("arm", HostIntent(pmd_cores=8, link_gbps=100, realtime=True, **_VMS)),
    "edge": (
        "edge",
        HostIntent(pmd_cores=1, realtime=True, link_gbps=25, vm_memory_mb=16 * 1024, mtus=(9000,)),
    ),
}
#: Machines whose OVS is set otherwise than Debian's.
_SET = {
    "intel-snc": {"dpdk-lcore-mask": "0x1"},
    "edge": {"per-port-memory": "true"},
}
PLAYBOOK = "published-realtime"
#: Kept with the source of each line.
EXPLAINED = ("intel-snc", "amd-nps4", "arm", "edge")


@cache
def facts_of(machine: str) -> Facts:
    return read_facts(MemoryRoot(tree(load(machine))))


def plan_of(name: str) -> TuningPlan:
    machine, intent = PLANS[name]
    return make_plan(facts_of(machine), intent, ovs(**_SET.get(name, {})))


def ovs(**other_config: str) -> Live:
    """With these keys added; ``_`` in a name is ``-``."""
    keys = {name.replace("_", "-"): value for name, value in other_config.items()}
    return Live(ovs=OvsLive("3.1.0", "DPDK 22.11.7", True, {"dpdk-init": "true", **keys}))


#: As Debian has it, with DPDK and nothing more.
OVS = ovs()


def step(plan: TuningPlan, target: Target) -> Step:
    [found] = [step for step in plan.steps if step.target == target]
    return found


def arguments(plan: TuningPlan) -> dict[str, str | None]:
    return {s.target.name: s.desired for s in plan.steps if isinstance(s.target, KernelArgument)}


def planned(machine: str, live: Live | None = None, **intent: Any) -> TuningPlan:
    return make_plan(facts_of(machine), HostIntent(**intent), live)


def texts() -> dict[str, str]:
    """What each file under the data's ``plans`` should have."""
    found = {f"{name}.txt": plan_text(plan_of(name), name in EXPLAINED) for name in PLANS}
    found[f"{PLAYBOOK}.yml"] = playbook(plan_of(PLAYBOOK), load("published").online)
    return found


if __name__ == "__main__":
    for file, text in texts().items():
        (DATA / "plans").mkdir(exist_ok=True)
        (DATA / "plans" / file).write_text(text)
