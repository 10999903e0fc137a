"""The host brought back to the intents: looks at all ports or some, repairs what differs, reports."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from agents.ports.backend_ports import BackendPorts
from agents.ports.call import LOOK_S
from agents.ports.claims import Claims, Quarantines
from agents.ports.converge import Converged, Plug, Stopwatch, converge, observe, record_states
from agents.ports.findings import not_working, of_network, of_orphans
from agents.ports.guests import Guests
from agents.ports.teams import TeamVfs
from agents.store.port_table import Record
from agents.store.store import Store
from agents.telemetry.host_events import HostEvents
from agents.telemetry.metrics import Metrics
from netplugin.api.errors import HostError, NetpluginError
from netplugin.api.models import Finding, PlannedChange, PortState, ReconcileReport
from netplugin.backend import Backend, Change, Intent, Observation, Plan

LOG = logging.getLogger(__name__)


#: States of a port that the agent can manage.
_WORKING = (PortState.ACTIVE, PortState.DEGRADED)
#: Seconds that bringing the whole host to its intents may take.
CHECK_S = 120.0


@dataclass(frozen=True)
class NetworkOutcome:
    """The result of a network change.

    ``reached`` is false if the change could not be applied to any port that worked before.
    """

    reached: bool = True
    failures: tuple[NetpluginError, ...] = ()

    def with_part(self, part: NetworkOutcome) -> NetworkOutcome:
        """Both; the first failure is that of a backend that could not apply the change, if there is one."""
        first, then = (self, part) if part.reached else (part, self)
        return NetworkOutcome(self.reached and part.reached, first.failures + then.failures)


class Reconciler:
    """Keeps the ports of one backend as they are to be. Not thread-safe: one worker calls it."""

    def __init__(
        self,
        backend: Backend[Observation],
        store: Store,
        metrics: Metrics,
        quarantines: Quarantines | None = None,
        team_vfs: TeamVfs | None = None,
    ) -> None:
        """Backends that share a pool share ``quarantines``, and those of the ports of a team ``team_vfs``."""
        self.ports = BackendPorts(backend, store, metrics, HostEvents(store.events, backend.name), team_vfs)
        self.guests = Guests(self.ports)
        self.plug = Plug(self.ports, self.guests)
        self.claims = Claims(self.ports, quarantines or Quarantines())
        self._marks = store.marks
        #: The physical networks that were not as they should be when the whole host was looked at
        #: last; any thread may read it.
        self.network_faults: Mapping[str, NetpluginError] = {}
        #: Whether the last look left something to be tried again.
        self._looks_again = False

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
        started, watch, whole, name = time.monotonic(), Stopwatch(), ports is None, self.ports.name
        self.ports.save_unsaved()
        # Before this check adds a report, which no operator has compared yet.
        accepts = remove_orphans and not dry_run and self._marks.reported(name)
        if whole and self.ports.store.database.failure:
            self.ports.store.database.try_to_write()  # there may be no other write for a long time
        records = {r.port_id: r for r in self.ports.records() if ports is None or r.port_id in ports}
        if not whole and not records:
            return ReconcileReport(dry_run=dry_run, ports=0, changes=[])
        observation = observe(self.ports, None if whole else list(records), started + LOOK_S, watch)
        if not dry_run:
            self.claims.end_quarantines(observation)
            if whole:
                # Before the plan is applied: with the store that changed the host last.
                there = (r for i, r in records.items() if i not in observation.ports)
                lacking = [r.port_id for r in there if r.state not in (PortState.REMOVING, PortState.PENDING)]
                self._marks.compare(name, observation.store_mark, lacking)
            records |= self.guests.migrated(records, observation, whole=whole)
        intents = self.ports.intents(records.values())
        kept: Mapping[str, str] = {}
        if whole:
            gone, kept = self.ports.orphans_in(observation.ports)
            if remove_orphans:
                gone, kept = sorted([*gone, *kept]), {}
            intents += [Intent(port_id, None) for port_id in gone]
            if not dry_run:
                self.ports.orphans = kept
        plan = self.ports.backend.plan(intents, observation)
        planned = self._planned(plan.changes)
        report = ReconcileReport(
            dry_run=dry_run, ports=len(records), changes=planned, orphans_kept=list(kept)
        )
        if dry_run:
            report.errors = [e.for_port(p).problem() for p, e in plan.refused.items()]
            return report
        drifted = self._report_found(plan.changes)
        result = self._converge_in_chunks(intents, observation, plan, watch, whole, batch_size)
        known = {change.detail for change in planned}
        later = [*{c.describe(): c for c in result.changes if c.describe() not in known}.values()]
        report.changes = [*planned, *self._planned(later)]
        drifted += self._report_found(later)
        errors = [*result.failed.values(), *result.of_networks.values(), *map(_left, result.left)]
        report.errors = [error.problem() for error in errors]
        looks_again = record_states(self.ports, records.values(), result)
        self._looks_again = looks_again or (self._looks_again and not whole)
        self.guests.announce(records.keys() - result.failed.keys())
        if whole:
            self.guests.follow(records.values())
        left = {change.describe() for change in result.left}
        self.ports.events.drift_handled(drifted, {*result.failed, *left})
        if accepts:
            self._marks.accept(name)
        if whole and not planned:  # the observation is what the host has now
            self._compare_findings(observation)
        LOG.info(
            "%s: looked at %d ports in %.0f ms, %d changes, %d failures",
            name,
            len(records),
            (time.monotonic() - started) * 1e3,
            len(result.changes),
            len(errors),
        )
        return report

    def _planned(self, changes: Sequence[Change]) -> list[PlannedChange]:
        return [
            PlannedChange(
                backend=self.ports.name, change=type(c).__name__, ports=c.ports, detail=c.describe()
            )
            for c in changes
        ]

    def _report_found(self, changes: Sequence[Change]) -> list[PlannedChange]:
        """Log what differs on the host, and make events of what no guest did; returns the latter."""
        for change in changes:
            level, why = (logging.INFO, "its guest") if change.follows_guest else (logging.WARNING, "drift")
            LOG.log(level, "%s: %s", why, change.describe(), extra={"port_id": ",".join(change.ports)})
        drifted = self._planned([change for change in changes if not change.follows_guest])
        self.ports.events.drift_found(drifted)
        return drifted

    def _converge_in_chunks(
        self,
        intents: Sequence[Intent],
        observation: Observation,
        plan: Plan,
        watch: Stopwatch,
        whole: bool,
        batch_size: int,
    ) -> Converged:
        """Converge in chunks, because a large transaction stalls ovs-vswitchd for seconds.

        Light changes need none: after a restart of vswitchd the flows of all ports are back at once. What
        keeps frames in does not wait for the chunks before; what fails of it is tried with its chunk again.
        """
        deadline = time.monotonic() + CHECK_S
        touched = {port for change in plan.changes if not change.is_light for port in change.ports}
        changes = [i for i in intents if i.port_id in touched]
        if len(changes) > batch_size:
            backend = self.ports.backend
            if closing := [change for change in plan.changes if change.closes]:
                backend.apply(closing, deadline)
            for change in closing:
                self.ports.metrics.changed(backend.name, type(change).__name__, "drift")
            made = tuple(closing)
            for start in range(0, len(changes), batch_size):
                chunk = changes[start : start + batch_size]
                made += converge(self.ports, chunk, deadline, watch, "drift").changes
            result = converge(self.ports, intents, deadline, watch, "drift", whole=whole)
            result = replace(result, changes=made + result.changes)
        else:
            result = converge(
                self.ports, intents, deadline, watch, "drift", whole=whole, observation=observation, plan=plan
            )
        if whole:
            self.ports.see(result.observed, whole=True)
            self._note_networks(result.observation)
        return result

    def unsettled(self) -> bool:
        """Whether a port is not in its desired state yet, so that another reconcile is due soon."""
        return (
            bool(self.ports.unsaved)
            or self._looks_again
            or self.guests.follow_again
            or self.ports.store.any_in(
                self.ports.name, PortState.PENDING, PortState.REMOVING, PortState.FAILED
            )
        )

    def converge_network(self, network_id: str, deadline: float) -> NetworkOutcome:
        """Apply a network to the ports of this backend.

        Raises: what ``Backend.observe`` raises, BackendUnavailable.
        """
        records = [r for r in self.ports.store.ports_on(network_id) if r.spec.backend == self.ports.name]
        if not records:
            return NetworkOutcome()
        result, reached = self._converge_network(records, deadline, "network")
        return NetworkOutcome(reached, tuple(result.failed.values()))

    def _converge_network(
        self, records: Sequence[Record], deadline: float, why: str, *, whole: bool = False
    ) -> tuple[Converged, bool]:
        """The result for these ports, and whether one that worked before has it, if there are any."""
        intents = self.ports.intents(records)
        result = converge(self.ports, intents, deadline, Stopwatch(), why, whole=whole)
        self._looks_again |= record_states(self.ports, records, result)
        working = {record.port_id for record in records if record.state in _WORKING}
        return result, not working or bool(working - set(result.failed))

    def converge_physical_network(self, name: str, deadline: float, *, gone: bool = False) -> NetworkOutcome:
        """Apply a physical network: what it keeps on the host, and its uplink under the ports.

        What cannot be done for other networks is logged. ``gone``: nothing of it may be left.

        Raises: what ``Backend.observe`` raises, BackendUnavailable.
        """
        self.ports.usable().require()
        records = [r for r in self.ports.records() if name == r.spec.network.physical_network]
        result, reached = self._converge_network(records, deadline, "physical-network", whole=True)
        self._note_networks(result.observation)
        of_others = {other: error for other, error in result.of_networks.items() if other != name}
        for other, error in sorted(of_others.items()):
            LOG.warning("while physical network %s changed: %s: %s", name, other or "no network", error)
        fault = self.network_faults.get(name)
        own = (result.of_networks.get(name), fault, *self._stays(name, result, gone))
        failures = [error for error in own if error is not None]
        return NetworkOutcome(reached and not failures, (*failures, *result.failed.values()))

    def _stays(self, name: str, result: Converged, gone: bool) -> Iterator[NetpluginError]:
        """What the host still has of a network that nothing needs, as it is read back."""
        networks = self.ports.extras.networks
        if gone and networks is not None and result.observation is not None:
            for what in networks.network_remains(name, result.observation):
                yield HostError(f"physical network {name}: {what} is still there", step="verify")
        elif name not in self.network_faults:
            yield from (_left(change) for change in result.left if change.physical_network == name)

    def _note_networks(self, observation: Observation | None) -> None:
        networks = self.ports.extras.networks
        if networks is not None and observation is not None:
            self.network_faults = networks.network_faults(observation)
            self.ports.events.networks(self.network_faults)

    def findings(self) -> list[Finding]:
        """The findings about this backend's part of the host.

        Raises: what ``Backend.observe`` raises.
        """
        return self._findings(observe(self.ports, None, time.monotonic() + LOOK_S, Stopwatch()))

    def _compare_findings(self, observation: Observation) -> None:
        """Events of findings. They are advice: an error in them must not end a check of the ports."""
        try:
            self.ports.events.findings(self._findings(observation))
        except Exception:
            LOG.exception("%s: the findings could not be compared", self.ports.name)

    def _findings(self, observation: Observation) -> list[Finding]:
        records, checks = self.ports.records(), self.ports.extras.findings
        _, kept = self.ports.orphans_in(observation.ports)
        self._note_networks(observation)
        return [
            *not_working(self.ports.name, records),
            *(checks.findings(self.ports.intents(records), observation) if checks else ()),
            *(of_network(name, fault) for name, fault in self.network_faults.items()),
            *of_orphans(self.ports.name, kept),
            *self._marks.findings(self.ports.name),
        ]


def _left(change: Change) -> HostError:
    """The error of a failed change that belongs to no port; otherwise it would be retried silently."""
    error = HostError(f"the host does not keep what was written: {change.describe()}", step="verify")
    LOG.warning("%s", error)
    return error
