"""Which store changed the host last: an older copy of the store, or another one, is noticed there.

What ports share on the host (the OVS database, the rules of Linux bridges) carries the store's identity
and the number of its commit, written together with the change. A store that finds a later number there
than its own is an older copy: what it lists may have been deleted since, and nothing on the host can tell.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from agents.store import Store
from netplugin.errors import HostError
from netplugin.models import Finding

LOG = logging.getLogger(__name__)
_NAMED = 20  # ports that the sentence names
# Whoever may write to the host may have written the mark: a longer one is cut, and a number with more
# digits is none (SQLite's largest integer has 19).
_LENGTH, _DIGITS = 100, 18


class StoreMarks:
    """Of one store. Any thread may call it."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def after(self, found: str) -> str:
        """The mark to write where ``found`` is, which this process did not write. One that says more
        than this store knew when it was opened stays until it was compared: afterwards nobody could
        tell any more."""
        compared = found[:_LENGTH] in self._store.compared.values()
        return self._store.mark if not found or compared or self._is_known(found) else found

    def compare(self, backend: str, found: str, plugged_again: Collection[str]) -> None:
        """Remember it if the store is not the one that changed the host last.

        ``found`` is the mark that this process found at a look at the whole host (empty: none),
        ``plugged_again`` are the ports that the store has and the host has not. Each backend is told of
        a mark once, also if the process ends meanwhile.
        """
        compared = self._store.compared.get(backend) == found[:_LENGTH]
        if not found or compared or self._is_known(found):
            return
        identity, number = _split(found)
        if identity == self._store.identity:
            told = (
                f"the store is an older copy: it was at commit {self._store.opened_at}, and the host was "
                f"last changed by commit {number}"
            )
        else:
            told = f"another store changed the host last: {identity}"
        ports = sorted(plugged_again)
        if ports:
            more = " and others" if len(ports) > _NAMED else ""
            told += f". It lists {len(ports)} ports that were not on the host, which are plugged again: "
            told += ", ".join(ports[:_NAMED]) + more
        LOG.warning("%s: %s", backend, told)
        try:
            of_ours = identity == self._store.identity
            self._store.note_older(backend, told, found[:_LENGTH], number if of_ours else 0)
        except HostError as refused:
            LOG.error("this is not remembered: %s", refused)

    def accept(self, backend: str) -> None:
        """An operator has compared the host with what the platform has. Raises: HostError."""
        if self.told(backend):
            self._store.forget_older(backend)

    def findings(self, backend: str) -> list[Finding]:
        told = self._store.older.get(backend)
        if told is None:
            return []
        return [
            Finding(
                id=f"store-older-{backend}",
                status="warn",
                found=told,
                expected="the store that changed the host last",
                fix="PUT every port that the platform has and DELETE those that it no longer has; "
                "then: netplugin reconcile --remove-orphans",
            )
        ]

    def told(self, backend: str) -> bool:
        """Whether there is something that an operator has yet to compare."""
        return backend in self._store.older

    def _is_known(self, found: str) -> bool:
        """Whether a mark is of this store and says nothing that it did not know when it was opened.

        What was committed since is no measure: an older copy soon has as many commits as the newest.
        """
        identity, number = _split(found)
        return identity == self._store.identity and number <= self._store.opened_at


def _split(mark: str) -> tuple[str, int]:
    """What is no mark of a store is another's."""
    identity, _, number = mark.partition("/")
    whole = number.isascii() and number.isdecimal() and len(number) <= _DIGITS
    return (identity[:_LENGTH], int(number)) if whole else (mark[:_LENGTH], 0)
