"""A call into the kernel that nothing interrupts, made by a thread: its caller need not wait for the end."""

from __future__ import annotations

import threading
from collections.abc import Callable


class ThreadedCall:
    """A call that a thread of its own makes from now on. It ends no earlier if nobody waits for it."""

    def __init__(self, name: str, call: Callable[[], object]) -> None:
        self._failed: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, args=(call,), name=name, daemon=True)
        self._thread.start()

    def _run(self, call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            self._failed.append(error)

    def ended(self, within_s: float) -> bool:
        """Wait until the call has ended, at most ``within_s``. Raises: what the call has raised."""
        self._thread.join(within_s)
        if self._thread.is_alive():
            return False
        for error in self._failed:
            raise error
        return True
