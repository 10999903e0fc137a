"""The converge loop: observe, plan, apply, and read back until the plan is empty."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from agents.ports.backend_ports import BackendPorts
from agents.store.port_table import Record
from netplugin.api.errors import HostError, NetpluginError
from netplugin.backend import Backend, Change, Claim, Intent, Observation, ObservedPort, Plan

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
    observed: dict[str, ObservedPort]
    changes: tuple[Change, ...]
    #: Ports that keep a configuration that differs from the options, with the reasons.
    kept: dict[str, NetpluginError] = field(default_factory=dict)
    #: Changes for no specific port (an empty bridge) that were applied and are still in the plan.
    left: tuple[Change, ...] = ()
    #: Errors of changes for no specific port, by physical network ("" for none).
    of_networks: Mapping[str, NetpluginError] = field(default_factory=dict)
    #: The last observation.
    seen: Observation | None = None


def converge(
    ports: BackendPorts,
    intents: Sequence[Intent],
    deadline: float,
    watch: Stopwatch,
    why: str,
    *,
    whole: bool = False,
    seen: Observation | None = None,
    plan: Plan | None = None,
) -> Converged:
    """Bring the ports of these intents to the desired state, and verify it by reading the host.

    ``why`` is the reason in the metric of changes. ``whole``: observe all our objects, not only these
    ports. ``seen``: a fresh observation, if the caller has one, and ``plan`` the plan for these
    intents and ``seen``, if it has made one. A port whose device has a fault on the host has not
    failed: see ``Converged.observed``. Claims that are unfit are quarantined.

    Raises: what ``Backend.observe`` raises; never for a single port.
    """
    backend, by_claims = ports.backend, ports.extras.by_claims
    failed: dict[str, NetpluginError] = {}
    unfit: dict[Claim, str] = {}
    done: list[Change] = []
    of_networks: dict[str, NetpluginError] = {}
    todo = list(intents)
    scope = None if whole else [intent.port_id for intent in intents]
    if seen is None:
        with watch.part("observe"):
            seen = backend.observe(scope, deadline)
        watch.add(seen.timings_ms)
    if plan is None:
        plan = _plan(backend, todo, seen, watch)
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
        todo = [intent for intent in todo if intent.port_id not in failed]
        if not todo and not whole:
            break  # no port is left to verify
        with watch.part("verify"):
            seen = backend.read_back(seen, plan.changes, scope, deadline)
        watch.add(seen.timings_ms)
        plan = _plan(backend, todo, seen, watch)
    if todo:
        left_over = _leftovers(todo, plan, failed)
        failed.update(left_over)
        for change in plan.changes:
            if change.thing is not None and change in done and {*change.ports} & {*left_over}:
                unfit[change.thing] = f"it does not keep what was written: {change.describe()}"
    loose = [change for change in plan.changes if not change.ports and change in done]
    left = tuple(change for change in loose if change.physical_network not in of_networks)
    observed = dict(by_claims.observed_ports(intents, seen) if by_claims else seen.ports)
    kept = {port_id: e for port_id, e in plan.kept.items() if port_id not in failed}
    for change in done:
        reason_of = "guest" if change.follows_guest and why == "drift" else why
        ports.metrics.changed(backend.name, type(change).__name__, reason_of)
    for claim, reason in unfit.items():
        LOG.warning("%s %s goes into quarantine: %s", claim.kind, claim.key, reason)
    ports.store.quarantine(unfit)
    ports.see(observed)
    return Converged(failed, observed, tuple(done), kept, left, of_networks, seen)


def _plan(
    backend: Backend[Observation], intents: Sequence[Intent], seen: Observation, watch: Stopwatch
) -> Plan:
    with watch.part("plan"):
        return backend.plan(intents, seen)


def _leftovers(
    intents: Sequence[Intent], plan: Plan, failed: dict[str, NetpluginError]
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


def faults_of(records: Mapping[str, Record], result: Converged) -> dict[str, NetpluginError]:
    """The faults of ports that are configured correctly but do not work."""
    faults: dict[str, NetpluginError] = {}
    for port_id in records:
        seen, kept = result.observed.get(port_id), result.kept.get(port_id)
        if kept is not None:
            faults[port_id] = kept.for_port(port_id)
        elif seen is not None and (fault := seen.fault or seen.impaired):
            faults[port_id] = HostError(fault, step="verify", port_id=port_id)
    return faults
