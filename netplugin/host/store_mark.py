"""The mark of the agent's store on an object of the host: the mark to write, and the mark found there."""

from __future__ import annotations

from collections.abc import Callable

#: Maps the mark that was found (empty: none) to the mark to write.
Mark = Callable[[str], str]
# How many of its own marks a process remembers: one for each commit that changed the object.
_WRITTEN = 10_000


def unmarked(found: str) -> str:
    """Keep the mark as it is."""
    return found


class CarriedMark:
    """The store mark of an object that several backends write to, such as an OVS database.

    The first backend that writes replaces the mark. The mark found before is remembered, so that
    every backend compares with it, in any order. Not thread-safe.
    """

    def __init__(self, mark: Mark = unmarked) -> None:
        self._mark = mark
        self._found = ""
        self._written: dict[str, None] = {}

    def found(self, there: str) -> str:
        """The last mark that another process wrote; empty if there was none."""
        if there and there not in self._written:
            self._found = there
        return self._found

    def after(self, there: str) -> str:
        """The mark to write over the mark ``there``."""
        found = self.found(there)
        mark = self._mark(found)
        if mark != found:
            self._written[mark] = None
            if len(self._written) > _WRITTEN:
                del self._written[next(iter(self._written))]
        return mark
