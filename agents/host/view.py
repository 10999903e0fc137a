"""The host outside the backends: facts, running daemons, and the CPU plan of ``[host]``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
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
    """Reads the host for every call, without a cache. Use it from the event loop only through ``within``.

    Calls that wait at the same time share one read, which begins after all of them: none gets an answer
    from before it asked, and none waits for more than two reads.
    """

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
        self._reads = ThreadPoolExecutor(1, "host")
        # Apart from the reads: what has been read is not held up by the next read.
        self._looks = ThreadPoolExecutor(1, "plan")
        self._lock = Lock()
        #: A read that has not begun.
        self._next: Future[tuple[Facts, Live]] | None = None

    @classmethod
    def read(cls, conf: Any) -> HostView:
        """Raises: ValueError naming the wrong option of ``[host]``."""
        intent = intent_of(conf)
        within_s = max(_LOOK_S, _LOOK_PART * conf.agent.operation_timeout)
        return cls(intent, OvsSockets.read(conf), conf[GROUP].libvirt_uri, within_s=within_s)

    async def within(self, look: Callable[[Facts, Live], T]) -> T:
        """Read the host, run ``look`` (such as a method of this object) on it in a thread, return its result.

        Raises: OperationTimeout if it takes too long; what ``look`` raises.
        """
        try:
            async with asyncio.timeout(self._within_s):
                # Shielded: others may wait for the same read.
                facts, live = await asyncio.shield(asyncio.wrap_future(self._shared_read()))
                return await asyncio.get_running_loop().run_in_executor(self._looks, look, facts, live)
        except TimeoutError:
            raise OperationTimeout(
                f"the host could not be read within {self._within_s:g} s",
                step="host",
                fix="see which file of /sys or /proc hangs, or which daemon does not answer (libvirtd, OVS): "
                "netplugin host facts; if all do, a higher [agent] operation_timeout: half of it is for this",
            ) from None

    def close(self) -> None:
        """Stop the threads without waiting for a read in progress."""
        self._reads.shutdown(wait=False, cancel_futures=True)
        self._looks.shutdown(wait=False, cancel_futures=True)

    def _shared_read(self) -> Future[tuple[Facts, Live]]:
        """The read that begins next."""
        with self._lock:
            if self._next is None:
                self._next = self._reads.submit(self._begun)
            return self._next

    def _begun(self) -> tuple[Facts, Live]:
        with self._lock:
            self._next = None
        return self.facts()

    def facts(self) -> tuple[Facts, Live]:
        from netplugin.tuning.read import read_facts
        from netplugin.tuning.read_live import read_live
        from netplugin.tuning.root import Root

        return read_facts(self._root or Root()), read_live(self._ovs_sockets, self._libvirt_uri)

    async def state(self) -> HostState:
        """The facts for the API. Raises: OperationTimeout."""
        return await self.within(self._state)

    def _state(self, facts: Facts, live: Live) -> HostState:
        from netplugin.tuning.output.text import as_json

        return HostState(facts=as_json(facts), live=as_json(live))

    def scene(self, facts: Facts, live: Live) -> Scene:
        """Facts, daemons and plan; no plan without ``[host] pmd_cores``.

        Raises: HostError as ``make_plan``, and Conflict if the host cannot satisfy ``[host]``.
        """
        from netplugin.tuning.checks.scene import Scene

        try:
            plan = self._plan(facts, live)
        except InvalidRequest as wrong:
            raise Conflict(f"[host] {wrong.detail}", step="plan", fix=wrong.fix) from wrong
        return Scene(facts, live, plan)

    def planned_or_not(self, facts: Facts, live: Live) -> Scene:
        """As ``scene``, but without a plan if the host cannot satisfy ``[host]``."""
        from netplugin.tuning.checks.scene import Scene

        try:
            return self.scene(facts, live)
        except NetpluginError:
            return Scene(facts, live)

    def _plan(self, facts: Facts, live: Live) -> TuningPlan | None:
        """Raises: HostError, InvalidRequest, as ``make_plan``."""
        from netplugin.tuning.planning.plan import make_plan

        return make_plan(facts, self._intent, live) if self._intent else None

    def findings(self, facts: Facts, live: Live) -> tuple[Finding, ...]:
        """The findings about the host.

        The one with the id ``plan`` says which CPUs are for VMs, or why there is no plan; without ``[host]
        pmd_cores`` there is no such finding.
        """
        from netplugin.tuning.checks import check
        from netplugin.tuning.checks.scene import Scene

        try:
            plan = self._plan(facts, live)
        except NetpluginError as impossible:
            found, expected = impossible.detail, "a plan for what [host] asks for"
            no_plan = Finding(id="plan", status="fail", found=found, expected=expected, fix=impossible.fix)
            return (no_plan, *check(Scene(facts, live)))
        return (*_about_vms(plan), *check(Scene(facts, live, plan)))


def _about_vms(plan: TuningPlan | None) -> Iterator[Finding]:
    if plan is None:
        return
    cpus = plan.partition.vm
    found = f"CPUs {format_list(cpus)} are for VMs" if cpus else "the plan has no CPUs for VMs"
    expected = "CPUs on which the agent places VMs (policy.pin, policy.realtime)"
    fix = None if cpus else "set [host] vm_cores, or fewer pmd_cores"
    yield Finding(id="plan", status="ok" if cpus else "warn", found=found, expected=expected, fix=fix)
