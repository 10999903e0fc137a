"""Scarce resources of ports after they were claimed: their quarantine, and claims on what has gone.

A NIC that fails as a whole would put all of its virtual functions into quarantine, one plug at a
time. Therefore a quarantine is short at first, and doubles each time the resource fails again.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass, field

from agents.ports.backend_ports import BackendPorts
from agents.ports.call import LOOK_S
from netplugin.api.errors import Conflict, OperationTimeout
from netplugin.api.models import VfInfo
from netplugin.backend import Claim, Intent, Observation

LOG = logging.getLogger(__name__)

#: Seconds. When a quarantine ends too early, at most one more plug fails.
FIRST_S, LONGEST_S = 60.0, 3600.0


@dataclass
class Quarantines:
    """The timers of one process. A restart resets them, which only ends quarantines earlier.

    Thread-safe: all backends that share the resources use one object.
    """

    #: When a quarantine ends, in seconds of ``time.monotonic``.
    _until: dict[Claim, float] = field(default_factory=dict)
    _terms: dict[Claim, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ended(
        self,
        unfit: Collection[Claim],
        there: Collection[str],
        out_of_order: Collection[str],
        now: float,
    ) -> dict[Claim, str]:
        """The quarantines among ``unfit`` that end now, with the reasons.

        ``there`` are the keys of existing resources; ``out_of_order`` are those that cannot be used
        now because their NIC has failed, whatever their own state.
        """
        with self._lock:
            self._until = {
                claim: self._until.get(claim, now + self._terms.setdefault(claim, FIRST_S)) for claim in unfit
            }
            found: dict[Claim, str] = {}
            for claim in unfit:
                if claim.key not in there:
                    found[claim] = "it has gone, and may come again as another"
                    self._terms.pop(claim)
                elif claim.key in out_of_order:
                    # The NIC is down or being reset: retry as soon as it recovers.
                    self._until[claim] = -math.inf
                elif now >= self._until[claim]:
                    found[claim] = "it is tried again"
                    self._terms[claim] = min(2 * self._terms[claim], LONGEST_S)
            for claim in found:
                del self._until[claim]
            return found


class Claims:
    """The resources that the ports of one backend take. Its worker's thread calls it."""

    def __init__(self, ports: BackendPorts, quarantines: Quarantines) -> None:
        self._ports = ports
        self.quarantines = quarantines

    def vfs(self) -> list[VfInfo]:
        """All virtual functions of the backend's pool with their states.

        Raises: what ``Backend.observe`` raises.
        """
        pool, store = self._ports.extras.vfs, self._ports.store
        if pool is None:
            return []
        return list(pool.vfs(self._observe(), store.claims(), store.unfit()))

    def end_quarantines(self, observation: Observation) -> None:
        """End quarantines that are over."""
        pool = self._ports.extras.vfs
        if pool is None:
            return
        unfit = self._ports.store.unfit()
        there = {vf.pci_address for vf in pool.vfs(observation, {}, {})} if unfit else set()
        out_of_order = pool.out_of_order(observation) if unfit else ()
        ended = self.quarantines.ended(unfit, there, out_of_order, time.monotonic())
        for claim, why in ended.items():
            LOG.info("%s %s is out of quarantine: %s", claim.kind, claim.key, why)
        if ended:
            self._ports.store.release(ended)

    def abandon(self, port_id: str, claim: Claim) -> None:
        """Forget a port that is being removed and whose virtual function no longer exists.

        Raises: Conflict if the function exists, even if its NIC does not report it now, because the
        port is then removed without help; what ``Backend.observe`` raises.
        """
        pool, observation = self._ports.extras.vfs, self._observe()
        waits = self._ports.backend.plan([Intent(port_id, None, (claim,))], observation).refused.get(port_id)
        states = (
            {vf.pci_address: vf.state for vf in pool.vfs(observation, {claim: port_id}, {})} if pool else {}
        )
        if not isinstance(waits, OperationTimeout) or states.get(claim.key) != "stale":
            raise Conflict(
                f"{claim.kind} {claim.key} is there: port {port_id} goes when it is free",
                step="release",
                port_id=port_id,
                fix=waits.fix if waits else None,
            )
        LOG.warning("forgotten, with %s as it is", claim.key, extra={"port_id": port_id})
        self._ports.store.save([], forget=[port_id])

    def _observe(self) -> Observation:
        return self._ports.backend.observe(None, time.monotonic() + LOOK_S)
