"""What each kind of target is to those that apply and undo: read, write, put back."""

from __future__ import annotations

from typing import Protocol, TypeAlias, TypeVar

T = TypeVar("T", contravariant=True)

#: A value as the host has it, in the words that bring it back exactly; None: not set.
Raw: TypeAlias = str | None


class Kept(Exception):
    """The kernel keeps a value as it is, and that is no fault: its words say why."""


class Place(Protocol[T]):
    """All of these raise a ``NetpluginError``, or ``Kept``."""

    def read(self, target: T) -> Raw: ...

    def value(self, target: T, raw: Raw) -> str | None:
        """What ``raw`` means, as plans say it: two texts of one meaning have one value."""
        ...

    def write(self, target: T, wanted: str | None) -> None:
        """``wanted`` is a value of a plan."""
        ...

    def restore(self, target: T, raw: Raw) -> None:
        """``raw`` was read here before."""
        ...
