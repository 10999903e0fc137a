"""Whether the answers to concurrent calls can be explained by some order in which each took effect at once.

The search of J. M. Wing and C. Gong, "Testing and Verifying Concurrent Objects" (1993), for one value,
carried along while the calls come and are answered: what is kept are the values that it may have now,
each with the open calls that have taken effect.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Outcome(Enum):
    """What an answer says of the effect of a call."""

    DONE = "done"
    NOT_DONE = "not done"
    #: It may have been done, or be done until the caller has another answer.
    PERHAPS = "perhaps"
    #: A condition of the call was not met, and nothing was done.
    UNMET = "unmet"


@dataclass(frozen=True)
class Call:
    """``effect``: the value after it, from that before. ``meets``: whether a value meets its condition."""

    number: int
    what: str
    effect: Callable[[Any], Any]
    meets: Callable[[Any], bool] = lambda value: True


#: The most open calls of one value: each may have taken effect, or not, or have found its condition unmet, so
#: one more triples the search.
MOST_OPEN = 4
#: A value, and the open calls before it: the number of each, and whether its condition was met.
Configuration = tuple[Any, frozenset[tuple[int, bool]]]


class NoOrder(AssertionError):
    """No order of the calls explains an answer."""


class History:
    """Of one value, None at first."""

    def __init__(self) -> None:
        self._open: dict[int, Call] = {}
        self._now: frozenset[Configuration] = frozenset({(None, frozenset())})
        #: All that came about, oldest first.
        self.happened: list[str] = []

    @property
    def is_full(self) -> bool:
        return len(self._open) >= MOST_OPEN

    def begins(self, call: Call) -> None:
        assert not self.is_full
        self._open[call.number] = call
        self.happened.append(f"{call.number} begins: {call.what}")

    def ends(self, number: int, outcome: Outcome) -> None:
        """A call was answered. Raises: NoOrder."""
        self.happened.append(f"{number} ends: {outcome.value}")
        now = self._reachable()
        took_effect, was_unmet = (number, True), (number, False)
        if outcome is Outcome.DONE:
            now = {(value, before) for value, before in now if took_effect in before}
        elif outcome is Outcome.NOT_DONE:
            now = {(value, before) for value, before in now if took_effect not in before}
        elif outcome is Outcome.UNMET:
            now = {(value, before) for value, before in now if was_unmet in before}
        self._keep({(value, before - {took_effect, was_unmet}) for value, before in now})
        del self._open[number]

    def is_cut_off(self) -> None:
        """The process has ended: open calls have no answer and take no effect any more."""
        self.happened.append("the process ends")
        self._keep({(value, frozenset[tuple[int, bool]]()) for value, _ in self._reachable()})
        self._open.clear()

    def is_seen_as(self, *values: Any) -> None:
        """Somebody saw it as one of these. Raises: NoOrder."""
        self.happened.append(f"seen: {' or '.join(map(str, values))}")
        self._keep({(value, before) for value, before in self._reachable() if value in values})

    def may_be(self) -> set[Any]:
        return {value for value, _ in self._reachable()}

    def _reachable(self) -> set[Configuration]:
        found = set(self._now)
        new = list(found)
        while new:
            value, before = new.pop()
            numbers = {number for number, _ in before}
            for call in self._open.values():
                if call.number in numbers:
                    continue
                met = call.meets(value)
                then = (call.effect(value) if met else value, before | {(call.number, met)})
                if then not in found:
                    found.add(then)
                    new.append(then)
        return found

    def _keep(self, now: Collection[Configuration]) -> None:
        if not now:
            raise NoOrder("no order explains:\n" + "\n".join(self.happened))
        self._now = frozenset(now)
