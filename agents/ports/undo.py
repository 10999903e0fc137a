"""What becomes of a failed call: a first plug is removed, a change goes back, what was there stays."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import replace

from agents.ports.backend_ports import BackendPorts, for_each, logged
from agents.ports.converge import Converged, Stopwatch, converge
from agents.ports.operations import UNDO_S
from agents.store.port_table import Record
from netplugin.api.errors import (
    NetpluginError,
)
from netplugin.api.models import (
    PortSpec,
    PortState,
)
from netplugin.backend import Observation, ObservedPort

LOG = logging.getLogger(__name__)


class Undo:
    """Of failed calls. Each method gives the records that are left for the next."""

    def __init__(self, ports: BackendPorts) -> None:
        self._ports = ports

    def restore(
        self, records: Mapping[str, Record], before: Mapping[str, Record | None]
    ) -> dict[str, Record]:
        """Restore the store, because the host could not be observed and nothing was written to it.

        Returns the records that the call did not change: their state shows the failure.
        """
        changed = [i for i, record in records.items() if record.spec != _spec_of(before[i])]
        back = [was for i in changed if (was := before[i]) is not None]
        if changed:
            self._ports.save_or_keep(back, [i for i in changed if before[i] is None])
        return {i: record for i, record in records.items() if i not in changed}

    def keep(
        self,
        records: Mapping[str, Record],
        failures: Mapping[str, NetpluginError],
        there: Collection[str],
    ) -> dict[str, Record]:
        """Keep ports that were already ``there`` at their first plug, to be retried.

        Returns the other records.
        """
        kept = {
            i: replace(r, state=fallen_state(i, self._ports.observed), error=failures[i].problem())
            for i, r in records.items()
            if i in there and r.previous is None and r.state is PortState.PENDING
        }
        if kept:
            self._ports.save_or_keep(list(kept.values()))
        return {i: record for i, record in records.items() if i not in kept}

    def undo(self, records: Mapping[str, Record], failures: Mapping[str, NetpluginError]) -> None:
        """Undo failed calls: remove a first plug, revert a change; otherwise only record the failure."""
        undone: dict[str, Record] = {}
        for port_id, record in records.items():
            problem = failures[port_id].problem()
            if record.previous is not None:
                undone[port_id] = replace(record, spec=record.previous, error=problem)
            elif record.state is PortState.PENDING:
                undone[port_id] = replace(record, state=PortState.REMOVING, error=problem)
            else:
                state = fallen_state(port_id, self._ports.observed)
                self._ports.save_or_keep([replace(record, state=state, error=problem)])
        if not undone:
            return
        deadline = time.monotonic() + UNDO_S
        undone = self._save_undone(undone, deadline)
        try:
            intents = self._ports.intents(undone.values())
            result = converge(self._ports, intents, deadline, Stopwatch(), "undo")
        except Exception as error:
            result = Converged(for_each(undone, error, "undo"), {}, ())
        saved, gone = [], []
        for port_id, record in undone.items():
            if record.state is PortState.REMOVING:
                if port_id not in result.failed:
                    gone.append(port_id)
                    self._ports.observed.pop(port_id, None)
            elif port_id in result.failed:
                saved.append(replace(record, state=PortState.FAILED, previous=None))
            else:
                saved.append(replace(record, state=PortState.ACTIVE, previous=None, error=None))
        unsaved = self._ports.unsaved
        self._ports.save_or_keep(
            [record for record in saved if record.port_id not in unsaved],
            [port_id for port_id in gone if port_id not in unsaved],
        )

    def _save_undone(self, records: Mapping[str, Record], deadline: float) -> dict[str, Record]:
        """Save the reverted records; reverted changes get the claims of their previous spec.

        What the store does not take is kept for later: the host is cleaned up nevertheless.
        """
        back = dict(records)
        changes = [i for i, r in records.items() if r.state is not PortState.REMOVING]
        commit_sequence = self._ports.store.commit_sequence()
        seen: Observation | None = None
        needs = self._ports.extras.claims
        if changes and needs:
            try:
                seen = self._ports.backend.observe(changes, deadline)
            except Exception as error:
                LOG.warning("claims stay as the change left them: %s", logged(error, "undo"))
        with self._ports.store.claiming(commit_sequence) as taken:
            for port_id in changes:
                if needs is None or seen is None:
                    break
                try:
                    claims = needs.claims(self._ports.intent(back[port_id]), seen, taken)
                except NetpluginError as error:
                    LOG.warning("claims stay as the change left them: %s", error)
                    continue
                taken.update(dict.fromkeys(claims, port_id))
                back[port_id] = replace(back[port_id], claims=claims)
            self._ports.save_or_keep(list(back.values()))
        return back


def fallen_state(port_id: str, observed: Mapping[str, ObservedPort]) -> PortState:
    seen = observed.get(port_id)
    return PortState.DEGRADED if seen is not None and seen.fault else PortState.FAILED


def _spec_of(record: Record | None) -> PortSpec | None:
    """The spec that a record has on the host; None if it is being removed."""
    return None if record is None or record.state is PortState.REMOVING else record.spec
