"""The host as the agent sees it beside its backends: facts, running daemons, and the plan of ``[host]``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from netplugin.errors import NetpluginError
from netplugin.models import Finding
from netplugin.tuning import host_options
from netplugin.tuning.checks import check
from netplugin.tuning.checks.scene import Scene
from netplugin.tuning.facts import Facts
from netplugin.tuning.intent import Intent
from netplugin.tuning.live import Live
from netplugin.tuning.live_ovs import read_ovs
from netplugin.tuning.planning.plan import Plan, make_plan
from netplugin.tuning.read import read_facts
from netplugin.tuning.root import Root


class HostView:
    """Reads anew each time: nothing of this is kept. Calls take tens of milliseconds; not for the loop."""

    def __init__(self, intent: Intent | None, ovs_rundir: Path, root: Root | None = None) -> None:
        self._intent = intent
        self._rundir = ovs_rundir
        self._root = root or Root()

    @classmethod
    def read(cls, conf: Any) -> HostView:
        """Raises: ValueError naming the option of ``[host]`` that is wrong."""
        return cls(host_options.intent_of(conf), Path(conf.ovs.rundir))

    def facts(self) -> tuple[Facts, Live]:
        return read_facts(self._root), Live(ovs=read_ovs(self._rundir))

    def plan(self) -> Plan | None:
        """None without ``[host] pmd_cores``. Raises: HostError, InvalidRequest, as ``make_plan``."""
        if self._intent is None:
            return None
        facts, live = self.facts()
        return make_plan(facts, self._intent, live)

    def findings(self) -> tuple[Finding, ...]:
        """What is wrong with the host; a plan that cannot be made is one of it."""
        facts, live = self.facts()
        try:
            plan = make_plan(facts, self._intent, live) if self._intent else None
        except NetpluginError as impossible:
            no_plan = Finding(
                id="plan", status="fail", found=impossible.detail,
                expected="a plan for what [host] asks for", fix=impossible.fix,
            )  # fmt: skip
            return (no_plan, *check(Scene(facts, live)))
        return check(Scene(facts, live, plan))
