"""The host brought back to the intents: looks at all ports or some, repairs what differs, reports."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from agents.ports.backend_ports import BackendPorts
from agents.ports.converge import Converged, Stopwatch, converge, faults_of
from agents.ports.migration import followed, hands_over, is_news, opens
from agents.ports.operations import LOOK_S
from agents.ports.orphans import Orphans, findings
from agents.ports.quarantines import Quarantines
from agents.store.marks import StoreMarks
from agents.store.port_table import Record
from agents.store.store import Store
from netplugin.api.errors import (
    Conflict,
    HostError,
    NetpluginError,
    OperationTimeout,
    TryAgain,
)
from netplugin.api.models import (
    Finding,
    PlannedChange,
    PortState,
    ReconcileReport,
    VfInfo,
)
from netplugin.backend import Change, Claim, Intent, Observation, Plan

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


class Drift:
    """Looks at the ports of one backend and repairs them. Not thread-safe."""

    def __init__(self, ports: BackendPorts, marks: StoreMarks, quarantines: Quarantines) -> None:
        self._ports = ports
        self._marks = marks
        self._quarantines = quarantines
        #: The physical networks that were not as they should be when the whole host was looked at
        #: last; any thread may read it.
        self.network_faults: Mapping[str, NetpluginError] = {}
        #: Whether the last look left something to be tried again.
        self._looks_again = False
        self._has_started = False

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
        started = time.monotonic()
        self._ports.save_unsaved()
        self._ports.backend.hold().require()
        # Before this check adds a report, which no operator has compared yet.
        accepts = remove_orphans and not dry_run and self._marks.reported(self._ports.backend.name)
        if ports is None and self._ports.store.database.failure:
            self._ports.store.database.try_to_write()  # there may be no other write for a long time
        records = {
            r.port_id: r
            for r in self._ports.store.records(backend=self._ports.backend.name)
            if ports is None or r.port_id in ports
        }
        if ports is not None and not records:
            return ReconcileReport(dry_run=dry_run, ports=0, changes=[])
        watch = Stopwatch()
        with watch.part("observe"):
            seen = self._ports.backend.observe(
                None if ports is None else list(records), time.monotonic() + LOOK_S
            )
        if not dry_run:
            self._end_quarantines(seen)
            if ports is None:
                self._compare_store(records, seen)
            records |= self._follow_guests(records, seen, whole=ports is None)
        intents = self._ports.intents(records.values())
        kept: Mapping[str, str] = {}
        if ports is None:
            orphans = Orphans.among(self._ports.store, self._ports.backend.name, seen.ports)
            kept = {} if remove_orphans else orphans.kept
            gone = {*orphans.forgotten, *orphans.kept} - set(kept)
            intents += [Intent(port_id, None) for port_id in sorted(gone)]
            if not dry_run:
                self._ports.orphans = kept
        plan = self._ports.backend.plan(intents, seen)
        planned = self._planned(plan.changes)
        report = ReconcileReport(
            dry_run=dry_run, ports=len(records), changes=planned, orphans_kept=list(kept)
        )
        if dry_run:
            report.errors = [e.for_port(p).problem() for p, e in plan.refused.items()]
            return report
        drifted = self._report_found(plan.changes)
        if ports is None:
            self._looks_again = False
        result = self._converge_in_chunks(intents, seen, plan, watch, ports is None, batch_size)
        known = {told.detail for told in planned}
        later = [*{c.describe(): c for c in result.changes if c.describe() not in known}.values()]
        report.changes = [*planned, *self._planned(later)]
        drifted += self._report_found(later)
        errors = [*result.failed.values(), *result.of_networks.values(), *map(_left, result.left)]
        report.errors = [error.problem() for error in errors]
        self._record_checked(records, result)
        self._ports.announcer.begin(records.keys() - result.failed.keys())
        if ports is None:
            self._ports.follow(records.values())
        left = {change.describe() for change in result.left}
        self._ports.events.drift_handled(drifted, {*result.failed, *left})
        if accepts:
            self._marks.accept(self._ports.backend.name)
        if ports is None and not planned:  # the observation is what the host has now
            self._compare_findings(seen)
        LOG.info(
            "%s: looked at %d ports in %.0f ms, %d changes, %d failures",
            self._ports.backend.name,
            len(records),
            (time.monotonic() - started) * 1e3,
            len(result.changes),
            len(errors),
        )
        return report

    def _planned(self, changes: Sequence[Change]) -> list[PlannedChange]:
        name = self._ports.backend.name
        return [
            PlannedChange(backend=name, change=type(c).__name__, ports=c.ports, detail=c.describe())
            for c in changes
        ]

    def _report_found(self, changes: Sequence[Change]) -> list[PlannedChange]:
        """Log what differs on the host, and make events of what no guest did; returns the latter."""
        for change in changes:
            level, why = (logging.INFO, "its guest") if change.follows_guest else (logging.WARNING, "drift")
            LOG.log(level, "%s: %s", why, change.describe(), extra={"port_id": ",".join(change.ports)})
        drifted = self._planned([change for change in changes if not change.follows_guest])
        self._ports.events.drift_found(drifted)
        return drifted

    def _compare_store(self, records: Mapping[str, Record], seen: Observation) -> None:
        """Compare the store with the one that changed the host last, before applying the plan."""
        lacking = [
            i
            for i, r in records.items()
            if i not in seen.ports and r.state not in (PortState.REMOVING, PortState.PENDING)
        ]
        self._marks.compare(self._ports.backend.name, seen.store_mark, lacking)

    def _follow_guests(
        self, records: Mapping[str, Record], seen: Observation, *, whole: bool
    ) -> dict[str, Record]:
        """The ports whose migration goes on because their guest runs or has stopped; stored."""
        now = datetime.now(UTC)
        if whole:
            self._ports.follow_again = False
            if not self._has_started:
                self._has_started = True
                self._ports.announcer.expect(i for i, r in records.items() if is_news(r.migration, now))
        auto = [r for r in records.values() if r.migration and r.migration.activation == "auto"]
        if not auto:
            return {}
        by_claims = self._ports.extras.by_claims
        there = by_claims.observed_ports(self._ports.intents(auto), seen) if by_claims else seen.ports
        moved: dict[str, Record] = {}
        for record in auto:
            found = there.get(record.port_id)
            migration = followed(record.migration, found.guest if found else None, now)
            if migration != record.migration:
                moved[record.port_id] = replace(record, migration=migration)
        unsaved = self._ports.store.save_each(moved.values())
        moved = {i: record for i, record in moved.items() if i not in unsaved}
        if moved:
            before = {i: records[i].migration for i in moved}
            self._ports.hand_over([r for i, r in moved.items() if hands_over(before[i], r.migration)])
            self._ports.announcer.expect(i for i, r in moved.items() if opens(before[i], r.migration))
        return moved

    def _converge_in_chunks(
        self,
        intents: Sequence[Intent],
        seen: Observation,
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
            backend = self._ports.backend
            if closing := [change for change in plan.changes if change.closes]:
                backend.apply(closing, deadline)
            for change in closing:
                self._ports.metrics.changed(backend.name, type(change).__name__, "drift")
            made = tuple(closing)
            for start in range(0, len(changes), batch_size):
                chunk = changes[start : start + batch_size]
                made += converge(self._ports, chunk, deadline, watch, "drift").changes
            result = converge(self._ports, intents, deadline, watch, "drift", whole=whole)
            result = replace(result, changes=made + result.changes)
        else:
            result = converge(
                self._ports, intents, deadline, watch, "drift", whole=whole, seen=seen, plan=plan
            )
        if whole:
            self._ports.see(result.observed, whole=True)
            self._note_networks(result.seen)
        return result

    def _record_checked(self, records: Mapping[str, Record], result: Converged) -> None:
        saved: list[Record] = []
        gone: list[str] = []
        faults = faults_of(records, result)
        for port_id, record in records.items():
            failure, fault = result.failed.get(port_id), faults.get(port_id)
            if port_id in self._ports.begun:
                continue  # the call that is being retried decides
            if isinstance(failure, TryAgain):
                self._looks_again = True
                continue
            if record.state is PortState.REMOVING:
                if failure is None:
                    gone.append(port_id)
                continue
            if failure is not None:
                state = PortState.FAILED
            else:
                state = PortState.DEGRADED if fault else PortState.ACTIVE
            error = failure or fault
            problem = error.problem() if error else None
            previous = record.previous if failure else None
            checked = replace(record, state=state, error=problem, previous=previous)
            if checked != record:
                LOG.info("port is %s", state.value, extra={"port_id": port_id})
                saved.append(checked)
        self._ports.save_or_keep(saved, gone)

    def unsettled(self) -> bool:
        """Whether a port is not in its desired state yet, so that another reconcile is due soon."""
        return (
            bool(self._ports.unsaved)
            or self._looks_again
            or self._ports.follow_again
            or self._ports.store.any_in(
                self._ports.backend.name, PortState.PENDING, PortState.REMOVING, PortState.FAILED
            )
        )

    def kept(self) -> dict[str, str]:
        """The orphans that no call has adopted since, with the reasons (callable from any thread)."""
        return {i: why for i, why in (self._ports.orphans or {}).items() if not self._has_record(i)}

    def _has_record(self, port_id: str) -> bool:
        record = self._ports.store.get(port_id)
        return record is not None and record.spec.backend == self._ports.backend.name

    def converge_network(self, network_id: str, deadline: float) -> NetworkOutcome:
        """Apply a network to the ports of this backend.

        Raises: what ``Backend.observe`` raises, BackendUnavailable.
        """
        records = {
            r.port_id: r
            for r in self._ports.store.ports_on(network_id)
            if r.spec.backend == self._ports.backend.name
        }
        if not records:
            return NetworkOutcome()
        working = {i for i, r in records.items() if r.state in _WORKING}
        self._ports.backend.hold().require()
        intents = self._ports.intents(records.values())
        result = converge(self._ports, intents, deadline, Stopwatch(), "network")
        self._record_checked(records, result)
        reached = not working or bool(working - set(result.failed))
        return NetworkOutcome(reached, tuple(result.failed.values()))

    def converge_physical_network(self, name: str, deadline: float, *, gone: bool = False) -> NetworkOutcome:
        """Apply a physical network: what it keeps on the host, and its uplink under the ports.

        What cannot be done for other networks is logged. ``gone``: nothing of it may be left.

        Raises: what ``Backend.observe`` raises, BackendUnavailable.
        """
        self._ports.usable().require()
        records = {
            r.port_id: r
            for r in self._ports.store.records(backend=self._ports.backend.name)
            if name == r.spec.network.physical_network
        }
        working = {i for i, r in records.items() if r.state in _WORKING}
        intents = self._ports.intents(records.values())
        result = converge(self._ports, intents, deadline, Stopwatch(), "physical-network", whole=True)
        self._record_checked(records, result)
        self._note_networks(result.seen)
        of_others = {other: error for other, error in result.of_networks.items() if other != name}
        for other, error in sorted(of_others.items()):
            LOG.warning("while physical network %s changed: %s: %s", name, other or "no network", error)
        fault = self.network_faults.get(name)
        own = (result.of_networks.get(name), fault, *self._stays(name, result, gone))
        failures = [error for error in own if error is not None]
        reached = not failures and (not working or bool(working - set(result.failed)))
        return NetworkOutcome(reached, (*failures, *result.failed.values()))

    def _stays(self, name: str, result: Converged, gone: bool) -> Iterator[NetpluginError]:
        """What the host still has of a network that nothing needs, as it is read back."""
        networks = self._ports.extras.networks
        if gone and networks is not None and result.seen is not None:
            for what in networks.network_remains(name, result.seen):
                yield HostError(f"physical network {name}: {what} is still there", step="verify")
        elif name not in self.network_faults:
            yield from (_left(change) for change in result.left if change.physical_network == name)

    def _note_networks(self, seen: Observation | None) -> None:
        networks = self._ports.extras.networks
        if networks is not None and seen is not None:
            self.network_faults = networks.network_faults(seen)
            self._ports.events.networks(self.network_faults)

    def findings(self) -> list[Finding]:
        """The findings about this backend's part of the host.

        Raises: what ``Backend.observe`` raises.
        """
        self._ports.backend.hold().require()
        return self._findings(self._ports.backend.observe(None, time.monotonic() + LOOK_S))

    def _compare_findings(self, seen: Observation) -> None:
        """Events of findings. They are advice: an error in them must not end a check of the ports."""
        try:
            self._ports.events.findings(self._findings(seen))
        except Exception:
            LOG.exception("%s: the findings could not be compared", self._ports.backend.name)

    def _findings(self, seen: Observation) -> list[Finding]:
        intents = self._ports.intents(self._ports.store.records(backend=self._ports.backend.name))
        orphans = Orphans.among(self._ports.store, self._ports.backend.name, seen.ports).kept
        checks = self._ports.extras.findings
        self._note_networks(seen)
        return [
            *_of_ports(self._ports.backend.name, self._ports.store),
            *(checks.findings(intents, seen) if checks else ()),
            *(of_network(name, fault) for name, fault in self.network_faults.items()),
            *findings(self._ports.backend.name, orphans),
            *self._marks.findings(self._ports.backend.name),
        ]

    def vfs(self) -> list[VfInfo]:
        """All virtual functions of the backend's pool with their states.

        Raises: what ``Backend.observe`` raises.
        """
        pool = self._ports.extras.vfs
        if pool is None:
            return []
        seen = self._ports.backend.observe(None, time.monotonic() + LOOK_S)
        return list(pool.vfs(seen, self._ports.store.claims(), self._ports.store.unfit()))

    def _end_quarantines(self, seen: Observation) -> None:
        """End quarantines that are over (see ``Quarantines``)."""
        pool = self._ports.extras.vfs
        if pool is None:
            return
        unfit = self._ports.store.unfit()
        there = {vf.pci_address for vf in pool.vfs(seen, {}, {})} if unfit else set()
        out_of_order = pool.out_of_order(seen) if unfit else ()
        ended = self._quarantines.ended(unfit, there, out_of_order, time.monotonic())
        for claim, why in ended.items():
            LOG.info("%s %s is out of quarantine: %s", claim.kind, claim.key, why)
        if ended:
            self._ports.store.release(ended)

    def abandon(self, port_id: str, claim: Claim) -> None:
        """Forget a port that is being removed and whose virtual function no longer exists.

        Raises: Conflict if the function exists, even if its NIC does not report it now, because the
        port is then removed without help; what ``Backend.observe`` raises.
        """
        pool = self._ports.extras.vfs
        seen = self._ports.backend.observe(None, time.monotonic() + LOOK_S)
        waits = self._ports.backend.plan([Intent(port_id, None, (claim,))], seen).refused.get(port_id)
        states = {vf.pci_address: vf.state for vf in pool.vfs(seen, {claim: port_id}, {})} if pool else {}
        if not isinstance(waits, OperationTimeout) or states.get(claim.key) != "stale":
            raise Conflict(
                f"{claim.kind} {claim.key} is there: port {port_id} goes when it is free",
                step="release",
                port_id=port_id,
                fix=waits.fix if waits else None,
            )
        LOG.warning("forgotten, with %s as it is", claim.key, extra={"port_id": port_id})
        self._ports.store.save([], forget=[port_id])


def _of_ports(backend: str, store: Store) -> list[Finding]:
    """Findings about failed and degraded ports, one per state and cause."""
    alike: dict[tuple[str, str, str, str | None], list[Record]] = defaultdict(list)
    for record in store.records(backend=backend):
        error = record.error
        if error is not None and record.state in (PortState.FAILED, PortState.DEGRADED):
            alike[record.state.value, error.code, error.step, error.fix].append(record)
    findings = []
    for (state, code, step, fix), records in sorted(alike.items(), key=lambda item: item[0][:3]):
        ids = [record.port_id for record in records]
        some = ", ".join(ids[:5]) + (" and others" if len(ids) > 5 else "")
        why = records[0].error.detail if records[0].error else ""
        findings.append(
            Finding(
                id=f"{backend}-ports-{state}",
                status="fail",
                found=f"{len(ids)} ports are {state} ({some}), {code} at {step}: {why}",
                expected="every port is active",
                fix=fix,
            )
        )
    return findings


def of_network(name: str, fault: NetpluginError) -> Finding:
    """The finding about a physical network that is not as it should be."""
    return Finding(
        id=f"physical-network-{name}",
        status="fail",
        found=fault.detail,
        expected=f"the bridge and the uplink of physical network {name} are there and work",
        fix=fault.fix,
    )


def _left(change: Change) -> HostError:
    """The error of a failed change that belongs to no port; otherwise it would be retried silently."""
    error = HostError(f"the host does not keep what was written: {change.describe()}", step="verify")
    LOG.warning("%s", error)
    return error
