"""Output formats of values: short text for humans, the API's values for ``-f json``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cliff.columns import FormattableColumn
from pydantic import BaseModel

from netplugin.errors import InvalidRequest

Row = tuple[Any, ...]


class Structure(FormattableColumn[Any]):
    """Nested values: a ``name: value`` line per leaf."""

    def human_readable(self) -> str:
        return "\n".join(_lines(self._value, ""))


class Network(FormattableColumn[dict[str, Any]]):
    """A network as ``vlan physnet1 100``."""

    def human_readable(self) -> str:
        names = ("type", "physical_network", "vlan_id", "network_id")
        parts = (self._value.get(name) for name in names)
        return " ".join(str(part) for part in parts if part is not None)


class Error(FormattableColumn[dict[str, Any] | None]):
    """An error as ``code: detail``, and the fix if there is one."""

    def human_readable(self) -> str:
        if self._value is None:
            return ""
        fix = f"\nFix: {self._value['fix']}" if self._value.get("fix") else ""
        return f"{self._value['code']}: {self._value['detail']}{fix}"


class Optional(FormattableColumn[Any]):
    """A value; None is shown as an empty cell."""

    def human_readable(self) -> str:
        return "" if self._value is None else str(self._value)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as aligned text columns; the first row is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines)


def fields(model: BaseModel) -> tuple[tuple[str, ...], Row]:
    """All fields of a model as the columns of one object."""
    values = model.model_dump(mode="json")
    return tuple(values), tuple(_column(name, value) for name, value in values.items())


def read_text(name: str) -> str:
    """The text of a file, or of standard input for ``-``. Raises: InvalidRequest."""
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text()
    except (OSError, UnicodeDecodeError) as wrong:
        raise InvalidRequest(
            f"{name} cannot be read: {wrong}", step="read", fix="name a text file, or - for stdin"
        ) from None


def _column(name: str, value: Any) -> Any:
    if name == "error":
        return Error(value)
    return Structure(value) if isinstance(value, dict | list) else Optional(value)


def _lines(value: Any, name: str) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _lines(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and any(isinstance(inner, dict | list) for inner in value):
        for number, inner in enumerate(value):
            yield from _lines(inner, f"{name}.{number}" if name else str(number))
    elif isinstance(value, list):
        if value:
            yield (f"{name}: " if name else "") + ", ".join(str(inner) for inner in value)
    elif value is not None:
        yield f"{name}: {value}" if name else str(value)
