"""PMD threads in the API: read from OVS on every call, changed by one call at a time."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from agents.host.view import HostView
from agents.store.placements import Placements
from netplugin.api.pmd_models import PmdChoice, PmdProposal, PmdRequest, PmdState
from netplugin.host import cpus
from netplugin.host.shared import Host
from netplugin.pmd.change import named, set_pmd
from netplugin.pmd.propose import propose
from netplugin.pmd.read import PmdReading, between, look
from netplugin.pmd.settings import MASK, masked

if TYPE_CHECKING:
    from netplugin.tuning.checks.scene import Scene

#: Seconds that a scrape waits for OVS; the default scrape timeout of Prometheus is 10 s.
_SCRAPE_S = 1.0


class Pmd:
    """For the event loop; blocking work runs in threads.

    All calls raise BackendUnavailable, HostError and OperationTimeout.
    """

    def __init__(self, host: Host, view: HostView, placements: Placements) -> None:
        self._host = host
        self._view = view
        self._placements = placements
        self._setting = asyncio.Lock()

    async def show(self, interval_s: float | None = None) -> PmdState:
        """The state since the threads started, or measured over the next ``interval_s`` seconds.

        The statistics of OVS are not cleared, because other tools read them.
        """
        before = await asyncio.to_thread(look, self._host.ovs_of_others)
        if interval_s is None:
            return before.state
        await asyncio.sleep(interval_s)  # occupies no thread
        after = await asyncio.to_thread(partial(look, self._host.ovs_of_others, usage_s=interval_s))
        return between(before, after, interval_s)

    async def proposal(self, interval_s: float | None = None) -> PmdProposal:
        """Propose an assignment from the load of the last minute, or of the next ``interval_s`` seconds."""
        return await asyncio.to_thread(propose, await self.show(interval_s))

    def scraped(self) -> PmdReading | None:
        """Read the state for metrics with a short timeout; None if no backend uses OVS.

        It blocks: do not call it from the event loop.
        """
        ovs = self._host.used_ovs
        return look(ovs, wait_s=_SCRAPE_S) if ovs else None

    async def set(self, request: PmdRequest) -> PmdState:
        """Change the PMD threads. Raises: also InvalidRequest, Conflict; then nothing was changed.

        ``count`` requires the plan of ``[host]``: without it the cores might be those of VMs.
        ``cpus`` needs no plan.
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
        """Choose the cores for ``count``; for ``cpus``, only check that VMs do not use them."""
        from netplugin.tuning.placing.pmd_cores import choose_cores, host_of, refuse_cores_of_vms

        ovs = self._host.ovs_of_others
        view = ovs.caught_up()
        interfaces = view.interfaces().values()
        host = host_of(scene, self._placements.all(), tuple(interfaces))
        if request.count is not None:
            return choose_cores(request.count, request.siblings, host)
        running = masked(view.root.other_config.get(MASK))
        refuse_cores_of_vms(named(request, cpus.online()), running, host)
        return ()
