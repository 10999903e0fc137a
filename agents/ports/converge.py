"""The way of a port: admit, store, observe, plan, apply, read back, record, answer.

``Plug.serve`` has all of it, for the calls of one batch. ``converge`` is the part between the store and the
host, and the only code that changes the host; ``record`` stores what it found. A repair, a change of a
network and an undo call these two; a dry run stops after the plan.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from agents.ports import admit
from agents.ports.backend_ports import BackendPorts, for_each, logged
from agents.ports.call import LOOK_S, UNDO_S, Call
from agents.ports.guests import Guests
from agents.ports.migration import opens
from agents.store.port_table import Record
from netplugin.api.errors import HostError, NetpluginError, OperationTimeout, TryAgain
from netplugin.api.models import PortState
from netplugin.backend import Change, Claim, Intent, Observation, ObservedPort, Plan

LOG = logging.getLogger(__name__)

# One round is the normal case. A second is needed if an object must be deleted before it is created
# again (a port with a changed socket path). A third means that the host or the plan is not stable.
_ROUNDS = 3


@dataclass
class Stopwatch:
    """Milliseconds spent in each part of an operation."""

    timings_ms: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.timings_ms[name] += (time.monotonic() - start) * 1e3

    def add(self, timings_ms: Mapping[str, float]) -> None:
        for name, spent in timings_ms.items():
            self.timings_ms[name] += spent


@dataclass(frozen=True)
class Converged:
    """The result: the ports that failed, with the errors, and the observed state of the ports."""

    failed: dict[str, NetpluginError]
    observed: Mapping[str, ObservedPort] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()
    #: Ports that keep a configuration that differs from the options, with the reasons.
    kept: Mapping[str, NetpluginError] = field(default_factory=dict)
    #: Changes for no specific port (an empty bridge) that were applied and are still in the plan.
    left: tuple[Change, ...] = ()
    #: Errors of changes for no specific port, by physical network ("" for none).
    of_networks: Mapping[str, NetpluginError] = field(default_factory=dict)
    #: The last observation.
    observation: Observation | None = None

    def fault(self, port_id: str) -> NetpluginError | None:
        """What is wrong with a port that is configured correctly but does not work."""
        port, kept = self.observed.get(port_id), self.kept.get(port_id)
        if kept is not None:
            return kept.for_port(port_id)
        reported = (port.fault or port.impaired) if port is not None else None
        return HostError(reported, step="verify", port_id=port_id) if reported else None

    def is_only_impaired(self, port_id: str) -> bool:
        """Whether the only fault of a port is outside of it (``impaired``)."""
        port = self.observed.get(port_id)
        return port_id not in self.kept and port is not None and not port.fault

    def asks_again(self, port_id: str) -> bool:
        """Whether the host asks to retry the call on a port."""
        if port_id in self.failed:
            return isinstance(self.failed[port_id], TryAgain)
        port = self.observed.get(port_id)
        return port is not None and port.passes


class Plug:
    """Carries out the calls for the ports of one backend. Not thread-safe."""

    def __init__(self, ports: BackendPorts, guests: Guests) -> None:
        self._ports = ports
        self._guests = guests

    def serve(self, calls: Sequence[Call]) -> list[Call]:
        """Carry out the calls as one batch; each gets a result of its own.

        Returns the calls that the host asks to retry. The caller passes them to ``resume``, and serves no
        other call on their ports before.

        Raises: errors that occur before anything is stored.
        """
        watch, begun = Stopwatch(), time.monotonic()
        self._ports.save_unsaved()
        calls = admit.admitted(self._ports, calls, begun)
        calls = admit.store_removals(self._ports, calls)
        if not calls:
            return []
        commit_sequence = self._ports.store.commit_sequence()
        try:
            # Before the commit: claims are chosen among what is free on the host.
            until = max(min(_deadline(calls), begun + LOOK_S), begun + 0.5)
            observation = observe(self._ports, [call.port_id for call in calls], until, watch)
        except Exception as error:
            wrong = logged(error, "observe")
            for call in calls:
                call.error = wrong.for_port(call.port_id)
                call.timings_ms = _timings(call, watch, begun)
            self._answer(calls)
            return []
        for call in calls:
            was_removed = call.before is not None and call.before.state is PortState.REMOVING
            call.was_there = call.port_id in observation.ports and not was_removed
        with watch.part("store"):
            calls = admit.store(self._ports, calls, observation, commit_sequence)
        return self._carry_out(calls, observation, watch, begun)

    def resume(self, calls: Sequence[Call], *, last: bool = False) -> list[Call]:
        """Retry the calls that ``serve`` or ``resume`` returned; ``last``: return none."""
        begun = time.monotonic()
        self._ports.retried -= {call.port_id for call in calls}
        for call in calls:
            call.is_retried = True
            call.record = self._ports.store.get(call.port_id)
        self._answer([call for call in calls if call.record is None])  # abandoned meanwhile
        left = [call for call in calls if call.record is not None]
        return self._carry_out(left, None, Stopwatch(), begun, last=last)

    def _carry_out(
        self,
        calls: Sequence[Call],
        observation: Observation | None,
        watch: Stopwatch,
        begun: float,
        *,
        last: bool = False,
    ) -> list[Call]:
        """Apply what is stored of these ports to the host, and answer. Returns the calls to retry."""
        if not calls:
            return []
        ids = [call.port_id for call in calls]
        intents = [self._ports.intent(c.record) if c.record else Intent(c.port_id, None) for c in calls]
        try:
            until = max(_deadline(calls), begun + 0.5)
            result = converge(self._ports, intents, until, watch, "plug", observation=observation)
        except Exception as error:
            result = Converged(for_each(ids, error, "converge"))
        again = [c for c in calls if not last and c.record and c.has_time() and result.asks_again(c.port_id)]
        self._ports.retried |= {call.port_id for call in again}
        ended = [call for call in calls if call.port_id not in self._ports.retried]
        for call in ended:
            call.timings_ms = _timings(call, watch, begun)
        self._record(ended, result)
        self._undo([call for call in ended if call.error and not call.removes])
        self._answer(ended)
        return again

    def _record(self, calls: Sequence[Call], result: Converged) -> None:
        """Decide what becomes of the ports, answer those that work, and commit it.

        They are answered before: their intents are committed, and a start after a crash finds their states
        again by looking at the host.
        """
        done: list[Record] = []
        gone: list[str] = []
        for call in calls:
            call.error, fault = result.failed.get(call.port_id), result.fault(call.port_id)
            if call.record is None or call.removes:
                gone += [call.port_id] if call.error is None else []
                continue
            call.record = replace(call.record, timings_ms=call.timings_ms)
            if call.before is not None and opens(call.before.migration, call.record.migration):
                self._guests.expect([call.port_id])
            if fault and not call.error and not result.is_only_impaired(call.port_id) and not _stays(call):
                call.error = _lasting(fault) if call.is_retried else fault
            if call.error is None:
                settled = _settled(call.record, None, fault)
                done += [settled] if settled != call.record else []
                call.record = settled
        working = [call.record for call in calls if call.record and not (call.removes or call.error)]
        self._ports.store.show(done)
        self._ports.note_gone(gone)
        self._guests.announce(record.port_id for record in working)
        self._guests.follow(working, result.observed)
        for call in calls:
            if call.error is None and not call.removes:
                call.future.set_result(self._ports.store.get(call.port_id))
        unsaved = self._ports.store.save_each(done, forget=[i for i in gone if self._ports.store.get(i)])
        self._ports.unsaved.update({r.port_id: r for r in done if r.port_id in unsaved})
        for call in calls:
            if call.removes and call.port_id in unsaved:
                call.error = logged(unsaved[call.port_id], "store").for_port(call.port_id)

    def _answer(self, calls: Sequence[Call]) -> None:
        """Count the calls, and answer those that have no answer yet."""
        for call in calls:
            self._ports.metrics.served(self._ports.name, call.kind, call.timings_ms, call.error)
        for call in calls:
            if call.error is not None:
                call.future.set_exception(call.error)
            elif not call.future.done():
                call.future.set_result(None)
        for call in calls:  # after all else, as the log is a lock that answers need too
            if call.error is not None:
                level = logging.DEBUG if call.condition.is_logged else logging.WARNING
                LOG.log(level, "%s failed: %s", call.kind, call.error, extra={"port_id": call.port_id})
            elif call.record is None or call.removes:
                LOG.info("port is gone", extra={"port_id": call.port_id})
            else:
                LOG.info("port is %s", call.record.state.value, extra={"port_id": call.port_id})

    def _undo(self, calls: Sequence[Call]) -> None:
        """Remove a first plug that failed, revert a change; of what was there only the failure is recorded.

        Ports that existed on the host before the call are not removed: after a lost store they are the NICs
        of VMs.
        """
        back: dict[str, Record] = {}
        stay: list[Record] = []
        for call in calls:
            assert call.record is not None and call.error is not None
            record = replace(call.record, error=call.error.problem())
            if record.previous is not None:
                back[call.port_id] = replace(record, spec=record.previous)
            elif record.state is PortState.PENDING and not call.was_there:
                back[call.port_id] = replace(record, state=PortState.REMOVING)
            else:
                port = self._ports.observed.get(call.port_id)
                fallen = PortState.DEGRADED if port is not None and port.fault else PortState.FAILED
                stay.append(replace(record, state=fallen))
        self._ports.save_or_keep(stay)
        if not back:
            return
        deadline = time.monotonic() + UNDO_S
        back = self._save_undone(back, deadline)
        try:
            intents = self._ports.intents(back.values())
            result = converge(self._ports, intents, deadline, Stopwatch(), "undo")
        except Exception as error:
            result = Converged(for_each(back, error, "undo"))
        saved = [r for r in back.values() if r.port_id not in self._ports.unsaved]
        record_states(self._ports, saved, result)

    def _save_undone(self, records: Mapping[str, Record], deadline: float) -> dict[str, Record]:
        """Save the reverted records; reverted changes get the claims of their previous spec.

        What the store does not take is kept for later: the host is cleaned up nevertheless.
        """
        changed = {i: r for i, r in records.items() if r.state is not PortState.REMOVING}
        commit_sequence = self._ports.store.commit_sequence()
        claimed: dict[str, Record] = {}
        try:
            observation = self._ports.backend.observe(list(changed), deadline) if changed else None
            claimed, failed = self._ports.save_with_claims(changed, observation, commit_sequence)
        except Exception as error:
            failed = for_each(changed, error, "undo")
        for wrong in failed.values():
            LOG.warning("claims stay as the change left them: %s", wrong)
        self._ports.save_or_keep([record for i, record in records.items() if i not in claimed])
        return {**records, **claimed}


def observe(
    ports: BackendPorts, scope: Collection[str] | None, deadline: float, watch: Stopwatch
) -> Observation:
    """Read these ports from the host, or (None) all of ours. Raises: what ``Backend.observe`` raises."""
    ports.require_lock()
    with watch.part("observe"):
        observation = ports.backend.observe(scope, deadline)
    watch.add(observation.timings_ms)
    return observation


def converge(
    ports: BackendPorts,
    intents: Sequence[Intent],
    deadline: float,
    watch: Stopwatch,
    why: str,
    *,
    whole: bool = False,
    observation: Observation | None = None,
    plan: Plan | None = None,
) -> Converged:
    """Bring the ports of these intents to the desired state, and verify it by reading the host.

    ``why`` is the reason in the metric of changes. ``whole``: observe all our objects, not only these
    ports. ``observation``: a fresh observation, if the caller has one, and ``plan`` the plan for these
    intents and ``observation``, if it has made one. A port whose device has a fault on the host has not
    failed: see ``Converged.observed``. Claims that are unfit are quarantined.

    Raises: what ``Backend.observe`` raises, BackendUnavailable without the lock on the host; never for a
    single port.
    """
    backend = ports.backend
    failed: dict[str, NetpluginError] = {}
    unfit: dict[Claim, str] = {}
    done: list[Change] = []
    of_networks: dict[str, NetpluginError] = {}
    remaining = list(intents)
    scope = None if whole else [intent.port_id for intent in intents]
    ports.require_lock()
    if observation is None:
        observation = observe(ports, scope, deadline, watch)
    if plan is None:
        with watch.part("plan"):
            plan = backend.plan(remaining, observation)
    for _ in range(_ROUNDS):
        failed.update({p: e.for_port(p) for p, e in plan.refused.items()})
        if not plan.changes:
            break
        with watch.part("apply"):
            applied = backend.apply(plan.changes, deadline)
        watch.add(applied.timings_ms)
        done += plan.changes
        failed.update(applied.failed)
        unfit.update(applied.unfit)
        of_networks = {**applied.of_networks, **of_networks}
        remaining = [intent for intent in remaining if intent.port_id not in failed]
        if not remaining and not whole:
            break  # no port is left to verify
        with watch.part("verify"):
            observation = backend.read_back(observation, plan.changes, scope, deadline)
        watch.add(observation.timings_ms)
        with watch.part("plan"):
            plan = backend.plan(remaining, observation)
    if remaining:
        left_over = _leftovers(remaining, plan, failed)
        failed.update(left_over)
        for change in plan.changes:
            if change.claimed is not None and change in done and {*change.ports} & {*left_over}:
                unfit[change.claimed] = f"it does not keep what was written: {change.describe()}"
    loose = [change for change in plan.changes if not change.ports and change in done]
    left = tuple(change for change in loose if change.physical_network not in of_networks)
    observed = dict(ports.observed_ports(intents, observation))
    kept = {port_id: e for port_id, e in plan.kept.items() if port_id not in failed}
    for change in done:
        ports.metrics.changed(backend.name, type(change).__name__, _reason(ports, change, why))
    for claim, reason in unfit.items():
        LOG.warning("%s %s goes into quarantine: %s", claim.kind, claim.key, reason)
    ports.store.quarantine(unfit)
    ports.see(observed)
    return Converged(failed, observed, tuple(done), kept, left, of_networks, observation)


def _leftovers(
    intents: Sequence[Intent], plan: Plan, failed: Mapping[str, NetpluginError]
) -> dict[str, NetpluginError]:
    """The errors of ports whose changes were accepted by the host but are missing when read back."""
    left: dict[str, list[str]] = defaultdict(list)
    for change in plan.changes:
        for port in change.ports:
            left[port].append(change.describe())
    return {
        i.port_id: HostError(
            f"the host does not keep what was written; still to do: {'; '.join(left[i.port_id])}",
            step="verify",
            port_id=i.port_id,
        )
        for i in intents
        if i.port_id in left and i.port_id not in failed
    }


def _reason(ports: BackendPorts, change: Change, why: str) -> str:
    """Why a change was made, for the metrics."""
    if why == "drift" and change.follows_guest:
        return "guest"
    if why == "plug" and change.ports and not any(map(ports.store.get, change.ports)):
        return "orphan"
    return why


def record_states(ports: BackendPorts, records: Iterable[Record], result: Converged) -> bool:
    """Store what became of ports: they work, have a fault or failed, or they are gone.

    Returns whether the host asks to look at one of them again.
    """
    saved: list[Record] = []
    gone: list[str] = []
    looks_again = False
    for record in records:
        error = result.failed.get(record.port_id)
        if record.port_id in ports.retried:
            continue  # the call that is being retried decides
        if isinstance(error, TryAgain):
            looks_again = True
        elif record.state is PortState.REMOVING:
            gone += [record.port_id] if error is None else []
        elif (settled := _settled(record, error, result.fault(record.port_id))) != record:
            LOG.info("port is %s", settled.state.value, extra={"port_id": record.port_id})
            saved.append(settled)
    ports.save_or_keep(saved, gone)
    ports.note_gone(gone)
    return looks_again


def _settled(record: Record, error: NetpluginError | None, fault: NetpluginError | None) -> Record:
    """The record after the host was read back."""
    wrong = error or fault
    state = PortState.FAILED if error else PortState.DEGRADED if fault else PortState.ACTIVE
    return replace(record, state=state, previous=None, error=wrong.problem() if wrong else None)


def _deadline(calls: Sequence[Call]) -> float:
    return min(call.deadline for call in calls) - UNDO_S / 2


def _timings(call: Call, watch: Stopwatch, begun: float) -> dict[str, float]:
    """Milliseconds of each part of a call."""
    timings = {name: round(ms, 3) for name, ms in watch.timings_ms.items()}
    timings["queue"] = round((begun - call.queued_at) * 1e3, 3)
    timings["total"] = round((time.monotonic() - call.queued_at) * 1e3, 3)
    return timings


def _lasting(fault: NetpluginError) -> OperationTimeout:
    """The error of a call that was retried for a fault that did not clear."""
    return OperationTimeout(f"{fault.detail}: it did not end in time", step=fault.step, port_id=fault.port_id)


def _stays(call: Call) -> bool:
    """Whether a change stays in force although the host reports a fault of the port.

    False for a first plug, and for a change of anything but the filter of a port that worked: that
    may have caused the fault. Otherwise the fault is unrelated, and an undo could, for example,
    revert a tightened filter.
    """
    before = call.before
    if before is None or call.record is None:
        return False
    if call.kind == "migrate":
        return True
    if before.state is PortState.REMOVING or (before.state is PortState.PENDING and before.previous is None):
        return False
    only_the_filter = call.record.spec.differing(before.spec) <= {"port_security"}
    return before.state is not PortState.ACTIVE or only_the_filter
