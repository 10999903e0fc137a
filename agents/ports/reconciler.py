"""Brings the ports of one backend to the desired state: the only code path that changes the host.

A plug converges one port, a restart converges all ports, and a dry run stops after the plan. The
order is always: commit the intent, converge, read back, record the result, answer.
"""

from __future__ import annotations

from collections.abc import Mapping

from agents.ports.backend_ports import BackendPorts
from agents.ports.drift import Drift
from agents.ports.plug import Plug
from agents.ports.quarantines import Quarantines
from agents.ports.team_vfs import TeamVfs
from agents.store.marks import StoreMarks
from agents.store.store import Store
from agents.telemetry.host_events import HostEvents
from agents.telemetry.metrics import Metrics
from netplugin.api.errors import NetpluginError
from netplugin.backend import Backend, Observation, ObservedPort


class Reconciler:
    """Not thread-safe: one worker calls it. ``observed`` may be read by any thread.

    Its methods are those of ``BackendPorts``, ``Plug`` and ``Drift``.
    """

    def __init__(
        self,
        backend: Backend[Observation],
        store: Store,
        metrics: Metrics,
        marks: StoreMarks | None = None,
        quarantines: Quarantines | None = None,
        team_vfs: TeamVfs | None = None,
    ) -> None:
        """Backends that share a pool share ``quarantines``, and those of the ports of a team ``team_vfs``."""
        self.backend = backend
        self.quarantines = quarantines or Quarantines()
        self.events = HostEvents(store.events, backend.name)
        self._ports = ports = BackendPorts(backend, store, metrics, self.events, team_vfs)
        plug = Plug(ports)
        drift = Drift(ports, marks or StoreMarks(store), self.quarantines)
        self.announcer = ports.announcer
        #: What the backend has beyond the contract.
        self.extras = ports.extras
        self.usable, self.may_keep = ports.usable, ports.may_keep
        self.serve, self.resume = plug.serve, plug.resume
        self.check, self.unsettled = drift.check, drift.unsettled
        self.converge_network, self.abandon = drift.converge_network, drift.abandon
        self.converge_physical_network = drift.converge_physical_network
        self._drift = drift
        self.kept, self.findings, self.vfs = drift.kept, drift.findings, drift.vfs

    @property
    def network_faults(self) -> Mapping[str, NetpluginError]:
        """The physical networks that were not as they should be when the host was looked at last."""
        return self._drift.network_faults

    @property
    def observed(self) -> Mapping[str, ObservedPort]:
        """What the host had of each port when it was looked at last."""
        return self._ports.observed
