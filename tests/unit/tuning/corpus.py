"""Hosts as operators have them, and what check and plan say of each: ``python -m tests.unit.tuning.corpus``.

The command writes the text of each host again, to be read line by line before it is kept. A host is a file of
tests/data/hosts; a field report becomes one more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from netplugin.api.errors import NetpluginError
from netplugin.api.pmd_models import PmdCore, PmdState, RxQueue
from netplugin.pmd.propose import propose
from netplugin.pmd.settings import read_settings
from netplugin.tuning.checks import check
from netplugin.tuning.checks.scene import Scene
from netplugin.tuning.facts import Facts, Live, OvsLive, OvsPortLive
from netplugin.tuning.guest.plan import guest_text, plan_guest
from netplugin.tuning.guest.settings import GuestOptions
from netplugin.tuning.intent import HostIntent
from netplugin.tuning.output.text import plan_text
from netplugin.tuning.planning.plan import TuningPlan, make_plan
from netplugin.tuning.read import read_facts
from netplugin.tuning.root import Unknown
from tests.unit.tuning.machines import Machine, MemoryRoot, Tree
from tests.unit.tuning.machines import load as load_machine
from tests.unit.tuning.trees import tree

DATA = Path(__file__).parents[2] / "data" / "hosts"
NAMES = tuple(sorted(file.stem for file in DATA.glob("*.yaml")))


@dataclass(frozen=True)
class Host:
    """``machine``: fields of one, or the name of one of tests/data/machines; ``files``, ``links`` and
    ``removed`` change its tree. ``ovs``: a running one, its ``bridges`` with their ports and its ``pmds``.
    ``domain``: the XML of a VM, for ``guest plan``."""

    machine: dict[str, Any] | str
    intent: dict[str, Any] | None = None
    ovs: dict[str, Any] | None = None
    domain: str | None = None

    @property
    def tree(self) -> Tree:
        if isinstance(self.machine, str):
            return tree(load_machine(self.machine))
        words = dict(self.machine)
        files, links, removed = (words.pop(name, {}) for name in ("files", "links", "removed"))
        made = tree(Machine(**words))
        made.files |= files
        made.links |= links
        for path in removed:
            made.files = {p: text for p, text in made.files.items() if not f"{p}/".startswith(f"{path}/")}
        return made


def load(name: str) -> Host:
    return Host(**yaml.safe_load((DATA / f"{name}.yaml").read_text()))


def report(host: Host) -> str:
    return "\n".join(_lines(host)) + "\n"


def _lines(host: Host) -> Iterator[str]:
    facts, live = read_facts(MemoryRoot(host.tree)), _live(host.ovs)
    plan, text = _plan(facts, host.intent, live)
    yield "CHECK"
    for finding in check(Scene(facts, live, plan)):
        yield f"{finding.status:5}{finding.id}: {finding.found}"
        if finding.status != "ok":
            yield f"     expected: {finding.expected}"
            yield f"     fix: {finding.fix}"
    if text:
        yield f"\nPLAN\n{text}"
    if not isinstance(live.ovs, Unknown) and live.ovs.pmds:
        state = PmdState(cpus="", cores=live.ovs.pmds, settings=read_settings(live.ovs.other_config))
        yield "\nPMD ADVICE"
        yield from (f"{advice.id}: {advice.text}" for advice in propose(state).advice)
    if host.domain:
        yield f"\nGUEST PLAN\n{guest_text(plan_guest(host.domain, GuestOptions()))}"


def _plan(facts: Facts, intent: dict[str, Any] | None, live: Live) -> tuple[TuningPlan | None, str]:
    if intent is None:
        return None, ""
    try:
        plan = make_plan(facts, HostIntent(**intent), live)
    except NetpluginError as refused:
        return None, f"{refused.code}: {refused.detail}\nfix: {refused.fix}"
    return plan, plan_text(plan)


def _live(ovs: dict[str, Any] | None) -> Live:
    if ovs is None:
        return Live()
    ports = (
        OvsPortLive(name, name, port["type"], port.get("mtu"), bridge=bridge, peer=port.get("peer"))
        for bridge, there in ovs["bridges"].items()
        for name, port in there.items()
    )
    homes = {name: port.get("node") for there in ovs["bridges"].values() for name, port in there.items()}
    pmds = (
        PmdCore(
            cpu=pmd["cpu"],
            numa_node=pmd["node"],
            isolated=False,
            busy_percent=None,
            queues=tuple(_queue(name, homes) for name in pmd["queues"]),
        )
        for pmd in ovs.get("pmds", ())
    )
    return Live(OvsLive(ovs["version"], "DPDK", True, ovs["other_config"], tuple(ports), tuple(pmds)))


def _queue(text: str, homes: dict[str, int | None]) -> RxQueue:
    """From ``p0/1 80``: queue 1 of p0 takes 80 % of a CPU; without a number it is not enabled."""
    name, _, usage = text.partition(" ")
    port, _, number = name.partition("/")
    node = homes[port]
    return RxQueue(
        port=port,
        queue=int(number),
        enabled=bool(usage),
        usage_percent=int(usage) if usage else None,
        pinned_to=None,
        port_numa_node=node,
        numa_mismatch=False,
    )


def file_of(name: str) -> Path:
    return DATA / "expected" / f"{name}.txt"


if __name__ == "__main__":
    for each in NAMES:
        file_of(each).write_text(report(load(each)))
