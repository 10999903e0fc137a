"""The host outside the backends: facts, running daemons, and the CPU plan of ``[host]``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from netplugin.api.errors import Conflict, InvalidRequest, NetpluginError, OperationTimeout
from netplugin.api.models import Finding, HostState
from netplugin.host.cpus import format_list
from netplugin.host.ovs_sockets import OvsSockets
from netplugin.tuning.intent import GROUP, HostIntent, intent_of

if TYPE_CHECKING:
    # One module in ten of all: imported by the first call that needs it, in the thread that reads the
    # host, so that a start does not take longer for it.
    from netplugin.tuning.checks.scene import Scene
    from netplugin.tuning.facts import Facts, Live
    from netplugin.tuning.planning.plan import TuningPlan
    from netplugin.tuning.root import Root

T = TypeVar("T")
#: Longer than the timeouts of all queried daemons together; a driver that hangs has no timeout.
_LOOK_S = 15.0
#: Of the time of an operation: the rest is for what it does with the answer.
_LOOK_PART = 0.5


class HostView:
    """Reads the host on every call, without a cache. Use it from the event loop only through ``within``."""

    def __init__(
        self,
        intent: HostIntent | None,
        ovs_sockets: OvsSockets,
        libvirt_uri: str,
        root: Root | None = None,
        within_s: float = _LOOK_S,
    ) -> None:
        """``within_s``: how long reading the host may take, in seconds."""
        self._within_s = within_s
        self._intent = intent
        self._ovs_sockets = ovs_sockets
        self._libvirt_uri = libvirt_uri
        self._root = root
        # A single thread: reads that hang must not use up the threads of the event loop.
        self._thread = ThreadPoolExecutor(1, "host")

    @classmethod
    def read(cls, conf: Any) -> HostView:
        """Raises: ValueError naming the wrong option of ``[host]``."""
        intent = intent_of(conf)
        within_s = max(_LOOK_S, _LOOK_PART * conf.agent.operation_timeout)
        return cls(intent, OvsSockets.read(conf), conf[GROUP].libvirt_uri, within_s=within_s)

    async def within(self, look: Callable[[], T]) -> T:
        """Run ``look`` (a method of this object) in a thread and return its result.

        Raises: OperationTimeout if it takes too long; what ``look`` raises.
        """
        begun = asyncio.get_running_loop().run_in_executor(self._thread, look)
        try:
            return await asyncio.wait_for(begun, self._within_s)
        except TimeoutError:
            raise OperationTimeout(
                f"the host could not be read within {self._within_s:g} s",
                step="host",
                fix="see which file of /sys or /proc hangs, or which daemon does not answer (libvirtd, OVS): "
                "netplugin host facts; if all do, a higher [agent] operation_timeout: half of it is for this",
            ) from None

    def close(self) -> None:
        """Stop the thread without waiting for a read in progress."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def facts(self) -> tuple[Facts, Live]:
        from netplugin.tuning.read import read_facts
        from netplugin.tuning.read_live import read_live
        from netplugin.tuning.root import Root

        return read_facts(self._root or Root()), read_live(self._ovs_sockets, self._libvirt_uri)

    def state(self) -> HostState:
        from netplugin.tuning.output.text import as_json

        facts, live = self.facts()
        return HostState(facts=as_json(facts), live=as_json(live))

    def scene(self) -> Scene:
        """Facts, daemons and plan, read at one time; no plan without ``[host] pmd_cores``.

        Raises: HostError as ``make_plan``, and Conflict if the host cannot satisfy ``[host]``.
        """
        from netplugin.tuning.checks.scene import Scene

        facts, live = self.facts()
        try:
            plan = self._plan(facts, live)
        except InvalidRequest as wrong:
            raise Conflict(f"[host] {wrong.detail}", step="plan", fix=wrong.fix) from wrong
        return Scene(facts, live, plan)

    def planned_or_not(self) -> Scene:
        """As ``scene``, but without a plan if the host cannot satisfy ``[host]``."""
        from netplugin.tuning.checks.scene import Scene

        facts, live = self.facts()
        try:
            plan = self._plan(facts, live)
        except NetpluginError:
            plan = None
        return Scene(facts, live, plan)

    def _plan(self, facts: Facts, live: Live) -> TuningPlan | None:
        """Raises: HostError, InvalidRequest, as ``make_plan``."""
        from netplugin.tuning.planning.plan import make_plan

        return make_plan(facts, self._intent, live) if self._intent else None

    def findings(self) -> tuple[Finding, ...]:
        """The findings about the host.

        The one with the id ``plan`` says which CPUs are for VMs, or why there is no plan; without ``[host]
        pmd_cores`` there is no such finding.
        """
        from netplugin.tuning.checks import check
        from netplugin.tuning.checks.scene import Scene

        facts, live = self.facts()
        try:
            plan = self._plan(facts, live)
        except NetpluginError as impossible:
            no_plan = Finding(
                id="plan",
                status="fail",
                found=impossible.detail,
                expected="a plan for what [host] asks for",
                fix=impossible.fix,
            )
            return (no_plan, *check(Scene(facts, live)))
        return (*_about_vms(plan), *check(Scene(facts, live, plan)))


def _about_vms(plan: TuningPlan | None) -> Iterator[Finding]:
    if plan is None:
        return
    cpus = plan.partition.vm
    yield Finding(
        id="plan",
        status="ok" if cpus else "warn",
        found=f"CPUs {format_list(cpus)} are for VMs" if cpus else "the plan has no CPUs for VMs",
        expected="CPUs on which the agent places VMs (policy.pin, policy.realtime)",
        fix=None if cpus else "set [host] vm_cores, or fewer pmd_cores",
    )
