"""How the demo tells what it does: numbered steps, each with the time it took."""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FILE = "steps.json"
INDENT = " " * 5
WIDTH = 100


class Steps:
    """The steps so far. They go over to another process through a file in a directory."""

    def __init__(self) -> None:
        # The clock is the machine's: it means the same in the sandbox.
        self._started = time.monotonic()
        self._number = 0
        self.taken: list[tuple[str, float]] = []

    def elapsed(self) -> float:
        return time.monotonic() - self._started

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        self.announce(title)
        start = time.monotonic()
        yield
        seconds = time.monotonic() - start
        self.taken.append((title, seconds))
        self.say(f"took {took(seconds)}")

    def announce(self, title: str) -> None:
        self._number += 1
        print(f"{self._number:2}. {title}", flush=True)

    def say(self, text: str) -> None:
        print(textwrap.indent(text.rstrip(), INDENT), flush=True)

    def say_wrapped(self, text: str) -> None:
        self.say(textwrap.fill(text, WIDTH - len(INDENT), subsequent_indent="  "))

    def save(self, directory: Path) -> None:
        state = {"started": self._started, "number": self._number, "taken": self.taken}
        (directory / FILE).write_text(json.dumps(state))

    def load(self, directory: Path) -> None:
        """Take over what another process saved."""
        state = json.loads((directory / FILE).read_text())
        self._started = float(state["started"])
        self._number = int(state["number"])
        self.taken = [(str(title), float(seconds)) for title, seconds in state["taken"]]


def took(seconds: float) -> str:
    """A time a person can read: 0.12 s, 12.3 s."""
    return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
