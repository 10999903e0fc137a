"""Brings the ports of one backend to the desired state: the only code path that changes the host.

A plug converges one port, a restart converges all ports, and a dry run stops after the plan. The
order is always: commit the intent, converge, read back, record the result, answer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from agents.metrics import Metrics
from agents.ports.backend_ports import BackendPorts
from agents.ports.drift import Drift, NetworkOutcome
from agents.ports.operations import Operation
from agents.ports.plug import Plug
from agents.ports.quarantines import Quarantines
from agents.store.marks import StoreMarks
from agents.store.store import Store
from netplugin.api.models import (
    Finding,
    ReconcileReport,
    VfInfo,
)
from netplugin.backend import Backend, Claim, Observation, ObservedPort
from netplugin.host.usability import Usability
from netplugin.optional import Extras


class Reconciler:
    """Not thread-safe: one worker calls it. ``observed`` may be read by any thread."""

    def __init__(
        self,
        backend: Backend[Observation],
        store: Store,
        metrics: Metrics,
        marks: StoreMarks | None = None,
        quarantines: Quarantines | None = None,
    ) -> None:
        """Backends that share a pool share ``quarantines``."""
        self.backend = backend
        self.quarantines = quarantines or Quarantines()
        self._ports = BackendPorts(backend, store, metrics)
        self._plug = Plug(self._ports)
        self._drift = Drift(self._ports, marks or StoreMarks(store), self.quarantines)

    @property
    def observed(self) -> Mapping[str, ObservedPort]:
        """What the host had of each port when it was looked at last."""
        return self._ports.observed

    @property
    def extras(self) -> Extras:
        """What the backend has beyond the contract."""
        return self._ports.extras

    def usable(self) -> Usability:
        """Whether the backend is usable and its locks are held by this agent (callable from any thread)."""
        return self._ports.usable()

    def may_keep(self, port_id: str) -> bool:
        """Whether the host may have this port without an intent (callable from any thread)."""
        return self._ports.may_keep(port_id)

    def serve(self, operations: Sequence[Operation]) -> list[Operation]:
        """Run the operations as one batch; each gets a result of its own.

        Returns the operations that the host asks to retry. The caller passes them to ``resume``,
        and serves no other operation on their ports before.

        Raises: errors that occur before anything is stored.
        """
        return self._plug.serve(operations)

    def resume(self, operations: Sequence[Operation], *, last: bool = False) -> list[Operation]:
        """Retry the operations that ``serve`` or ``resume`` returned; ``last``: return none."""
        return self._plug.resume(operations, last=last)

    def check(
        self,
        ports: Collection[str] | None = None,
        *,
        dry_run: bool = False,
        remove_orphans: bool = False,
        batch_size: int = 32,
    ) -> ReconcileReport:
        """Reconcile these ports, or all ports of the backend, and report the changes.

        Raises: what ``Backend.observe`` raises.
        """
        return self._drift.check(ports, dry_run=dry_run, remove_orphans=remove_orphans, batch_size=batch_size)

    def converge_network(self, network_id: str, deadline: float) -> NetworkOutcome:
        """Apply a network to the ports of this backend.

        Raises: what ``Backend.observe`` raises, BackendUnavailable.
        """
        return self._drift.converge_network(network_id, deadline)

    def unsettled(self) -> bool:
        """Whether a port is not in its desired state yet, so that another reconcile is due soon."""
        return self._drift.unsettled()

    def kept(self) -> dict[str, str]:
        """The orphans that no call has adopted since, with the reasons (callable from any thread)."""
        return self._drift.kept()

    def findings(self) -> list[Finding]:
        """The findings about this backend's part of the host.

        Raises: what ``Backend.observe`` raises.
        """
        return self._drift.findings()

    def vfs(self) -> list[VfInfo]:
        """All virtual functions of the backend's pool with their states.

        Raises: what ``Backend.observe`` raises.
        """
        return self._drift.vfs()

    def abandon(self, port_id: str, claim: Claim) -> None:
        """Forget a port that is being removed and whose virtual function no longer exists.

        Raises: Conflict if the function exists, even if its NIC does not report it now, because the
        port is then removed without help; what ``Backend.observe`` raises.
        """
        self._drift.abandon(port_id, claim)
