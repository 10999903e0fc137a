"""The mark of the store on one object of the host: the one to write, and the one found beneath it."""

from __future__ import annotations

from collections.abc import Callable

#: Gives the mark of the store to write, for the one that is there (empty: none).
Mark = Callable[[str], str]
# How many of its own marks a process knows again: one for each commit that changed this object.
_WRITTEN = 10_000


def unmarked(found: str) -> str:
    """The mark stays as it is."""
    return found


class CarriedMark:
    """The mark on one object that several backends may write to, such as an OVS database.

    The first backend that writes replaces the mark. What was found there stays known, so that every
    backend compares with it, whichever looks first. Not thread-safe.
    """

    def __init__(self, mark: Mark = unmarked) -> None:
        self._mark = mark
        self._found = ""
        self._written: dict[str, None] = {}

    def found(self, there: str) -> str:
        """The last mark that was there and that this process did not write; empty if there was none."""
        if there and there not in self._written:
            self._found = there
        return self._found

    def after(self, there: str) -> str:
        """The mark to write where ``there`` is."""
        found = self.found(there)
        mark = self._mark(found)
        if mark != found:
            self._written[mark] = None
            if len(self._written) > _WRITTEN:
                del self._written[next(iter(self._written))]
        return mark
