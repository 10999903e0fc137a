"""What the agent answers of PMD threads: looked at anew each time, set by one call at a time."""

from __future__ import annotations

import asyncio
from functools import partial

from agents.host import HostView
from agents.placements import Placements
from netplugin.host import cpus
from netplugin.host.shared import Host
from netplugin.models import PmdChoice, PmdProposal, PmdRequest, PmdState
from netplugin.placing.pmd_cores import choose_cores, host_of, refuse_cores_of_vms
from netplugin.pmd.change import named
from netplugin.pmd.propose import propose
from netplugin.pmd.read import Reading, between, look
from netplugin.pmd.set import set_pmd
from netplugin.pmd.settings import MASK, masked
from netplugin.tuning.checks.scene import Scene

#: Seconds that a scrape waits for OVS: Prometheus gives up after 10 s, as it comes.
_SCRAPE_S = 1.0


class Pmd:
    """For the loop: what takes its time is in a thread.

    All calls raise BackendUnavailable, HostError and OperationTimeout.
    """

    def __init__(self, host: Host, view: HostView, placements: Placements) -> None:
        self._host = host
        self._view = view
        self._placements = placements
        self._setting = asyncio.Lock()

    async def show(self, interval_s: float | None = None) -> PmdState:
        """As it is since the threads started, or measured anew for so many seconds.

        Nothing is cleared: others count on the same counters.
        """
        before = await asyncio.to_thread(look, self._host.ovs_of_others)
        if interval_s is None:
            return before.state
        await asyncio.sleep(interval_s)  # no thread is held meanwhile
        after = await asyncio.to_thread(partial(look, self._host.ovs_of_others, usage_s=interval_s))
        return between(before, after, interval_s)

    async def proposal(self, interval_s: float | None = None) -> PmdProposal:
        """From the loads of the last minute, or of so many seconds from now."""
        return await asyncio.to_thread(propose, await self.show(interval_s))

    def scraped(self) -> Reading | None:
        """For metrics, not from the loop: a look that gives up soon; None if no backend uses OVS."""
        ovs = self._host.used_ovs
        return look(ovs, wait_s=_SCRAPE_S) if ovs else None

    async def set(self, request: PmdRequest) -> PmdState:
        """Raises: also InvalidRequest, Conflict; nothing has changed, then.

        Cores are chosen only by the plan that ``[host]`` asks for: without it they might be those that VMs
        are to have. CPUs that are named need no plan.
        """
        async with self._setting:
            chosen: tuple[PmdChoice, ...] = ()
            if request.count is not None or request.cpus is not None:
                self._host.ovs_of_others.usable().require()
                view = self._view
                look = view.planned_or_not if request.count is None else view.scene
                scene = await view.within(look)
                chosen = await asyncio.to_thread(self._choose, request, scene)
            return await asyncio.to_thread(set_pmd, self._host.ovs_of_others, request, chosen)

    def _choose(self, request: PmdRequest, scene: Scene) -> tuple[PmdChoice, ...]:
        """Nothing for CPUs that are named, which only must not be those of VMs."""
        ovs = self._host.ovs_of_others
        interfaces = ovs.mirror.interfaces().values()
        host = host_of(scene, self._placements.all(), tuple(interfaces))
        if request.count is not None:
            return choose_cores(request.count, request.siblings, host)
        running = masked(ovs.mirror.root.other_config.get(MASK))
        refuse_cores_of_vms(named(request, cpus.online()), running, host)
        return ()
