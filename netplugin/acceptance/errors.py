"""What ends a measurement before it has a verdict, each with the words its user needs."""

from __future__ import annotations


class UnusableInput(Exception):
    """An option or a file cannot be used; nothing has been sent yet."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")
        self.what = what
        self.why = why


class GeneratorError(Exception):
    """The generator died, does not answer in time, or answers what cannot be understood."""


class ReplayError(Exception):
    """A trial log does not belong to the search that it is replayed with."""
