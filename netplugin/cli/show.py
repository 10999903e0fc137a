"""Output formats of values: short text for humans, the API's values for ``-f json``."""

from __future__ import annotations

import sys
from abc import abstractmethod
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from cliff.columns import FormattableColumn
from cliff.lister import Lister
from pydantic import BaseModel

from netplugin.api.errors import InvalidRequest
from netplugin.api.models import Finding

Row = tuple[Any, ...]


class Structure(FormattableColumn[Any]):
    """Nested values: a ``name: value`` line per leaf."""

    def human_readable(self) -> str:
        return "\n".join(_lines(self._value, ""))


class NetworkColumn(FormattableColumn[dict[str, Any]]):
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


# -- Base class of commands that print findings as a table; the exit status is 1 if a check fails.


class FindingLister(Lister):
    """A command that lists findings."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._status = 0

    @abstractmethod
    def find(self, parsed_args: Namespace) -> Iterable[Finding]: ...

    def take_action(self, parsed_args: Namespace) -> tuple[Sequence[str], Iterable[Row]]:
        findings = list(self.find(parsed_args))
        self._status = 1 if any(finding.status == "fail" for finding in findings) else 0
        return ("id", "status", "found", "expected", "fix"), [
            (f.id, f.status, f.found, f.expected, Optional(f.fix)) for f in findings
        ]

    def run(self, parsed_args: Namespace) -> int:
        return super().run(parsed_args) or self._status
