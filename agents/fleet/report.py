"""What a host reports: a summary, and a key for each object that is not as desired from the store."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from agents.fleet.carry import current_spec
from agents.fleet.plan import Held
from agents.store.fleet import Known
from agents.store.store import Store
from netplugin.api.errors import NetpluginError
from netplugin.api.models import PortState
from netplugin.api.problem import Problem
from netplugin.fleet.names import PORTS, Ref
from netplugin.fleet.values import Fault, digest_of

_LONGEST = 500
_OFF = {PortState.FAILED: "failed", PortState.DEGRADED: "degraded"}


def faults_of(
    store: Store, errors: Mapping[Ref, NetpluginError], listed: Collection[Ref] | None
) -> dict[Ref, Fault]:
    """The objects that are not as desired, each with the first reason that holds."""
    found: dict[Ref, Fault] = {}
    known = store.fleet.known
    for ref in sorted({*known, *errors}):
        at = known.get(ref)
        generation = at.generation if at else 0
        has_key = listed is None or ref in listed
        error = errors.get(ref)
        record = store.get(ref.id) if ref.kind in PORTS else None
        if error is not None:
            state = "waiting" if isinstance(error, Held) else "failed"
            found[ref] = Fault(state=state, generation=generation, error=_short(error.problem()))
        elif at is None or not at.is_owned:
            continue
        elif not at.is_made and (has_key or current_spec(store, ref) is None):
            continue  # unless the agent was killed while it made it, and the key has gone since
        elif at.is_made and at.tag != digest_of(current_spec(store, ref)):
            found[ref] = Fault(state="overridden", generation=generation)
        elif record is not None and record.state in _OFF:
            problem = _short(record.error) if record.error else None
            found[ref] = Fault(state=_OFF[record.state], generation=generation, error=problem)
        elif not has_key:
            found[ref] = Fault(state="unlisted", generation=generation)
    return found


def counts_of(known: Mapping[Ref, Known], open_steps: int, faults: Mapping[Ref, Fault]) -> dict[str, int]:
    """How many objects the fleet has made here, and how many are in each state that is not as desired."""
    states = [fault.state for fault in faults.values()]
    counts = {state: states.count(state) for state in sorted(set(states))}
    return {"owned": sum(each.is_made for each in known.values()), "open": open_steps, **counts}


def _short(problem: Problem) -> Problem:
    return problem.model_copy(update={"detail": problem.detail[:_LONGEST], "errors": problem.errors[:3]})
