"""Exceptions that end a measurement without a verdict."""

from __future__ import annotations


class UnusableInput(Exception):
    """An option or a file is unusable; no traffic was sent."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")
        self.what = what
        self.why = why


class GeneratorError(Exception):
    """The generator died, missed its deadline, or sent an invalid answer."""


class ReplayError(Exception):
    """The recorded trials do not belong to the replayed search."""
