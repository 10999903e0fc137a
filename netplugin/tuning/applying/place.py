"""Accessor protocol of a kind of target: read, write, restore."""

from __future__ import annotations

from typing import Protocol, TypeAlias, TypeVar

T = TypeVar("T", contravariant=True)

#: A value in the host's own format, from which it can be restored exactly; None: not set.
Raw: TypeAlias = str | None


class Kept(Exception):
    """The write was ignored or the target has gone, which is not a failure; the message says why."""


class Place(Protocol[T]):
    """Reads and writes targets of one kind. All methods raise: NetpluginError, ``Kept``."""

    def read(self, target: T) -> Raw: ...

    def value(self, target: T, raw: Raw) -> str | None:
        """Normalise ``raw`` to a plan value; equivalent texts give the same value."""
        ...

    def write(self, target: T, wanted: str | None) -> None:
        """Set ``wanted``, a plan value."""
        ...

    def restore(self, target: T, raw: Raw) -> None:
        """Set ``raw``, which was read earlier."""
        ...
