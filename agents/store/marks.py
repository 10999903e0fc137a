"""Marks of the store on the host: another or an older store is detected, and reported in findings."""

from __future__ import annotations

import logging
from collections.abc import Collection

from agents.store.store import Store
from netplugin import store_file
from netplugin.api.errors import HostError
from netplugin.api.models import Finding

# -- Detects that another store, or a newer copy of this one, changed the host last. --------------
# The state that ports share on the host (the OVS database, the rules of Linux bridges) carries the
# identity of the store and its last commit, written together with each change. A store that does not
# have this commit is an older copy: the ports that it lists may have been deleted since, which nothing
# on the host can show.


LOG = logging.getLogger(__name__)
_NAMED = 20  # ports listed by name
# Anyone who can write to the host can write the mark: it is cut to this length, and a number with
# more digits is ignored (SQLite's largest integer has 19).
_LENGTH, _DIGITS = 100, 18


class StoreMarks:
    """The marks of one store. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def after(self, found: str) -> str:
        """The mark to write over ``found``, which this process did not write.

        A mark of a commit that this store does not have is kept until it was compared; overwriting it
        would lose the information.
        """
        compared = found[:_LENGTH] in self._store.compared.values()
        return self._store.mark if not found or compared or self._is_known(found) else found

    def compare(self, backend: str, found: str, plugged_again: Collection[str]) -> None:
        """Save a report if another store, or a newer copy, changed the host last.

        ``found`` is the mark found when the whole host was observed (empty: none).
        ``plugged_again`` are the ports that the store has and the host lacks. Each mark is reported
        once per backend, also across restarts.
        """
        compared = self._store.compared.get(backend) == found[:_LENGTH]
        if not found or compared or self._is_known(found):
            return
        identity, number, _ = _split(found)
        if identity == self._store.identity:
            report = f"the store is an older copy: it lacks commit {number}, which changed the host last"
        else:
            report = f"another store changed the host last: {identity}"
        ports = sorted(plugged_again)
        if ports:
            more = " and others" if len(ports) > _NAMED else ""
            report += f". It lists {len(ports)} ports that were not on the host, which are plugged again: "
            report += ", ".join(ports[:_NAMED]) + more
        LOG.warning("%s: %s", backend, report)
        try:
            self._store.note_older(backend, report, found[:_LENGTH])
        except HostError as refused:
            LOG.error("this is not remembered: %s", refused)

    def accept(self, backend: str) -> None:
        """Delete the report, because an operator has compared the host with the platform. Raises:
        HostError.
        """
        if self.reported(backend):
            self._store.forget_older(backend)

    def findings(self, backend: str) -> list[Finding]:
        report = self._store.older.get(backend)
        if report is None:
            return []
        return [
            Finding(
                id=f"store-older-{backend}",
                status="warn",
                found=report,
                expected="the store that changed the host last",
                fix="PUT every port that the platform has and DELETE those that it no longer has; "
                'then: POST /v1/reconcile {"remove_orphans": true}',
            )
        ]

    def reported(self, backend: str) -> bool:
        """Whether there is a report that an operator has to compare."""
        return backend in self._store.older

    def _is_known(self, found: str) -> bool:
        """Whether a mark is of a commit that this store has."""
        identity, number, run = _split(found)
        return identity == self._store.identity and self._store.commits.has(number, run)


def _split(mark: str) -> tuple[str, int, str]:
    """Parse a mark (``Store.mark``); anything else counts as the mark of another store."""
    identity, _, commit = mark.partition("/")
    number, _, run = commit.partition("/")
    whole = number.isascii() and number.isdecimal() and len(number) <= _DIGITS
    return (identity[:_LENGTH], int(number), run) if whole else (mark[:_LENGTH], 0, "")


# -- Findings about the store itself. -------------------------------------------------------------


def store_findings(store: Store) -> list[Finding]:
    """Findings about unreadable rows, and about damaged databases that were moved aside."""
    found = [
        Finding(
            id=f"store-row-{aside.table}-{aside.key}",
            status="warn",
            found=f"the row {aside.key} of {aside.table} could not be read and is set aside: {aside.reason}",
            expected="a store whose rows can all be read",
            fix="repeat the request (PUT), or restore a copy: netplugin store restore",
        )
        for aside in store.set_aside.all()
    ]
    found += [
        Finding(
            id=f"store-damaged-{path.name}",
            status="warn",
            found=f"the store was damaged; it is now {path}, and the agent began with an empty one",
            expected="a whole database",
            fix="look at the disk; let the platform PUT its ports again, or restore a copy: "
            f"netplugin store restore; then move {path.name} away",
        )
        for path in store_file.damaged(store.database.path.parent)
    ]
    return found
