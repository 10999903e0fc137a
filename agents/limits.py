"""Limits per caller: the rate of changes, and the number of concurrent calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from netplugin.errors import Overloaded

#: Maximum number of remembered callers (names of tokens, certificates and local users).
_MOST_CALLERS = 4096


@dataclass(frozen=True)
class LimitSettings:
    changes_per_second: int
    calls_at_once: int

    @staticmethod
    def read(api: Any) -> LimitSettings:
        return LimitSettings(api.changes_per_second, api.calls_at_once)


@dataclass
class _Use:
    """A token bucket that holds the tokens of two seconds, and the number of calls in progress."""

    left: float
    at: float
    calls: int = 0


class Limits:
    """The limits of all callers; used only on the event loop."""

    def __init__(
        self, settings: LimitSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._uses: dict[str, _Use] = {}

    @contextmanager
    def call(self, caller: str, *, changes: bool) -> Iterator[None]:
        """Count a call while the context is open. Raises: Overloaded."""
        use = self._use(caller)
        if use.calls >= self._settings.calls_at_once:
            raise _too_much(
                caller, f"{self._settings.calls_at_once} calls at once", "calls_at_once"
            )
        if changes:
            rate = self._settings.changes_per_second
            if use.left < 1:
                raise _too_much(caller, f"{rate} changing calls a second", "changes_per_second")
            use.left -= 1
        use.calls += 1
        try:
            yield
        finally:
            use.calls -= 1

    def _use(self, caller: str) -> _Use:
        now = self._clock()
        most = 2.0 * self._settings.changes_per_second
        use = self._uses.get(caller)
        if use is None:
            if len(self._uses) >= _MOST_CALLERS:
                # Callers without calls and with a full bucket need no entry.
                self._uses = {
                    name: u for name, u in self._uses.items() if u.calls or now - u.at < 2
                }
            use = self._uses[caller] = _Use(most, now)
        use.left = min(most, use.left + (now - use.at) * self._settings.changes_per_second)
        use.at = now
        return use


def _too_much(caller: str, what: str, option: str) -> Overloaded:
    return Overloaded(
        f"{caller} sends more than {what}", step="limit",
        fix=f"send it again later; the operator may raise [api] {option}",
    )  # fmt: skip
